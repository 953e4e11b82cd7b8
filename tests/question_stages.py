"""A folder as the question answering stages find it, around a tiny model, and a way to run one of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from architecture import ROOT
from peft import PeftModel
from ruamel.yaml import YAML
from tiny import CPU, perturb, random_texts, write_policy_folder
from toy import toy_question_params

from rlhf import heads, models
from rlhf.config import load
from rlhf.record import write_json, write_jsonl

SIZES = {"sft": 8, "val": 4, "test": 5, "rm": 6, "rm_test": 3, "ppo": 8}
ANSWERED = ("sft", "val", "test")


def model_with(*names: str) -> PeftModel:
    """The tiny base under fresh adapters of the shape that params.yaml gives."""
    return models.load_model(Path("policy"), load().model, CPU, list(names), load().seed)


def part_rows(part: str, size: int) -> list[dict]:
    """Random questions of several lengths, with random answers where the part has them."""
    prompts = random_texts([2 + i % 4 for i in range(size)], seed=len(part))
    answers = random_texts([1 + i % 5 if part in ANSWERED else 0 for i in range(size)], seed=9)
    return [
        {"id": f"{part}-{i:05d}", "question": f"{part} question {i}?"}
        | ({"answer": f"{part} answer {i}."} if part in ANSWERED else {})
        | {"token_ids": prompt + answer, "prompt_tokens": len(prompt)}
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def write_artifacts() -> None:
    """Perturbed SFT and reward adapters, and a linear reward head whose scores are not centred."""
    model = model_with("sft", "reward")
    for name in ("sft", "reward"):
        perturb(model, name)
        models.save_adapter(model, name, Path("artifacts", name), "tiny")
    heads.save_head(heads.reward_head("linear", 32, 3, CPU), Path("artifacts/reward/head.safetensors"))
    write_json("artifacts/reward/reward.json", {"adapter": True, "centre": None})


@contextmanager
def write_folder(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `folder` the current one, with parameters, a tiny base, a split and `write_artifacts`."""
    threads = torch.get_num_threads()
    patch.chdir(folder)
    yaml = YAML(typ="safe", pure=True)
    params = toy_question_params(yaml.load((ROOT / "qa/params.yaml").read_text(encoding="utf-8")))
    params["split"]["sizes"] = SIZES
    params["runtime"]["snapshot_seconds"] = 1e9
    yaml.dump(params, Path("params.yaml"))
    write_policy_folder(Path("policy"))
    write_json("data/manifests/policy.json", {"source": {"name": "tiny", "revision": None}})
    write_jsonl("data/preferences.jsonl", [])
    for part, size in SIZES.items():
        write_jsonl(f"data/split/{part}.jsonl", part_rows(part, size))
    write_artifacts()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def run_stage(command: str) -> None:
    """Run a stage, given as on the command line, in the current folder."""
    stage = import_module(f"stages.{command.split()[0]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "locate", lambda manifest: Path("policy"), raising=False)
        patch.setattr(sys, "argv", command.split())
        stage.main()


def written() -> dict[str, bytes]:
    """Every file under artifacts/ and reports/."""
    files = [path for name in ("artifacts", "reports") for path in Path(name).rglob("*") if path.is_file()]
    return {path.as_posix(): path.read_bytes() for path in files}
