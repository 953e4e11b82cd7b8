"""Reproduce the committed results in a fresh clone and compare every output: `make verify`.

The hashes of HEAD's dvc.lock (with `--run-file qa/dvc.yaml` of qa/dvc.lock) are held against those that
`dvc repro --force` gives in a clone of HEAD with an empty DVC cache. On the hardware of the committed results
every output has to be the same to the bit. On other hardware that holds for the stages before any model; the
metrics of the others have to lie within tolerances.
"""

import argparse
import hashlib
import json
import os
import posixpath
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath

from ruamel.yaml import YAML

from rlhf import config, errors, record
from rlhf.environment import environment
from rlhf.errors import UserError
from tools.comparison import (
    MISSING,
    Comparison,
    compare_locks,
    largest_difference,
    model_stages,
    outputs,
    overlap,
    problems,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description=__doc__.splitlines()[0])
    parser.add_argument("--keep", metavar="FOLDER", help="clone into this new folder and keep it")
    parser.add_argument(
        "--run-file", metavar="FILE", default="dvc.yaml", help="the pipeline: dvc.yaml or qa/dvc.yaml"
    )
    parser.add_argument(
        "stages",
        metavar="STAGE",
        nargs="*",
        help="verify these alone, on the inputs of the working directory",
    )
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        # As Ctrl-C, so that the temporary folder goes; `nohup` has SIGHUP ignored, and that stays.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(verify(arguments.stages, arguments.keep, arguments.run_file))
    except KeyboardInterrupt:
        print("interrupted: nothing has been verified", file=sys.stderr)
        sys.exit(130)


def verify(names: list[str], keep: str | None = None, run_file: str = "dvc.yaml") -> int:
    """Reproduce HEAD's pipeline, or the named stages of it, and print how it compares; return the status."""
    if git(".", "status", "--porcelain"):
        print("note: uncommitted changes are not part of what is verified")
    with fresh_clone(keep) as clone:
        lock = read_lock(clone, run_file)
        chosen = expand(names, read_stages(clone / run_file), lock)
        copy_inputs(inputs(lock, chosen), clone)
        loose = loose_outputs(lock, changed_environment((clone / run_file).parent))
        committed = {name: lock[name] for name in chosen}
        held = {path: path_md5(clone / path) for path in outputs(committed) if (clone / path).exists()}
        new = reproduce(clone, run_file, chosen if names else [])
        rows = compare_locks(committed, new, held)
        return conclude(rows, loose, read_texts(rows, held, clone))


def conclude(rows: list[Comparison], loose: set[str], texts: dict[str, tuple[str, str]]) -> int:
    """Print the comparison, what is wrong with it, and the counts; return 1 if anything is wrong, else 0."""
    show(rows, texts)
    wrong = problems(rows, loose, texts)
    if loose:
        print("\n".join(wrong) or "every metric is within its tolerance")
    different = sum(row.committed != row.new for row in rows)
    print(f"{len(rows)} outputs, {len(rows) - different} identical, {different} different")
    return 1 if wrong else 0


def expand(names: list[str], run_file: dict, lock: dict) -> list[str]:
    """Return the lock's stages that `names` stand for, in the run file's order; no names stand for all."""
    if not names:
        return list(lock)
    groups = {base: [name for name in lock if name.split("@")[0] == base] for base in run_file}
    known = {base for base in groups if groups[base]} | {name for group in groups.values() for name in group}
    for name in names:
        if name not in known:
            raise UserError(f"stage {name!r} is unknown: expected some of {', '.join(sorted(known))}")
    return [name for base in groups for name in groups[base] if base in names or name in names]


def inputs(lock: dict, chosen: list[str]) -> dict[str, str]:
    """Return path -> hash of what the chosen stages read of the outputs of stages that are not chosen."""
    given = outputs({name: stage for name, stage in lock.items() if name not in chosen})
    needed = {}
    for dep in (dep for name in chosen for dep in lock[name].get("deps", [])):
        for path in (path for path in given if overlap(path, dep["path"])):
            inside = PurePosixPath(dep["path"]) in PurePosixPath(path).parents
            needed |= {path: given[path]} if inside else {dep["path"]: dep["md5"]}
    return needed


def path_md5(path: Path) -> str:
    """Hash a file, or a folder as DVC does: the md5 of the JSON list of its files' hashes, then ".dir"."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    listed = [{"md5": path_md5(files[name]), "relpath": name} for name in sorted(files)]
    return hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + ".dir"


def copy_inputs(needed: dict[str, str], clone: Path) -> None:
    """Copy from the working directory what git did not bring into the clone, once its hash is right."""
    for path in sorted(needed):
        if (clone / path).exists():
            continue
        found = path_md5(Path(path)) if Path(path).exists() else MISSING
        if found != needed[path]:
            what = found if found == MISSING else "not what dvc.lock says"
            raise UserError(
                f"{path} is {what}: run `dvc repro` or `dvc pull` first, or verify without naming stages"
            )
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if Path(path).is_dir() else shutil.copy)(path, clone / path)


def changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return one line for each entry of two environments that differs."""
    names = [name for name in then | now if then.get(name) != now.get(name)]
    return [f"{name}: {then.get(name, MISSING)} then, {now.get(name, MISSING)} now" for name in names]


