"""People's own tables: what is accepted in each format, and the one line that refuses all else."""

import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from architecture import ROOT
from malformed_tables import FORMATS, MALFORMED, encoded, parquet, row_of
from toy import environment

from rlhf.data import Row, read_table
from rlhf.errors import UserError
from rlhf.tables import Record, read_records, spelled

DEFAULT = {"0": 0, "1": 1}


@pytest.fixture
def table(tmp_path):
    """Write a file and read it back as labelled rows."""

    def read(name, content, where=None, labels=None, encoding="utf-8") -> list[Row]:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_table(path, "text", "label", labels or DEFAULT, where or {}, encoding)

    return read


# What is accepted


@pytest.mark.parametrize("suffix", FORMATS)
def test_the_same_rows_in_every_format(table, suffix):
    rows = [
        {"year": "1", "label": "1", "text": ' a "fine"\tfilm,\r\nsaid é 🙂\u2028\x0bme '},
        {"year": "2", "label": "0", "text": "dull" * 50_000},  # over csv's default limit
    ]
    expected = [Row(rows[0]["text"].strip(), 1), Row(rows[1]["text"], 0)]
    assert table(f"a.{suffix}", encoded(suffix, rows)) == expected
    assert table(f"B [v2] {{x}}*.{suffix.upper()}", encoded(suffix, rows)) == expected
    assert table(f"a.{suffix}", encoded(suffix, [dict(reversed(row.items())) for row in rows])) == expected
    assert table(f"a.{suffix}", encoded(suffix, rows), {"year": "2"}) == expected[1:]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"a.{end}", b"\xef\xbb\xbf" + encoded(end, [{"text": "a", "label": "1"}])) for end in FORMATS[:3]),
        ("a.csv", "text,label\r\na,1\r\n"),
        ("a.csv", "text,label\ra,1\r"),
        ("a.csv", "text,label\na,1"),
        ("a.csv", "\n\ntext,label\n\n\na,1\n\n"),
        ("a.tsv", "text\tlabel\r\n\r\na\t1\r\n"),
        ("a.jsonl", '\n{"text": "a", "label": 1}\r\n \t\r\n\n'),
        ("a.jsonl", '{"text": "a", "label": 1}'),
        ("a.jsonl", ' {"label": true, "text": "a", "more": [null, {"text": 1.5}]} '),
        (
            "a.parquet",
            parquet({"label": pa.array([1], pa.int8()), "text": pa.array(["a"], pa.large_string())}),
        ),
        ("a.parquet", parquet({"label": [True], "text": pa.array(["a"]).dictionary_encode()})),
        ("a.parquet", parquet({"text": ["a"], "label": [1]}, compression="zstd", row_group_size=1)),
    ],
)
def test_byte_order_marks_line_ends_empty_lines_and_types(table, name, content):
    assert table(name, content, labels={"1": 1, "true": 1, "no": 0}) == [Row("a", 1)]


@pytest.mark.parametrize("suffix", FORMATS[:3])
def test_latin_1_when_it_is_asked_for(table, suffix):
    content = encoded(suffix, [{"text": "café\x85\xa0!", "label": "0"}]).decode().encode("latin-1")
    assert table(f"a.{suffix}", content, encoding="latin-1") == [Row("café\x85\xa0!", 0)]


@pytest.mark.parametrize("suffix", FORMATS)
def test_labels_by_a_mapping_and_rows_by_a_filter(table, suffix):
    rows = [
        {"text": "a", "label": "pos", "source": "x"},
        {"text": "b", "label": "neg", "source": "x"},
        {"text": "c", "label": "very pos", "source": "x"},
        {"text": "", "label": "?", "source": "y"},  # a row that the filter leaves out may hold anything
    ]
    labels = {"neg": 0, "pos": 1, "very pos": 1}
    found = table(f"a.{suffix}", encoded(suffix, rows), {"source": "x"}, labels)
    assert found == [Row("a", 1), Row("b", 0), Row("c", 1)]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_numbers_and_truth_values_match_by_their_spelling(table, suffix):
    rows = [{"text": "a", "label": True, "year": 1999}, {"text": "b", "label": False, "year": 2000}]
    labels = {"true": 0, "false": 1}
    assert table(f"a.{suffix}", encoded(suffix, rows), None, labels) == [Row("a", 0), Row("b", 1)]
    assert table(f"a.{suffix}", encoded(suffix, rows), {"year": "2000"}, labels) == [Row("b", 1)]
    assert table(f"a.{suffix}", encoded(suffix, rows), {"label": "true"}, labels) == [Row("a", 0)]
    assert [spelled(value) for value in (1, 1.0, True, False, "x", None)] == [
        "1", "1.0", "true", "false", "x", None,
    ]  # fmt: skip


