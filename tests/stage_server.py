"""The server behind `striking`: a program that forks a process for each run of a stage, and strikes it.

It has imported the libraries, not the project, so that a run costs a second. Moments are numbered: each
opening of a file for writing, rename, removal, new folder, each snapshot that is written in full or in half,
and each optimiser step, before and after.
"""

import json
import logging
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def serve(folder: Path) -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses an optional kernel
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as reports:
            process = os.fork()
            if process == 0:
                _run(folder, Path(reports), *json.loads(line))
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            printed = (Path(reports) / "console").read_text()
            moments = (Path(reports) / "moments").read_text().splitlines()
        print(json.dumps([status, printed, moments]), flush=True)


def _run(folder: Path, reports: Path, place: str, command: str, moment: int | None, strike: str) -> None:
    os.chdir(folder / place)
    console = os.open(reports / "console", os.O_WRONLY | os.O_CREAT)
    os.dup2(console, 1)
    os.dup2(console, 2)
    _watch(folder, os.open(reports / "moments", os.O_WRONLY | os.O_CREAT), moment, strike)
    # A shell that runs the tests in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module, *arguments = command.split()
    sys.path[0], sys.argv = str(folder), [module, *arguments]
    status = 1
    try:
        runpy.run_module(f"stages.{module}", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exit:
        status = exit.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watch(folder: Path, moments: int, strike_at: int | None, strike: str) -> None:
    """Write every moment down, and strike at the chosen one."""
    from torch.optim import optimizer

    count, full, sync = 0, False, os.fsync

    def moment(name: str, path: str | None = None) -> None:
        nonlocal count, full
        os.write(moments, f"{name} {path or ''}\n".encode())
        count += 1
        if strike == "full disk" and (full or count - 1 == strike_at) and name.startswith("open"):
            full = True
            raise OSError(28, "No space left on device", path)
        if count - 1 == strike_at and strike == "kill":
            if name == "half written":
                os.truncate(folder / path, (folder / path).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if count - 1 == strike_at and strike == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)

    def audit(event: str, arguments: tuple) -> None:
        if event != "open" and event not in CHANGES:
            return
        if isinstance(arguments[0], str | bytes | Path) and (event != "open" or arguments[2] & WRITING):
            path = Path.cwd() / os.fsdecode(arguments[0])
            if path.is_relative_to(folder):
                moment(event, path.relative_to(folder).as_posix())

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_file():
            moment("half written", path.relative_to(folder).as_posix())
            moment("written", path.relative_to(folder).as_posix())

    os.fsync = fsync
    optimizer.register_optimizer_step_pre_hook(lambda *_: moment("before a step"))
    optimizer.register_optimizer_step_post_hook(lambda *_: moment("after a step"))
    sys.addaudithook(audit)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
