"""Feedback on texts and on pairs by hand, and the reward stage on pairs: what it trains, writes and keeps."""

import csv
import math
from pathlib import Path

import pytest
import torch
from question_stages import model_with, run_stage, write_folder
from tiny import CPU, EOS, plain_forward, random_texts
from torch import tensor
from toy import set_params

from rlhf.config import load
from rlhf.errors import UserError
from rlhf.feedback import LABELS, PAIRS, centre_of
from rlhf.heads import load_head, reward_head
from rlhf.models import load_model
from rlhf.objectives import Centre
from rlhf.randomness import epoch_order
from rlhf.record import read_json, read_jsonl, write_jsonl
from rlhf.scoring import load_reward, reward_logits, reward_scores

PREFERENCES = "artifacts/preferences"


def pair(prompt: str, margin: float | None, name: str = "rm-0-0-1") -> dict:
    texts = {"chosen": "so", "rejected": "no", "chosen_ids": [5, 3, 7], "rejected_ids": [5, 3, 9]}
    return {"id": name, "prompt": prompt, "margin": margin} | texts


def test_pairs_by_hand():
    rows = [pair("a", 6), pair("a", -2), pair("b", 2), pair("b", 4), pair("c", -5)]
    logits = tensor([[2.0, 0.0], [1.0, 2.0], [0.0, 1.0], [3.0, 3.0], [1.0, 0.0]])
    assert PAIRS.texts(rows[0]) == [[5, 3, 7], [5, 3, 9]]
    losses = PAIRS.losses(logits, rows)
    # log(1 + exp(-d)) for the differences 2, -1, -1, 0, 1
    expected = [math.log1p(math.exp(-d)) for d in (2, -1, -1, 0, 1)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-6)
    found = PAIRS.summarise(logits, rows)
    assert found.pop("loss") == pytest.approx(sum(expected) / 5, rel=1e-6)
    assert found == {
        "accuracy": 2 / 5,  # the first and the last: a tie agrees with nobody
        "n": 5,
        "prompts": 3,
        # The second and the last were turned round by noise: right, right, wrong, wrong, wrong.
        "noise_free_accuracy": 2 / 5,
        "accuracy_margin_2": 1 / 2,
        "accuracy_margin_4": 1 / 3,
        "n_margin_2": 2,
        "n_margin_4": 3,
    }


def test_pairs_without_margins_have_no_figures_by_margin():
    rows = [pair("a", None), pair("b", None)]
    found = PAIRS.summarise(tensor([[1.0, 0.0], [0.0, 1.0]]), rows)
    assert set(found) == {"accuracy", "loss", "n", "prompts"} and found["accuracy"] == 0.5


def test_a_tie_in_reward_agrees_with_no_preference_turned_round_or_not():
    found = PAIRS.summarise(tensor([[1.0, 1.0], [1.0, 1.0]]), [pair("a", 2), pair("b", -2)])
    assert found["accuracy"] == found["noise_free_accuracy"] == 0


def test_margins_that_are_no_whole_numbers_are_counted_by_the_whole_number_below():
    rows = [pair("a", margin) for margin in (0.5, 1.0, 1.75, 3.999, 4.0, 100.0)]
    found = PAIRS.summarise(tensor([[1.0, 0.0]] * 6), rows)
    counts = {name: value for name, value in found.items() if name.startswith("n_margin")}
    assert counts == {"n_margin_0": 1, "n_margin_1": 2, "n_margin_3": 1, "n_margin_4": 2}


def test_predictions_of_pairs_by_hand():
    rows = [pair("a", -2), pair("b", None)]
    found = PAIRS.predictions(tensor([[1.0, 0.0], [0.0, 0.0]]), rows)
    written = {"id": "rm-0-0-1", "chosen": "so", "rejected": "no"}
    sure = pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)
    assert found == [
        written | {"prompt": "a", "margin": -2, "flipped": True, "probability": sure},
        written | {"prompt": "b", "margin": None, "flipped": False, "probability": 0.5},
    ]


def test_labels_by_hand():
    rows = [{"id": f"rm-{i}", "text": "so", "token_ids": [5], "label": i % 2} for i in range(4)]
    logits = tensor([[0.0], [1.0], [2.0], [-1.0]])
    assert LABELS.texts(rows[0]) == [[5]]
    losses = [math.log(2), math.log1p(math.exp(-1)), math.log1p(math.exp(2)), math.log1p(math.exp(1))]
    assert LABELS.losses(logits, rows).tolist() == pytest.approx(losses, rel=1e-6)
    found = LABELS.summarise(logits, rows)
    assert found.pop("loss") == pytest.approx(sum(losses) / 4, rel=1e-6)
    cells = {"true_negatives": 1, "false_positives": 1, "false_negatives": 1, "true_positives": 1}
    assert found == {"accuracy": 0.5, "n": 4} | cells
    assert LABELS.predictions(logits, rows)[1] == {
        "id": "rm-1",
        "text": "so",
        "label": 1,
        "probability": pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6),
    }


def test_the_centre_is_the_mean_and_the_deviation_over_all_samples():
    assert centre_of(tensor([1.0, 3.0, 5.0, 7.0])) == pytest.approx(Centre(4.0, math.sqrt(5)), rel=1e-6)


@pytest.mark.parametrize("logits", [[0.5, 0.5, 0.5], [2.0]])
def test_rewards_all_alike_have_no_centre(logits):
    with pytest.raises(UserError, match="same reward: train it further"):
        centre_of(tensor(logits))