def test_records_keep_values_and_places(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1, "b": [2]}\n\n{"c": 3}\n{"a": null, "d": 1.5, "c": 4}\n')
    with pytest.raises(UserError, match=r"^a\.jsonl, line 3: no column 'a': it has \['c'\]$"):
        read_records(path, ("a",), {})
    assert read_records(path, (), {}) == [
        Record("a.jsonl, line 1", {"a": 1, "b": [2]}),
        Record("a.jsonl, line 3", {"c": 3}),
        Record("a.jsonl, line 4", {"a": None, "d": 1.5, "c": 4}),
    ]
    path.write_text('{"a": "x"}\n{"a": "y", "c": 4}\n')
    assert read_records(path, ("c",), {"a": "y"}) == [Record("a.jsonl, line 2", {"a": "y", "c": 4})]


def test_only_parquet_pays_for_its_library(tmp_path):
    (tmp_path / "a.csv").write_text("text\na\n")
    code = (
        "import sys; from pathlib import Path; from rlhf.tables import read_records; "
        "read_records(Path(sys.argv[1]), ['text'], {}); sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "a.csv"], cwd=ROOT, check=True)


def test_columns_that_are_not_read_may_hold_anything(table):
    """A map is a type that `datasets` has no name for; large files are read in several batches."""
    maps = pa.array([[("a", 1)]] * 1000, pa.map_(pa.string(), pa.int8()))
    content = parquet(
        {"text": [f"{i}" for i in range(1000)], "m": maps, "label": [i % 2 for i in range(1000)]}
    )
    assert table("a.parquet", content) == [Row(f"{i}", i % 2) for i in range(1000)]


def test_a_relative_path_below_a_folder_with_the_marks_of_a_pattern(tmp_path, monkeypatch):
    (tmp_path / "my [v2] *").mkdir()
    monkeypatch.chdir(tmp_path / "my [v2] *")
    Path("a.parquet").write_bytes(parquet({"text": ["a"]}))
    assert read_records(Path("a.parquet"), ["text"], {}) == [Record("a.parquet, row 1", {"text": "a"})]


def test_reading_parquet_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.parquet").write_bytes(parquet({"text": ["a"]}))
    code = "import sys; from pathlib import Path; from rlhf.tables import read_records; "
    code += "print(read_records(Path(sys.argv[1]), ['text'], {})[0].values)"
    variables = environment(HOME=str(tmp_path / "home"), TMPDIR=str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", code, tmp_path / "a.parquet"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{'text': 'a'}\n", "")
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "a.parquet"]
    assert left == []


# What is refused


@pytest.mark.parametrize(
    ("rows", "options", "loaded"),
    [
        (
            70,
            {"compression": "zstd", "use_dictionary": False},
            False,
        ),  # the footer says how large the columns are
        (70 * 256, {"use_dictionary": True}, True),  # one value, unpacked for every row
    ],
)
def test_a_small_file_may_not_unpack_without_end(table, rows, options, loaded):
    size = 2**20 * 70 // rows
    content = parquet({"text": ["a" * size] * rows, "label": [1] * rows}, **options)
    assert len(content) < 2**20 * 70 / 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.load_dataset", datasets.load_dataset if loaded else None)
        with pytest.raises(UserError, match=r"^a\.parquet: unpacks to more than 100 times its size$"):
            table("a.parquet", content)
        patch.undo()
        patch.setattr("rlhf.tables.UNPACKED_BYTES", 2**30)
        assert len(table("a.parquet", content)) == rows


@pytest.mark.parametrize(("name", "content", "message"), MALFORMED)
def test_a_bad_table_is_refused_in_one_line(table, name, content, message):
    with pytest.raises(UserError) as raised:
        table(name, content)
    assert str(raised.value) == message


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_label_outside_the_mapping_is_told_what_the_mapping_has(table, suffix):
    content = encoded(suffix, [{"text": "a", "label": "neg"}, {"text": "b", "label": "Pos"}])
    place = f"a.{suffix}, {row_of(suffix, 2)}"
    for labels, expected in (
        ({"neg": 0, "pos": 1}, "neg or pos"),
        ({"neg": 0, "1": 1, "2": 1}, "neg, 1 or 2"),
    ):
        with pytest.raises(UserError) as raised:
            table(f"a.{suffix}", content, labels=labels)
        assert str(raised.value) == f"{place}: label is 'Pos': expected {expected}"


@pytest.mark.parametrize("suffix", FORMATS)
def test_filters_that_find_nothing(table, suffix):
    content = encoded(suffix, [{"text": "a", "label": "1", "source": "IMDB"}])
    with pytest.raises(UserError) as raised:
        table(f"a.{suffix}", content, {"source": "imdb"})
    assert str(raised.value) == f"a.{suffix}: no row where {{'source': 'imdb'}}"
    with pytest.raises(UserError, match=r"no column 'from': it has \['text', 'label', 'source'\]$"):
        table(f"a.{suffix}", content, {"from": "imdb"})


def test_a_file_that_is_gone_is_the_machine_s_own_error(tmp_path):
    for suffix in FORMATS:
        with pytest.raises(FileNotFoundError):
            read_records(tmp_path / f"a.{suffix}", ("text",), {})
