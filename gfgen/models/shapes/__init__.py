"""The built-in model `shapes`: what it draws, how it is trained, how it is judged."""
