"""Elastic generation of pictures and videos on the GPUs of one machine."""
