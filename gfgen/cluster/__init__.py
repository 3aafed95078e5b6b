"""Several machines: a driver that hands jobs to nodes, each of which schedules its own ranks."""
