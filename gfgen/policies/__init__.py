"""Scheduling policies: pure functions from a snapshot to decisions."""
