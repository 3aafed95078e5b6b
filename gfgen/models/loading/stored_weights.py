"""Single weights of a checkpoint, for models that have them in 8 bits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from gfgen.errors import ModelError
from gfgen.models.geometry.weight_files import is_published
from gfgen.models.geometry.weights import component_files
from gfgen.models.loading.components import load_component, read_scales, scaled
from gfgen.models.loading.random_weights import draw_weight
from gfgen.system.wording import first_of


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The weights that a pipeline of this checkpoint has after loading."""

    checkpoint: Path
    has_random_weights: bool = False

    def read(
        self, component: str, wanted: Mapping[str, Any], *, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Weights by name, in shape and dtype of those in `wanted`.

        Weights of files are in host memory. Random ones are drawn on the device, since another device would
        draw other values. A pickled or single file is loaded as a whole meanwhile.

        Raises: ModelError as `load_component`, and for a weight that the files lack.
        """
        if self.has_random_weights:
            for name, like in wanted.items():
                weight = torch.empty(like.shape, dtype=like.dtype, device=device)
                draw_weight(weight, f"{component}.{name}")
                yield name, weight
            return
        files = component_files(self.checkpoint)[component].files
        if files[0].suffix != ".safetensors" or is_published(files[0]):
            dtype = next(iter(wanted.values())).dtype
            weights = dict(load_component(self.checkpoint, component, dtype=dtype).named_parameters())
            _check_there(f"{files[0]}", wanted.keys() - weights.keys())
            yield from ((name, weights[name].data.to(like.dtype)) for name, like in wanted.items())
            return
        left, scales = set(wanted), read_scales(files)
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in sorted(left & set(file.keys())):
                    left.discard(name)
                    weight, dtype = file.get_tensor(name), wanted[name].dtype
                    scale = scales.get(name)
                    yield name, weight.to(dtype) if scale is None else scaled(weight, scale, dtype=dtype)
        _check_there(f"{files[0].parent}", left)


def _check_there(where: str, lacking: Collection[str]) -> None:
    if lacking:
        reason = "the files of the model have changed since it was loaded"
        raise ModelError(f"{where}: lacks {', '.join(first_of(sorted(lacking), 'weight'))}; {reason}")
