"""The gradient of one PPO minibatch, in micro-batches that do not change it."""

from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlhf.batching import micro_batches, pad_pairs
from rlhf.objectives import policy_loss, value_loss
from rlhf.optim import StepNorms
from rlhf.rollout import Rollout
from rlhf.scoring import response_outputs


class UpdateStatistics(NamedTuple):
    """Means over a minibatch's real tokens, before its update; no value loss without a value head."""

    policy_loss: float
    value_loss: float | None
    mean_ratio: float
    clip_fraction: float


def minibatch_backward(
    model: PeftModel,
    value_head: nn.Linear | None,
    rollout: Rollout,
    advantages: Tensor,
    returns: Tensor,
    minibatch: list[int],
    scaler: torch.amp.GradScaler,
    *,
    temperature: float,
    clip: float,
    value_clip: float,
    value_coef: float,
    max_tokens: int,
) -> UpdateStatistics:
    """Add the gradient of policy_loss + value_coef value_loss over rows `minibatch` of the rollout.

    advantages, returns [B, R]. Each micro-batch's mean is weighted by its share of the minibatch's real
    tokens, so the sum of the gradients is the gradient of the minibatch's mean.
    """
    tokens = rollout.response_mask[minibatch].sum()
    statistics = torch.zeros(4, device=tokens.device)
    lengths = [len(rollout.prompts[i]) + len(rollout.responses[i]) for i in minibatch]
    for indices in micro_batches(lengths, max_tokens):
        rows = [minibatch[i] for i in indices]
        prompts, responses = [rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows]
        batch = pad_pairs(prompts, responses, 0, tokens.device)
        outputs = response_outputs(model, batch, value_head, temperature)
        mask = batch.response_mask
        old_logprobs, old_values, row_advantages, row_returns = (
            whole[rows, : mask.shape[1]] for whole in (rollout.logprobs, rollout.values, advantages, returns)
        )
        policy = policy_loss(outputs.logprobs, old_logprobs, row_advantages, mask, clip)
        value = torch.zeros_like(policy.loss)
        if value_head is not None:
            value = value_loss(outputs.values, old_values, row_returns, mask, value_clip)
        weight = mask.sum() / tokens
        scaler.scale((policy.loss + value_coef * value) * weight).backward()
        parts = torch.stack([policy.loss, value, policy.mean_ratio, policy.clip_fraction])
        statistics += parts.detach() * weight
    found = UpdateStatistics(*statistics.tolist())
    return found if value_head is not None else found._replace(value_loss=None)


def summarise_updates(
    statistics: list[UpdateStatistics], norms: list[StepNorms], value_coef: float
) -> dict[str, float | int | None]:
    """A PPO step's updates as flat numbers: means over the updates that were made, None where none was, and
    how many were skipped."""
    made = [found for found, norm in zip(statistics, norms, strict=True) if not norm.skipped]
    means = {name: _mean([getattr(found, name) for found in made]) for name in UpdateStatistics._fields}
    return {
        "loss": means["policy_loss"] + value_coef * (means["value_loss"] or 0.0) if made else None,
        **means,
        "policy_grad_norm": _mean([norm.groups["policy"] for norm in norms]),
        "value_grad_norm": _mean([norm.groups.get("value") for norm in norms]),
        "skipped_updates": sum(norm.skipped for norm in norms),
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
