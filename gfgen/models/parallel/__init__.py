"""A forward or a decode shared by several ranks."""
