"""Tables that must be refused, `MALFORMED`: file name, content, and the whole one-line message."""

import csv
import io
import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

FORMATS = ("csv", "tsv", "jsonl", "parquet")
NOT_UTF8 = "is not utf-8; latin-1 must be asked for"
NOT_WHOLE = "holds a NUL or half a surrogate pair"
Case = tuple[str, str | bytes, str]


def parquet(columns: dict[str, object], **options) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, **options)
    return buffer.getvalue()


def encoded(suffix: str, rows: list[dict]) -> bytes:
    """The same rows in any of the formats; the first row names the columns."""
    if suffix == "parquet":
        return parquet({name: [row[name] for row in rows] for name in rows[0]})
    if suffix == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter="," if suffix == "csv" else "\t", lineterminator="\n")
    writer.writerows([list(rows[0]), *(row.values() for row in rows)])
    return text.getvalue().encode()


LABELS = [
    ("2", "'2'"), ("-1", "'-1'"), ("1.0", "'1.0'"), (" 1", "' 1'"), ("", "''"), ("true", "'true'"),
    ("a\nb\x1b[0m", r"'a\nb\x1b[0m'"), ("x" * 300, f"'{'x' * 76}..."),
]  # fmt: skip
VALUES = [  # for the two formats that have types
    (None, "None"), (2, "2"), (-1, "-1"), (1.0, "1.0"), (True, "True"), ([1], "[1]"), ({"a": 1}, "{'a': 1}"),
]  # fmt: skip
TEXTS = [5, 1.5, True, ["a"], {"a": "b"}, None]


def row_of(suffix: str, number: int) -> str:
    """How row `number`, from 1, is called where each row has one line."""
    return f"row {number}" if suffix == "parquet" else f"line {number + (suffix != 'jsonl')}"


def wrong_values() -> Iterator[Case]:
    good = {"text": "a", "label": "1"}
    for suffix in FORMATS:
        second, name = row_of(suffix, 2), f"a.{suffix}"
        for label, found in LABELS:
            rows = [good, {"text": "b", "label": label}]
            yield name, encoded(suffix, rows), f"a.{suffix}, {second}: label is {found}: expected 0 or 1"
        for text in ("", " \t ", "\u00a0\u3000"):
            rows = [good, {"text": text, "label": "1"}]
            yield name, encoded(suffix, rows), f"a.{suffix}, {second}: the text is empty"
        yield (
            name,
            encoded(suffix, [{"text": "a", "stars": "1"}]),
            f"a.{suffix}{', line 1' * (suffix == 'jsonl')}: no column 'label': it has ['text', 'stars']",
        )
        yield (
            name,
            encoded(suffix, [{"Text": "a", "label": "1"}]),
            f"a.{suffix}{', line 1' * (suffix == 'jsonl')}: no column 'text': it has ['Text', 'label']",
        )
    for suffix in FORMATS[2:]:
        for label, found in VALUES:
            rows = [{"text": "b", "label": label}]
            place = f"a.{suffix}, {row_of(suffix, 1)}"
            yield f"a.{suffix}", encoded(suffix, rows), f"{place}: label is {found}: expected 0 or 1"
        for text in TEXTS:
            rows = [{"text": text, "label": "1"}]
            place = f"a.{suffix}, {row_of(suffix, 1)}"
            yield f"a.{suffix}", encoded(suffix, rows), f"{place}: the text is {text!r}: expected a text"


BAD_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\5\0\0\0"), pa.py_buffer(b"acaf\xe9")]
)
TWICE = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array([1])], ["text", "text", "label"])
WHOLE = parquet({"text": ["a", "b"], "label": [1, 0]}, compression="none")


def malformed_delimited() -> Iterator[Case]:
    for suffix, tab in (("csv", ","), ("tsv", "\t")):
        for content, message in _in_both(tab, f"text{tab}label\n"):
            yield f"a.{suffix}", content, f"a.{suffix}{message}"
    yield "a.csv", "text;label\na;1\n", "a.csv: no column 'text': it has ['text;label']"
    yield "a.csv", "text, label\na, 1\n", "a.csv: no column 'label': it has ['text', ' label']"
    yield "a.tsv", "text,label\na,1\n", "a.tsv: no column 'text': it has ['text,label']"


