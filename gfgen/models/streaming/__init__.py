"""Blocks that are read for each forward, because the GPU does not hold all of a transformer."""
