"""What a model makes of a job, from its config files alone: sizes, operations, memory. No torch."""
