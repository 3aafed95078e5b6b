"""The files of a run: journal, manifest, resume points, the lock, outputs."""
