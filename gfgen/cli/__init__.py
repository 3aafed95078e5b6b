"""The command line: click commands that wire the concrete classes together and hold no logic."""
