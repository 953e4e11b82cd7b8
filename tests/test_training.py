"""The stages that train or sample, run here on a tiny model: what they descend, start from and keep."""

import csv
import math
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from architecture import ROOT
from question_stages import model_with, write_artifacts
from ruamel.yaml import YAML
from tiny import CPU, EOS, plain_forward, random_texts, write_policy_folder
from toy import set_params, toy_params

from rlhf import heads, models, record
from rlhf.config import load
from rlhf.errors import UserError
from rlhf.heads import reward_head
from rlhf.objectives import label_loss, token_rewards
from rlhf.ops import whiten
from rlhf.randomness import epoch_order, stream
from rlhf.record import read_json, read_jsonl, write_json, write_jsonl
from rlhf.scoring import reward_logits
from rlhf.update import minibatch_backward

yaml = YAML(typ="safe", pure=True)
SIZES = {"sft": 8, "rm": 12, "ppo": 8, "val": 6, "rm_test": 6, "test": 5}
STILL = 1e-30  # a learning rate that moves nothing: it is rounded away beside every parameter


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder: a tiny base, perturbed SFT and reward adapters, random rows of many lengths."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    for name in ("reviews.csv", "constraints.txt"):
        Path(name).touch()
    params = toy_params(yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8")), tmp_path)
    params["split"]["sizes"] = SIZES
    params["runtime"]["snapshot_seconds"] = 1e9
    yaml.dump(params, Path("params.yaml"))
    write_policy_folder(Path("policy"))
    write_json("data/manifests/policy.json", {"source": {"name": "tiny", "revision": None}})
    for part, size in SIZES.items():
        texts = random_texts([4 + 3 * i % 8 for i in range(size)], seed=len(part))
        rows = [{"id": f"{part}-{i}", "label": i % 2, "token_ids": text} for i, text in enumerate(texts)]
        write_jsonl(f"data/split/{part}.jsonl", [{"text": "", **row} for row in rows])
    write_artifacts()
    yield tmp_path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run(folder, monkeypatch):
    """Run a stage, given as on the command line, after changing parameters by their dotted keys."""

    def run_stage(command: str, changes: dict[str, object]) -> None:
        set_params(folder, changes)
        stage = import_module(f"stages.{command.split()[0]}")
        monkeypatch.setattr(stage, "locate", lambda manifest: folder / "policy")
        monkeypatch.setattr(sys, "argv", command.split())
        stage.main()

    return run_stage


def table(path: str) -> list[dict[str, float]]:
    with Path(path).open(encoding="utf-8") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo --seed 1", "sample --policy sft"])
def test_a_model_with_too_few_positions_is_refused_before_any_step(run, stage):
    """The longest text given has 11 tokens and an EOS; a prompt has 3, its response 6, the reward an EOS."""
    config = read_json("policy/config.json")
    enough = 3 + 6 + 1 if stage.startswith("ppo") else 11 + 1
    for positions in (enough, enough - 1):
        write_json("policy/config.json", config | {"max_position_embeddings": positions})
        if positions == enough:
            run(stage, {"sft.steps": 1, "reward.steps": 1, "ppo.steps": 1})
        else:
            with pytest.raises(UserError, match=f"the model has {positions} positions: expected {enough}, "):
                run(stage, {})


def first_batch(part: str, stage: str) -> list[dict]:
    rows = read_jsonl(f"data/split/{part}.jsonl")
    return [rows[i] for i in epoch_order(load().seed, stage, len(rows), 0, 4)]


def first_steps(run, stage: str) -> list[dict[str, float]]:
    """The logs of one step, with each row alone in its micro-batch and with all rows together."""
    found = []
    for max_tokens in (1, 1000):
        changes = {f"{stage}.steps": 1, f"{stage}.batch_size": 4}
        run(stage, {"model.micro_batch_tokens": max_tokens, **changes})
        found += table(f"reports/plots/{stage}.csv")
    return found


def test_sft_descends_the_mean_over_sequences_whatever_the_micro_batches(run):
    alone, together = first_steps(run, "sft")
    model, losses = model_with("sft"), []
    for row in first_batch("sft", "sft"):
        text = [*row["token_ids"], EOS]
        log_p = plain_forward(model, text)[0][:-1].log_softmax(-1)
        losses.append(-log_p[range(len(text) - 1), text[1:]].mean().item())
    assert together["loss"] == pytest.approx(sum(losses) / 4, abs=1e-5)  # float32
    assert alone == pytest.approx(together, rel=1e-5)


def test_reward_descends_the_mean_over_rows_whatever_the_micro_batches(run):
    alone, together = first_steps(run, "reward")
    model, head, losses = model_with("reward"), reward_head("linear", 32, load().seed, CPU), []
    for row in first_batch("rm", "reward"):
        logit = head(plain_forward(model, [*row["token_ids"], EOS])[1][-1])
        losses.append(label_loss(logit, torch.tensor([row["label"]])).item())
    assert together["loss"] == pytest.approx(sum(losses) / 4, abs=1e-5)
    assert alone == pytest.approx(together, rel=1e-5)


def test_the_reward_model_with_the_lowest_validation_loss_is_kept(run):
    changes = {"reward.steps": 8, "reward.batch_size": 4, "reward.lr": 0.05, "reward.validate_every": 1}
    run("reward", changes)
    best = min(table("reports/plots/reward_validation.csv"), key=lambda row: row["loss"])
    assert read_json("reports/metrics/reward.json")["selected_step"] == best["step"]
    assert 1 < best["step"] < 8, "choose another learning rate"
    model, rows = model_with("reward"), read_jsonl("data/split/val.jsonl")
    models.load_adapter(model, "reward", "artifacts/reward")
    head = heads.load_head("artifacts/reward/head.safetensors", CPU)
    with torch.no_grad():
        logits = reward_logits(model, head, [row["token_ids"] for row in rows], EOS, 1024)
    losses = label_loss(logits, torch.tensor([row["label"] for row in rows]))
    assert losses.mean().item() == pytest.approx(best["loss"], abs=1e-6)


def test_ppo_starts_as_the_sft_policy(run):
    run("ppo --seed 1", {"ppo.steps": 1})
    assert table("reports/plots/ppo_validation/1.csv")[0]["kl"] == 0
    assert table("reports/plots/ppo/1.csv")[0]["kl"] == 0


def test_returns_are_raw_and_advantages_whitened(run, monkeypatch):
    """Before the first update KL and values are 0: the return is the score, discounted from the end."""
    seen = []

    def watched(model, head, rollout, advantages, returns, *rest, **settings):
        seen.append((rollout, advantages, returns))
        return minibatch_backward(model, head, rollout, advantages, returns, *rest, **settings)

    monkeypatch.setattr("stages.ppo.minibatch_backward", watched)
    changes = {"ppo.steps": 1, "ppo.gamma": 0.9, "ppo.lam": 0.8}
    run("ppo --seed 1", {"generation.response_tokens": 60, **changes})
    rollout, advantages, returns = seen[0]
    mask = rollout.response_mask
    assert not mask.all(), "choose another seed"
    tokens_left = mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1])
    expected = torch.where(mask, rollout.scores[:, None] * (0.9 * 0.8) ** tokens_left, 0.0)
    torch.testing.assert_close(returns, expected, rtol=1e-6, atol=1e-7)
    assert advantages[mask].mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages[mask].std(correction=0).item() == pytest.approx(1, abs=1e-5)


