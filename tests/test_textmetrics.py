"""Text metrics by hand, by brute force over every pair or gram, and at the edges of empty and short texts."""

import math
import random
from itertools import combinations

import pytest

from rlhf import textmetrics
from rlhf.textmetrics import Phrase


@pytest.mark.parametrize(("text", "expected"), [
    ("", 0.0), ("one two", 0.0), ("one two three", 0.0),
    ("a b c a b c", 1 - 3 / 4),  # abc bca cab abc
    ("Ho  ho\nHO\tho ho", 1 - 1 / 3),  # ho ho ho, three times
    ("a b c, a b c", 0.0),  # punctuation stays with its word, as in the notebook: "c," is not "c"
])  # fmt: skip
def test_repetition_by_hand(text, expected):
    assert textmetrics.repetition(text) == pytest.approx(expected, abs=1e-15)


def test_distinct_n_by_hand():
    texts = ["a b A", "b c", ""]  # words a b a b c; pairs ab ba bc; no pair crosses two texts
    assert textmetrics.distinct_n(texts, 1) == 3 / 5
    assert textmetrics.distinct_n(texts, 2) == 1.0
    assert textmetrics.distinct_n(texts * 4, 2) == 3 / 12
    assert textmetrics.distinct_n(texts, 4) == textmetrics.distinct_n([], 1) == 0.0


def test_repetition_is_one_minus_distinct_3_of_a_single_text():
    words = random.Random(0).choices("abc", k=60)
    repeated = textmetrics.repetition(" ".join(words))
    assert 0.5 < repeated == pytest.approx(1 - textmetrics.distinct_n([" ".join(words)], 3), abs=1e-15)


def test_overused_phrases_by_hand():
    # "a great film": 3 of 4 texts (not 4 times) against 1 of 4; "so it goes": 1 of 4 in both, left out.
    texts = ["a great film , a great film", "A great film", "a great film", "so it goes"]
    reference = ["a great film", "a dull film", "so it goes", "this ends"]
    expected = [
        Phrase("a great film", 0.75, 0.25),
        Phrase(", a great", 0.25, 0.0), Phrase("film , a", 0.25, 0.0), Phrase("great film ,", 0.25, 0.0),
    ]  # fmt: skip
    assert textmetrics.overused_phrases(texts, reference) == expected
    assert textmetrics.overused_phrases(texts[::-1], reference[::-1], top=2) == expected[:2]
    assert textmetrics.overused_phrases(texts, reference, n=1, top=2) == [
        Phrase("great", 0.75, 0.25), Phrase(",", 0.25, 0.0),
    ]  # fmt: skip
    assert textmetrics.overused_phrases(reference, reference) == []


def test_overused_phrases_tie_exactly_whatever_the_sizes():
    # a: 6/10 - 3/6 and b: 1/10 - 0/6 are both 1/10, which floats put in the other order.
    assert 6 / 10 - 3 / 6 < 1 / 10
    texts = ["a b"] + ["a"] * 5 + ["c"] * 4
    found = textmetrics.overused_phrases(texts, ["a"] * 3 + ["c"] * 3, n=1)
    assert found == [Phrase("a", 0.6, 0.5), Phrase("b", 0.1, 0.0)]


def test_self_similarity_by_hand():
    # {a b} {a b} 1; {a b} {b c d} 1/4, twice.
    assert textmetrics.self_similarity(["a b", "B a a", "b c d"]) == (1 + 1 / 4 + 1 / 4) / 3
    assert textmetrics.self_similarity(["same words"] * 5) == textmetrics.self_similarity(["", " "]) == 1.0
    assert textmetrics.self_similarity(["", "a"]) == 0.0


def test_self_similarity_takes_every_pair_or_an_even_part_of_them():
    draw = random.Random(1)
    texts = [" ".join(draw.choices("abcdefgh", k=5)) for _ in range(30)]
    sets = [set(text.split()) for text in texts]
    every = [len(a & b) / len(a | b) for a, b in combinations(sets, 2)]  # 435 pairs
    assert textmetrics.self_similarity(texts) == pytest.approx(math.fsum(every) / 435, abs=1e-15)
    assert textmetrics.self_similarity(texts[::-1], 435) == textmetrics.self_similarity(texts)
    # At most 100: every 5th, since every 4th would be 109.
    assert textmetrics.self_similarity(texts, 100) == pytest.approx(math.fsum(every[::5]) / 87, abs=1e-15)
    assert textmetrics.self_similarity(texts, 1) == every[0]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: textmetrics.distinct_n(["a"], 0), "n 0"),
    (lambda: textmetrics.overused_phrases([], ["a"]), "at least one text"),
    (lambda: textmetrics.overused_phrases(["a"], []), "one reference text"),
    (lambda: textmetrics.self_similarity(["a"]), "1 texts"),
    (lambda: textmetrics.self_similarity(["a", "b"], 0), "0 pairs"),
])  # fmt: skip
def test_errors_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
