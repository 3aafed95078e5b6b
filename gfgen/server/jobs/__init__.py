"""The server's jobs: requests, their acceptance and end, and the files in the output folder."""
