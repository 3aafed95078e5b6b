"""The HTTP process and its routes."""
