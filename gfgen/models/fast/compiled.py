"""What is faster in pipelines without an adapter of their own: blocks compiled, texts cut, channels last.

`prepare` lets the repeated blocks of a transformer choose with each call between their own forward and the
compiled one (kernels.py). All blocks of a class share what the compiler makes for a shape. A GELU behind a
linear layer is computed in the epilogue of the layer's product, which the compiler does not do. Hooks stay
outside of what is compiled. If the compiler fails, the blocks run their own forward from then on.

`cut_texts`: HunyuanVideo's pipeline pads each text to 256 tokens and hides the padding from attention by a
mask, with which attention takes a slower kernel. Here each text is cut to its length, and there is no mask.

`channels_last`: UNets and VAEs have the order of a GPU's convolutions, which group norms keep, too.

All of it is equal up to rounding. Source: diffusers 0.42 transformer_hunyuan_video.py.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL, HunyuanVideoTransformer3DModel, UNet2DConditionModel
from diffusers.models.activations import GELU
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from gfgen.errors import in_one_line
from gfgen.models.fast.kernels import present_choice
from gfgen.models.fast.linears import linear_gelu
from gfgen.models.parallel.plans import TEXT
from gfgen.models.parallel.sequence_parallel import sharing_ranks
from gfgen.models.streaming.turns import CallLocal

logger = logging.getLogger(__name__)

RECOMPILE_LIMIT = 64
"""Shapes of a block: several sizes of pictures at several degrees. Behind torch's own limit of 8, blocks run
their own forward without a word."""

Forward = Callable[..., Any]


def prepare(transformer: nn.Module, *, has_any_texts: bool = False, backend: Any = "inductor") -> None:
    """Let the blocks of a transformer run compiled, permanently; once for each instance.

    has_any_texts: texts have many lengths, so what is compiled is for all of them.
    """
    compiler = _Compiler(transformer, has_any_texts=has_any_texts, backend=backend)
    for block in repeated_blocks(transformer):
        block.forward = functools.partial(_forward, compiler, _Block(block.forward))
        modules: list[Any] = list(block.modules())
        for module in modules:
            is_plain = type(module) is GELU and type(module.proj) is nn.Linear  # its weight is not quantised
            if is_plain and module.approximate == "tanh" and module.proj.bias is not None:
                module.__class__ = EpilogueGelu


def repeated_blocks(transformer: nn.Module) -> list[nn.Module]:
    """The blocks that diffusers names, or else those of the classes in the list with most parameters.

    Parts outside of lists, such as the embedding of patches, run once, so compiling them gains nothing.
    """
    lists = [module for module in transformer.modules() if isinstance(module, nn.ModuleList)]
    named = set(getattr(transformer, "_repeated_blocks", None) or ())
    found = [block for each in lists for block in each if type(block).__name__ in named]
    if not found and lists:
        largest = max(lists, key=lambda each: sum(x.numel() for x in each.parameters()))
        kinds = {type(block) for block in largest}
        found = [block for each in lists for block in each if type(block) in kinds]
    inner = {module for block in found for module in block.modules() if module is not block}
    return [block for block in found if block not in inner]


class EpilogueGelu(GELU):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            projected: Tensor = _linear_gelu(hidden_states, self.proj.weight, self.proj.bias)
            return projected
        own: Tensor = super().forward(hidden_states)
        return own


@torch.library.custom_op("gfgen::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One operator, because the compiler would take the activation apart from the product."""
    return linear_gelu(x, weight, bias)


@_linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@dataclass(slots=True)
class _Block:
    own: Forward
    compiled: Forward | None = None


class _Compiler:
    def __init__(self, transformer: nn.Module, *, has_any_texts: bool, backend: Any) -> None:
        self._name = type(transformer).__name__
        self.transformer = weakref.ref(transformer)
        self._has_any_texts = has_any_texts
        self._backend = backend
        self.has_failed = False

    def run(self, block: _Block, args: Any, kwargs: Any) -> Any:
        """The result of the compiled block.

        Raises: what the block raises; what the compiler raises becomes a line in the log.
        """
        from torch._dynamo import exc

        try:
            if block.compiled is None:
                config = torch._dynamo.config
                config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
                config.fail_on_recompile_limit_hit = True
                # Otherwise each rank takes whichever way of a sum was faster when it tried them.
                options: Any = {"deterministic": True} if self._backend == "inductor" else None
                block.compiled = torch.compile(
                    block.own, dynamic=False, backend=self._backend, options=options
                )
            if self._has_any_texts:
                args = _of_any_text(args)
            return block.compiled(*args, **kwargs)
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            self.has_failed = True
            logger.warning("%s: its blocks run without the compiler: %s", self._name, in_one_line(error))
            return block.own(*args, **kwargs)


