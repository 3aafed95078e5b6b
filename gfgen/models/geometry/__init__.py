"""Sizes, operations and memory of a job, computed from a model's config files. No torch."""
