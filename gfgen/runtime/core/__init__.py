"""The vocabulary of a run: admitted jobs, events, dispatches, the clock, the devices."""
