"""Reading labelled text strictly, and a split that depends on content alone."""

import random
from fractions import Fraction

import pytest

from rlhf import data
from rlhf.data import Row
from rlhf.errors import UserError


@pytest.fixture
def table(tmp_path):
    """Write bytes as reviews.csv and read them back as rows."""

    def read(content: str | bytes, where: dict[str, str] | None = None) -> list[Row]:
        path = tmp_path / "reviews.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return data.read_table(path, "text", "label", where or {})

    return read


# read_table


def test_rows_are_filtered_by_exact_column_values(table):
    content = "label,text,source,year\n1,good,a,1\n0,bad,b,1\n1,fine,a,2\n0,dull,a,1\n"
    assert table(content) == [Row("good", 1), Row("bad", 0), Row("fine", 1), Row("dull", 0)]
    assert table(content, {"source": "a", "year": "1"}) == [Row("good", 1), Row("dull", 0)]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b"\xef\xbb\xbftext,label\na,1\n", [Row("a", 1)]),  # a byte order mark
        (b"text,label\r\na,1\r\n", [Row("a", 1)]),
        (b"text,label\n\n  a b\t,1\n", [Row("a b", 1)]),  # stripped; an empty line is no row
        (b'text,label\n"a, ""b""\nc",0\n', [Row('a, "b"\nc', 0)]),
        ("text,label\né 🙂\u2028x,1\n".encode(), [Row("é 🙂\u2028x", 1)]),
        (b"text,label\na\x00b,1\n", [Row("a\x00b", 1)]),
        (b"text,label\n" + b"a" * 200_000 + b",1\n", [Row("a" * 200_000, 1)]),  # over csv's default limit
    ],
)
def test_what_a_text_may_hold(table, content, rows):
    assert table(content) == rows


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("text,label\na,1\nb,2\n", "reviews.csv, line 3: label is '2': expected 0 or 1"),
        ("text,label\na,-1\n", "reviews.csv, line 2: label is '-1': expected 0 or 1"),
        ("text,label\na,1.0\n", "reviews.csv, line 2: label is '1.0': expected 0 or 1"),
        ("text,label\na, 1\n", "reviews.csv, line 2: label is ' 1': expected 0 or 1"),
        ("text,label\na,\n", "reviews.csv, line 2: label is '': expected 0 or 1"),
        ("text,label\na\n", "reviews.csv, line 2: label is None: expected 0 or 1"),
        ("label,text\n1\n", "reviews.csv, line 2: the text is empty"),
        ("text,label\n,1\n", "reviews.csv, line 2: the text is empty"),
        ('text,label\n"a\nb",1\n" \t\n",0\n', "reviews.csv, line 5: the text is empty"),
        ("text,label\n\u00a0,0\n", "reviews.csv, line 2: the text is empty"),
        ("text,stars\na,1\n", "reviews.csv: no column 'label': it has ['text', 'stars']"),
        ("Text,label\na,1\n", "reviews.csv: no column 'text': it has ['Text', 'label']"),
        ("", "reviews.csv: no column 'text': it has None"),
        ("text,label\n", "reviews.csv: no row where {}"),
    ],
)
def test_a_bad_table_is_refused_with_line_and_value(table, content, complaint):
    with pytest.raises(UserError) as raised:
        table(content)
    assert str(raised.value) == complaint


def test_filters_that_find_nothing(table):
    with pytest.raises(UserError, match="no column 'source'"):
        table("text,label\na,1\n", {"source": "imdb"})
    with pytest.raises(UserError, match=r"no row where \{'source': 'imdb'\}"):
        table("text,label,source\na,1,IMDB\n", {"source": "imdb"})
    # A row that the filter leaves out may hold anything: the other data set has its own label set.
    assert table("text,label,source\na,1,a\n,9,b\n", {"source": "a"}) == [Row("a", 1)]


@pytest.mark.parametrize(
    "content",
    [
        b"text,label\ncaf\xe9,1\n",
        "text,label\na,1\n".encode("utf-16"),
        b'text,label\n"a,1\n',
        b'text,label\n"a"b,1\n',
    ],
)
def test_what_is_not_utf8_or_not_csv(table, content):
    with pytest.raises(UserError, match=r"^reviews\.csv, line \d+: not readable as CSV: [^\n]+$"):
        table(content)


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
    with pytest.raises(UserError, match="needs 5 rows and only 4 are eligible"):
        data.cut(rows, {"sft": 3, "test": 2})


def test_token_limits_are_inclusive():
    rows = [Row("x" * n, n % 2) for n in (1, 2, 3, 4, 5, 6)]
    kept, dropped = data.tokenised(rows, lambda text: list(range(len(text))), min_tokens=2, max_tokens=4)
    assert [row["token_ids"] for row in kept] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [(row["text"], row["label"]) for row in kept] == [("xx", 0), ("xxx", 1), ("xxxx", 0)]
    assert dropped == {"too_short": 1, "too_long": 2}


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
