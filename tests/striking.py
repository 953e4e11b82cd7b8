"""Run real stages, each in a process of its own, and strike them at a chosen moment; see `stage_server`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from toy import environment


class Run(NamedTuple):
    """A finished run: its exit status (negative: the signal that ended it), console and moments."""

    status: int
    printed: str
    moments: list[str]


@contextmanager
def stage_server(folder: Path) -> Iterator[subprocess.Popen]:
    """A server whose stages run in `folder`; give it to `run_stage`."""
    program = [sys.executable, str(Path(__file__).resolve().with_name("stage_server.py")), str(folder)]
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        program,
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", **quiet),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield server
        server.stdin.close()


def run_stage(
    server: subprocess.Popen, command: str, moment: int | None = None, strike: str = "kill", place: str = "."
) -> Run:
    """Run `stages.<command>` in the server's folder or in `place` below it; at `moment` comes the strike:
    kill, a full disk, or Ctrl-C."""
    print(json.dumps([place, command, moment, strike]), file=server.stdin, flush=True)
    return Run(*json.loads(server.stdout.readline()))
