"""What a stage writes: files that appear whole or not at all, and one progress line per step."""

import csv
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf.errors import UserError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a temporary neighbour of `path`, a file or a folder to be; move it into place on success only.

    A folder that was there steps aside first and goes last, so that no moment leaves half of one at `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "old.partial"))
    _remove(temporary)
    _remove(old)
    try:
        yield temporary
        _sync(temporary)
        if path.is_dir():
            path.replace(old)
        temporary.replace(path)
    finally:
        if old.exists() and not path.exists():
            old.replace(path)
        _remove(temporary)
        _remove(old)


def _sync(path: Path) -> None:
    """Have all of a file or folder on the disk before it takes its place: no power cut can then empty it."""
    for part in [*path.rglob("*"), path]:
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 with \\n line ends, whatever the platform and locale."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON; a number that is not finite is an error (DVC cannot compare it)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: str | Path, rows: Iterable[dict]) -> None:
    """Write one JSON object per line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def write_csv(path: str | Path, rows: list[dict]) -> None:
    """Write rows with the first row's keys as header; None becomes an empty cell.

    No rows, or a number that is not finite, is a `ValueError`.
    """
    if not rows or not all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float)):
        raise ValueError(f"{path}: expected rows of finite numbers")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_json(path: str | Path) -> Any:
    """Read a JSON file; raises `UserError` when it is not JSON."""
    return _parse_json(f"{path}", _read_text(path))


def read_jsonl(path: str | Path) -> list[dict]:
    """Read one JSON object per line; raises `UserError` with the line's number."""
    lines = enumerate(_read_text(path).split("\n"), start=1)
    return [_parse_object(f"{path}, line {number}", line) for number, line in lines if line]


def _parse_object(where: str, line: str) -> dict:
    value = _parse_json(where, line)
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object")
    return value


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid UTF-8: {error}") from None


def _parse_json(where: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_not_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None


def _not_finite(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number too large for 64 bits")
    return value


def sha256_file(path: str | Path) -> str:
    """Hash a file without holding it in memory."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_rows(rows: Iterable[dict]) -> str:
    """Hash rows by their canonical JSON, so that the digest does not depend on how they are stored."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode("utf-8") + b"\n")
    return digest.hexdigest()


class Progress:
    """Console lines with values, tokens per second and time left, some fifty in all. Never in an output."""

    def __init__(self, name: str, steps: int, done: int = 0) -> None:
        self.name, self.steps, self.done = name, steps, done
        self.started, self.tokens = time.monotonic(), 0

    def step(self, step: int, tokens: int, **values: float | None) -> None:
        """Note that `step` is done and took `tokens` more tokens; print at every fiftieth of the way."""
        self.tokens += tokens
        if step % max(1, self.steps // 50) and step != self.steps:
            return
        elapsed = max(time.monotonic() - self.started, 1e-9)
        left = int(elapsed / (step - self.done) * (self.steps - step))
        shown = "  ".join(f"{name} {'null' if v is None else format(v, '.4g')}" for name, v in values.items())
        print(
            f"{self.name} {step}/{self.steps}  {shown}  {self.tokens / elapsed:.0f} tokens/s  "
            f"{left // 60}:{left % 60:02d} left",
            flush=True,
        )
