"""What the processes of a run exchange: messages, job state in shared memory, plans of transfers."""