def separable(part: str, count: int) -> list[dict]:
    """Pairs that one token tells apart: 7 after the prompt is better, 9 is worse."""
    prompts, ends = random_texts([3] * count, seed=len(part)), random_texts([1, 2] * count, seed=5)
    return [
        pair(f"{part} {i}", 2, f"{part}-{i}")
        | {"chosen_ids": [*prompts[i], 7, *ends[2 * i]], "rejected_ids": [*prompts[i], 9, *ends[2 * i + 1]]}
        for i in range(count)
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Separable pairs, some with an EOS of their own, and samples."""
    with write_folder(tmp_path, monkeypatch):
        for part, count in (("rm", 32), ("val", 8), ("rm_test", 12)):
            rows = separable(part, count)
            rows[1]["chosen_ids"].append(EOS)
            write_jsonl(f"{PREFERENCES}/{part}.jsonl", rows)
        samples = random_texts([4 + i % 5 for i in range(20)], seed=6)
        write_jsonl(f"{PREFERENCES}/samples.jsonl", [{"token_ids": text} for text in samples])
        yield tmp_path


def table(path: str) -> list[dict[str, float]]:
    with Path(path).open(encoding="utf-8", newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def files_of(path: str) -> set[str]:
    return {file.name for file in Path(path).iterdir()}


ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("adapter", [True, False])
def test_the_first_step_descends_the_mean_pairwise_loss(folder, kind, adapter):
    found = []
    for max_tokens in (1, 1000):
        changes = {"reward.steps": 1, "reward.batch_size": 6, "reward.head": kind, "reward.adapter": adapter}
        set_params(Path(), {"model.micro_batch_tokens": max_tokens, **changes})
        run_stage("reward")
        found += table("reports/plots/reward.csv")
    rows, model, head = (
        read_jsonl(f"{PREFERENCES}/rm.jsonl"),
        model_with("reward"),
        reward_head(kind, 32, 42, CPU),
    )
    losses = []
    for index in epoch_order(42, "reward", len(rows), 0, 6):
        chosen, rejected = (
            head(plain_forward(model, [*(t for t in rows[index][ids] if t != EOS), EOS])[1][-1]).item()
            for ids in ("chosen_ids", "rejected_ids")
        )
        losses.append(math.log1p(math.exp(rejected - chosen)))
    assert found[1]["loss"] == pytest.approx(sum(losses) / 6, abs=1e-5)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize(("kind", "adapter"), [("linear", True), ("mlp", False)])
def test_separable_pairs_are_learned_and_scores_are_centred_on_the_samples(folder, kind, adapter):
    changes = {"reward.head": kind, "reward.adapter": adapter, "reward.lr": 0.02, "reward.validate_every": 10}
    set_params(Path(), {"reward.steps": 40, "reward.batch_size": 8, **changes})
    run_stage("reward")
    metrics, described = read_json("reports/metrics/reward.json"), read_json("artifacts/reward/reward.json")
    validations = table("reports/plots/reward_validation.csv")
    assert metrics["accuracy"] == metrics["noise_free_accuracy"] == metrics["accuracy_margin_2"] == 1
    assert (metrics["n"], metrics["prompts"], metrics["weak"]) == (12, 12, False)
    assert metrics["selected_step"] == min(validations, key=lambda row: row["loss"])["step"]
    expected = {"head.safetensors", "reward.json"} | (ADAPTER_FILES if adapter else set())
    assert files_of("artifacts/reward") == expected
    assert described["adapter"] is adapter and (described["fingerprint"] is not None) is adapter
    assert set(described) == {"score", "centre", "adapter", "base", "base_revision", "fingerprint"}

    # The whole model, loaded as PPO loads it, says what the stage said: with a frozen base too.
    model = model_with("reward")
    reward = load_reward(model, "artifacts/reward", CPU)
    assert reward.adapter == ("reward" if adapter else None)
    assert reward.centre == pytest.approx(Centre(metrics["mean_sft"], metrics["std_sft"]))
    texts = [row["token_ids"] for row in read_jsonl(f"{PREFERENCES}/samples.jsonl")]
    scores = reward_scores(model, reward, texts, EOS, 64)
    assert scores.mean().item() == pytest.approx(0, abs=1e-5)
    assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-5)
    for row, said in zip(
        read_jsonl(f"{PREFERENCES}/rm_test.jsonl"), read_jsonl("artifacts/reward_test.jsonl"), strict=True
    ):
        with torch.no_grad():
            chosen, rejected = reward_logits(model, reward.head, PAIRS.texts(row), EOS, 64).tolist()
        assert said["probability"] == pytest.approx(1 / (1 + math.exp(rejected - chosen)), abs=1e-5)


def test_a_frozen_base_trains_the_head_alone(folder, monkeypatch):
    """Neither the base nor the unused adapter changes or could change while the head learns."""
    seen = []
    monkeypatch.setattr("stages.reward.load_model", lambda *x: seen.append(load_model(*x)) or seen[0])
    set_params(Path(), {"reward.adapter": False, "reward.steps": 3, "reward.lr": 0.05})
    run_stage("reward")
    model, fresh = seen[0], dict(model_with("reward").named_parameters())
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad and parameter.grad is None and torch.equal(parameter, fresh[name])
    first = reward_head("mlp", 32, load().seed, CPU).state_dict()
    trained = load_head("artifacts/reward/head.safetensors", CPU).state_dict()
    unmoved = {name for name, value in first.items() if torch.equal(trained[name], value)}
    assert unmoved == {"2.bias"}, "a constant added to every reward changes no preference"
