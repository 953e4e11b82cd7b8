"""Labelled text: reading, normalising, and a split that depends on content alone, never on row order."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import UserError
from rlhf.tables import Record, read_records, shown, spelled


class Row(NamedTuple):
    """One labelled text; label 1 is positive, 0 negative."""

    text: str
    label: int


def read_table(
    path: Path,
    text_column: str,
    label_column: str,
    labels: dict[str, int],
    where: dict[str, str],
    encoding: str,
) -> list[Row]:
    """Read a table's rows whose columns equal `where`; formats and encodings are those of `read_records`.

    `labels` maps what the label column holds, as `spelled`, to 0 or 1. Texts lose the white space around
    them. Raises `UserError` naming file, row and value.
    """
    records = read_records(path, (text_column, label_column), where, encoding)
    return [
        Row(
            checked_text(record.place, "the text", record.values[text_column]),
            _label(record, label_column, labels),
        )
        for record in records
    ]


def checked_text(place: str, name: str, text: Any, may_be_empty: bool = False) -> str:
    """Return a text, called `name`, without the white space around it; `UserError` for anything else."""
    if not isinstance(text, str):
        raise UserError(f"{place}: {name} is {shown(text)}: expected a text")
    if not (text.strip() or may_be_empty):
        raise UserError(f"{place}: {name} is empty")
    if re.search(r"[\0\ud800-\udfff]", text):
        raise UserError(f"{place}: {name} {shown(text)} holds a NUL or half a surrogate pair")
    return text.strip()


def _label(record: Record, column: str, labels: dict[str, int]) -> int:
    value = record.values[column]
    label = labels.get(spelled(value))
    if label is None:
        *names, last = labels
        expected = f"{', '.join(names)} or {last}" if names else last
        raise UserError(f"{record.place}: label is {shown(value)}: expected {expected}")
    return label


def check_both_labels(name: str, rows: list[dict]) -> None:
    """Raise `UserError` where all of `rows` have one label: nothing can be learned or tested on them."""
    labels = {row["label"] for row in rows}
    if len(labels) == 1:
        raise UserError(
            f"{name}: each of the {len(rows)} rows in use has label {labels.pop()}: expected 0 and 1"
        )


def normalised(text: str) -> str:
    """Lower-case, with single spaces: two texts that agree in this are the same text."""
    return " ".join(text.lower().split())


def distinct(rows: list[Row]) -> tuple[list[Row], dict[str, int]]:
    """Keep one row per normalised text, none where its labels contradict; also count what was dropped.

    Of several spellings the smallest is kept, so that the order of `rows` does not matter.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[normalised(row.text)].append(row)
    kept = [min(group) for group in groups.values() if len({row.label for row in group}) == 1]
    contradicting = sum(len(group) for group in groups.values() if len({row.label for row in group}) > 1)
    return kept, {"duplicate": len(rows) - len(kept) - contradicting, "contradicting_labels": contradicting}


def in_hash_order(rows: list, seed: int, text_of: Callable[[Any], str] = attrgetter("text")) -> list:
    """Order rows by sha256(seed, normalised text): a shuffle that every machine and file order agrees on."""

    def key(row: Any) -> bytes:
        return hashlib.sha256(f"{seed}\x00{normalised(text_of(row))}".encode()).digest()

    return sorted(rows, key=key)


def cut(rows: list[dict], sizes: dict[str, int], source: str = "") -> dict[str, list[dict]]:
    """Cut rows of `source`, in order, into disjoint parts, their rows numbered; `UserError` if too few."""
    needed = sum(sizes.values())
    if len(rows) < needed:
        raise UserError(
            f"split.sizes needs {needed} rows for {', '.join(sizes)} and only "
            f"{len(rows)}{f' of {source}' if source else ''} are eligible"
        )
    parts, start = {}, 0
    for part, size in sizes.items():
        chosen = rows[start : start + size]
        parts[part] = [{"id": f"{part}-{i:05d}", **row} for i, row in enumerate(chosen)]
        start += size
    return parts


def check_frozen(hashes: dict[str, str], frozen: dict[str, str] | None) -> None:
    """Stop, naming the parts, when the computed split is not the one that params.yaml froze."""
    if frozen is None or hashes == frozen:
        return
    changed = sorted(part for part in hashes | frozen if hashes.get(part) != frozen.get(part))
    raise UserError(
        f"the split is not the frozen one: split.sha256 differs for {', '.join(changed)}; "
        "if that is meant, set split.sha256 to null and copy the new hashes from data/split.json"
    )


def closing_text(text: str, characters: int) -> str:
    """Return the last whole sentences of a review, lower-cased, `characters` long at most, or ''."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(re.sub(r"<[^>]*>", " ", text).lower().split()))
    closing = ""
    for sentence in reversed(sentences):
        longer = f"{sentence} {closing}".strip()
        if len(longer) > characters:
            break
        closing = longer
    return closing


def near_duplicates(parts: dict[str, list[dict]], threshold: float = 0.5) -> int:
    """Count pairs of rows in different parts whose word 3-grams overlap: Jaccard index >= `threshold`."""
    owners = [(part, _trigrams(row["text"])) for part, rows in parts.items() for row in rows]
    shared = Counter(_pairs_sharing(owners))
    return sum(
        count / (len(owners[i][1]) + len(owners[j][1]) - count) >= threshold
        for (i, j), count in shared.items()
    )


def _trigrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def _pairs_sharing(owners: list[tuple[str, set]]) -> Iterator[tuple[int, int]]:
    where = defaultdict(list)
    for index, (_, trigrams) in enumerate(owners):
        for trigram in trigrams:
            where[trigram].append(index)
    for indices in where.values():
        yield from (pair for pair in combinations(indices, 2) if owners[pair[0]][0] != owners[pair[1]][0])


def shared_prefixes(test: list[dict], training: list[dict], prefix_tokens: int) -> int:
    """Count the test rows whose first `prefix_tokens` token ids also start a training row."""
    starts = {tuple(row["token_ids"][:prefix_tokens]) for row in training}
    return sum(tuple(row["token_ids"][:prefix_tokens]) in starts for row in test)


def tokenised(
    rows: list[Row], encode: Callable[[str], list[int]], min_tokens: int, max_tokens: int
) -> tuple[list[dict], dict[str, int]]:
    """Add token ids and drop rows outside the limits (inclusive); also count what was dropped."""
    kept, dropped = [], {"too_short": 0, "too_long": 0}
    for row in rows:
        token_ids = encode(row.text)
        if len(token_ids) < min_tokens:
            dropped["too_short"] += 1
        elif len(token_ids) > max_tokens:
            dropped["too_long"] += 1
        else:
            kept.append({"text": row.text, "label": row.label, "token_ids": token_ids})
    return kept, dropped
