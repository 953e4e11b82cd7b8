"""Files that appear whole or not at all, and bytes that do not depend on the platform."""

import csv
import hashlib
import json
from pathlib import Path

import pytest

from rlhf import record
from rlhf.errors import UserError

HOSTILE = [
    "line\u2028separator",
    "next\u0085line",
    "a\rb\r\nc\nd",
    "\x00\x0b\x0c\x1c",
    '"quoted", \\ 🙂 é',
    "",
    " ",
]


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


# replacing


@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_moves_into_place_on_success_only(tmp_path, old):
    target = tmp_path / "new" / "folder" / "x.txt"
    if old:
        target.parent.mkdir(parents=True)
        target.write_text(old)
    with record.replacing(target) as temporary:
        assert temporary.parent == target.parent  # a rename within one file system
        temporary.write_text("new")
        assert (target.read_text() if old else target.exists()) == (old or False)
    assert target.read_text() == "new"
    assert names(target.parent) == {"x.txt"}


def test_a_folder_replaces_the_whole_old_folder(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "stale.bin").write_text("old")
    with record.replacing(target) as temporary:
        temporary.mkdir()
        (temporary / "fresh.bin").write_text("new")
        assert names(target) == {"stale.bin"}
    assert names(target) == {"fresh.bin"}
    assert names(tmp_path) == {"adapter"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_failure_keeps_the_old_and_leaves_nothing_behind(tmp_path, error, kind):
    target = tmp_path / "x"
    if kind == "folder":
        target.mkdir()
    kept = target / "kept" if kind == "folder" else target
    kept.write_text("old")
    with pytest.raises(error), record.replacing(target) as temporary:
        if kind == "folder":
            temporary.mkdir()
        (temporary / "half" if kind == "folder" else temporary).write_text("half")
        raise error
    assert kept.read_text() == "old"
    assert names(tmp_path) == {"x"}


def test_writing_nothing_is_an_error_that_keeps_the_old_file(tmp_path):
    target = tmp_path / "x"
    target.write_text("old")
    with pytest.raises(FileNotFoundError), record.replacing(target):
        pass
    assert target.read_text() == "old"


@pytest.mark.parametrize("leftover", ["file", "folder"])
def test_what_a_killed_process_left_is_cleared_first(tmp_path, leftover):
    with record.replacing(tmp_path / "x") as temporary:
        temporary.write_text("1")
    if leftover == "folder":
        temporary.mkdir()
        (temporary / "half").write_text("half")
    else:
        temporary.write_text("half")
    with record.replacing(tmp_path / "x") as again:
        assert not again.exists()
        again.write_text("2")
    assert names(tmp_path) == {"x"}


def test_a_link_in_the_way_is_replaced_and_its_target_is_not_touched(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "weights").write_text("cached")
    (tmp_path / "out").symlink_to(tmp_path / "cache")
    with record.replacing(tmp_path / "out") as temporary:
        temporary.mkdir()
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "cache" / "weights").read_text() == "cached"


# JSON, JSONL, CSV


