"""Malformed tables, questions and JSON records, each with words of the line that refuses it.

Tables are read with columns text and label, labels 0 and 1, as UTF-8.
"""

import io
import json

import pyarrow
from pyarrow import parquet

Cases = dict[str, tuple[bytes, str]]

LABEL, FIELDS = "label is .*: expected 0 or 1", ".*2 fields"
EMPTY = "the text is empty"
NO_TEXT, NO_LABEL = "no column 'text': it has", "no column 'label': it has"


def delimited(mark: bytes, name: str) -> Cases:
    """What is wrong in both formats, with `mark` between the fields."""
    cases = {
        "empty file": (b"", "the file is empty: expected a line of column names"),
        "line ends alone": (b"\n\r\n\n", "the file is empty: expected a line of column names"),
        "byte order mark alone": (b"\xef\xbb\xbf", "the file is empty"),
        "header alone": (b"text,label\n", "no row"),
        "no header": (b"good,1\nbad,0\n", NO_TEXT),
        "other case": (b"Text,label\na,1\n", NO_TEXT),
        "space in a name": (b"text ,label\na,1\n", NO_TEXT),
        "no label": (b"text,stars\na,1\n", NO_LABEL),
        "two texts": (b"text,label,text\na,1,b\n", "two columns are called 'text'"),
        "two labels": (b"text,label,label\na,1,0\n", "two columns are called 'label'"),
        "other marks": (b"text;label\na;1\n", NO_TEXT),
        "no label in a row": (b"text,label\na\n", "line 2: " + FIELDS),
        "one field more": (b"text,label\na,1\na,b,1\n", "line 3: " + FIELDS),
        "white space alone": (b"text,label\na,1\n   \n", "line 3: " + FIELDS),
        "label 2": (b"text,label\na,1\nb,2\n", "line 3: " + LABEL),
        "label -1": (b"text,label\na,-1\n", "line 2: " + LABEL),
        "label 1.0": (b"text,label\na,1.0\n", "line 2: " + LABEL),
        "label of two digits": ("text,label\na,١\n".encode(), "line 2: " + LABEL),
        "label in words": (b"text,label\na,positive\n", "line 2: label is 'positive': expected 0 or 1"),
        "empty label": (b"text,label\na,\n", "line 2: label is '': expected 0 or 1"),
        "label with a line end": (b'text,label\na,"1\n"\n', r"line 2: label is '1\\n': expected 0 or 1"),
        "empty text": (b"text,label\n,1\n", "line 2: " + EMPTY),
        "blank text": (b"text,label\na,1\n \t ,0\n".replace(b"\t", b" "), "line 3: " + EMPTY),
        "no-break space": ("text,label\n\u00a0,0\n".encode(), "line 2: " + EMPTY),
        "Latin-1": (b"text,label\ncaf\xe9,1\n", "line 2: byte 0xe9 is not utf-8; latin-1 must be asked for"),
        "UTF-16": ("text,label\na,1\n".encode("utf-16"), "line 1: a NUL byte: expected text in utf-8"),
        "NUL": (b"text,label\na,1\na\0b,1\n", "line 3: a NUL byte: expected text in utf-8"),
        "half a surrogate pair": (b"text,label\n\xed\xa0\x80,1\n", "line 2: byte 0xed is not utf-8"),
        "cut character": (b"text,label\na,1\nb\xf0\x9f", "line 3: byte 0xf0 is not utf-8"),
        "open quote": (b'text,label\na,1\n"b,0\n', "line 3: the row is not readable"),
        "text after a quote": (b'text,label\n"a"b,1\n', "line 2: the row is not readable"),
        "one label only": (
            b"text,label\ngood one here,1\nfine one here,1\n",
            "each of the 2 rows .* has label 1",
        ),
        "contradicting alone": (b"text,label\ngood one,1\ngood one,0\n", "none of 2 rows is eligible"),
        "too few rows": (b"text,label\ngood one here,1\ndull one here,0\n", "only 2 are eligible"),
        "all too short": (b"text,label\na,1\nb,0\n", "none of 2 rows is eligible .*: too_short 2"),
        "all too long": (b"text,label\n%b,1\n%b,0\n" % (b"warm " * 99, b"dull " * 99), "too_long 2"),
        "huge line": (b"text,label\n%b,1,\n" % (b"a" * 10**6), "line 2: " + FIELDS),
        "binary": (bytes(range(256)), "line 1: a NUL byte|line 1: byte"),
    }
    return {
        what: (content.replace(b",", mark), f"(?:{name}|split.sizes needs).*{words}")
        for what, (content, words) in cases.items()
    }


CSV: Cases = delimited(b",", "rows.csv")
TSV: Cases = delimited(b"\t", "rows.tsv")


