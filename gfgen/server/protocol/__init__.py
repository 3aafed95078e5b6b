"""What HTTP requests and answers hold, and what the front and the run tell each other."""
