"""Whatever comes in, a valid result or one of our own errors in one line.

The examples are the same in every run: derandomised, no database, no deadline.
"""

import copy
import csv
import io
import json
from pathlib import Path

import pytest
import tiny
import torch
from architecture import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from safetensors.torch import save

from rlhf import checkpoint, data, heads, models, questions, record, sections, sources
from rlhf.config import Params, QuestionParams, load
from rlhf.errors import UserError

CPU = torch.device("cpu")
DOCUMENTS = [
    YAML(typ="safe", pure=True).load((ROOT / name).read_text(encoding="utf-8"))
    for name in ("params.yaml", "qa/params.yaml")
]
SHARED = {
    **{"derandomize": True, "database": None, "deadline": None},
    "suppress_health_check": (HealthCheck.function_scoped_fixture, HealthCheck.too_slow),
}
ANY_TEXT = st.text(st.characters(), max_size=12)  # half surrogate pairs and control characters included
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FLOATS | TEXT
JSON = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=6
)
ROWS = st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=5)


def examples(count: int):
    return settings(max_examples=count, **SHARED)


def either(program):
    """The program's result, or None where it refuses with one printable line; anything else is raised."""
    try:
        return program()
    except UserError as error:
        assert str(error) and str(error).isprintable()
    except OSError as error:
        assert error.errno is not None  # a name too long, say: `errors.run` says it in one line
    return None


def damaged(content: bytes):
    """Bytes of `content` with a piece of it replaced, or no piece of it at all."""
    places = st.tuples(st.integers(0, len(content)), st.integers(0, 9), st.binary(max_size=9))
    return st.binary(max_size=60) | places.map(lambda p: content[: p[0]] + p[2] + content[p[0] + p[1] :])


# Parameters


def leaves(section: dict, prefix: tuple = ()) -> list[tuple]:
    """The path of every key, sections included."""
    found = []
    for name, value in section.items():
        found += [(*prefix, name), *(leaves(value, (*prefix, name)) if isinstance(value, dict) else ())]
    return found


VALUES = JSON | st.sampled_from([[], {}, 0, 1, 2, -1, 1e-5, 2**63, "1", "cpu", "hub", "0" * 64])


@st.composite
def documents(draw) -> dict:
    """The published parameters after up to three edits: a key gone, another value, a key more."""
    document = copy.deepcopy(draw(st.sampled_from(DOCUMENTS)))
    for _ in range(draw(st.integers(1, 3))):
        *sections, name = draw(st.sampled_from(leaves(document)))
        section = document
        for part in sections:
            section = section[part]
        edit = draw(st.sampled_from(["remove", "replace", "replace", "add"]))
        if edit == "remove":
            del section[name]
        else:
            section[name if edit == "replace" else draw(TEXT)] = draw(VALUES)
        if not leaves(document):
            break
    return document


