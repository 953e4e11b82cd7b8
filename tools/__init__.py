"""Programs about the experiment as a whole, not stages of it: `python -m tools.<name>`."""