def _of_any_text(args: Sequence[Any]) -> Sequence[Any]:
    """A block's arguments, picture and text first, so that what is compiled serves texts of any length.

    Strides of a single sample may depend on the length although they mean nothing.
    """
    picture, text = (
        x.contiguous().as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)) for x in args[:2]
    )
    torch._dynamo.maybe_mark_dynamic(text, 1)
    return picture, text, *args[2:]


def _forward(compiler: _Compiler, block: _Block, *args: Any, **kwargs: Any) -> Any:
    runs_beside = getattr(compiler.transformer(), "runs_beside", False)  # changes that no block compiles
    if present_choice() != "compiled" or compiler.has_failed or runs_beside:
        return block.own(*args, **kwargs)
    return compiler.run(block, args, kwargs)


TEXT_MASK, MASK = "encoder_attention_mask", "attention_mask"
_MASK_POSITION = 3
MIN_TOKENS = 2
"""A length of 1 would be a kind of its own for the compiler."""


def cut_texts(transformer: nn.Module) -> bool:
    """Let a transformer cut its texts, permanently, for other than `own` kernels (kernels.py); whether its
    class is one that can. Before `branches.watch`, inside which a forward is asked for twice."""
    if not isinstance(transformer, HunyuanVideoTransformer3DModel):
        return False
    current = CallLocal()  # has_cut: in the present forward
    lengths: Any = WeakTensorKeyDictionary()
    forward, signature = transformer.forward, inspect.signature(transformer.forward)

    @functools.wraps(forward)
    def cut(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        shorter = _cut(given, lengths)
        current.has_cut = bool(shorter)
        return forward(**{**given, **shorter})

    transformer.forward = cut
    for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]:
        hook = functools.partial(_without_mask, current=current)
        block.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    return True


def _cut(given: Mapping[str, Any], lengths: Any) -> Mapping[str, Any]:
    """The arguments that are shorter than given; none if the padding stays."""
    mask, text = given.get(TEXT_MASK), given.get(TEXT)
    if present_choice() == "own" or mask is None or text is None:
        return {}
    if mask not in lengths:
        lengths[mask] = _common_length(mask)  # waits for the device, once for each prompt
    length, ranks = lengths[mask], sharing_ranks()
    if length is None or length < (MIN_TOKENS if ranks is None else max(MIN_TOKENS, ranks.size)):
        return {}
    return {TEXT: text[:, :length], TEXT_MASK: mask[:, :length]}


def _common_length(mask: Tensor) -> int | None:
    """The length of all texts of a batch; None if lengths differ, or padding is elsewhere than at the end."""
    rows = mask.bool().tolist()
    length = sum(rows[0])
    return length if all(row == [True] * length + [False] * (len(row) - length) for row in rows) else None


def _without_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, current: CallLocal
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not current.has_cut:
        return None
    if MASK in kwargs:
        return args, {**kwargs, MASK: None}
    return (*args[:_MASK_POSITION], None, *args[_MASK_POSITION + 1 :]), kwargs


def channels_last(pipeline: Any) -> None:
    """Change the order in a pipeline that has a UNet, permanently."""
    parts = [x for x in pipeline.components.values() if isinstance(x, (AutoencoderKL, UNet2DConditionModel))]
    if not any(isinstance(part, UNet2DConditionModel) for part in parts):
        return
    for module in [
        module for part in parts for module in part.to(memory_format=torch.channels_last).modules()
    ]:
        if type(module) is nn.GroupNorm:
            module.__class__ = _Norm
        elif isinstance(module, ResnetBlock2D) and _is_activated(module):
            module.nonlinearity = _OfEmbeddings()
            module.norm1.activates = module.norm2.activates = True


def _is_activated(block: Any) -> bool:
    """Whether SiLU follows both norms of a residual block at once."""
    return type(block.nonlinearity) is nn.SiLU and block.time_embedding_norm != "scale_shift"


class _Norm(nn.GroupNorm):
    activates = False

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dim() == 4:
            from gfgen.models.fast import row_kernels

            x_NHWC = x.permute(0, 2, 3, 1).contiguous()
            result = torch.empty_like(x_NHWC)
            row_kernels.group_norm(x_NHWC, torch.float32, self, result, activate=self.activates)
            return result.permute(0, 3, 1, 2)
        normed = super().forward(x)
        return functional.silu(normed) if self.activates else normed


class _OfEmbeddings(nn.SiLU):
    """SiLU of embeddings; pictures have had theirs."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 4 else super().forward(x)
