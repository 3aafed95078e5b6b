"""Runs in virtual time: whole ones, looks ahead, plans and forecasts."""
