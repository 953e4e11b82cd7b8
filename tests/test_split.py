"""The split stage on people's own files: which file is read, what is held out, a judge that is ready."""

import json
from types import SimpleNamespace

import pytest
from architecture import ROOT
from malformed_tables import encoded
from ruamel.yaml import YAML
from tiny import tiny_tokenizer

from rlhf.errors import UserError
from rlhf.record import read_json, read_jsonl, sha256_file, sha256_rows, write_json
from rlhf.sources import fetch
from stages import split

yaml = YAML(typ="safe", pure=True)
PARTS = ("sft", "rm", "ppo", "val", "rm_test", "test")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(("abcdefghijklmnopqrstuvwxyz 0123456789",))


def source(path, name=None) -> SimpleNamespace:
    pinned = {name: sha256_file(path / name)} if name else {}
    return SimpleNamespace(
        kind="file", name=str(path), revision=None, path=name, sha256=pinned, license="none"
    )


@pytest.fixture
def project(tmp_path, tokenizer, monkeypatch):
    """Write files of rows and parameters, run the stage there, return split.json and the parts."""
    tokenizer.save_pretrained(tmp_path / "policy")
    monkeypatch.chdir(tmp_path)

    def run(files: dict[str, bytes], only: str | None = None, sizes: int = 2, **changes):
        for name, content in files.items():
            (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "own" / name).write_bytes(content)
        params = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        params["split"]["rows"] |= {"where": {}} | changes.pop("rows", {})
        params["split"] |= {"min_tokens": 7, "max_tokens": 40, "sha256": None, "judge": None}
        params["split"] |= {"sizes": dict.fromkeys(PARTS, sizes)} | changes
        params["judge"]["epochs"] = 0 if params["split"]["judge"] is None else 1
        params["ppo"]["validation_prefixes"] = 2
        with (tmp_path / "params.yaml").open("w", encoding="utf-8") as file:
            yaml.dump(params, file)
        write_json("data/manifests/policy.json", fetch(source(tmp_path / "policy")))
        write_json("data/manifests/reviews.json", fetch(source(tmp_path / "own", only)))
        split.main()
        parts = {part: read_jsonl(f"data/split/{part}.jsonl") for part in (*PARTS, "judge")}
        return read_json("data/split.json"), parts

    return run


def rows(first: int, last: int, **more) -> list[dict]:
    return [{"text": f"Review number {i}", "label": str(i % 2), **more} for i in range(first, last)]


def numbers(*parts: list[dict]) -> set[int]:
    return {int(row["text"].split()[-1]) for part in parts for row in part}


def complaint(project, *arguments, **changes) -> str:
    with pytest.raises(UserError) as raised:
        project(*arguments, **changes)
    return str(raised.value)


# Which file


def test_an_only_file_needs_no_name_and_several_do(project):
    one, other = encoded("csv", rows(0, 20)), encoded("jsonl", rows(100, 120))
    alone, _ = project({"a.csv": one})
    named, parts = project({"a.csv": one, "deep/b [2].jsonl": other}, rows={"file": "a.csv"})
    assert named == alone
    assert numbers(*parts.values()) <= set(range(20))
    _, parts = project({}, rows={"file": "deep/b [2].jsonl"})
    assert numbers(*parts.values()) <= set(range(100, 120))
    expected = "expected one of a.csv, deep/b [2].jsonl"
    assert complaint(project, {}) == f"split.rows.file is null: {expected}"
    assert complaint(project, {}, rows={"file": "b.csv"}) == f"split.rows.file is 'b.csv': {expected}"
    held_out = {"file": "a.csv", "held_out_file": "../policy/tokenizer.json"}
    assert complaint(project, {}, rows=held_out) == (
        f"split.rows.held_out_file is '../policy/tokenizer.json': {expected}"
    )
    assert complaint(project, {}, "a.csv", rows={"held_out_file": "a.csv"}) == (
        "split.rows.held_out_file is 'a.csv': expected another file than split.rows.file"
    )
    assert complaint(project, {}, rows={"held_out_file": "a.csv"}) == f"split.rows.file is null: {expected}"


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_formats_names_and_labels_change_nothing_else(project, suffix):
    expected, _ = project({"a.csv": encoded("csv", rows(0, 20))}, "a.csv")
    spelled = {"0": "bad", "1": "good"}
    own = [{"stars": spelled[row["label"]], "review": row["text"]} for row in reversed(rows(0, 20))]
    names = {"text_column": "review", "label_column": "stars", "labels": {"bad": 0, "good": 1}}
    file = f"own.{suffix}"
    assert project({file: encoded(suffix, own)}, file, rows=names)[0] == expected


# Held out


def test_held_out_rows_come_from_their_own_file_and_from_nowhere_else(project):
    train = [*rows(0, 30), {"text": " REVIEW  number 101", "label": "0"}, {"text": "r 102", "label": "1"}]
    train += [{"text": "review number 103", "label": "1"}, {"text": "review number 103 ", "label": "0"}]
    held_out = [*rows(100, 112), {"text": "review number 104", "label": "1"}, {"text": "no", "label": "1"}]
    train = [row | {"kind": "short"} for row in train] + rows(200, 204, kind="long")
    held_out = [row | {"kind": "short"} for row in held_out]
    files = {"train.jsonl": encoded("jsonl", train), "held.parquet": encoded("parquet", held_out)}
    names = {"file": "train.jsonl", "held_out_file": "held.parquet", "where": {"kind": "short"}}
    judge = {"where": {"kind": "long"}, "characters": 40, "size": 4, "leftover": True}
    summary, parts = project(files, rows=names, judge=judge)
    trained_on = numbers(parts["sft"], parts["rm"], parts["ppo"])
    assert trained_on <= set(range(30))
    assert numbers(parts["val"], parts["rm_test"], parts["test"]) <= set(range(100, 112)) - {104}
    assert numbers(parts["judge"]) == set(range(30)) - trained_on | {102} | set(range(200, 204))
    assert {part: len(chosen) for part, chosen in parts.items()} == summary["sizes"]
    # 101 and both of 103 are held out; 104 contradicts itself there; "r 102" and "no" are too short.
    assert summary["rows_read"] == 34 + 14
    assert summary["rows_dropped"] == {
        "duplicate": 0, "contradicting_labels": 2, "too_short": 2, "too_long": 0, "also_held_out": 3,
    }  # fmt: skip
    assert summary["rows_left_over"] == 48 - 7 - 12


