"""The whole toy pipeline from a hub: a tiny Qwen3, a ready DistilBERT, a data set with a held-out file."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import torch
from hub_client import TOKEN, clean_environment, pin
from hub_server import Hub, running, sha256
from safetensors.torch import load_file
from tiny import write_policy_folder
from toy import SENTENCES, set_params, write_project
from transformers import DistilBertConfig, DistilBertForSequenceClassification

COMMITS = {"policy": "906bfd4b4dc7f14ee4320094d8b41684abff8539", "reviews": "8" * 40, "judge": "7" * 40}
STAGES = (
    *("split", "sft", "reward", "judge_model", "ppo --seed 1"),
    *(f"sample --policy {policy}" for policy in ("base", "sft", "sft-again", "ppo --seed 1")),
    *("judge", "report"),
)
# What `python -m stages.X` does, for one after another, since their libraries take long to load.
PROGRAM = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    name, *sys.argv[1:] = line.split()
    runpy.run_module(f"stages.{name}", run_name="__main__", alter_sys=True)
"""
TRAIN = [row for index, row in enumerate(SENTENCES) if index % 4]
VALIDATION = SENTENCES[::4]


def write_judge(path: Path, tokenizer: Path) -> Path:
    """Write a random DistilBERT of two classes, of which the second is the positive one."""
    names = {0: "NEGATIVE", 1: "POSITIVE"}
    config = DistilBertConfig(
        **{"vocab_size": 96, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "id2label": names},
        label2id={name: index for index, name in names.items()},
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        DistilBertForSequenceClassification(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    return path


def parquet(rows: list[tuple[str, str]]) -> bytes:
    """SST-2's own columns: a number, a sentence that ends in a space, a label 0 or 1."""
    table = pd.DataFrame(
        {
            "idx": range(len(rows)),
            "sentence": [f"{text} " for text, _ in rows],
            "label": [int(label) for _, label in rows],
        }
    )
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return content.getvalue()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def fill(hub: Hub, folder: Path) -> dict[str, bytes]:
    """Put the three repositories on the hub, with what no pipeline may bring; return the judge's files."""
    policy = write_policy_folder(folder / "policy", "qwen3", sentences=tuple(text for text, _ in SENTENCES))
    judge = contents(write_judge(folder / "judge", policy))
    pickle = {"pytorch_model.bin": b"pickled", "modeling.py": b"raise SystemExit"}
    data = {"data/train.parquet": parquet(TRAIN), "data/validation.parquet": parquet(list(VALIDATION))}
    hub.repositories["models", "owner/policy"] = {COMMITS["policy"]: contents(policy) | pickle}
    hub.repositories["models", "owner/judge"] = {COMMITS["judge"]: judge | pickle}
    hub.repositories["datasets", "owner/reviews"] = {COMMITS["reviews"]: data}
    return judge


def params(judge: dict[str, bytes]) -> dict[str, object]:
    """What differs from the toy project's own parameters."""
    known = {"model.safetensors": sha256(judge["model.safetensors"])}
    return {
        "fetch.policy": pin("policy", revision=COMMITS["policy"]),
        "fetch.reviews": pin("reviews", revision=COMMITS["reviews"], path="data"),
        "fetch.judge": pin("judge", revision=COMMITS["judge"], sha256=known),
        "split.rows.file": "train.parquet",
        "split.rows.held_out_file": "validation.parquet",
        "split.rows.text_column": "sentence",
        "split.rows.label_column": "label",
        "split.rows.where": {},
        "split.judge": None,
        "judge.epochs": 0,
        "ppo.seeds": [1],
    }


def stages(folder: Path, address: str, names: tuple[str, ...]) -> str:
    """Run stages in `folder`; return what they printed."""
    variables = clean_environment(folder.parent, address) | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=variables,
        input="\n".join(names),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr and address not in done.stdout + done.stderr
    return done.stdout


def test_the_pipeline_runs_from_a_hub_that_is_needed_only_to_fetch(tmp_path, sources):
    folder = tmp_path / "project"
    folder.mkdir()
    write_project(folder, sources)
    with running() as hub:
        judge = fill(hub, tmp_path / "made")
        set_params(folder, params(judge))
        assert "fetch: reviews: 2 files" in stages(folder, hub.address, ("fetch",))
        asked = {path.rpartition("/")[2] for _, path, _, _ in hub.asked}
    assert not asked & {"pytorch_model.bin", "modeling.py"}
    stages(folder, "http://127.0.0.1:9", STAGES)

    manifests = {name: json.loads((folder / f"data/manifests/{name}.json").read_text()) for name in COMMITS}
    assert {name: manifest["source"]["revision"] for name, manifest in manifests.items()} == COMMITS
    held_out = {text for text, _ in VALIDATION}
    for part in ("sft", "rm", "ppo", "val", "rm_test", "test"):
        rows = [json.loads(line) for line in (folder / f"data/split/{part}.jsonl").read_text().splitlines()]
        assert {row["text"] in held_out for row in rows} == {part in ("val", "rm_test", "test")}
        assert all(dict(SENTENCES)[row["text"]] == str(row["label"]) for row in rows)

    (tmp_path / "served.safetensors").write_bytes(judge["model.safetensors"])
    served, used = (
        load_file(tmp_path / "served.safetensors"),
        load_file(folder / "artifacts/judge_model/model.safetensors"),
    )
    assert served.keys() == used.keys() and all(torch.equal(served[name], used[name]) for name in served)
    judged = pd.read_csv(folder / "artifacts/judged.csv")
    assert (
        set(judged["policy"]) == {"base", "sft", "sft-again", "ppo-1"}
        and judged["judge_full"].between(0, 1).all()
    )
    assert "owner/policy" in (folder / "reports/report.md").read_text(encoding="utf-8")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
