"""Questions, hand-written answers and people's preferences: read strictly, ordered by content."""

import math
from pathlib import Path
from typing import Any

from rlhf.data import checked_text, in_hash_order, normalised
from rlhf.errors import UserError
from rlhf.sections import AnswerTable, PairTable, QuestionTable, Table
from rlhf.tables import read_records, shown


def read_questions(table: QuestionTable) -> list[dict]:
    """Read rows with the keys question and, where the table has the column and the row a value, topic.

    Those of an `AnswerTable` have the key answer too. Raises `UserError` naming file, row and value.
    """
    columns = {"question": table.question_column}
    if isinstance(table, AnswerTable):
        columns["answer"] = table.answer_column
    if table.topic_column is not None:
        columns["topic"] = table.topic_column
    return [
        {
            name: checked_text(place, name, value)
            for name, value in values.items()
            if name != "topic" or value not in (None, "")
        }
        for place, values in _rows(table, columns)
    ]


def _rows(table: Table, columns: dict[str, str]) -> list[tuple[str, dict]]:
    """Each row's place, and its values under our names of the columns."""
    records = read_records(Path(table.file), columns.values(), {}, table.encoding)
    return [
        (record.place, {name: record.values[column] for name, column in columns.items()})
        for record in records
    ]


def asked(question: str) -> str:
    """What two spellings of one question share: case, spaces and the marks at its end do not count."""
    return normalised(question).rstrip("?!.:; ")


def read_preferences(table: PairTable) -> list[dict]:
    """Read rows with the keys prompt (the question), chosen, rejected and margin; none of an empty file.

    `margin` is how much better the chosen answer is, below 0 where the preference is known to be turned
    round; None where it is not given. One of two answers may be empty, as a policy may write nothing. Raises
    `UserError` naming file, row and value.
    """
    if not Path(table.file).read_bytes().strip():
        return []
    columns = {
        "prompt": table.prompt_column,
        "chosen": table.chosen_column,
        "rejected": table.rejected_column,
    }
    if table.margin_column is not None:
        columns["margin"] = table.margin_column
    return [_pair(place, values) for place, values in _rows(table, columns)]


def _pair(place: str, values: dict) -> dict:
    pair = {
        name: checked_text(place, name, values[name], may_be_empty=name != "prompt")
        for name in ("prompt", "chosen", "rejected")
    }
    if pair["chosen"] == pair["rejected"]:
        raise UserError(f"{place}: chosen and rejected are the same text: {shown(pair['chosen'])}")
    return pair | {"margin": _margin(place, values.get("margin"))}


def _margin(place: str, value: Any) -> float | None:
    """A number other than 0, which a table without types may spell; none where the cell is empty."""
    if value is None or value == "":
        return None
    try:
        margin = 0.0 if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        margin = 0.0
    if not (margin and math.isfinite(margin)):
        raise UserError(f"{place}: margin is {shown(value)}: expected a number other than 0, or none")
    return margin


def distinct_questions(rows: list[dict]) -> list[dict]:
    """Keep one row per question as `asked`: an answered one if there is one, and of several the smallest."""
    kept: dict[str, dict] = {}

    def key(row: dict) -> tuple:
        return "answer" not in row, row["question"], row.get("answer", ""), str(row.get("topic", ""))

    for row in sorted(rows, key=key):
        kept.setdefault(asked(row["question"]), row)
    return list(kept.values())


def divided(pairs: list[dict], sizes: dict[str, int], seed: int, source: str) -> dict[str, list[dict]]:
    """Divide the pairs of `source` into parts in the proportions of `sizes`, each prompt's into one part."""
    order = in_hash_order(sorted({asked(pair["prompt"]) for pair in pairs}), seed, str)
    if len(order) < len(sizes):
        raise UserError(f"{source}: {len(order)} distinct prompts: expected at least {len(sizes)}")
    total, bounds, reached = sum(sizes.values()), [0], 0
    for number, size in enumerate(sizes.values(), start=1):
        reached += size
        most = len(order) - len(sizes) + number  # each later part needs a prompt too
        bounds.append(min(max(round(reached / total * len(order)), bounds[-1] + 1), most))
    owner = {}
    for part, start, stop in zip(sizes, bounds, bounds[1:], strict=False):
        owner |= dict.fromkeys(order[start:stop], part)
    return {part: [pair for pair in pairs if owner[asked(pair["prompt"])] == part] for part in sizes}
