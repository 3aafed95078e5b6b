"""Checkpoints of small pipelines of the real classes, with text encoders that can be saved."""

from pathlib import Path

from transformers import T5Config, T5EncoderModel

from benchmarks.small_pipelines import WIDTH, small_pipeline
from gfgen.models.loading.tiny_text import t5_tokenizer


def save_checkpoint(name: str, folder: Path) -> Path:
    """A pipeline with one T5 encoder, written to a folder."""
    pipeline = small_pipeline(name)
    config = T5Config(vocab_size=1000, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipeline.register_modules(text_encoder=T5EncoderModel(config).eval(), tokenizer=t5_tokenizer())
    pipeline.save_pretrained(folder)
    return folder
