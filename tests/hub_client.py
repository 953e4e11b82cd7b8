"""Fetch sources from a hub in a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

from architecture import ROOT

TOKEN = "hf_secret"
# Fetches or locates many sources in one process, since its libraries take long to load; the library waits
# seconds between its tries, which nothing here depends on.
PROGRAM = """
import contextlib, io, json, sys, time
from rlhf import errors, sources
from rlhf.sources import Pin
time.sleep = lambda seconds: None
answers = {}
for name, task in json.load(sys.stdin).items():
    out, err, status, found = io.StringIO(), io.StringIO(), 0, []
    def work():
        if "files" in task:
            found.append(str(sources.locate(task)))
        else:
            found.append(sources.fetch(Pin(**task)))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            errors.run(work)
        except SystemExit as end:
            status = end.code
    found = found[0] if found else None
    answers[name] = {"status": status, "out": out.getvalue(), "err": err.getvalue(), "found": found}
print(json.dumps(answers))
"""


def pin(name: str, **changes: object) -> dict:
    """A hub source as params.yaml has it, at commit aa...a."""
    source = {"kind": "hub", "name": f"owner/{name}", "revision": "a" * 40, "path": None, "sha256": {}}
    return {**source, "license": "none", **changes}


def ask(folder: Path, address: str, tasks: dict, start: str = "", **variables: str) -> dict:
    """Do the tasks, {any name: a pin to fetch or a manifest to locate}; nothing else may reach a console."""
    done = subprocess.run(
        [sys.executable, "-c", start + PROGRAM],
        env=clean_environment(folder, address) | variables,
        cwd=folder,
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert TOKEN not in done.stdout and address not in done.stdout
    return json.loads(done.stdout)


def clean_environment(folder: Path, address: str) -> dict[str, str]:
    """A shell with that hub, a token, patience with a busy machine, no cache and no proxy."""
    others = ("HF_", "PYTHON", "RLHF_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(others) and "proxy" not in k.lower()}
    return clean | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "HF_ENDPOINT": address,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_ETAG_TIMEOUT": "60",
        "HF_HUB_DOWNLOAD_TIMEOUT": "60",
        "RLHF_CACHE": str(folder / "cache"),
    }
