"""One program per stage, run from the project's root as `python -m stages.NAME`; no stage imports another."""