def changed_environment(folder: Path) -> list[str]:
    """Return what differs between the environment of a folder's committed results and the present one."""
    path = folder / "reports/environment.json"
    if not path.exists():
        print("note: HEAD has no reports/environment.json, so the hardware cannot be compared")
        return []
    runtime = config.load(folder / "params.yaml").runtime
    return changed(record.read_json(path), environment(runtime.device, runtime.threads))


def loose_outputs(lock: dict, changes: list[str]) -> set[str]:
    """Return the outputs that may differ in bits: on the hardware of the committed results none."""
    if not changes:
        return set()
    stages = model_stages(lock)
    print("this is not the environment of the committed results:", *changes, sep="\n  ")
    print("what computes with a model is expected to differ in bits; its metrics are held to tolerances:")
    print(" ", ", ".join(name for name in lock if name in stages))
    return set(outputs({name: lock[name] for name in stages}))


def git(folder: str | Path, *arguments: str) -> str:
    """Run git in a folder and return what it printed; raises `UserError` with its last line."""
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode != 0:
        raise UserError(
            f"git {arguments[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        )
    return done.stdout


@contextmanager
def fresh_clone(keep: str | None) -> Iterator[Path]:
    """Give a clone of HEAD, in a new folder `keep` that stays, or in a temporary one that always goes."""
    if keep is not None and Path(keep).exists():
        raise UserError(f"--keep is {keep!r}: expected a folder that does not exist yet")
    with tempfile.TemporaryDirectory(prefix="verify-") if keep is None else nullcontext(keep) as folder:
        clone = Path(folder).absolute()
        git(".", "clone", "--quiet", "--no-hardlinks", ".", str(clone))
        yield clone


def reproduce(clone: Path, run_file: str, chosen: list[str]) -> dict:
    """Run DVC in the clone, for all of a run file or the chosen stages alone; return the lock of what ran."""
    (clone / lock_of(run_file)).unlink()
    targets = ["--single-item", *(f"{run_file}:{name}" for name in chosen)] if chosen else [run_file]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = ["dvc", "repro", "--force", "--no-run-cache", *targets]
    print(f"running {' '.join(command)} in {clone}", flush=True)
    status = run_to_the_end(command, clone, os.environ | {"PATH": path})
    if status != 0:
        raise UserError(f"dvc repro ended with status {status}: its message stands above")
    return read_lock(clone, run_file)


def run_to_the_end(command: list[str], folder: Path, variables: dict[str, str]) -> int:
    """Run a program with all that it starts in a session of its own; on Ctrl-C end them all and wait."""
    process = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        process.wait()
        raise


def read_stages(path: Path) -> dict:
    """Return the stages of a run file or a dvc.lock by name."""
    if not path.exists():
        raise UserError(f"HEAD has no {path.name}: expected a committed DVC project")
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))["stages"]


def lock_of(run_file: str) -> str:
    """Return the path of a run file's lock."""
    return PurePosixPath(run_file).with_name("dvc.lock").as_posix()


def read_lock(clone: Path, run_file: str) -> dict:
    """Return the stages of a run file's lock, with every path as it is from the root of the clone."""
    folder = posixpath.dirname(run_file)
    stages = read_stages(clone / lock_of(run_file))
    for entry in (e for stage in stages.values() for e in stage.get("deps", []) + stage.get("outs", [])):
        entry["path"] = posixpath.normpath(posixpath.join(folder, entry["path"]))
    return stages


def read_texts(rows: list[Comparison], held: dict[str, str], clone: Path) -> dict[str, tuple[str, str]]:
    """Return path -> committed and new text of the .json and .csv files that differ and that git holds."""
    return {
        path: (git(clone, "show", f"HEAD:{path}"), (clone / path).read_text("utf-8", errors="replace"))
        for path, committed, new in rows
        if committed != new != MISSING and path in held and path.endswith((".json", ".csv"))
    }


def show(rows: list[Comparison], texts: dict[str, tuple[str, str]]) -> None:
    """Print one line per output, and under one that differs the largest difference between its numbers."""
    width = max((len(row.path) for row in rows), default=0)
    for path, committed, new in rows:
        print(f"{path:{width}}  {committed:36}  {new:36}  {'identical' if committed == new else 'different'}")
        found = largest_difference(*texts[path], Path(path).suffix) if path in texts else None
        if found:
            print(f"{'':{width}}  largest difference: {found[0]:.6g} in {found[1]}")


if __name__ == "__main__":
    errors.run(main)
