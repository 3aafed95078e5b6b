"""The worker process: one rank that runs tasks."""
