"""The jobs of the server: the store, what is accepted, what is shown."""
