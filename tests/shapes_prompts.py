"""Prompts for the built-in model, what each of them should show, and what a file shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from movies import decoded
from numpy.typing import NDArray
from PIL import Image

from training.drawing import draw, sketch
from training.evaluation import misplaced
from training.measures import judge, look
from training.scenes import MOTIONS, SIZES, STILL, Scene, Thing

WAY = 0.5
"""Of the picture's side, that a moving thing covers."""

Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class Asked:
    """A prompt and the scene that it tells, at a size that the model is trained for."""

    prompt: str
    scene: Scene
    width: int = 128
    height: int = 128
    frames: int = 17

    def job(self, name: str, **fields: Any) -> dict[str, Any]:
        """A line of a job file that says no more than has to be said."""
        shape = {"width": self.width, "height": self.height, "frames": self.frames}
        plain = {"width": 128, "height": 128, "frames": 17}
        said = {} if shape == plain else shape
        return {"id": name, "prompt": self.prompt, **said, **fields}

    def drawn(self, *, frames: int | None = None) -> Frames:
        """What should be seen ([T, H, W, 3])."""
        num_frames = self.frames if frames is None else frames
        video = draw(sketch([self.scene]), width=self.width, height=self.height, frames=num_frames)[0]
        pixels: Frames = (video * 255).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()
        return pixels

    def misplaced(self, frames: Frames) -> list[str]:
        """Colours of things that are not at first where they are drawn at first."""
        return misplaced(self.scene, look(frames))

    @property
    def suffix(self) -> str:
        return ".png" if self.frames == 1 else ".mp4"

    def read(self, path: Path) -> Frames:
        """The frames of a file of this kind and size ([T, H, W, 3])."""
        if self.frames > 1:
            return decoded(path, height=self.height, width=self.width)
        with Image.open(path) as image:
            return np.asarray(image)[None]

    def wrong(self, frames: Frames) -> list[str]:
        """What these frames show otherwise than the prompt says."""
        assert frames.shape == (self.frames, self.height, self.width, 3)
        scores = judge(self.scene, look(frames), is_video=self.frames > 1)
        return [kind for kind, is_right in scores.items() if not is_right]


def thing(what: str, *, motion: str = STILL, at: tuple[float, float] = (0.5, 0.5)) -> Thing:
    """A thing, told as "red circle" or "large red circle"; `at` is the middle of its way."""
    *told, colour, shape = what.split()
    size = told[0] if told else "medium"
    step_x, step_y = (WAY / 2 * part for part in MOTIONS.get(motion, (0, 0)))
    start, end = (at[0] - step_x, at[1] - step_y), (at[0] + step_x, at[1] + step_y)
    return Thing(shape, colour, size, motion, start, end, radius=SIZES[size], says_size=bool(told))


def scene(background: str, *things: Thing, place: str | None = None, relation: str | None = None) -> Scene:
    return Scene(background, things, place=place, relation=relation)


