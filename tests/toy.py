"""A copy of this project at toy size: tiny random models, made-up texts, the real stages and run files."""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

from architecture import ROOT
from ruamel.yaml import YAML
from tiny import write_policy_folder
from transformers import BertConfig, BertModel

from rlhf.record import sha256_file, write_csv, write_jsonl

NOUNS = ("film", "story", "cast", "plot", "ending", "score", "script", "hero")
PLACES = ("for once", "at last", "in the end", "as ever", "by far")
WORDS = {"0": ("dull", "stale", "thin", "lifeless"), "1": ("warm", "funny", "tender", "honest")}
COPIED = ("rlhf/", "stages/", "tools/", ".dvc/", "qa/dvc.yaml", "qa/params.yaml")
SENTENCES = tuple(
    (f"the {noun} is {word} and {other} {place} .", label)
    for label, words in WORDS.items()
    for noun, word, other, place in product(NOUNS, words, words, PLACES)
    if word != other
)


def write_sources(folder: Path) -> None:
    """Write policy/, judge/ and reviews.csv: snippets for every part, and longer texts for the judge."""
    texts = tuple(text for text, _ in SENTENCES)
    write_policy_folder(folder / "policy", sentences=texts)
    judge = BertConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(judge).save_pretrained(folder / "judge")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "policy" / name, folder / "judge" / name)
    with (folder / "reviews.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")  # as git keeps it
        writer.writerow(["text", "label", "source"])
        for index, (text, label) in enumerate(SENTENCES):
            row = (text, "snippets") if index % 4 else (f"Seen it.<br />{text}", "long")
            writer.writerow([row[0], label, row[1]])


def write_questions(folder: Path) -> None:
    """Write answers.csv, questions.jsonl and an empty preferences.jsonl, made of the same sentences."""
    texts = [text for text, _ in SENTENCES]
    answered = zip(texts[::10], texts[5::10], strict=True)
    write_csv(folder / "answers.csv", [{"Q": question, "A": answer} for question, answer in answered])
    write_jsonl(folder / "questions.jsonl", [{"question": question} for question in texts[1::10]])
    write_jsonl(folder / "preferences.jsonl", [])


def source(path: str, sha256: dict[str, str]) -> dict:
    """A local source, in the shape of params.yaml."""
    return {
        "kind": "file",
        "name": path,
        "revision": None,
        "path": None,
        "sha256": sha256,
        "license": "none",
    }


def toy_params(params: dict, folder: Path) -> dict:
    """Shrink the real params.yaml, so that a new key needs no second place to be named in."""
    reviews = sha256_file(folder / "reviews.csv")
    params["fetch"] = {
        "policy": source("toy/policy", {}),
        "judge": source("toy/judge", {}),
        "reviews": source("toy/reviews.csv", {"reviews.csv": reviews}),
    }
    params["runtime"] |= {"threads": 1, "snapshot_seconds": 0}
    params["split"]["rows"]["where"] = {"source": "snippets"}
    params["split"]["judge"] |= {"where": {"source": "long"}, "size": 40, "leftover": True}
    params["split"]["sizes"] = {"sft": 48, "rm": 96, "ppo": 32, "val": 12, "rm_test": 24, "test": 12}
    params["split"] |= {"min_tokens": 8, "max_tokens": 60, "sha256": None}
    params["generation"] |= {"prefix_tokens": 3, "response_tokens": 6}
    params["sft"] |= {"steps": 4, "batch_size": 4, "lr": 0.01}
    params["reward"] |= {"steps": 6, "batch_size": 4, "lr": 0.01, "validate_every": 3}
    params["ppo"] |= {"seeds": [1, 2], "steps": 3, "batch_size": 4, "minibatches": 2, "lr": 0.01}
    params["ppo"] |= {"validate_every": 2, "validation_prefixes": 4}
    params["ppo"] |= {"kl_controller": "stepwise", "kl_target": 0.05}
    params["sample"] |= {"n": 2, "batch_size": 8}
    params["judge"] |= {"epochs": 1, "batch_size": 8}
    params["report"] |= {"resamples": 200, "examples": 3}
    return params


def toy_question_params(params: dict) -> dict:
    """The same for qa/params.yaml, whose stages run one folder below toy/.

    A response of 6 tokens has fewer than 20 characters or more, so that the annotator prefers some to others.
    """
    params["fetch"] = {"policy": source("../toy/policy", {})}
    params["runtime"] |= {"threads": 1, "snapshot_seconds": 0}
    params["split"] |= {"template": "{question} and so", "max_tokens": 60, "sha256": None}
    params["split"]["questions"] |= {"topic_column": None}
    params["split"]["answers"] |= {"file": "data/answers.csv", "topic_column": None}
    params["split"]["answers"] |= {"question_column": "Q", "answer_column": "A"}
    params["split"]["sizes"] = {"sft": 32, "val": 6, "test": 8, "rm": 16, "rm_test": 8, "ppo": 16}
    params["preferences"] |= {"samples": 3, "noise": 0.1, "batch_size": 16}
    params["generation"] |= {"response_tokens": 6}
    params["sft"] |= {"steps": 4, "batch_size": 4, "lr": 0.01, "lora_dropout": 0.1}
    params["reward"] |= {"head": "mlp", "adapter": False}
    params["reward"] |= {"steps": 6, "batch_size": 4, "lr": 0.01, "validate_every": 3}
    params["ppo"] |= {"seeds": [1], "steps": 2, "batch_size": 4, "minibatches": 2, "lr": 0.01}
    params["ppo"] |= {"validate_every": 1, "validation_prefixes": 4, "advantage": "returns"}
    params["sample"] |= {"n": 2, "batch_size": 8}
    params["report"] |= {"resamples": 200, "examples": 3}
    return params


def write_project(folder: Path, sources: Path) -> Path:
    """Copy what git would commit here, put the toy texts and parameters in, and return the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(COPIED) or "/" not in name:
            if name == "dvc.lock" or not (ROOT / name).exists():
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(sources, folder / "toy")
    write_questions(folder / "qa/data")
    rewrite(folder / "params.yaml", lambda params: toy_params(params, folder / "toy"))
    rewrite(folder / "qa/params.yaml", toy_question_params)
    return folder


def rewrite(path: Path, change: Callable[[dict], dict]) -> None:
    """Change a parameter file in place, in the form that DVC writes."""
    yaml = YAML()
    params = yaml.load(path.read_text(encoding="utf-8"))
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(change(params), file)


def environment(**changes: str) -> dict[str, str]:
    """A newcomer's shell after `source .venv/bin/activate`, without personal git settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DVC_", "GIT_", "MAKE", "PYTHON"))}
    identity = {f"GIT_{who}_{what}": "toy" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean | identity | {"PATH": path, "GIT_CONFIG_GLOBAL": os.devnull} | changes


def run(folder: Path, *command: str, expect: int = 0, **changes: str) -> str:
    """Run a command in `folder`; return what it printed, stdout and stderr together."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(**changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == expect, f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def set_params(folder: Path, changes: dict[str, object]) -> None:
    """Change parameters of `folder`/params.yaml by their dotted keys."""
    yaml = YAML(typ="safe", pure=True)
    params = yaml.load((folder / "params.yaml").read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = params
        for name in sections:
            section = section[name]
        section[last] = value
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(params, file)
