"""What makes forwards faster, and where they can be stopped."""
