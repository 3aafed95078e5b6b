"""Writes the colours of the built-in model's latents, for previews, from scenes as it was trained on.

    python -m training.colours

The file comes with the model, so that a server need not fit them (gfgen/models/loading/colour_fit.py).
"""

from __future__ import annotations

import json
from random import Random

from gfgen.models.families.registry import WEIGHTS
from gfgen.models.loading.colour_fit import fit_colours, load_vae
from training.drawing import draw, sketch
from training.parts import DEFAULTS
from training.scenes import sample_scene

NUM_SCENES = 48


def main() -> None:
    width, height, frames = (int(DEFAULTS[name]) for name in ("width", "height", "frames"))
    scenes = [sample_scene(Random(number), width=width, height=height) for number in range(NUM_SCENES)]
    videos = draw(sketch(scenes), width=width, height=height, frames=frames) * 2 - 1
    found = fit_colours(load_vae(WEIGHTS / "shapes"), videos)
    found["source"] = f"fitted to this model's VAE on {NUM_SCENES} scenes by training/colours.py"
    (WEIGHTS / "shapes/vae/latent_colours.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
