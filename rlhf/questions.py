"""Questions, hand-written answers and people's preferences: read strictly, ordered by content."""

import math
from pathlib import Path

from rlhf.data import check_characters, in_hash_order, normalised
from rlhf.errors import UserError
from rlhf.record import read_jsonl


def read_questions(path: str | Path, answered: bool) -> list[dict]:
    """Read rows with the keys question, answer (if `answered`) and, as the user likes, topic.

    Raises `UserError` naming file, row and value for any other key and for a text that is missing or empty.
    """
    needed = ("question", "answer") if answered else ("question",)
    return [
        _checked(f"{path}, row {i}", row, needed, ("topic",))
        for i, row in enumerate(read_jsonl(path), start=1)
    ]


def read_preferences(path: str | Path) -> list[dict]:
    """Read rows with the keys prompt (the question), chosen, rejected and, as the user likes, margin.

    `margin` is how much better the chosen answer is, above 0; None where it is not given. Raises `UserError`.
    """
    found = []
    for i, row in enumerate(read_jsonl(path), start=1):
        where = f"{path}, row {i}"
        margin = row.pop("margin", None)
        row = _checked(where, row, ("prompt", "chosen", "rejected"), ())
        if row["chosen"] == row["rejected"]:
            raise UserError(f"{where}: chosen and rejected are the same text: {row['chosen'][:60]!r}")
        if margin is not None and not (type(margin) in (int, float) and 0 < margin < math.inf):
            raise UserError(f"{where}: margin is {margin!r}: expected a number above 0, or null")
        found.append(row | {"margin": margin})
    return found


def _checked(where: str, row: dict, needed: tuple[str, ...], optional: tuple[str, ...]) -> dict:
    expected = ", ".join(needed) + "".join(f", {name} (optional)" for name in optional)
    for name in row:
        if name not in needed + optional:
            raise UserError(f"{where}: unknown key {name!r}: expected {expected}")
    for name in needed:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise UserError(f"{where}: {name} is {row.get(name)!r}: expected a text that is not empty")
        check_characters(where, name, row[name])
    return {name: value.strip() if isinstance(value, str) else value for name, value in row.items()}


def distinct_questions(rows: list[dict]) -> list[dict]:
    """Keep one row per normalised question: an answered one if there is one, and of several the smallest."""
    kept: dict[str, dict] = {}

    def key(row: dict) -> tuple:
        return "answer" not in row, row["question"], row.get("answer", ""), str(row.get("topic", ""))

    for row in sorted(rows, key=key):
        kept.setdefault(normalised(row["question"]), row)
    return list(kept.values())


def divided(pairs: list[dict], sizes: dict[str, int], seed: int) -> dict[str, list[dict]]:
    """Divide pairs into parts in the proportions of `sizes`, all pairs of one prompt in one part."""
    order = in_hash_order(sorted({normalised(pair["prompt"]) for pair in pairs}), seed, str)
    if len(order) < len(sizes):
        raise UserError(f"preferences: {len(order)} distinct prompts: expected at least {len(sizes)}")
    total, bounds, reached = sum(sizes.values()), [0], 0
    for number, size in enumerate(sizes.values(), start=1):
        reached += size
        most = len(order) - len(sizes) + number  # each later part needs a prompt too
        bounds.append(min(max(round(reached / total * len(order)), bounds[-1] + 1), most))
    owner = {}
    for part, start, stop in zip(sizes, bounds, bounds[1:], strict=False):
        owner |= dict.fromkeys(order[start:stop], part)
    return {part: [pair for pair in pairs if owner[normalised(pair["prompt"])] == part] for part in sizes}
