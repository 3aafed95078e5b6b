"""`gfgen bench`: policies compared on workloads, collectives, and the paper's evaluation."""
