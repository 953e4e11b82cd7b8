"""Questions, hand-written answers and people's preferences: read strictly, ordered by content."""

import math
from pathlib import Path

from rlhf.data import check_characters, in_hash_order, normalised
from rlhf.errors import UserError
from rlhf.record import read_jsonl

MADE_ANEW = ("id", "chosen_ids", "rejected_ids")


def read_questions(path: str | Path, answered: bool) -> list[dict]:
    """Read rows with the keys question, answer (if `answered`) and, as the user likes, topic.

    Raises `UserError` naming file, row and value for any other key and for a text that is missing or empty.
    """
    needed = ("question", "answer") if answered else ("question",)
    return [
        _checked(f"{path}, row {i}", row, needed, ("topic",))
        for i, row in enumerate(read_jsonl(path), start=1)
    ]


def asked(question: str) -> str:
    """What two spellings of one question share: case, spaces and the marks at its end do not count."""
    return normalised(question).rstrip("?!.:; ")


def read_preferences(path: str | Path) -> list[dict]:
    """Read rows with the keys prompt (the question), chosen, rejected and, as the user likes, margin.

    `margin` is how much better the chosen answer is, below 0 where the preference is known to be turned
    round; None where it is not given. The rows that the preferences stage writes may come back: their ids and
    token ids are made anew, and one of two answers may be empty. Raises `UserError`.
    """
    found = []
    for i, row in enumerate(read_jsonl(path), start=1):
        where = f"{path}, row {i}"
        margin = row.pop("margin", None)
        row = {name: value for name, value in row.items() if name not in MADE_ANEW}
        row = _checked(where, row, ("prompt", "chosen", "rejected"), (), may_be_empty=("chosen", "rejected"))
        if row["chosen"] == row["rejected"]:
            raise UserError(f"{where}: chosen and rejected are the same text: {row['chosen'][:60]!r}")
        if margin is not None and not (type(margin) in (int, float) and margin and math.isfinite(margin)):
            raise UserError(f"{where}: margin is {margin!r}: expected a number other than 0, or null")
        found.append(row | {"margin": margin})
    return found


def _checked(
    where: str,
    row: dict,
    needed: tuple[str, ...],
    optional: tuple[str, ...],
    may_be_empty: tuple[str, ...] = (),
) -> dict:
    expected = ", ".join(needed) + "".join(f", {name} (optional)" for name in optional)
    for name in row:
        if name not in needed + optional:
            raise UserError(f"{where}: unknown key {name!r}: expected {expected}")
    for name in needed:
        what = "a text" if name in may_be_empty else "a text that is not empty"
        if not isinstance(row.get(name), str) or not (row[name].strip() or name in may_be_empty):
            raise UserError(f"{where}: {name} is {row.get(name)!r}: expected {what}")
        check_characters(where, name, row[name])
    return {name: value.strip() if isinstance(value, str) else value for name, value in row.items()}


def distinct_questions(rows: list[dict]) -> list[dict]:
    """Keep one row per question as `asked`: an answered one if there is one, and of several the smallest."""
    kept: dict[str, dict] = {}

    def key(row: dict) -> tuple:
        return "answer" not in row, row["question"], row.get("answer", ""), str(row.get("topic", ""))

    for row in sorted(rows, key=key):
        kept.setdefault(asked(row["question"]), row)
    return list(kept.values())


def divided(pairs: list[dict], sizes: dict[str, int], seed: int) -> dict[str, list[dict]]:
    """Divide pairs into parts in the proportions of `sizes`, all pairs of one prompt in one part."""
    order = in_hash_order(sorted({asked(pair["prompt"]) for pair in pairs}), seed, str)
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
    return {part: [pair for pair in pairs if owner[asked(pair["prompt"])] == part] for part in sizes}
