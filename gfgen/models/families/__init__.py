"""The executors of each model family."""