PICTURES = {
    "circle": Asked("a red circle on a white background", scene("white", thing("red circle")), frames=1),
    "star": Asked(
        "a large yellow star on a black background",
        scene("black", thing("large yellow star")),
        frames=1,
    ),
    "above": Asked(
        "a green triangle above a white square on a black background",
        scene(
            "black",
            thing("green triangle", at=(0.5, 0.25)),
            thing("white square", at=(0.5, 0.75)),
            relation="above",
        ),
        frames=1,
    ),
    "corner": Asked(
        "a small orange diamond in the top left corner, blue background",
        scene("blue", thing("small orange diamond", at=(0.22, 0.22)), place="top left"),
        frames=1,
    ),
    "beside": Asked(
        "a picture of a blue heart to the right of a black ring on a yellow background",
        scene(
            "yellow",
            thing("blue heart", at=(0.75, 0.5)),
            thing("black ring", at=(0.25, 0.5)),
            relation="right of",
        ),
        frames=1,
    ),
}
VIDEOS = {
    "right": Asked(
        "a red circle moves from left to right on a white background",
        scene("white", thing("red circle", motion="right")),
    ),
    "left": Asked(
        "a blue square slides to the left on a yellow background",
        scene("yellow", thing("blue square", motion="left")),
    ),
    "up": Asked(
        "a white star rises against a blue background",
        scene("blue", thing("white star", motion="up")),
    ),
    "down": Asked(
        "a pink heart falls on a black background",
        scene("black", thing("pink heart", motion="down")),
    ),
    "still": Asked(
        "an orange ring stays still on a black background",
        scene("black", thing("orange ring")),
    ),
    "two": Asked(
        "a red square moves upwards to the left of a blue circle on a white background",
        scene(
            "white",
            thing("red square", motion="up", at=(0.25, 0.5)),
            thing("blue circle", at=(0.75, 0.5)),
            relation="left of",
        ),
    ),
    "wide": Asked(
        "a yellow triangle drifts to the right on a green background",
        scene("green", thing("yellow triangle", motion="right")),
        width=192,
    ),
    "tall": Asked(
        "a black diamond sinks on a pink background",
        scene("pink", thing("black diamond", motion="down")),
        height=192,
    ),
}
ANIMATED = {
    "from-circle": Asked(
        "a blue circle moves left to right on a white background",
        scene("white", thing("blue circle", motion="right", at=(0.5, 0.35))),
    ),
    "from-two": Asked(
        "a green square falls to the right of a red heart on a white background",
        scene(
            "white",
            thing("green square", motion="down", at=(0.75, 0.5)),
            thing("red heart", at=(0.25, 0.6)),
            relation="right of",
        ),
    ),
}
"""Videos from a given picture, which is their first frame as drawn."""
EVERY = PICTURES | VIDEOS | ANIMATED


def moving(background: str, what: str, motion: str) -> Scene:
    return scene(background, thing(what, motion=motion))


PRINTED = {
    "a red circle falls": moving("white", "red circle", "down"),
    "a red circle moves to the right on a blue background": moving("blue", "red circle", "right"),
    "a yellow star rises on a blue background": moving("blue", "yellow star", "up"),
    "a yellow star rises on blue": moving("blue", "yellow star", "up"),
    "a yellow star slides from left to right on a blue background": moving("blue", "yellow star", "right"),
    "a yellow star moves to the right on a blue background": moving("blue", "yellow star", "right"),
    "a yellow star does not move, blue background": moving("blue", "yellow star", STILL),
    "a pink heart rises on black": moving("black", "pink heart", "up"),
    "a large pink heart falls on a black background": moving("black", "large pink heart", "down"),
    "a pink heart falls on a black background": moving("black", "pink heart", "down"),
    "a green square slides to the left on a yellow background": moving("yellow", "green square", "left"),
    "a purple circle drifts to the left on a yellow background": moving("yellow", "purple circle", "left"),
    "a video of a black ring that rises on pink": moving("pink", "black ring", "up"),
    "a square, red, on a blue background": moving("blue", "red square", STILL),
    "a large yellow star on a black background": moving("black", "large yellow star", STILL),
    "a large red ring on a yellow background": moving("yellow", "large red ring", STILL),
    "a white ring on blue": moving("blue", "white ring", STILL),
    "a small white ball in the top right corner, green background": scene(
        "green", thing("small white circle"), place="top right"
    ),
    "a huge black heart in the middle, a pink backdrop": scene(
        "pink", thing("large black heart"), place="center"
    ),
    "a blue box to the left of a yellow disc, white background": scene(
        "white", thing("blue square"), thing("yellow circle"), relation="left of"
    ),
    "a blue heart above a white ring, black background": scene(
        "black", thing("blue heart"), thing("white ring"), relation="above"
    ),
    "a small yellow star above a large purple heart, white background": scene(
        "white", thing("small yellow star"), thing("large purple heart"), relation="above"
    ),
    "an orange star above a white ring against a purple background": scene(
        "purple", thing("orange star"), thing("white ring"), relation="above"
    ),
    "a red circle glides from left to right above a white square, green background": scene(
        "green", thing("red circle", motion="right"), thing("white square"), relation="above"
    ),
    (
        "a green triangle moving upwards to the left of an orange diamond that moves down, white background"
    ): scene(
        "white",
        thing("green triangle", motion="up"),
        thing("orange diamond", motion="down"),
        relation="left of",
    ),
}
"""Every prompt for the built-in model that users are shown, and what it says."""
