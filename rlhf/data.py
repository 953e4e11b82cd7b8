"""Labelled text: reading, normalising, and a split that depends on content alone, never on row order."""

import csv
import hashlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import UserError


class Row(NamedTuple):
    """One labelled text; label 1 is positive, 0 negative."""

    text: str
    label: int


def read_table(path: Path, text_column: str, label_column: str, where: dict[str, str]) -> list[Row]:
    """Read a CSV file's rows whose columns equal `where`; raises `UserError` naming file, line and value."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    rows = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for name in (text_column, label_column, *where):
                if name not in (reader.fieldnames or []):
                    raise UserError(f"{path.name}: no column {name!r}: it has {reader.fieldnames}")
            for fields in reader:
                if all(fields[name] == value for name, value in where.items()):
                    rows.append(_row(path.name, reader.line_num, fields[text_column], fields[label_column]))
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path.name}, line {reader.line_num}: not readable as CSV: {error}") from None
    if not rows:
        raise UserError(f"{path.name}: no row where {where}")
    return rows


def _row(name: str, line: int, text: str | None, label: str | None) -> Row:
    if label not in ("0", "1"):
        raise UserError(f"{name}, line {line}: label is {label!r}: expected 0 or 1")
    if not text or not text.strip():
        raise UserError(f"{name}, line {line}: the text is empty")
    return Row(text.strip(), int(label))


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


def in_hash_order(rows: list[Row], seed: int) -> list[Row]:
    """Order rows by sha256(seed, normalised text): a shuffle that every machine and file order agrees on."""

    def key(row: Row) -> bytes:
        return hashlib.sha256(f"{seed}\x00{normalised(row.text)}".encode()).digest()

    return sorted(rows, key=key)


def cut(rows: list[dict], sizes: dict[str, int]) -> dict[str, list[dict]]:
    """Cut `rows` in order into disjoint parts and number each part's rows; `UserError` if too few."""
    needed = sum(sizes.values())
    if len(rows) < needed:
        raise UserError(f"split.sizes needs {needed} rows and only {len(rows)} are eligible")
    parts, start = {}, 0
    for part, size in sizes.items():
        chosen = rows[start : start + size]
        parts[part] = [{"id": f"{part}-{i:05d}", **row} for i, row in enumerate(chosen)]
        start += size
    return parts


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