def check_params(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = either(lambda: load(path))
    assert found is None or isinstance(found, Params | QuestionParams)


@examples(100)
@given(documents())
def test_edited_parameters_are_valid_or_refused(tmp_path, document):
    check_params(tmp_path / "params.yaml", json.dumps(document).encode())


@examples(150)
@given(
    st.binary(max_size=40)
    | st.text(st.sampled_from("&*!|>'\"%@`{}[],:?-#=<~ \n\tax0.e"), max_size=30).map(str.encode)
)
def test_bytes_are_no_parameters(tmp_path, content):
    check_params(tmp_path / "params.yaml", content)


@examples(40)
@given(damaged((ROOT / "params.yaml").read_bytes()) | damaged((ROOT / "qa/params.yaml").read_bytes()))
def test_damaged_parameters_are_valid_or_refused(tmp_path, content):
    check_params(tmp_path / "params.yaml", content)


# JSON and CSV


@examples(60)
@given(ROWS)
def test_json_lines_come_back_as_they_went(tmp_path, rows):
    record.write_jsonl(tmp_path / "x", rows)
    assert record.read_jsonl(tmp_path / "x") == rows
    record.write_json(tmp_path / "y", rows)
    assert record.read_json(tmp_path / "y") == rows
    assert record.sha256_rows(record.read_jsonl(tmp_path / "x")) == record.sha256_rows(rows)


@examples(150)
@given(damaged(b'{"a": [1.5e3, null, "\\u00e9"], "b": {"c": -0}}\n{"a": true}\n'))
def test_any_bytes_are_json_or_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    either(lambda: record.read_json(tmp_path / "x"))
    rows = either(lambda: record.read_jsonl(tmp_path / "x"))
    assert rows is None or all(isinstance(row, dict) for row in rows)


@examples(100)
@given(st.lists(st.fixed_dictionaries({"a": TEXT, "b": SCALARS}), min_size=1, max_size=4))
def test_cells_of_a_written_table_are_read_as_text(tmp_path, rows):
    record.write_csv(tmp_path / "x.csv", rows)
    with io.StringIO((tmp_path / "x.csv").read_bytes().decode(), newline="") as file:
        found = [(row["a"], row["b"]) for row in csv.DictReader(file)]
    assert found == [(row["a"], "" if row["b"] is None else str(row["b"])) for row in rows]


# Tables that people bring


def rows_of(path: Path, content: bytes) -> list[data.Row] | None:
    path.write_bytes(content)
    rows = either(lambda: data.read_table(path, "text", "label", {"1": 1, "0": 0}, {}, "utf-8"))
    assert rows is None or all(row.text.strip() and row.label in (0, 1) for row in rows)
    return rows


@pytest.mark.parametrize(("name", "mark"), [("x.csv", ","), ("x.tsv", "\t")])
@examples(100)
@given(st.data())
def test_any_bytes_are_a_delimited_table_or_refused(tmp_path, name, mark, data):
    rows_of(tmp_path / name, data.draw(damaged(f'text{mark}label\n"a, ""b"{mark}1\né{mark}0\n'.encode())))


@examples(100)
@given(damaged('{"text": "é", "label": 1}\n{"text": "b", "label": "0"}\n'.encode()))
def test_any_bytes_are_json_lines_or_refused(tmp_path, content):
    rows_of(tmp_path / "x.jsonl", content)


@examples(100)
@given(
    st.lists(
        st.fixed_dictionaries({"text": ANY_TEXT | JSON, "label": st.sampled_from([0, 1]) | JSON}), max_size=3
    )
)
def test_any_values_are_json_lines_or_refused(tmp_path, rows):
    rows_of(tmp_path / "x.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@examples(60)
@given(st.data())
def test_any_bytes_are_parquet_or_refused(tmp_path, data):
    rows_of(tmp_path / "x.parquet", data.draw(damaged(parquet_bytes())))


def parquet_bytes() -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [1, 0]}), buffer)
    return buffer.getvalue()


def pairs_of(path: Path, content: bytes) -> None:
    """Pairs and questions of the same file are sound, or refused."""
    path.write_bytes(content)
    columns = ("prompt", "chosen", "rejected", "margin")
    pairs = either(lambda: questions.read_preferences(sections.PairTable(str(path), "utf-8", *columns)))
    for pair in pairs or ():
        assert pair.keys() == set(columns) and pair["prompt"] and pair["chosen"] != pair["rejected"]
        assert pair["margin"] is None or (pair["margin"] and abs(pair["margin"]) < float("inf"))
    table = sections.AnswerTable(str(path), "utf-8", "prompt", "margin", "chosen")
    rows = either(lambda: questions.read_questions(table))
    for row in rows or ():
        assert row["question"] and row["answer"] and row.get("topic", "any")


@pytest.mark.parametrize(("name", "mark"), [("x.csv", ","), ("x.tsv", "\t")])
@examples(80)
@given(st.data())
def test_any_bytes_are_delimited_pairs_or_refused(tmp_path, name, mark, data):
    rows = 'prompt,chosen,rejected,margin\n"é\n?",b,c,1\nd,e,f,\n'.replace(",", mark)
    pairs_of(tmp_path / name, data.draw(damaged(rows.encode())))