def test_a_judge_never_learns_from_a_held_out_text(project):
    train = [*rows(0, 12, kind="short"), {"text": "First. review number 50", "label": "1", "kind": "long"}]
    train += [{"text": f"So long. Number {i}", "label": str(i % 2), "kind": "long"} for i in (60, 61, 62)]
    held_out = [*rows(50, 60, kind="short"), {"text": "so long. number 60", "label": "0", "kind": "short"}]
    files = {"a.csv": encoded("csv", train), "b.csv": encoded("csv", held_out)}
    names = {"file": "a.csv", "held_out_file": "b.csv", "where": {"kind": "short"}}
    judge = {"where": {"kind": "long"}, "characters": 16, "size": 2, "leftover": False}
    _, parts = project(files, rows=names, judge=judge, sizes=3)
    assert {row["text"] for row in parts["judge"]} == {"number 61", "number 62"}


def test_too_few_rows_say_which_file_s_parts_lack_them(project):
    files = {"a.csv": encoded("csv", rows(0, 5)), "b.csv": encoded("csv", rows(10, 15))}
    names = {"file": "a.csv", "held_out_file": "b.csv"}
    assert complaint(project, files, rows=names) == (
        "split.sizes needs 6 rows for sft, rm, ppo and only 5 are eligible"
    )
    assert complaint(project, {"a.csv": encoded("csv", rows(0, 6))}, rows=names) == (
        "split.sizes needs 6 rows for val, rm_test, test and only 5 are eligible"
    )
    assert complaint(project, {}, "b.csv") == (
        "split.sizes needs 12 rows for sft, rm, ppo, val, rm_test, test and only 5 are eligible"
    )


# Rows that cannot be used


def test_rows_all_outside_the_limits(project):
    content = encoded("csv", [{"text": "a", "label": "1"}, {"text": "b" * 60, "label": "0"}])
    assert complaint(project, {"a.csv": content}) == (
        "a.csv: none of 2 rows is eligible (split.min_tokens 7, split.max_tokens 40): too_short 1, too_long 1"
    )
    files = {"a.csv": encoded("csv", rows(0, 9)), "b.csv": encoded("csv", rows(0, 12))}
    assert complaint(project, files, rows={"file": "a.csv", "held_out_file": "b.csv"}) == (
        "a.csv: none of 9 rows is eligible (split.min_tokens 7, split.max_tokens 40): also_held_out 9"
    )
    assert complaint(
        project, files | {"b.csv": content}, rows={"file": "a.csv", "held_out_file": "b.csv"}
    ) == (
        "b.csv: none of 2 rows is eligible (split.min_tokens 7, split.max_tokens 40): too_short 1, too_long 1"
    )


def test_one_label_alone_among_the_rows_in_use(project):
    """The other label is there, in a text that is too short."""
    ones = [{"text": row["text"], "label": "1"} for row in rows(0, 20)] + [{"text": "a", "label": "0"}]
    message = "each of the 20 rows in use has label 1: expected 0 and 1"
    assert complaint(project, {"a.csv": encoded("csv", ones)}) == f"a.csv: {message}"
    files = {"a.csv": encoded("csv", rows(50, 90)), "b.csv": encoded("csv", ones)}
    assert complaint(project, files, rows={"file": "a.csv", "held_out_file": "b.csv"}) == f"b.csv: {message}"
    short, long = rows(0, 20, kind="short"), [row | {"kind": "long"} for row in ones]
    files = {"a.csv": encoded("csv", short + [row | {"text": f"So {row['text']}"} for row in long])}
    judge = {"where": {"kind": "long"}, "characters": 40, "size": 3, "leftover": False}
    assert complaint(project, files, "a.csv", rows={"where": {"kind": "short"}}, judge=judge) == (
        "split.judge: each of the 3 rows in use has label 1: expected 0 and 1"
    )


def test_a_bad_file_leaves_the_split_as_it_was(project):
    before, _ = project({"a.csv": encoded("csv", rows(0, 20))})
    message = complaint(project, {"a.csv": b"text,label\nfine,1\n" + b"caf\xe9,1\n"})
    assert message == "a.csv, line 3: byte 0xe9 is not utf-8; latin-1 must be asked for"
    assert read_json("data/split.json") == before
    found = {part: sha256_rows(read_jsonl(f"data/split/{part}.jsonl")) for part in PARTS}
    assert found == before["sha256"]


# A ready judge


def test_a_ready_judge_leaves_an_empty_part(project):
    summary, parts = project({"a.csv": encoded("csv", rows(0, 20))})
    assert parts["judge"] == []
    for table in ("sizes", "label_balance", "sha256"):
        assert list(summary[table]) == list(PARTS)
    assert summary["rows_dropped"] == {
        "duplicate": 0, "contradicting_labels": 0, "too_short": 0, "too_long": 0,
    }  # fmt: skip
    assert summary["rows_left_over"] == 8
    json.dumps(summary, allow_nan=False)
