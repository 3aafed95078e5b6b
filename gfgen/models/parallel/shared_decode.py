"""One decode on several ranks: each makes the pixels of its own band of rows.

The latents' rows are cut into bands, by slot. Nearly all layers of a causal video VAE work on one position at
a time. The others get data from other ranks, through hooks on unmodified diffusers modules, which do nothing
if no decode is shared: convolutions of 3 rows get the row above a band and the one below it, and the middle
attention the keys and values of all bands. On a GPU causal_vae.py computes all this itself (`present_bands`).

Upsampling repeats rows, so a band grows by the same factor on every rank. Rows are fetched at every
convolution: to compute them, a rank would need 14 rows of latents on either side of its band behind the
middle attention, and 4 ranks have 11 rows each of a picture of 704.

Legend: B batch, C channels, T H W frames, rows, columns; L own, S all places of one frame.
Source: diffusers 0.42 AutoencoderKLWan and AutoencoderKLQwenImage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gfgen.errors import LayoutError, ModelError
from gfgen.gfc.group import Collectives
from gfgen.gfc.reshard import Sizes, shard_sizes
from gfgen.layout import shard_bounds
from gfgen.models.parallel.parallel import Parallel, held


@dataclass(frozen=True, slots=True)
class _Bands:
    """The ranks that share the current decode, and the rows of latents of each."""

    ranks: Collectives
    rows: Sizes

    def halo(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The rows right above and below the own ones; None at the picture's edge.

        Every rank gets every rank's two outer rows, with an existing collective. The surplus is negligible
        compared with a convolution (a megabyte to each rank where rows are longest).

        Shapes: x [..., H, W], as many columns on every rank -> each [..., W].
        """
        edges = torch.stack((x[..., 0, :], x[..., -1, :]))
        every = self.ranks.all_gather(edges, dim=0)
        slot, last = self.ranks.slot, self.ranks.size - 1
        above = every[2 * slot - 1] if slot > 0 else None
        below = every[2 * slot + 2] if slot < last else None
        return above, below

    def everywhere(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All places' keys and values, the own ones first; attention does not depend on their order.

        Shapes: each [B, 1, L, C] -> [B, 1, S, C].
        """
        length, own = key.shape[2], self.rows[self.ranks.slot]
        assert length % own == 0, f"an attention of {length} places to {own} rows of latents"
        sizes = [rows * (length // own) for rows in self.rows]
        keys, values = self.ranks.gather_tokens(key.transpose(1, 2), value.transpose(1, 2), token_sizes=sizes)
        return keys.transpose(1, 2), values.transpose(1, 2)


# Per context and so per thread, as in sequence_parallel.py: it passes through forwards that are not ours.
_BANDS: ContextVar[_Bands | None] = ContextVar("bands", default=None)


def present_bands() -> _Bands | None:
    return _BANDS.get()


def install(vae: torch.nn.Module) -> None:
    """Put hooks on a diffusers VAE, permanently; once for each instance.

    Raises: ModelError for a decoder with unknown layers.
    """
    decoder: Any = vae.decoder
    for name, module in decoder.named_modules():
        is_known = True
        if isinstance(module, torch.nn.Conv3d):  # it pads one row on either side, or none
            form = module.kernel_size[1], module.stride[1], tuple(getattr(module, "_padding", ()))[2:4]
            is_known = form in ((1, 1, (0, 0)), (3, 1, (1, 1)))
        elif isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1):
            is_known = (module.kernel_size[0], module.padding, module.stride[0]) == (3, (1, 1), 1)
            module.register_forward_pre_hook(_widen)
            module.register_forward_hook(_cut)
        if not is_known:
            kind = type(vae).__name__
            raise ModelError(f"{kind}: its decoder's {name} cannot be shared among ranks: {module}")
    code: Any = sys.modules[type(vae).__module__]
    if not isinstance(code.F, _Functional):
        assert code.F is functional, f"{code.__name__} is wrapped already"
        code.F = _Functional()


def decode_rows(vae: Any, latents_BCTHW: Tensor, parallel: Parallel | None) -> tuple[Tensor, int]:
    """The decoded pixels of this rank's rows, and the index of the first row.

    All ranks of a layout make the same call with the same whole latents; one rank alone decodes all rows. The
    result depends on the degree and the slot, not on the ranks.

    Shapes: latents_BCTHW -> [B, 3, T, H, W] with the VAE's factors for frames, rows and columns.
    Raises: LayoutError when a rank would have no row, and for ranks of two guidance branches.
    """
    if parallel is None or (ranks := parallel.sequence).size * parallel.cfg.size == 1:
        return _decoded(vae, latents_BCTHW), 0
    num_rows = latents_BCTHW.shape[3]
    if parallel.cfg.size > 1:
        raise LayoutError(f"a decode has no guidance branches for cfg degree {parallel.cfg.size}")
    if num_rows < ranks.size:
        raise LayoutError(f"{num_rows} rows of latents cannot be shared among {ranks.size} ranks")
    assert not vae.use_tiling, "a shared decode is no tiled one"
    start, stop = shard_bounds(num_rows, ranks.size, ranks.slot)
    band_BCTHW = latents_BCTHW[:, :, :, start:stop].contiguous()
    with held(_BANDS, _Bands(ranks, shard_sizes(num_rows, ranks.size))):
        pixels = _decoded(vae, band_BCTHW)
    return pixels, start * (pixels.shape[3] // (stop - start))


def _decoded(vae: Any, latents_BCTHW: Tensor) -> Tensor:
    """The VAE's pixels; after a failure its cache of frames is empty."""
    try:
        pixels: Tensor = vae.decode(latents_BCTHW, return_dict=False)[0]
    except BaseException:
        vae.clear_cache()
        raise
    return pixels


# Causal convolutions, which pad for themselves, and attention --------------------------------------


class _Functional:
    """torch.nn.functional for the modules of a VAE: its padding and attention know of bands."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)

    @staticmethod
    def pad(x: Tensor, pad: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        """`functional.pad`; of a band, rows that are beyond it and in the picture are the neighbours'."""
        padded = functional.pad(x, pad, *args, **kwargs)
        bands = _BANDS.get()
        if bands is not None and any(pad[2:4]):
            _fill(padded, x, pad, bands)
        return padded

    @staticmethod
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """`functional.scaled_dot_product_attention`; of a band's places to those of all bands."""
        bands = _BANDS.get()
        if bands is not None:
            key, value = bands.everywhere(key, value)
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _fill(padded: Tensor, x: Tensor, pad: Sequence[int], bands: _Bands) -> None:
    """Put the neighbours' rows where `padded`, which is x and a row of zeros on either side, has zeros."""
    inner = padded.narrow(-1, pad[0], x.shape[-1])
    if len(pad) > 4:
        inner = inner.narrow(-3, pad[4], x.shape[-3])
    above, below = bands.halo(x)
    if above is not None:
        inner[..., 0, :].copy_(above)
    if below is not None:
        inner[..., -1, :].copy_(below)


# Flat convolutions, whose padding is their own: they are given a row more on either side --------------


def _widen(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
    """A pre-forward hook: the band with the neighbours' rows, or zeros at the picture's edge."""
    bands = _BANDS.get()
    if bands is None:
        return None
    pad = (0, 0, 1, 1)
    padded = functional.pad(args[0], pad)
    _fill(padded, args[0], pad, bands)
    return (padded,)


def _cut(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """A forward hook: without the rows that are made from the module's own padding."""
    return None if _BANDS.get() is None else output[..., 1:-1, :]
