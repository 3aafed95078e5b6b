"""What gfgen needs of the operating system: processes that end together, signals, limits, files of lines."""