def _in_both(tab: str, head: str) -> Iterator[tuple[str | bytes, str]]:
    yield "", ": the file is empty: expected a line of column names"
    yield "\n\n", ": the file is empty: expected a line of column names"
    yield b"\xef\xbb\xbf", ": the file is empty: expected a line of column names"
    yield head, ": no row"
    yield f"text{tab}text{tab}label\na{tab}b{tab}1\n", ": two columns are called 'text'"
    yield f"text{tab}label{tab}x{tab}x\na{tab}1{tab}2{tab}3\n", ": two columns are called 'x'"
    yield f"{head}a{tab}1\nb\n", ", line 3: expected 2 fields, found 1"
    yield f"{head}a{tab}1\n\n \n", ", line 4: expected 2 fields, found 1"
    yield f"{head}b{tab}1{tab}\n", ", line 2: expected 2 fields, found 3"
    yield f'{head}"a\nb"{tab}1\n{tab}{tab}\n', ", line 4: expected 2 fields, found 3"
    yield f'{head}"a\nb"{tab}1\n" \n"{tab}0\n', ", line 4: the text is empty"
    yield f'{head}a{tab}1\n"b\n{tab}1\nc{tab}0\n', ", line 3: the row is not readable: unexpected end of data"
    yield f'{head}"a"b{tab}1\n', f", line 2: the row is not readable: {tab!r} expected after '\"'"
    yield f"{head}a\0b{tab}1\n", ", line 2: a NUL byte: expected text in utf-8"
    yield f"{head}a{tab}1\r\n\r\n{tab}\0", ", line 4: a NUL byte: expected text in utf-8"
    yield f"{head}a{tab}1\n".encode("utf-16"), ", line 1: a NUL byte: expected text in utf-8"
    yield f"{head}a{tab}1\ncaf\xe9{tab}1\n".encode("latin-1"), f", line 3: byte 0xe9 {NOT_UTF8}"
    yield b"\xef\xbb\xbf" + f"{head}\r\xff{tab}1\n".encode("latin-1"), f", line 3: byte 0xff {NOT_UTF8}"
    yield f"{head}\ud800{tab}1\n".encode(errors="surrogatepass"), f", line 2: byte 0xed {NOT_UTF8}"
    yield f"{head}a{tab}1\nb".encode() + b"\xc3", f", line 3: byte 0xc3 {NOT_UTF8}"


def malformed_json_lines() -> Iterator[Case]:
    def line(content, message, number=1):
        return "a.jsonl", content, f"a.jsonl, line {number}: {message}"

    good = '{"text": "a", "label": 1}\n'
    yield "a.jsonl", "", "a.jsonl: no row"
    yield "a.jsonl", "\n \r\n", "a.jsonl: no row"
    yield line(
        good + "\n{'text': 1}",
        "not valid JSON: Expecting property name enclosed in double quotes (character 2)",
        3,
    )
    yield line(good + '{"text": "a", "label": 1', "not valid JSON: Expecting ',' delimiter (character 25)", 2)
    yield line(good[:-1] + good, "not valid JSON: Extra data (character 26)")
    yield line("text,label\n", "not valid JSON: Expecting value (character 1)")
    yield line(
        '[{"text": "a", "label": 1}]', "the row is [{'text': 'a', 'label': 1}]: expected a JSON object"
    )
    yield line("[" + "1, " * 100 + "1]", f"the row is [{'1, ' * 25}1...: expected a JSON object")
    for value, found in (("1", "1"), ('"a"', "'a'"), ("null", "None"), ("true", "True")):
        yield line(value, f"the row is {found}: expected a JSON object")
    yield line('{"text": "a\tb", "label": 1}', "not valid JSON: Invalid control character at (character 12)")
    yield line('{"text": "a", "label": NaN}', "not valid JSON: NaN is not a JSON number")
    yield line('{"text": "a", "label": -Infinity}', "not valid JSON: -Infinity is not a JSON number")
    yield line('{"text": "a", "text": "b", "label": 1}', "not valid JSON: two values for 'text'")
    yield line('{"text": "a\\u0000b", "label": 1}', rf"the text 'a\x00b' {NOT_WHOLE}")
    yield line('{"text": "a\\ud83d b", "label": 1}', rf"the text 'a\ud83d b' {NOT_WHOLE}")
    yield line(
        '{"text": "a", "label": 1' + "0" * 5000 + "}",
        "not valid JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5001 "
        "digits; use sys.set_int_max_str_digits() to increase the limit",
    )
    yield line(
        '{"text": ' + "[" * 10**5,
        "not valid JSON: maximum recursion depth exceeded while decoding a JSON array from a unicode string",
    )
    yield line('{"text": "a", "label": "\\ud83d"}', r"label is '\ud83d': expected 0 or 1")
    yield line('{"text": "a", "label": 1e999}', "label is inf: expected 0 or 1")
    yield line('{"text": "a"}\n', "no column 'label': it has ['text']")
    yield line("{}", "no column 'text': it has []")
    yield line('{"text": "a\0b", "label": 1}\n', "a NUL byte: expected text in utf-8")
    yield line(good.encode() + b'{"text": "\xe9", "label": 1}\n', f"byte 0xe9 {NOT_UTF8}", 2)
    yield line(good.encode("utf-16"), "a NUL byte: expected text in utf-8")


