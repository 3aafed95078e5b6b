"""What the commands share to set up a run."""
