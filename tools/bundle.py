"""Pack an experiment into one verified zip, and put it back: `python -m tools.bundle pack|restore FILE.zip`.

A bundle holds params.yaml, dvc.yaml, dvc.lock and every output that the lock names, not compressed: the same
bytes for the same experiment. MANIFEST.json has the size and sha256 of each, and the git commit. Both work in
the folder of either pipeline (for question answering `cd qa`, with PYTHONPATH=..).

`restore` takes bundles from anywhere. It puts nothing in place before all of the bundle has been checked, and
then only params.yaml, dvc.lock and outputs under artifacts/, data/ and reports/: never code, nor dvc.yaml and
the commands in it. At the end it gives the outputs to DVC's cache, so that `dvc repro` takes them for its own
and reruns only what the lock does not fit.
"""

import argparse
import errno
import json
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from rlhf import config, errors, record
from rlhf.errors import UserError
from tools.comparison import outputs
from tools.verify import git, path_md5, read_stages

MANIFEST = "MANIFEST.json"
MANIFEST_BYTES = 2**24  # what a manifest may have at most
PROJECT_FILES = ("dvc.lock", "dvc.yaml", "params.yaml")
FOLDERS = ("artifacts", "data", "reports")  # where outputs lie, and all that `restore` writes into
DATE = (1980, 1, 1, 0, 0, 0)
MODE = stat.S_IFREG | 0o644
# What reading a run file or a lock raises where it is none.
YAML_ERRORS = (YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
# What zipfile raises on an archive that is damaged or not its own.
ZIP_ERRORS = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error)

Files = dict[str, dict[str, Any]]  # relative name -> {"bytes": size, "sha256": hash}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bundle", description="Pack an experiment into one zip, or put it back."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("pack", "write a bundle"), ("restore", "put a bundle's files in place")):
        command = commands.add_parser(name, help=text)
        command.add_argument("zip", metavar="FILE.zip", type=Path)
        if name == "restore":
            command.add_argument("--force", action="store_true", help="replace files that differ")
    arguments = parser.parse_args()
    if arguments.command == "pack":
        pack(arguments.zip)
    else:
        restore(arguments.zip, arguments.force)


def pack(path: Path) -> None:
    """Write the experiment of the working directory, once every output is what dvc.lock says."""
    if path.suffix != ".zip":
        raise UserError(f"{path}: expected a file name that ends in .zip")
    if path.exists():
        raise UserError(f"{path} is there: expected a new name")
    for name in PROJECT_FILES:
        if not Path(name).is_file():
            raise UserError(f"{name} is not there: run from the project's root, after `dvc repro`")
    names = {*PROJECT_FILES, *output_files(Path(), locked_outputs(Path("dvc.lock")))}
    files = {
        name: {"bytes": Path(name).stat().st_size, "sha256": record.sha256_file(name)}
        for name in sorted(names)
    }
    manifest = {"commit": git(".", "rev-parse", "HEAD").strip(), "files": files}
    with record.replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        archive.writestr(member(MANIFEST, len(text.encode())), text)
        for name, entry in files.items():
            with Path(name).open("rb") as source, archive.open(member(name, entry["bytes"]), "w") as target:
                shutil.copyfileobj(source, target)
    print(f"{path}: {len(files)} files, {path.stat().st_size:,} bytes, sha256 {record.sha256_file(path)}")


def member(name: str, size: int) -> zipfile.ZipInfo:
    """Describe a stored member without anything of its file but name and size."""
    info = zipfile.ZipInfo(name, DATE)
    info.create_system, info.external_attr, info.file_size = 3, MODE << 16, size
    return info


def output_files(root: Path, outs: dict[str, str]) -> list[str]:
    """Return the files of outputs, path -> md5, below `root`; raises `UserError` unless each has its md5."""
    names = []
    for path, md5 in outs.items():
        check_name(path)
        here = root / path
        found = [file for file in (here, *here.rglob("*")) if file.is_file()]
        if not found or path_md5(here) != md5:
            state = "not what dvc.lock says" if found else "missing"
            raise UserError(f"output {path} is {state}: run `dvc repro` or `dvc pull` first")
        names += [file.relative_to(root).as_posix() for file in found]
    for name in names:
        check_name(name)
    return names


def locked_outputs(path: Path) -> dict[str, str]:
    """Return path -> md5 of every output of a dvc.lock; raises `UserError` when it is none."""
    try:
        found = outputs(read_stages(path))
    except YAML_ERRORS:
        found = None
    if found is None or not all(isinstance(text, str) for item in found.items() for text in item):
        raise UserError("dvc.lock is not a lock file of DVC with an md5 for every output")
    return found