def malformed_parquet() -> Iterator[Case]:
    def damaged(content, message):
        return "a.parquet", content, f"a.parquet: not readable as Parquet: {message}"

    yield damaged(b"", "Parquet file size is 0 bytes")
    yield damaged(b"PAR1", "Parquet file size is 4 bytes, smaller than the minimum file footer (8 bytes)")
    magic = (
        "Parquet magic bytes not found in footer. Either the file is corrupted or this is not a parquet file."
    )
    yield damaged("text,label\na,1\n", magic)
    yield damaged(WHOLE[:-1], magic)
    yield damaged(WHOLE[: len(WHOLE) // 2], magic)
    footer = "Parquet file size is 204 bytes, smaller than the size reported by footer's (549bytes)"
    yield damaged(WHOLE[:4] + WHOLE[-200:], footer)
    yield damaged(
        WHOLE[:4] + bytes(100) + WHOLE[104:],
        "Couldn't deserialize thrift: TProtocolException: Invalid data Deserializing page header failed.",
    )
    yield damaged(
        WHOLE.replace(b"label", b"lab\xffl"),
        "'utf-8' codec can't decode byte 0xff in position 3: invalid start byte",
    )
    yield (
        "a.parquet",
        parquet({"text": BAD_UTF8, "label": [1, 1]}),
        "a.parquet, row 2: column 'text' is not readable: 'utf-8' codec can't decode byte 0xe9 in position "
        "3: unexpected end of data",
    )
    yield (
        "a.parquet",
        parquet({"text": ["a\0b"], "label": [1]}),
        rf"a.parquet, row 1: the text 'a\x00b' {NOT_WHOLE}",
    )
    yield (
        "a.parquet",
        parquet({"text": [b"a"], "label": [1]}),
        "a.parquet, row 1: the text is b'a': expected a text",
    )
    yield (
        "a.parquet",
        parquet({"text": ["a"], "label": [float("nan")]}),
        "a.parquet, row 1: label is nan: expected 0 or 1",
    )
    yield damaged(
        parquet({"text": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), "label": [1]}),
        "Arrow type map<string, int8 ('text')> does not have a datasets dtype equivalent.",
    )
    buffer = io.BytesIO()
    pq.write_table(TWICE, buffer)
    yield "a.parquet", buffer.getvalue(), "a.parquet: two columns are called 'text'"
    yield (
        "a.parquet",
        parquet({"text": pa.array([], pa.string()), "label": pa.array([], pa.int8())}),
        "a.parquet: no row",
    )
    for name in ("a.txt", "a.json", "a", "a.csv.gz", "csv", ".csv"):
        yield (
            name,
            "text,label\na,1\n",
            f"{name}: expected a name that ends in .csv, .tsv, .jsonl or .parquet",
        )


MALFORMED = [*wrong_values(), *malformed_delimited(), *malformed_json_lines(), *malformed_parquet()]
