"""Embeddings of prompts with weights and of any length for a pipeline's call, made by compel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gfgen.job.weighted import Parts, weighted
from gfgen.models.loading.components import without_warnings


@torch.no_grad()
@without_warnings()
def with_embeddings(pipeline: Any, arguments: Mapping[str, Any], *, device: str) -> dict[str, Any]:
    """The arguments of a call with embeddings in place of its texts."""
    from compel import Compel, ReturnedEmbeddingsType  # seconds that only such jobs pay

    kind = ReturnedEmbeddingsType.LAST_HIDDEN_STATES_NORMALIZED
    if is_large := getattr(pipeline, "text_encoder_2", None) is not None:
        kind = ReturnedEmbeddingsType.PENULTIMATE_HIDDEN_STATES_NON_NORMALIZED
    texts = {"": arguments["prompt"], "negative_": arguments.get("negative_prompt")}
    if is_large and texts["negative_"] is None and pipeline.config.get("force_zeros_for_empty_prompt"):
        del texts["negative_"]  # the call makes zeros
    parts = [weighted(text or "") for text in texts.values()]
    options = {"returned_embeddings_type": kind, "truncate_long_prompts": False, "device": device}
    makers = []  # new for each job: they keep an embedding, which LoRAs change
    for end in ("", "_2"):
        if (encoder := getattr(pipeline, f"text_encoder{end}", None)) is not None:
            makers.append(Compel(getattr(pipeline, f"tokenizer{end}"), encoder, **options))
    embeds: Any = torch.cat([_embeddings(maker, parts) for maker in makers], dim=-1)
    made = dict(zip((f"{name}prompt_embeds" for name in texts), embeds.split(1), strict=True))
    for name, each in zip(texts, parts, strict=True) if is_large else ():
        plain = " ".join(text for part in each for text, _ in part)
        provider = makers[-1].conditioning_provider
        made[f"{name}pooled_prompt_embeds"] = provider.get_pooled_embeddings([plain], device=device)
    return {name: arguments[name] for name in arguments if name not in ("prompt", "negative_prompt")} | made


def _embeddings(maker: Any, texts: list[Parts]) -> torch.Tensor:
    """[texts, tokens, channels]; all as long as the longest."""
    from compel.prompt_parser import Conjunction, FlattenedPrompt

    prompts = (Conjunction([FlattenedPrompt(part) for part in parts]) for parts in texts)
    made = [maker.build_conditioning_tensor_for_conjunction(prompt)[0] for prompt in prompts]
    return torch.cat(maker.pad_conditioning_tensors_to_same_length(made))
