"""Models from files, or made up."""
