"""The job file: its lines become `JobSpec`s."""