def stage_names(path: Path) -> list[str]:
    """Return the stages of a run file or a lock, a stage of a matrix once; `UserError` when it is none."""
    try:
        return [name.partition("@")[0] for name in read_stages(path)]
    except YAML_ERRORS:
        raise UserError(f"{path.name} is not a file of DVC's with stages") from None


def check_name(name: str) -> None:
    """Raise `UserError` unless `name` is a plain relative path to one of the project's files or outputs."""
    parts = name.split("/")
    plain = name.isprintable() and not set(name) & set("\\:") and not set(parts) & {"", ".", ".."}
    if not plain or not (name in PROJECT_FILES or (parts[0] in FOLDERS and len(parts) > 1)):
        raise UserError(f"{name!r} is no file of a bundle: expected a plain path under {', '.join(FOLDERS)}")


def restore(path: Path, force: bool) -> None:
    """Check a bundle, put its files in place, and give its outputs to DVC's cache."""
    here = Path.cwd()
    if not (Path("dvc.yaml").is_file() and any((path / ".dvc").is_dir() for path in (here, *here.parents))):
        raise UserError("dvc.yaml or .dvc is not there: run in a clone of the project")
    with tempfile.TemporaryDirectory(dir=".", prefix=".restore-", suffix=".partial") as folder:
        staged = Path(folder)
        with zip_errors(path), zipfile.ZipFile(path) as archive:
            commit, files = read_manifest(archive)
            check_members(archive, files)
            extract(archive, files, staged)
        check_staged(staged, files)
        different = differences(staged, files)
        if different and not force:
            raise UserError(f"{different[0]} is here with other content; --force takes the bundle's")
        place(staged, files, different)
    print(f"restored {len(files)} files of an experiment packed at commit {commit}")
    changed = give_to_cache()
    print(f"`dvc repro` will start with {', '.join(changed)}" if changed else "`dvc repro` has nothing to do")


@contextmanager
def zip_errors(path: Path) -> Iterator[None]:
    """Turn what zipfile raises on a damaged archive into a `UserError`."""
    try:
        yield
    except (*ZIP_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        raise UserError(f"{path}: not a sound zip: {' '.join(str(error).split())}") from None


def read_manifest(archive: zipfile.ZipFile) -> tuple[str, Files]:
    """Return the commit and the files that a bundle's manifest names, once they have the right form."""
    found = [info for info in archive.infolist() if info.filename == MANIFEST]
    if len(found) != 1 or found[0].file_size > MANIFEST_BYTES:
        raise UserError(f"the bundle has no single {MANIFEST} of at most {MANIFEST_BYTES:,} bytes")
    check_member(found[0])
    try:
        manifest = json.loads(archive.read(found[0]).decode("utf-8"))
        sound = set(manifest) == {"commit", "files"} and is_hex(manifest["commit"], 40)
        sound = sound and all(is_entry(entry) for entry in manifest["files"].values())
    except (ValueError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"the bundle's {MANIFEST} is not one that this program wrote")
    return manifest["commit"], manifest["files"]


def is_entry(entry: Any) -> bool:
    """Tell whether a manifest's entry is a size and a sha256."""
    size = isinstance(entry, dict) and set(entry) == {"bytes", "sha256"} and entry["bytes"]
    return type(size) is int and size >= 0 and is_hex(entry["sha256"], 64)


def is_hex(text: Any, digits: int) -> bool:
    """Tell whether a value is a text of so many hexadecimal digits."""
    return isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def check_members(archive: zipfile.ZipFile, files: Files) -> None:
    """Raise `UserError` unless the members are the manifest's files: plain, regular, stored, of its sizes."""
    members = [info for info in archive.infolist() if info.filename != MANIFEST]
    seen: set[str] = set()
    for info in members:
        name = info.filename
        check_name(name)
        check_member(info)
        if name.casefold() in seen:
            raise UserError(f"the bundle has {name} twice")
        seen.add(name.casefold())
        if name not in files or files[name]["bytes"] != info.file_size:
            raise UserError(f"{name} in the bundle is not as its manifest says")
    missing = [name for name in sorted({*files, *PROJECT_FILES}) if name.casefold() not in seen]
    if missing:
        raise UserError(f"the bundle has no {missing[0]}")
    if sum(info.file_size for info in members) > Path(archive.filename).stat().st_size:
        raise UserError("the bundle holds more bytes than its own size: its members overlap")


def check_member(info: zipfile.ZipInfo) -> None:
    """Raise `UserError` unless a member is a regular file, stored as it is."""
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG) or info.orig_filename != info.filename:
        raise UserError(f"{info.orig_filename!r} in the bundle is not a regular file")
    if info.flag_bits & 1 or info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise UserError(f"{info.filename} in the bundle is compressed or encrypted: expected it stored")


