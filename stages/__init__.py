"""One program per stage of dvc.yaml, each runnable alone: `python -m stages.<name>`."""

import logging
import os

# Libraries that would otherwise fill the console: one asks for an optional kernel that nothing here uses,
# the other draws a progress bar for each loaded file. Set before either is imported.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
