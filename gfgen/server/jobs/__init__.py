"""The server's jobs: requests, the store, the live state."""
