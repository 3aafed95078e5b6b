"""The processes of a run, as the control plane sees them."""
