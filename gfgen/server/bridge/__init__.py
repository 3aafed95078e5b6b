"""The run's side of the server."""
