"""Exchange between the processes of a run: messages, job state in shared memory, plans of transfers."""
