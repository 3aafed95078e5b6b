"""Commands for runs and servers that other processes hold: status, top, cancel, submit."""
