"""The control plane, its backends, and the worker process."""