def line(**values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


GOOD = line(text="a", label=1)
LINES: Cases = {
    "empty file": (b"", ": no row"),
    "blank lines": (b"\n \n", ": no row"),
    "half a line": (GOOD + GOOD[:9], "line 2: not valid JSON"),
    "two on a line": (GOOD[:-1] + GOOD, "line 1: not valid JSON: Extra data"),
    "a comma": (GOOD[:-1] + b",\n", "line 1: not valid JSON: Extra data"),
    "a JSON list of rows": (b"[" + GOOD[:-1] + b"]\n", "line 1: the row is .*: expected a JSON object"),
    "null": (GOOD + b"null\n", "line 2: the row is None: expected a JSON object"),
    "text": (b'"text"\n', "line 1: the row is 'text': expected a JSON object"),
    "number": (b"1\n", "line 1: the row is 1: expected a JSON object"),
    "CSV": (b"text,label\na,1\n", "line 1: not valid JSON"),
    "single quotes": (b"{'text': 'a', 'label': 1}", "line 1: not valid JSON"),
    "comment": (b"// rows\n" + GOOD, "line 1: not valid JSON"),
    "NaN": (b'{"text": "a", "label": NaN}', "NaN is not a JSON number"),
    "digits": (b'{"text": "a", "label": %b}' % (b"1" * 5000), "line 1: not valid JSON"),
    "deep": (b'{"text":' * 10**5, "line 1: not valid JSON"),
    "key twice": (b'{"text": "a", "text": "b", "label": 1}', "two values for 'text'"),
    "no text": (line(label=1), "line 1: no column 'text'"),
    "no label": (GOOD + line(text="a"), "line 2: no column 'label'"),
    "empty object": (b"{}\n", "line 1: no column 'text'"),
    "text is a number": (line(text=3, label=1), "line 1: the text is 3: expected a text"),
    "text is null": (line(text=None, label=1), "line 1: the text is None: expected a text"),
    "text is a list": (line(text=["a"], label=1), "line 1: the text is .*: expected a text"),
    "text is empty": (line(text="\n", label=1), "line 1: " + EMPTY),
    "text has a NUL": (line(text="a\0", label=1), "line 1: the text .* holds a NUL"),
    "half a surrogate pair": (line(text="a\ud800", label=1), "line 1: the text .* half a surrogate pair"),
    "label is true": (line(text="a", label=True), "label is True: expected 0 or 1"),
    "label is null": (line(text="a", label=None), "label is None: expected 0 or 1"),
    "label is 1.0": (line(text="a", label=1.0), "label is 1.0: expected 0 or 1"),
    "label is a list": (line(text="a", label=[1]), r"label is \[1\]: expected 0 or 1"),
    "label is an object": (line(text="a", label={"1": 1}), "label is {'1': 1}: expected 0 or 1"),
    "label is infinite": (b'{"text": "a", "label": 1e999}', "label is inf: expected 0 or 1"),
    "Latin-1": (b'{"text": "caf\xe9", "label": 1}', "line 1: byte 0xe9 is not utf-8"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "line 1: a NUL byte"),
    "line separator": ('{"text": "a",\u2028"label": 1}'.encode(), "line 1: not valid JSON"),
    "one label only": (line(text="good one here", label=1), "each of the 1 rows .* has label 1"),
}  # fmt: skip
JSON_LINES: Cases = {what: (content, f"rows.jsonl.*{words}") for what, (content, words) in LINES.items()}


def table(names: tuple[str, ...] = ("text", "label"), **columns: object) -> bytes:
    """A Parquet file; columns that are not given hold one good row."""
    given = {"text": ["a"], "label": [1]} | columns
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table([pyarrow.array(given[n]) for n in names], names=names), buffer)
    return buffer.getvalue()