def extract(archive: zipfile.ZipFile, files: Files, folder: Path) -> None:
    """Write the members below `folder`; raises `UserError` for one whose sha256 is not the manifest's."""
    for name, entry in files.items():
        target = folder / name
        if any(parent.is_file() for parent in target.parents) or target.is_dir():
            raise UserError(f"{name} is a file and a folder in the bundle")
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
        if record.sha256_file(target) != entry["sha256"]:
            raise UserError(f"{name} in the bundle has another sha256 than its manifest says")


def check_staged(folder: Path, files: Files) -> None:
    """Raise `UserError` unless the lock's outputs are there and nothing else, and the parameters valid."""
    expected = {*PROJECT_FILES, *output_files(folder, locked_outputs(folder / "dvc.lock"))}
    if extra := sorted(set(files) - expected):
        raise UserError(f"{extra[0]} in the bundle is no output that its dvc.lock names")
    if others := set(stage_names(folder / "dvc.lock")) - set(stage_names(Path("dvc.yaml"))):
        raise UserError(f"the bundle is of another pipeline: dvc.yaml here has no stage {min(others)!r}")
    try:
        config.load(folder / "params.yaml")
    except UserError as error:
        raise UserError(f"the bundle's {str(error).removeprefix(f'{folder}/')}") from None


def differences(folder: Path, files: Files) -> list[str]:
    """Return the files that are here with other content, and those in an output's folder that are not in the
    bundle; raises `UserError` where a file cannot be put."""
    root = Path.cwd().resolve()
    for name in files:
        here = Path(name)
        blocked = here.is_dir() or any(parent.is_file() for parent in here.parents)
        if blocked or not here.resolve().is_relative_to(root):
            raise UserError(f"{name} cannot be put in its place: something else is there, or it is outside")
    changed = [n for n in files if Path(n).exists() and record.sha256_file(n) != files[n]["sha256"]]
    folders = [Path(path) for path in locked_outputs(folder / "dvc.lock") if Path(path).is_dir()]
    present = [file.as_posix() for path in folders for file in path.rglob("*") if not file.is_dir()]
    return sorted(changed) + sorted(set(present) - set(files))


def place(folder: Path, files: Files, different: list[str]) -> None:
    """Move the files into place, the lock last, so that it never names what is not there."""
    for name in set(different) - set(files):
        Path(name).unlink()
    if "dvc.yaml" in different:
        print("note: dvc.yaml is kept as it is here; the bundle's differs")
    for name in sorted(set(files) - {"dvc.yaml"}, key=lambda name: name == "dvc.lock"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).replace(name)


def give_to_cache() -> list[str]:
    """Commit to DVC's cache what only lacks there; return the stages that have changed otherwise."""
    status = json.loads(dvc("status", "--json", "dvc.yaml"))  # of this pipeline, not of one below it
    for stage, path in absent_inputs(status):
        print(f"note: {path}, which stage {stage} reads, is no part of a bundle and is not here")
    lacking = [name for name, changes in status.items() if all(map(only_lacks_cache, changes))]
    if lacking:
        dvc("commit", *lacking)
    return [name for name in status if name not in lacking]


def absent_inputs(status: dict[str, list]) -> list[tuple[str, str]]:
    """Return stage and path of every input that DVC misses, such as a table of the user's."""
    found = [
        (stage, change["changed deps"])
        for stage, changes in status.items()
        for change in changes
        if isinstance(change, dict) and "changed deps" in change
    ]
    return [(stage, path) for stage, deps in found for path, state in deps.items() if state == "deleted"]


def only_lacks_cache(change: Any) -> bool:
    """Tell whether a change in `dvc status` is that outputs, checked just now, are not in the cache."""
    outs = change.get("changed outs", {}) if isinstance(change, dict) else {}
    return bool(outs) and set(change) == {"changed outs"} and set(outs.values()) == {"not in cache"}


def dvc(*arguments: str) -> str:
    """Run DVC here and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "dvc", *arguments], capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the files are in place, but `dvc {arguments[0]}` failed: {reason}")
    return done.stdout


if __name__ == "__main__":
    errors.run(main)