def test_without_a_critic_advantages_are_whitened_rewards_to_go(run, monkeypatch):
    """Before the first update the KL is 0: what is to go is the score, discounted from the end."""
    seen = []

    def watched(model, head, rollout, advantages, returns, *rest, **settings):
        seen.append((head, rollout, advantages, returns))
        return minibatch_backward(model, head, rollout, advantages, returns, *rest, **settings)

    monkeypatch.setattr("stages.ppo.minibatch_backward", watched)
    run("ppo --seed 1", {"ppo.advantage": "returns", "ppo.steps": 1, "ppo.gamma": 0.9, "ppo.lam": 0.8})
    head, rollout, advantages, returns = seen[0]
    mask = rollout.response_mask
    tokens_left = mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1])
    expected = torch.where(mask, rollout.scores[:, None] * 0.9**tokens_left, 0.0)
    assert head is None and not rollout.values.any()
    torch.testing.assert_close(returns, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(advantages, whiten(expected, mask), rtol=1e-5, atol=1e-6)


def test_without_a_critic_there_is_no_value_head_and_its_cells_are_empty(run):
    run("ppo --seed 1", {"ppo.advantage": "returns", "ppo.steps": 2})
    with Path("reports/plots/ppo/1.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["value_loss"], row["value_grad_norm"]) for row in rows] == [("", "")] * 2
    assert all(row["loss"] == row["policy_loss"] and float(row["policy_grad_norm"]) > 0 for row in rows)
    found = {path.relative_to("artifacts/ppo/1").as_posix() for path in Path("artifacts/ppo/1").rglob("*.*")}
    names = ("adapter_config.json", "adapter_model.safetensors")
    assert found == {*names, *(f"last/{name}" for name in names)}


def test_ppo_is_rewarded_by_centred_scores(run):
    """The same texts under tanh(x / 2) and under (x - 1/4) / 2, for the same logits x."""
    found = []
    for centre in (None, [0.25, 2.0]):
        write_json("artifacts/reward/reward.json", {"adapter": True, "centre": centre})
        run("ppo --seed 1", {"ppo.steps": 1, "ppo.lr": STILL})
        found.append(read_jsonl("artifacts/ppo_validation/1.jsonl"))
    for bounded, centred in zip(*found, strict=True):
        logit = 2 * math.atanh(bounded.pop("reward"))
        assert centred.pop("reward") == pytest.approx((logit - 0.25) / 2, abs=1e-4)
        assert bounded == centred


def test_rewards_use_the_kl_coefficient_that_the_controller_sets(run, monkeypatch):
    """The first batch has a KL of 0, the second one far above the target: down, then up again."""
    used = []
    monkeypatch.setattr("stages.ppo.token_rewards", lambda *x: used.append(x[-1]) or token_rewards(*x))
    changes = {"ppo.kl_controller": "stepwise", "ppo.kl_beta": 0.5, "ppo.kl_target": 1e-6}
    run("ppo --seed 1", {"ppo.steps": 3, "ppo.lr": 0.02, **changes})
    assert used == pytest.approx([0.5, 0.5 / 1.2, 0.5], rel=1e-15)
    assert [row["kl_beta"] for row in table("reports/plots/ppo/1.csv")] == used


def test_the_policy_with_the_highest_validation_reward_is_kept(run):
    """A run that ends at the selected step ends with the selected policy."""
    run("ppo --seed 1", {"ppo.steps": 4, "ppo.validate_every": 1, "ppo.lr": 0.02})
    best = max(table("reports/plots/ppo_validation/1.csv"), key=lambda row: row["reward"])
    assert read_json("reports/metrics/ppo/1.json")["selected_step"] == best["step"]
    assert 0 < best["step"] < 4, "choose another learning rate"
    names = ("adapter_model.safetensors", "value_head.safetensors")
    kept = [Path("artifacts/ppo/1", name).read_bytes() for name in names]
    run("ppo --seed 1", {"ppo.steps": int(best["step"])})
    assert [Path("artifacts/ppo/1/last", name).read_bytes() for name in names] == kept


def test_a_policy_that_stands_still_validates_alike_at_every_step_and_for_every_seed(run):
    found = []
    for seed in (1, 2):
        run(f"ppo --seed {seed}", {"ppo.steps": 2, "ppo.validate_every": 1, "ppo.lr": STILL})
        found += table(f"reports/plots/ppo_validation/{seed}.csv")
    assert [row.pop("step") for row in found] == [0, 1, 2] * 2
    assert all(row == found[0] for row in found)


def test_no_step_of_ppo_draws_the_noise_of_another(run, monkeypatch):
    keys = []
    monkeypatch.setattr("stages.ppo.stream", lambda *key: keys.append(key) or stream(*key))
    run("ppo --seed 1", {"ppo.steps": 3, "ppo.batch_size": 4, "ppo.epochs": 2})
    training = [key for key in keys if "validation" not in key]
    assert len(training) == len(set(training)) == 3 * (4 + 2)  # a stream for each row and each epoch


def test_a_ppo_policy_equal_to_sft_samples_as_sft_does(run):
    """The noise is named by prefix and sample, and the KL is to SFT."""
    shutil.copytree("artifacts/sft", "artifacts/ppo/1")
    found = []
    for policy, arguments in (("sft", "sft"), ("ppo-1", "ppo --seed 1")):
        run(f"sample --policy {arguments}", {"sample.n": 2})
        found.append(read_jsonl(f"artifacts/samples/{policy}.jsonl"))
    assert {row.pop("policy") for row in found[0]} == {"sft"}
    assert {row.pop("policy") for row in found[1]} == {"ppo-1"}
    assert found[0] == found[1] and all(row["kl"] == 0 for row in found[1])
    texts = {tuple(row["token_ids"]) for row in found[0]}
    assert len(texts) > SIZES["test"]  # the second sample of a prefix is another draw


def written() -> dict[str, bytes]:
    files = [
        path for folder in ("artifacts", "reports") for path in Path(folder).rglob("*") if path.is_file()
    ]
    return {path.as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("sft", {"sft.steps": 5, "sft.lr": 0.02}),
        (
            "reward",
            {"reward.steps": 8, "reward.batch_size": 4, "reward.lr": 0.05, "reward.validate_every": 1},
        ),
        (
            "ppo --seed 1",
            {"ppo.steps": 4, "ppo.validate_every": 1, "ppo.lr": 0.02}
            | {"ppo.kl_controller": "stepwise", "ppo.kl_beta": 0.5, "ppo.kl_target": 1e-6},
        ),
        ("ppo --seed 1", {"ppo.steps": 4, "ppo.lr": 0.02, "ppo.advantage": "returns"}),
        ("sample --policy sft", {"sample.n": 2, "sample.batch_size": 3}),
    ],
)
def test_interrupted_after_any_step_a_stage_gives_the_same_bytes(run, monkeypatch, capsys, command, changes):
    run(command, changes)
    expected = written()
    step_of = record.Progress.step
    for last in (1, 2, 3):
        calls = iter(range(100))

        def interrupted(progress, *arguments, calls=calls, last=last, **values):
            step_of(progress, *arguments, **values)
            if next(calls) == last:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(record.Progress, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(command, {"runtime.snapshot_seconds": 0})
        capsys.readouterr()
        run(command, {"runtime.snapshot_seconds": 1e9})
        assert f"resuming after step {last}" in capsys.readouterr().out
        assert written() == expected
        assert not list(Path(".checkpoints").iterdir())
