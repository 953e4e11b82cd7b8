"""A split that depends on content alone."""

import random
from fractions import Fraction

import pytest

from rlhf import data
from rlhf.data import Row
from rlhf.errors import UserError

# distinct -> in_hash_order -> tokenised -> cut


def test_duplicates_and_contradictions_by_hand():
    rows = [
        Row("A  fine film", 1),
        Row("a fine film", 1),
        Row("A Fine\tfilm", 1),
        Row("dull", 0),
        Row("DULL", 1),
    ]
    kept, dropped = data.distinct([*rows, Row("dull ", 0), Row("new", 0)])
    # Of three spellings of one text the smallest by code points stays, "A  fine film"; "dull" goes thrice.
    assert sorted(kept) == [Row("A  fine film", 1), Row("new", 0)]
    assert dropped == {"duplicate": 2, "contradicting_labels": 3}


def test_hash_order_by_hand():
    # `printf '42\0a fine film' | sha256sum` and so on: seed 42 gives 78ad.. fine, 14c3.. dull, 3b04.. bad,
    # 72db.. sparkles; seed 7 gives 6e43.., 905a.., 6f6f.., 5de9...
    fine, dull, bad, sparkles = (
        Row(t, 1) for t in ("A Fine  film", "a dull film", "Not bad at all", "it sparkles")
    )
    rows = [fine, dull, bad, sparkles]
    assert data.in_hash_order(rows, 42) == [dull, bad, sparkles, fine]
    assert data.in_hash_order(rows, 7) == [sparkles, fine, bad, dull]
    assert rows == [fine, dull, bad, sparkles]


def test_the_split_does_not_depend_on_the_order_of_the_file():
    rows = [Row(f"text {'x' * (i % 7)} {i}", i % 2) for i in range(60)]
    rows += [Row(f"TEXT  {'x' * (i % 7)} {i}", i % 2) for i in range(20)]  # another spelling
    rows += [Row(f"text {'x' * (i % 7)} {i}", 1 - i % 2) for i in range(50, 55)]  # another label

    def split(order: list[Row]):
        kept, dropped = data.distinct(order)
        eligible, outside = data.tokenised(
            data.in_hash_order(kept, 42), lambda text: [ord(c) for c in text], 9, 13
        )
        return data.cut(eligible, {"sft": 20, "test": 10}), dropped, outside

    expected = split(rows)
    assert expected[1] == {"duplicate": 20, "contradicting_labels": 10}
    assert min(expected[2].values()) > 0
    for seed in range(5):
        assert split(random.Random(seed).sample(rows, len(rows))) == expected


def test_cut_numbers_disjoint_parts_in_order():
    rows = [{"text": text} for text in "abcd"]
    assert data.cut(rows, {"sft": 2, "test": 1}) == {
        "sft": [{"id": "sft-00000", "text": "a"}, {"id": "sft-00001", "text": "b"}],
        "test": [{"id": "test-00000", "text": "c"}],
    }
    assert rows == [{"text": text} for text in "abcd"]
    assert data.cut(rows, {"sft": 3, "test": 1})["test"] == [{"id": "test-00000", "text": "d"}]  # just enough
    with pytest.raises(UserError, match=r"^split\.sizes needs 5 rows for sft, test and only 4 are eligible$"):
        data.cut(rows, {"sft": 3, "test": 2})


def test_token_limits_are_inclusive():
    rows = [Row("x" * n, n % 2) for n in (1, 2, 3, 4, 5, 6)]
    kept, dropped = data.tokenised(rows, lambda text: list(range(len(text))), min_tokens=2, max_tokens=4)
    assert [row["token_ids"] for row in kept] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [(row["text"], row["label"]) for row in kept] == [("xx", 0), ("xxx", 1), ("xxxx", 0)]
    assert dropped == {"too_short": 1, "too_long": 2}


@pytest.mark.parametrize("label", [0, 1])
def test_rows_of_one_label_alone_are_refused(label):
    rows = [{"text": "a", "label": label}] * 3
    with pytest.raises(UserError) as raised:
        data.check_both_labels("a.csv", rows)
    assert str(raised.value) == f"a.csv: each of the 3 rows in use has label {label}: expected 0 and 1"
    data.check_both_labels("a.csv", [*rows, {"text": "a", "label": 1 - label}])


# closing_text, near_duplicates, shared_prefixes


@pytest.mark.parametrize(
    ("text", "characters", "expected"),
    [
        ("One. Two! Three?", 100, "one. two! three?"),
        ("One. Two! Three?", 11, "two! three?"),  # exactly 11 characters
        ("One. Two! Three?", 10, "three?"),
        ("One. Two! Three?", 6, "three?"),
        ("One. Two! Three?", 5, ""),  # not even the last sentence fits: never half of one
        ("A very long opening sentence. OK.", 10, "ok."),
        ("Fine.<br /><br />Then <i>dull</i>.", 100, "fine. then dull ."),
        ("Costs 3.50 dollars. Mr.X left", 100, "costs 3.50 dollars. mr.x left"),
        ("Costs 3.50 dollars. Mr.X left", 15, "mr.x left"),  # a full stop inside a word ends nothing
        ("  Wait...\n\n what?!  Yes ", 16, "what?! yes"),
        ("", 100, ""),
        ("<br />", 100, ""),
    ],
)
def test_closing_text_by_hand(text, characters, expected):
    assert data.closing_text(text, characters) == expected


def test_near_duplicates_by_hand():
    # 3-grams: {abc, bcd, cde} and {abc, bcd, cdf} share 2 of 4, an index of exactly 1/2.
    parts = {"sft": [{"text": "a b c d e"}], "test": [{"text": "A, b c: d f!"}, {"text": "x y z"}]}
    assert data.near_duplicates(parts) == 1
    assert data.near_duplicates(parts, threshold=0.51) == 0
    assert data.near_duplicates({"sft": [*parts["sft"], *parts["test"]], "test": []}) == 0  # within one part


@pytest.mark.parametrize("seed", range(10))
def test_near_duplicates_against_brute_force(seed):
    generator = random.Random(seed)
    parts = {
        name: [{"text": " ".join(generator.choices("ab", k=generator.randint(2, 9)))} for _ in range(12)]
        for name in ("sft", "ppo", "test")
    }

    def trigrams(text: str) -> set[str]:
        words = text.split(" ")
        return {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}

    rows = [(name, trigrams(row["text"])) for name, part in parts.items() for row in part]
    count = 0
    for i, (name, one) in enumerate(rows):
        for other_name, other in rows[:i]:
            if name != other_name and one | other:
                count += Fraction(len(one & other), len(one | other)) >= Fraction(1, 2)
    assert count > 0
    assert data.near_duplicates(parts) == count


def test_shared_prefixes_by_hand():
    training = [{"token_ids": [1, 2, 3, 4]}, {"token_ids": [5, 6, 7]}]
    test = [{"token_ids": ids} for ids in ([1, 2, 3, 9], [1, 2, 9], [5, 6, 7], [9, 1, 2, 3], [1, 2, 3])]
    assert data.shared_prefixes(test, training, 3) == 3  # the first, the third, the last
    assert data.shared_prefixes(test, training, 2) == 4  # and [1, 2, 9]
    assert data.shared_prefixes(test, training, 4) == 1  # [5, 6, 7] alone
    assert data.shared_prefixes(test, [], 2) == 0
