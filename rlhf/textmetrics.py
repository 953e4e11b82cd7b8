"""What a policy's texts look like, by their words alone: repetition, diversity, phrases, likeness.

A word is what stands between white space, lower-cased. An n-gram is n words in a row within one text.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, islice
from statistics import fmean
from typing import NamedTuple


class Phrase(NamedTuple):
    """A phrase and the share of texts, in [0, 1], that contain it at least once."""

    phrase: str
    share: float
    reference_share: float


def repetition(text: str) -> float:
    """1 - distinct word 3-grams / all word 3-grams, in [0, 1); 0 below three words (as the notebook)."""
    grams = _ngrams(text, 3)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct word n-grams / all word n-grams over a set of texts, in [0, 1]; 0 where there are none.

    It falls as texts are added: compare sets of equal size only. Source: Li et al. (2016), "A diversity-
    promoting objective function", but divided by n-grams, not by words: texts without repetition score 1.
    """
    grams = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def overused_phrases(
    texts: Sequence[str], reference_texts: Sequence[str], n: int = 3, top: int = 10
) -> list[Phrase]:
    """The word n-grams whose share of texts exceeds their share of reference texts most, at most `top`.

    Only phrases with share > reference_share, by falling difference, ties in the order of the alphabet.
    Raises `ValueError` without texts or without reference texts.
    """
    if not texts or not reference_texts:
        raise ValueError("overused phrases need at least one text and one reference text")
    counts, reference_counts = _containing(texts, n), _containing(reference_texts, n)
    # share - reference_share, times both sizes: in whole numbers equal differences tie exactly.
    excess = {
        gram: count * len(reference_texts) - reference_counts[gram] * len(texts)
        for gram, count in counts.items()
    }
    chosen = sorted((gram for gram in excess if excess[gram] > 0), key=lambda gram: (-excess[gram], gram))
    return [
        Phrase(" ".join(gram), counts[gram] / len(texts), reference_counts[gram] / len(reference_texts))
        for gram in chosen[:top]
    ]


def self_similarity(texts: Sequence[str], pairs: int = 10_000) -> float:
    """Mean over pairs of texts of |A and B| / |A or B|, A and B their sets of words, in [0, 1] (Jaccard).

    Two texts without words count as equal, 1. Of more than `pairs` pairs every k-th is taken, with the
    smallest k that keeps within `pairs`. Raises `ValueError` for fewer than two texts or `pairs` below 1.
    """
    if len(texts) < 2 or pairs < 1:
        raise ValueError(f"{len(texts)} texts and {pairs} pairs: at least 2 and 1 expected")
    words = [set(_words(text)) for text in texts]
    every = -(-len(words) * (len(words) - 1) // 2 // pairs)
    return fmean(_jaccard(a, b) for a, b in islice(combinations(words, 2), 0, None, every))


def _jaccard(a: set[str], b: set[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 1.0


def _containing(texts: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(gram for text in texts for gram in set(_ngrams(text, n)))


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    if n < 1:
        raise ValueError(f"n {n}: at least 1 expected")
    words = _words(text)
    return list(zip(*(words[start:] for start in range(n)), strict=False))


def _words(text: str) -> list[str]:
    return text.lower().split()
