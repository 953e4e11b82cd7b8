"""Compare what was committed with what was computed again: hashes first, then numbers within tolerances."""

import csv
import io
import json
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, NamedTuple

MODELS = "rlhf/models.py"  # a stage that depends on it computes with a model
MISSING = "missing"

# What a metric may differ by on other hardware, by `file:key`; the first pattern that matches counts. PPO has
# wider ones: another last bit changes a sampled token, and the runs part as two seeds do.
TOLERANCES = (
    ("qa/*:pairs*", 40.0),  # other answers of SFT make other pairs; of about a thousand
    ("qa/*:ties*", 40.0),
    ("qa/*:flipped*", 10.0),
    ("qa/*:prompts", 10.0),
    ("qa/*:n", 12.0),
    ("qa/*:n_margin_*", 12.0),
    ("qa/*:accuracy_margin_*", 0.3),  # of a few pairs each
    ("qa/*:*accuracy", 0.1),
    ("*:n", 0.0),
    ("*:train_rows", 0.0),
    ("*:human", 0.0),
    ("*:samples_per_prompt", 0.0),
    ("*:mean_sft", 0.3),  # a reward before it is centred
    ("*:*heuristic*", 0.5),
    ("*:*characters*", 25.0),
    ("*:*token_f1*", 0.05),
    ("*:*chrf*", 3.0),
    ("*:selected_step", math.inf),  # a choice between near equals; what follows from it is compared
    ("*:nll_per_token_ppo*", 0.1),
    ("*/ppo-*:nll_per_token", 0.1),
    ("*:nll_per_token*", 0.02),
    ("*:*accuracy", 0.03),
    ("*:true_*", 12.0),  # confusion counts, of 256 rows
    ("*:false_*", 12.0),
    ("*:loss", 0.05),
    ("*:*_minus_*", 0.15),
    ("*:*reward*", 0.15),
    ("*:*kl*", 1.0),
    ("*:*_rate*", 0.1),
    ("*:*probability*", 0.1),
    ("*:distinct*", 0.1),
    ("*:repetition*", 0.02),
    ("*:length*", 5.0),
)
RELATIVE_TOLERANCE = 0.2  # of the committed value, for every other metric


class Comparison(NamedTuple):
    """One output: its path, and its hash as committed and as computed here, or `MISSING`."""

    path: str
    committed: str
    new: str


def outputs(lock: dict) -> dict[str, str]:
    """Return path -> hash of all outputs of a lock's stages."""
    return {out["path"]: out["md5"] for stage in lock.values() for out in stage.get("outs", [])}


def compare_locks(committed: dict, new: dict, held: dict[str, str]) -> list[Comparison]:
    """Compare two locks' stages output by output; an output that only one has is `MISSING` in the other.

    held: path -> hash of the outputs that git holds. One that is not what the committed lock says of it, and
    is not what was computed either, stands in the lock's place.
    """
    before, after = outputs(committed), outputs(new)
    rows = []
    for path in before | after:
        locked, computed = before.get(path, MISSING), after.get(path, MISSING)
        rows.append(
            Comparison(path, locked if held.get(path, computed) == computed else held[path], computed)
        )
    return rows


def numbers(text: str, suffix: str) -> dict[str, float]:
    """Return the numbers of a .json text by key, or of a .csv text by column and row; {} if it is neither."""
    if suffix == ".csv":
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
        cells = {
            f"{name}, row {i}": cell
            for i, row in enumerate(rows, start=1)
            for name, cell in zip(header, row, strict=False)
        }
        return {name: float(cell) for name, cell in cells.items() if is_number(cell)}
    try:
        return dict(json_numbers("", json.loads(text)))
    except json.JSONDecodeError:
        return {}


def is_number(cell: str) -> bool:
    """Tell whether a CSV cell is a number."""
    try:
        float(cell)
    except ValueError:
        return False
    return True


def json_numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers inside a JSON value under dotted keys; true and false are not numbers."""
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from json_numbers(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, float(value)


def gap(one: float | None, other: float | None) -> float:
    """Return the absolute difference; infinite if only one is there, or only one is NaN."""
    if one is None or other is None or math.isnan(one) != math.isnan(other):
        return math.inf
    return 0.0 if one == other or math.isnan(one) else abs(one - other)


def largest_difference(committed_text: str, new_text: str, suffix: str) -> tuple[float, str] | None:
    """Return the largest absolute difference between two texts' numbers, and where; None if all agree."""
    old, new = numbers(committed_text, suffix), numbers(new_text, suffix)
    gaps = {name: gap(old.get(name), new.get(name)) for name in old | new}
    worst = max(gaps, key=gaps.__getitem__, default=None)
    return (gaps[worst], worst) if worst is not None and gaps[worst] > 0 else None


def tolerance(name: str, committed: float) -> float:
    """Return by how much the metric `file:key` may differ from its committed value on other hardware."""
    found = (allowed for pattern, allowed in TOLERANCES if fnmatchcase(name, pattern))
    return next(found, RELATIVE_TOLERANCE * abs(committed))


def outside_tolerance(path: str, committed_text: str, new_text: str) -> list[str]:
    """Return one line for each number of a JSON file that moved beyond its tolerance, or came or went."""
    old, new = numbers(committed_text, ".json"), numbers(new_text, ".json")
    lines = []
    for key in old | new:
        allowed = tolerance(f"{path}:{key}", old.get(key, 0.0))
        if gap(old.get(key), new.get(key)) > allowed:
            values = f"was {old.get(key, MISSING)}, is {new.get(key, MISSING)}"
            lines.append(f"{path}: {key} {values}: tolerance {allowed:.4g}")
    return lines


def overlap(one: str, other: str) -> bool:
    """Tell whether two paths are the same or one lies inside the other."""
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first.is_relative_to(second) or second.is_relative_to(first)


def model_stages(lock: dict) -> set[str]:
    """Return the stages that compute with a model, and all that is downstream of them."""
    found, sources = set(), {MODELS}
    while True:
        deps = [(name, dep["path"]) for name, stage in lock.items() for dep in stage.get("deps", [])]
        more = {name for name, dep in deps if any(overlap(dep, source) for source in sources)}
        if more == found:
            return found
        found, sources = more, {MODELS, *outputs({name: lock[name] for name in more})}


def problems(rows: list[Comparison], loose: set[str], texts: dict[str, tuple[str, str]]) -> list[str]:
    """Return what fails the verification, one line each.

    loose: paths that may differ in their bits, within `TOLERANCES` for the numbers of a .json file.
    texts: path -> the committed and the new text, where both can be read.
    """
    lines = []
    for path, committed, new in rows:
        if committed == new:
            continue
        if path not in loose or MISSING in (committed, new):
            lines.append(f"{path}: different, and expected to be the same on every machine")
        elif path.endswith(".json") and path in texts:
            lines += outside_tolerance(path, *texts[path])
    return lines