def test_bytes_of_each_format(tmp_path):
    record.write_text(tmp_path / "t", "é\nb\n")
    record.write_json(tmp_path / "j", {"b": 0.1, "a": "é"})
    record.write_jsonl(tmp_path / "l", [{"b": 1, "a": "é"}, {"c": None}])
    record.write_csv(tmp_path / "c", [{"b": 1, "a": None}, {"b": 'é,"\n', "a": 0.1}])
    assert (tmp_path / "t").read_bytes() == b"\xc3\xa9\nb\n"
    assert (tmp_path / "j").read_bytes() == b'{\n  "b": 0.1,\n  "a": "\xc3\xa9"\n}\n'
    assert (tmp_path / "l").read_bytes() == b'{"b": 1, "a": "\xc3\xa9"}\n{"c": null}\n'
    assert (tmp_path / "c").read_bytes() == b'b,a\n1,\n"\xc3\xa9,""\n",0.1\n'


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_never_damage_the_old_file(tmp_path, bad):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.write_json(path, {"a": [1.0, bad]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        record.write_jsonl(path, [{"a": 1.0}, {"a": bad}])
    assert path.read_text() == "old"
    assert names(tmp_path) == {"x"}


def test_rows_that_cannot_be_written_keep_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(TypeError):
        record.write_jsonl(path, [{"a": 1}, {"a": object()}])
    with pytest.raises(UnicodeEncodeError):
        record.write_jsonl(path, [{"a": "\ud800"}])  # half of a surrogate pair is not text
    with pytest.raises(ValueError, match="b"):
        record.write_csv(path, [{"a": 1}, {"a": 1, "b": 2}])
    assert path.read_text() == "old"
    assert names(tmp_path) == {"x"}


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_survives(tmp_path, text):
    rows = [{"text": text, "n": 1}, {"text": "after", "n": 2}]
    record.write_jsonl(tmp_path / "x.jsonl", rows)
    assert record.read_jsonl(tmp_path / "x.jsonl") == rows
    record.write_json(tmp_path / "x.json", {text: text})
    assert record.read_json(tmp_path / "x.json") == {text: text}
    record.write_csv(tmp_path / "x.csv", rows)
    with (tmp_path / "x.csv").open(encoding="utf-8", newline="") as file:
        assert [(row["text"], row["n"]) for row in csv.DictReader(file)] == [(text, "1"), ("after", "2")]


def test_jsonl_skips_empty_lines_and_numbers_bad_ones(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}')
    assert record.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 3: not valid JSON"):
        record.read_jsonl(path)


@pytest.mark.parametrize("read", [record.read_json, record.read_jsonl])
@pytest.mark.parametrize("content", [b'{"a": 1', b"\xff\xfe{}", b'{"a": "caf\xe9"}', b"\x00"])
def test_a_damaged_file_is_named_in_one_line(tmp_path, read, content):
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


# Hashes


def test_sha256_of_files(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")  # FIPS 180-2, example B.1
    assert record.sha256_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    data = bytes(range(256)) * 5000  # larger than any read buffer
    path.write_bytes(data)
    assert record.sha256_file(path) == hashlib.sha256(data).hexdigest()


def test_sha256_of_rows_is_of_their_canonical_json():
    lines = b'{"a": "\xc3\xa9", "b": [1, 2]}\n{"a": "x", "b": []}\n'
    rows = [{"b": [1, 2], "a": "é"}, {"a": "x", "b": []}]
    assert record.sha256_rows(rows) == hashlib.sha256(lines).hexdigest()
    assert record.sha256_rows(iter(rows)) == record.sha256_rows(rows)
    assert record.sha256_rows(rows[::-1]) != record.sha256_rows(rows)
    assert record.sha256_rows([{"a": "x\n"}]) != record.sha256_rows([{"a": "x"}])


def test_sha256_of_rows_survives_the_round_trip_through_a_file(tmp_path):
    rows = [{"text": text, "token_ids": [1, 2]} for text in HOSTILE]
    record.write_jsonl(tmp_path / "x", rows)
    assert record.sha256_rows(record.read_jsonl(tmp_path / "x")) == record.sha256_rows(rows)


# Progress


def test_a_progress_line_by_hand(capsys, monkeypatch):
    clock = iter([100.0, 110.0, 170.0])
    monkeypatch.setattr(record.time, "monotonic", lambda: next(clock))
    progress = record.Progress("sft", 8)
    progress.step(1, 50, loss=1.23456, norm=None)  # 50 tokens in 10 s; 7 steps of 10 s are left
    progress.step(2, 90, loss=2.0)  # 140 tokens in 70 s; 6 steps of 35 s are left
    assert capsys.readouterr().out.splitlines() == [
        "sft 1/8  loss 1.235  norm null  5 tokens/s  1:10 left",
        "sft 2/8  loss 2  2 tokens/s  3:30 left",
    ]


@pytest.mark.parametrize(
    ("steps", "printed"),
    [
        (3, [1, 2, 3]),
        (99, list(range(1, 100))),
        (200, list(range(4, 201, 4))),
        (101, [*range(2, 101, 2), 101]),
    ],
)
def test_progress_prints_some_fifty_lines_and_the_last(capsys, steps, printed):
    progress = record.Progress("ppo", steps)
    for step in range(1, steps + 1):
        progress.step(step, 1)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line.split()[1].split("/")[0]) for line in lines] == printed


@pytest.mark.parametrize("rows", [[], [{"a": 1.0}, {"a": float("nan")}], [{"a": float("inf")}]])
def test_a_table_without_rows_or_with_numbers_that_are_not_finite_is_refused(tmp_path, rows):
    (tmp_path / "x.csv").write_text("before")
    with pytest.raises(ValueError, match=r"x\.csv: expected rows of finite numbers"):
        record.write_csv(tmp_path / "x.csv", rows)
    assert (tmp_path / "x.csv").read_text() == "before"


@pytest.mark.parametrize("text", ["NaN", "Infinity", '{"a": [-Infinity]}'])
def test_what_only_python_calls_json_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json: not valid JSON: -?(NaN|Infinity) is not a JSON number"):
        record.read_json(tmp_path / "x.json")


def strike(monkeypatch, at: int) -> None:
    """Have the `at`-th rename fail, as Ctrl-C would end it."""
    renames, rename = iter(range(100)), Path.replace

    def struck(self, target):
        if next(renames) == at:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", struck)


@pytest.mark.parametrize("at", [0, 1])
def test_a_folder_that_was_there_survives_an_interruption_between_the_renames(tmp_path, monkeypatch, at):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/kept").write_text("before")
    with monkeypatch.context() as patch:
        strike(patch, at)
        with pytest.raises(KeyboardInterrupt), record.replacing(tmp_path / "x") as folder:
            folder.mkdir()
            (folder / "new").write_text("after")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["x", "x/kept"]
    with record.replacing(tmp_path / "x") as folder:
        folder.mkdir()
        (folder / "new").write_text("after")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["x", "x/new"]


def test_json_nested_beyond_what_can_be_read_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"x\.json: not valid JSON"):
        record.read_json(tmp_path / "x.json")


def test_progress_of_a_resumed_run_counts_its_own_steps(monkeypatch, capsys):
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(record.time, "monotonic", lambda: next(clock))
    record.Progress("x", steps=10, done=4).step(6, tokens=50)
    assert capsys.readouterr().out == "x 6/10    5 tokens/s  0:20 left\n"  # 2 steps in 10 s, 4 to go
