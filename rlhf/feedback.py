"""What a reward model learns from: labelled texts, or preferences between two answers to one question.

A kind of feedback turns a row into its k texts, and the logits [n, k] of n rows into losses and figures.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.errors import UserError
from rlhf.objectives import Centre, label_loss, pairwise_loss


class Feedback(NamedTuple):
    texts: Callable[[dict], list[list[int]]]  # row -> token ids of each of its k texts
    losses: Callable[[Tensor, list[dict]], Tensor]  # [n, k], n rows -> [n], nats
    summarise: Callable[[Tensor, list[dict]], dict[str, float | int]]  # the same -> flat numbers
    predictions: Callable[[Tensor, list[dict]], list[dict]]  # the same -> rows to write down


def label_texts(row: dict) -> list[list[int]]:
    """A labelled text."""
    return [row["token_ids"]]


def label_losses(logits: Tensor, rows: list[dict]) -> Tensor:
    """`objectives.label_loss` of each row."""
    return label_loss(logits[:, 0], torch.tensor([row["label"] for row in rows], device=logits.device))


def label_summary(logits: Tensor, rows: list[dict]) -> dict[str, float | int]:
    """Quality of the predictions `logits > 0`."""
    positive = logits[:, 0] > 0
    truth = torch.tensor([row["label"] for row in rows], device=logits.device).bool()
    return {
        "accuracy": (positive == truth).float().mean().item(),
        "loss": label_losses(logits, rows).mean().item(),
        "n": len(rows),
        "true_negatives": (~positive & ~truth).sum().item(),
        "false_positives": (positive & ~truth).sum().item(),
        "false_negatives": (~positive & truth).sum().item(),
        "true_positives": (positive & truth).sum().item(),
    }


def label_predictions(logits: Tensor, rows: list[dict]) -> list[dict]:
    """Each text with its label and the probability of label 1."""
    probabilities = logits[:, 0].sigmoid().tolist()
    return [
        {"id": row["id"], "text": row["text"], "label": row["label"], "probability": probability}
        for row, probability in zip(rows, probabilities, strict=True)
    ]


def pair_texts(row: dict) -> list[list[int]]:
    """The chosen and the rejected answer, each after the prompt."""
    return [row["chosen_ids"], row["rejected_ids"]]


def pair_losses(logits: Tensor, rows: list[dict]) -> Tensor:
    """`objectives.pairwise_loss` of each row."""
    return pairwise_loss(logits[:, 0], logits[:, 1])


def pair_summary(logits: Tensor, rows: list[dict]) -> dict[str, float | int]:
    """Share of pairs in which the chosen answer has the higher reward, overall and by margin.

    Where margins are known, so is what the annotator meant before noise: `noise_free_accuracy` is the share
    of pairs in which the reward agrees with that, and the shares by margin (4: 4 or more) too.
    """
    differences = (logits[:, 0] - logits[:, 1]).tolist()
    agrees = [difference > 0 for difference in differences]
    meant = defaultdict(list)
    for row, difference in zip(rows, differences, strict=True):
        if row["margin"] is not None:
            meant_so = difference > 0 if row["margin"] > 0 else difference < 0
            meant[int(min(abs(row["margin"]), 4))].append(meant_so)
    known = [agree for group in meant.values() for agree in group]
    return {
        "accuracy": sum(agrees) / len(rows),
        "loss": pair_losses(logits, rows).mean().item(),
        "n": len(rows),
        "prompts": len({row["prompt"] for row in rows}),
        **({"noise_free_accuracy": sum(known) / len(known)} if known else {}),
        **{f"accuracy_margin_{margin}": sum(meant[margin]) / len(meant[margin]) for margin in sorted(meant)},
        **{f"n_margin_{margin}": len(meant[margin]) for margin in sorted(meant)},
    }


def pair_predictions(logits: Tensor, rows: list[dict]) -> list[dict]:
    """Each pair with its margin and the probability that the chosen answer is the preferred one."""
    probabilities = (logits[:, 0] - logits[:, 1]).sigmoid().tolist()
    return [
        {name: row[name] for name in ("id", "prompt", "chosen", "rejected", "margin")}
        | {"flipped": (row["margin"] or 0) < 0, "probability": probability}
        for row, probability in zip(rows, probabilities, strict=True)
    ]


LABELS = Feedback(label_texts, label_losses, label_summary, label_predictions)
PAIRS = Feedback(pair_texts, pair_losses, pair_summary, pair_predictions)


def centre_of(logits: Tensor) -> Centre:
    """Mean and standard deviation of the reward of SFT's samples [N]; `UserError` if all are alike."""
    centre = Centre(logits.mean().item(), logits.std(correction=0).item())
    if not centre.deviation > 0:
        raise UserError("the reward model gives every sample of SFT the same reward: train it further")
    return centre
