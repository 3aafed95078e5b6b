"""The control plane: the state of a run, and the loop that changes it."""
