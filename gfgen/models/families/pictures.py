"""Pictures on their way into a model, and latents and pictures on their way out."""

from __future__ import annotations

import hashlib
import io
import itertools
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from gfgen.errors import JobError, Problem, in_one_line
from gfgen.job.fields import MAX_VOLUME_PIXELS
from gfgen.job.images import DEMUXERS, as_rgb, frames_of


def load_image(path: str | Path, **options: Any) -> Image.Image:
    """The picture at a path, or the first frame of an animation; with the options of `load_frames`."""
    return load_frames(path, most=1, **options)[0]


def load_frames(
    path: str | Path, *, sha256: str | None = None, most: int | None = None, **colours: Any
) -> list[Image.Image]:
    """The frames of an animation, one of a picture, upright as EXIF data says; `colours` are of `as_rgb`.

    sha256: the file's hash when its job was admitted; None accepts any file.

    Raises: JobError when it is missing, no picture, or has changed since admission.
    Source: diffusers.utils.load_image, and load_video for GIF.
    """
    try:
        with Image.open(io.BytesIO(_content(path, sha256=sha256))) as image:
            frames = itertools.islice(frames_of(image), most)
            return [as_rgb(ImageOps.exif_transpose(frame), **colours) for frame in frames]
    except OSError as error:
        why = "it is none" if isinstance(error, UnidentifiedImageError) else error.strerror or error
        reason = f"cannot be read as a picture ({why}); put it back and run again"
        raise JobError(Problem.of("image", str(path), reason)) from None


def _content(path: str | Path, *, sha256: str | None) -> bytes:
    content = Path(path).read_bytes()
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        changed = "has changed since the job file was read; run the command again to take it as it is now"
        raise JobError(Problem.of("image", str(path), changed))
    return content


def load_video(path: str | Path, *, sha256: str | None = None) -> list[Image.Image]:
    """The frames of a video as RGB; the hash is that of `load_frames`.

    Raises: JobError when it cannot be read, has changed since admission, or has too many frames.
    Source: diffusers.utils.load_video.
    """
    import imageio.v3 as imageio

    frames: list[Image.Image] = []
    try:
        content = _content(path, sha256=sha256)
        # imageio refuses the endings of some formats; ffmpeg goes by content.
        options: dict[str, Any] = {"extension": ".mp4", "plugin": "FFMPEG", "input_params": list(DEMUXERS)}
        for frame in imageio.imiter(content, **options):
            frames.append(Image.fromarray(frame))
            if len(frames) * frame.shape[0] * frame.shape[1] > MAX_VOLUME_PIXELS:
                accepted = f"has too many frames; width x height x frames of at most {MAX_VOLUME_PIXELS:,}"
                raise JobError(Problem.of("files", str(path), accepted))
    except (OSError, ValueError, RuntimeError) as error:
        reason = f"cannot be read as a video ({in_one_line(error)})"
        raise JobError(Problem.of("files", str(path), reason)) from None
    return frames


def to_uint8(pictures_FCHW: torch.Tensor, *, per_sample: int = 1) -> torch.Tensor:
    """Pictures in [0, 1] as bytes, on their own device.

    Shapes: pictures_FCHW [F, C, H, W] float -> [F, H, W, C * per_sample] uint8, contiguous. Two bytes per
            sample are little-endian.
    Source: diffusers 0.42 VaeImageProcessor.pt_to_numpy and numpy_to_pil, which round half to
            even as torch does; converting before the copy to the host moves a quarter of the bytes.
    """
    most = 256**per_sample - 1
    levels: torch.Tensor = (pictures_FCHW.permute(0, 2, 3, 1).float() * most).round_().clamp_(0, most)
    if per_sample == 1:
        return levels.to(torch.uint8).contiguous()
    levels = levels.to(torch.int32)
    halves = (levels & 255).to(torch.uint8), (levels >> 8).to(torch.uint8)
    return torch.stack(halves, dim=-1).flatten(-2).contiguous()


def denormalize_latents(latents_BCTHW: torch.Tensor, config: Any) -> torch.Tensor:
    """Latents in the VAE's own scale.

    Divides by the inverse, as the pipelines do, for equal bits.

    Source: diffusers 0.42, the end of WanPipeline.__call__ and QwenImagePipeline.__call__.
    """
    both = (config.latents_mean, config.latents_std)
    mean, std = (torch.tensor(x).view(1, config.z_dim, 1, 1, 1).to(latents_BCTHW) for x in both)
    return latents_BCTHW / (1.0 / std) + mean