PLAIN = table()
UNREADABLE = "rows.parquet: not readable as Parquet: "
PARQUET: Cases = {
    "empty file": (b"", UNREADABLE),
    "text": (b"text,label\na,1\n", UNREADABLE),
    "magic alone": (b"PAR1", UNREADABLE),
    "magic twice": (b"PAR1PAR1", UNREADABLE),
    "first half": (PLAIN[: len(PLAIN) // 2], UNREADABLE),
    "last byte cut": (PLAIN[:-1], UNREADABLE),
    "footer's length": (PLAIN[:-8] + b"\xff\xff\xff\x7f" + PLAIN[-4:], UNREADABLE),
    "no footer": (PLAIN[:-8] + b"\0\0\0\0PAR1", UNREADABLE),
    "encrypted": (PLAIN[:-4] + b"PARE", UNREADABLE),
    "no text": (table(("label",)), NO_TEXT),
    "no label": (table(("text",)), NO_LABEL),
    "two texts": (table(("text", "label", "text")), "two columns are called 'text'"),
    "no rows": (table(text=pyarrow.array([], "string"), label=pyarrow.array([], "int64")), "no row"),
    "text is null": (table(text=["a", None], label=[1, 0]), "row 2: the text is None: expected a text"),
    "text is a number": (table(text=[3]), "row 1: the text is 3: expected a text"),
    "text is bytes": (table(text=[b"a"]), "row 1: the text is b'a': expected a text"),
    "text is a list": (table(text=[["a"]]), "row 1: the text is .*: expected a text"),
    "text is empty": (table(text=[" "]), "row 1: " + EMPTY),
    "text has a NUL": (table(text=["a\0"]), "row 1: the text .* holds a NUL"),
    "label is 2": (table(label=[2]), "row 1: label is 2: expected 0 or 1"),
    "label is 1.0": (table(label=[1.0]), "row 1: label is 1.0: expected 0 or 1"),
    "label is null": (table(text=["a", "b"], label=[1, None]), "row 2: label is None: expected 0 or 1"),
    "label is true": (table(label=[True]), "row 1: label is True: expected 0 or 1"),
    "label is a mapping": (table(label=[{"a": 1}]), "row 1: label is {'a': 1}: expected 0 or 1"),
    "not UTF-8": (table(text=pyarrow.array([b"\xff"]).view("string")), "column 'text' is not readable"),
}  # fmt: skip

# Questions with their answers, as `rlhf.questions.read_questions` reads them.
ASKED = {"question": "Why?", "answer": "So."}
QUESTIONS: Cases = {
    "no question": (line(answer="So."), "line 1: no column 'question'"),
    "no answer": (line(question="Why?"), "line 1: no column 'answer'"),
    "empty question": (line(**ASKED | {"question": " "}), "line 1: question is empty"),
    "answer is a number": (line(**ASKED | {"answer": 3}), "line 1: answer is 3: expected a text"),
    "answer is null": (line(**ASKED | {"answer": None}), "line 1: answer is None: expected a text"),
    "answer is a list": (line(**ASKED | {"answer": ["So."]}), r"answer is \['So.'\]: expected a text"),
    "answer has a NUL": (line(**ASKED | {"answer": "a\0"}), "answer .* holds a NUL"),
    "half a surrogate pair": (line(**ASKED | {"question": "\udfff?"}), "half a surrogate pair"),
    "second row": (line(**ASKED) + b"{}\n", "line 2: no column 'question'"),
    "no rows": (b"\n", "questions.jsonl: no row"),
}  # fmt: skip

# People's preferences, as `rlhf.questions.read_preferences` reads them.
PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No.", "margin": 1}
PREFERENCES: Cases = {
    "no chosen": (line(prompt="Why?", rejected="No."), "line 1: no column 'chosen'"),
    "no margin": (line(prompt="Why?", chosen="So.", rejected="No."), "line 1: no column 'margin'"),
    "empty prompt": (line(**PAIR | {"prompt": ""}), "line 1: prompt is empty"),
    "chosen is null": (line(**PAIR | {"chosen": None}), "line 1: chosen is None: expected a text"),
    "rejected is a list": (line(**PAIR | {"rejected": ["No."]}), r"rejected is \['No.'\]: expected a text"),
    "rejected has a NUL": (line(**PAIR | {"rejected": "\0"}), "rejected .* holds a NUL"),
    "twice the same": (line(**PAIR | {"rejected": " So. "}), "line 1: chosen and rejected are the same text"),
    "both empty": (line(**PAIR | {"chosen": "", "rejected": ""}), "chosen and rejected are the same"),
    "margin 0": (line(**PAIR | {"margin": 0}), "line 1: margin is 0: expected a number other than 0"),
    "margin is true": (line(**PAIR | {"margin": True}), "margin is True: expected a number"),
    "margin in words": (line(**PAIR | {"margin": "much"}), "margin is 'much': expected a number"),
    "margin is infinite": (line(**PAIR | {"margin": float("inf")}), "Infinity is not a JSON number"),
    "margin beyond 64 bits": (line(**PAIR).replace(b"1", b"1e999"), "line 1: margin is inf"),
    "margin of many digits": (line(**PAIR | {"margin": 10**400}), "margin is 1000.*: expected a number"),
    "second row": (line(**PAIR) + line(prompt="Why?"), "line 2: no column 'chosen'"),
    "a JSON list": (b"[]", "line 1: the row is \\[\\]: expected a JSON object"),
}  # fmt: skip

# Files that the program itself writes, as `rlhf.record.read_jsonl` reads them.
RECORDS: Cases = {
    "text": (b"hello", "line 1: not valid JSON"),
    "half a line": (b'{"a": 1}\n{"a"', "line 2: not valid JSON"),
    "list": (b"[1]\n", "line 1: expected a JSON object"),
    "number": (b'{"a": 1}\n\n3\n', "line 3: expected a JSON object"),
    "null": (b"null", "line 1: expected a JSON object"),
    "infinity": (b'{"a": -Infinity}', "line 1: not valid JSON: -Infinity is not a JSON number"),
    "beyond 64 bits": (b'{"a": 1e999}', "line 1: not valid JSON: a number too large for 64 bits"),
    "digits": (b'{"a": %b}' % (b"9" * 5000), "line 1: not valid JSON"),
    "deep": (b"[" * 10**5, "line 1: not valid JSON"),
    "Latin-1": (b'{"a": "caf\xe9"}', "not valid UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not valid UTF-8"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "line 1: not valid JSON"),
    "control character": (b'{"a": "\1"}', "line 1: not valid JSON: Invalid control character"),
    "escape": (b'{"a": "\\x"}', r"line 1: not valid JSON: Invalid \\escape"),
    "pickle": (b"\x80\x04K\x01.", "not valid UTF-8"),
}  # fmt: skip
