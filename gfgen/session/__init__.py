"""One run from admission to its end: what `run`, `serve` and `bench` share, and gfgen from Python."""