@examples(80)
@given(
    st.lists(
        st.fixed_dictionaries(
            dict.fromkeys(("prompt", "chosen", "rejected"), ANY_TEXT | JSON) | {"margin": SCALARS | JSON}
        ),
        max_size=3,
    )
)
def test_any_values_are_pairs_or_refused(tmp_path, rows):
    pairs_of(tmp_path / "x.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9).filter(str.strip)
LABELLED = st.lists(st.tuples(WORDS, st.integers(0, 1)), min_size=1, max_size=6)


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.jsonl"])
@examples(60)
@given(LABELLED)
def test_labelled_texts_come_back_from_every_format(tmp_path, name, rows):
    buffer = io.StringIO(newline="")
    if name.endswith("jsonl"):
        buffer.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
    else:
        writer = csv.writer(buffer, delimiter="," if name == "x.csv" else "\t", quoting=csv.QUOTE_ALL)
        writer.writerows([("text", "label"), *rows])
    found = rows_of(tmp_path / name, buffer.getvalue().encode())
    assert found == [data.Row(text.strip(), label) for text, label in rows]


@examples(80)
@given(LABELLED, st.randoms(use_true_random=False))
def test_the_split_does_not_depend_on_the_order_of_rows(rows, random):
    def ordered(rows: list[data.Row]) -> tuple:
        kept, dropped = data.distinct(rows)
        return data.in_hash_order(kept, 42), dropped

    rows = [data.Row(*row) for row in rows] + [data.Row(rows[0][0].upper(), 1)]
    assert ordered(random.sample(rows, len(rows))) == ordered(rows)


# Manifests, snapshots, tensors


PIN = {"kind": "file", "name": "rows.csv", "revision": None, "path": None, "sha256": {}, "license": "MIT"}
# No wheel and no hub: those would ask pip and the network.
PINS = st.fixed_dictionaries(
    {
        key: st.just(value) | (JSON | ANY_TEXT).filter(lambda v: v not in ("wheel", "hub"))
        for key, value in PIN.items()
    }
)


@examples(120)
@given(JSON | st.fixed_dictionaries({"source": JSON | PINS, "files": JSON}))
def test_any_manifest_leads_to_a_folder_or_is_refused(tmp_path, monkeypatch, manifest):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\n")
    found = either(lambda: sources.locate(manifest))
    assert found is None or found.is_dir()


@examples(100)
@given(st.data())
def test_a_snapshot_that_is_not_whole_is_never_used(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("snapshots")
    store = checkpoint.Snapshots(folder, "key", 0)
    for step in (1, 2):
        store.save(checkpoint.Snapshot(step, {"x": torch.full((2,), float(step))}, {"log": [step]}))
    newest = max(store.folder.iterdir())
    content = newest.read_bytes()
    changed = data.draw(damaged(content) | st.integers(0, len(content)).map(lambda end: content[:end]))
    newest.write_bytes(changed)
    step = 2 if changed == content else 1
    found = store.latest()
    assert (found.step, found.record, found.tensors["x"].tolist()) == (step, {"log": [step]}, [step, step])


@examples(100)
@given(damaged(save({"weight": torch.ones(1, 4), "bias": torch.zeros(1)})))
def test_any_bytes_are_a_head_or_refused(tmp_path, content):
    (tmp_path / "head").write_bytes(content)
    head = either(lambda: heads.load_head(tmp_path / "head", CPU))
    assert head is None or all(p.isfinite().all() and not p.requires_grad for p in head.parameters())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    model, folder = tiny.tiny_model("llama"), tmp_path_factory.mktemp("adapter")
    models.save_adapter(model, "sft", folder, "base")
    return model, folder, {path.name: path.read_bytes() for path in folder.glob("adapter_*")}


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@examples(40)
@given(st.data())
def test_any_bytes_are_an_adapter_or_refused(adapted, name, data):
    model, folder, contents = adapted
    for file, content in contents.items():
        (folder / file).write_bytes(data.draw(damaged(content)) if file == name else content)
    either(lambda: models.load_adapter(model, "sft", folder))
    assert all(p.isfinite().all() for _, p in model.named_parameters())
