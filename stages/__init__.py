"""One program per stage of dvc.yaml, each runnable alone: `python -m stages.<name>`."""

import logging
import os
import sys
from types import TracebackType

# Libraries that would otherwise fill the console: one asks for an optional kernel that nothing here uses,
# one draws a progress bar for each loaded file, one reports the judge's missing head, which is trained here
# (`rlhf.models` makes a missing weight of the policy an error), one logs each error that it also raises. Set
# before any is imported.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("DATASETS_VERBOSITY", "critical")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _interrupted_import(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Ctrl-C while a stage still imports its libraries, where `rlhf.errors.run` cannot catch it yet."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = _interrupted_import
