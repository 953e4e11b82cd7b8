"""Programs about the experiment as a whole, not stages of it: `python -m tools.<name>`."""

import stages  # noqa: F401  (before the libraries that its settings keep quiet)
