"""Results as objects of a store: files, or shards of many jobs."""
