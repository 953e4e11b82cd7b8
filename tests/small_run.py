"""A tiny trained run of either pipeline, as the stages leave it: sources, SFT, one PPO seed of two, metrics
and the lock."""

import shutil
from pathlib import Path

import pytest
from architecture import ROOT
from locks import listed
from ruamel.yaml import YAML
from tiny import CPU, ROTARY_TARGETS, perturb, write_policy_folder
from toy import set_params

from rlhf.models import Lora, add_adapters, load_base, save_adapter
from rlhf.record import write_json
from rlhf.sections import Source
from rlhf.sources import fetch
from tools.verify import path_md5

CHANGES = {
    "model.lora": {"rank": 2, "alpha": 4.0, "targets": list(ROTARY_TARGETS)},
    "model.dtype": "float32",
    "model.quantization": "none",
    "generation.response_tokens": 12,
    "generation.temperature": 0.7,
    "ppo.seeds": [1, 2],
    "runtime": {"device": "cpu", "threads": 1, "snapshot_seconds": 0},
    "sample.batch_size": 3,
}
SOURCE = {"kind": "file", "name": "policy", "revision": None, "path": None, "sha256": {}, "license": "mine"}

METRICS = {
    "report": {
        "positive_rate_base": 0.25,
        "positive_rate_sft": 0.5,
        "positive_rate_ppo": 0.625,
        "judge_probability_ppo_minus_sft": 0.125,
        "judge_probability_ppo_minus_sft_low": -0.0625,
        "judge_probability_ppo_minus_sft_high": 0.375,
        "kl_nats_per_sequence_ppo": 1.75,
    },
    "reward": {"accuracy": 1.0, "n": 10},
    "judge_model": {"accuracy": 0.0, "vader_accuracy": 0.5, "n": 2, "train_rows": 77},
    "ppo/1": {"selected_step": 6},
}

QUESTION_METRICS = {
    "report": {
        "heuristic_score_base": -0.5,
        "heuristic_score_sft": 2.25,
        "heuristic_score_ppo": 4.125,
        "chrf_base": 12.0,
        "chrf_sft": 25.5,
        "chrf_ppo": 21.75,
        "heuristic_score_ppo_minus_sft": 1.875,
        "heuristic_score_ppo_minus_sft_low": 1.0,
        "heuristic_score_ppo_minus_sft_high": 2.5,
        "chrf_ppo_minus_sft": -3.75,
        "chrf_ppo_minus_sft_low": -7.25,
        "chrf_ppo_minus_sft_high": -0.125,
        "kl_nats_per_sequence_ppo": 1.75,
    },
    "reward": {"accuracy": 0.0, "noise_free_accuracy": 1.0, "n": 30, "prompts": 10},
    "preferences": {"pairs": 91, "pairs_rm": 77, "prompts": 20, "human": 0, "samples_per_prompt": 3},
    "ppo/1": {"selected_step": 3},
}
# People's pairs have no margin here, so that nothing is known of noise.
PEOPLE_S_METRICS = {
    "reward": {"accuracy": 0.5, "n": 30, "prompts": 2},
    "preferences": {"pairs": 91, "pairs_rm": 55, "prompts": 20, "human": 1, "samples_per_prompt": 0},
}


def write_run(folder: Path) -> None:
    """Write what the stages leave of a run on movie reviews."""
    write_trained(folder, "params.yaml", METRICS)


def write_question_run(folder: Path) -> None:
    """Write what the stages leave of a run on questions, with the annotator's preferences."""
    write_trained(folder, "qa/params.yaml", QUESTION_METRICS)


def write_metrics(folder: Path, metrics: dict[str, dict]) -> None:
    """Write what stages measured, name -> numbers."""
    for name, content in metrics.items():
        write_json(folder / f"reports/metrics/{name}.json", content)


def write_trained(folder: Path, params: str, metrics: dict[str, dict]) -> None:
    """Write what the stages leave, for a policy of two layers: SFT, and PPO seed 1 but not yet 2."""
    shutil.copy(ROOT / params, folder)
    set_params(folder, CHANGES | {"fetch.policy": SOURCE})
    write_policy_folder(folder / "policy", generation={"repetition_penalty": 5.0})
    lora = Lora(rank=2, alpha=4.0, targets=ROTARY_TARGETS)
    model = add_adapters(load_base(folder / "policy", "float32", "none", CPU), lora, ["sft", "ppo"], seed=1)
    for name, place, scale in (("sft", "sft", 0.1), ("ppo", "ppo/1", 0.2)):
        perturb(model, name, scale)
        save_adapter(model, name, folder / "artifacts" / place, "policy")
    write_metrics(folder, metrics)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_json("data/manifests/policy.json", fetch(Source(**SOURCE)))
    write_lock(folder)


def write_lock(folder: Path, params: dict | None = None, deps: dict[str, str] | None = None) -> None:
    """Write that run's dvc.lock; the report's recorded parameters and inputs can be others than they are."""
    metrics = sorted((folder / "reports/metrics").rglob("*.json"))
    names = ["artifacts/sft", "artifacts/ppo/1", *(path.relative_to(folder).as_posix() for path in metrics)]
    outs = {name: path_md5(folder / name) for name in names}
    now = YAML(typ="safe", pure=True).load((folder / "params.yaml").read_text(encoding="utf-8"))
    recorded = {"seed": now["seed"], "ppo": now["ppo"], "runtime.threads": 1} | (params or {})
    report = {
        "deps": listed({name: outs[name] for name in names[:2]} | (deps or {})),
        "params": {"params.yaml": recorded},
        "outs": listed({name: outs[name] for name in names[2:]}),
    }
    stages = {"train": {"outs": listed({name: outs[name] for name in names[:2]})}, "report": report}
    YAML(typ="safe", pure=True).dump({"schema": "2.0", "stages": stages}, folder / "dvc.lock")
