"""Tokenizers of the tiny models, and of others without a vocabulary."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2Tokenizer, T5Tokenizer

WORD_LIST = """
a an the of in on at with and over under through from to by into is are red orange yellow green blue
purple pink black white gold silver cat dog fox bird horse fish whale tree forest mountain river
lake sea ocean beach city street house castle bridge tower train car boat ship robot astronaut girl
boy woman man child people sun moon star stars sky cloud clouds rain snow storm fire water light
shadow night day dawn sunset sunrise morning evening spring summer autumn winter flower flowers
garden field desert island road running walking flying swimming dancing sleeping looking sitting
standing slowly fast small big old new ancient modern wide close shot view portrait landscape
cinematic photo painting watercolor oil style bright dark soft warm cold blurry quality detailed
colourful colorful waves glass neon lantern lanterns
"""
"""Frequent words of prompts; all others are split into characters."""

QWEN_TEMPLATE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background: system user assistant"
)
"""Words of the pipeline's template. Each must be one token, as it is in the real tokenizer:
the pipeline cuts off the first 34 tokens without looking."""

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def t5_tokenizer() -> Any:
    """A unigram tokenizer of words and characters."""
    return T5Tokenizer(vocab=_t5_vocabulary(), extra_ids=0)


def qwen_tokenizer() -> Any:
    """A byte-pair tokenizer whose fixed prefix of the pipeline's template has 34 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _qwen_merges()
    pieces = [*alphabet, *("".join(pair) for pair in merges), *QWEN_SPECIAL]
    vocab = {piece: idx for idx, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer: Any = Qwen2Tokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in QWEN_SPECIAL])
    return tokenizer


def _t5_vocabulary() -> list[tuple[str, float]]:
    """Pieces and their log probabilities; the first three are where T5 expects them."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"\u2581{word}", -4.0) for word in WORD_LIST.split()]
    characters = [("\u2581", -6.0)] + [(chr(code), -9.0) for code in range(33, 127)]
    return special + words + characters


def _qwen_merges() -> list[tuple[str, str]]:
    """Merges that build each word letter by letter; those of the template come first."""
    space = "\u0120"  # how byte-level tokenizers write a blank
    template = QWEN_TEMPLATE.replace(",", "").replace(":", "").split()
    starts = ["Describe", "system", "user", "assistant"]
    words = (
        starts
        + [space + word for word in template if word not in starts]
        + [space + word for word in WORD_LIST.split()]
    )
    merges = {(word[:end], word[end]): None for word in words for end in range(1, len(word))}
    return list(merges)
