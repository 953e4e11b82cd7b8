"""Losses and returns of SFT, reward modelling and PPO. Pure: tensors in, tensors out."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.ops import masked, masked_mean


def sequence_nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Mean negative log-probability of each sequence's own tokens, nats per token: [B, R] -> [B].

    Averaging tokens within a sequence before sequences gives every review the same weight, whatever its
    length (the reference notebook's SFT loss).
    """
    _same_shapes(logprobs, mask)
    return -masked(logprobs, mask).sum(1) / mask.sum(1).clamp_min(1)


def label_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy with logits, one value per row, nats: softplus(x) - x y.   [B], [B] -> [B]."""
    _same_shapes(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected), one value per pair, nats.   [B], [B] -> [B].

    The negative log-likelihood of the preferences under Bradley and Terry (1952).
    """
    _same_shapes(chosen, rejected)
    return -F.logsigmoid(chosen - rejected)


class Centre(NamedTuple):
    """Mean and standard deviation of a reward model's logits on samples of SFT."""

    mean: float
    deviation: float


def score_from_logit(logits: Tensor, centre: Centre | None = None) -> Tensor:
    """Reward score 2 sigmoid(x) - 1, in [-1, 1], 0 where the reward model is undecided; with a `centre`
    (x - mean) / deviation, since preferences fix a reward up to a constant only."""
    if centre is None:
        return 2 * torch.sigmoid(logits) - 1
    return (logits - centre.mean) / centre.deviation


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_beta: float
) -> Tensor:
    """r_t = -beta (logprob_t - ref_logprob_t) + [t is last] score;  0 outside the mask.   -> [B, R].

    scores [B]; the others [B, R]. The score lands on the last real token, EOS or not. Source: Ziegler et
    al. 2019, as in the reference notebook.
    """
    _same_shapes(logprobs, ref_logprobs, mask)
    if scores.shape != mask.shape[:1] or not mask.any(1).all():
        raise ValueError("expected one score for each sequence, and at least one real token in each")
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).max(1).values
    rewards = masked(-kl_beta * (logprobs - ref_logprobs), mask)
    return rewards + (positions == last[:, None]) * scores[:, None]


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns, both [B, R], 0 outside the mask.

    delta_t = r_t + gamma V_{t+1} - V_t;   A_t = delta_t + gamma lam A_{t+1};   return_t = A_t + V_t,
    with V and A zero past the last real token. Advantages are raw: whitening comes after the returns.
    Source: Schulman et al. 2016, equation 16.
    """
    _same_shapes(rewards, values, mask)
    rewards, values = masked(rewards, mask), masked(values, mask)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t]
        reversed_advantages.append(next_advantage)
    advantages = torch.stack(reversed_advantages[::-1], 1)
    return advantages, advantages + values


def reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, 0 past the last real token: advantages without a critic.   -> [B, R].

    Source: the question answering reference. It is `gae` with lam = 1 and all values 0.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, lam=1.0)[0]


class PolicyLoss(NamedTuple):
    loss: Tensor
    mean_ratio: Tensor
    clip_fraction: Tensor


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float
) -> PolicyLoss:
    """PPO's clipped surrogate, a mean over real tokens; all arguments [B, R].

    rho = exp(logprob - old_logprob);   loss = mean max(-rho A, -clip(rho, 1 - eps, 1 + eps) A).
    Source: Schulman et al. 2017, equation 7.
    """
    _same_shapes(logprobs, old_logprobs, advantages, mask)
    logprobs, old_logprobs, advantages = (masked(x, mask) for x in (logprobs, old_logprobs, advantages))
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped, clipped = -ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages
    with torch.no_grad():
        outside = ((ratio - 1).abs() > clip).float()
    return PolicyLoss(
        masked_mean(torch.maximum(unclipped, clipped), mask),
        masked_mean(ratio.detach(), mask),
        masked_mean(outside, mask),
    )


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Half the mean over real tokens of max((V - R)^2, (V_clipped - R)^2); all arguments [B, R].

    V_clipped = V_old + clip(V - V_old, -eps, eps), around the rollout's values. Source: the PPO2 baseline,
    as in the reference notebook.
    """
    _same_shapes(values, old_values, returns, mask)
    values, old_values, returns = (masked(x, mask) for x in (values, old_values, returns))
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * masked_mean(torch.maximum((values - returns).square(), (clipped - returns).square()), mask)


def next_kl_beta(
    controller: str, kl_beta: float, kl: float, target: float, rollouts: int, horizon: int
) -> float:
    """The KL coefficient for the next batch, from this batch's `kl` to the reference (unit of `target`).

    fixed:    beta.
    ziegler:  beta (1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon). Source: Ziegler et al. 2019.
    stepwise: 1.2 beta above 1.5 target, beta / 1.2 below target / 1.5, within [0.01, 1]. Source: the
    question answering reference, which steers by the KL between old and new policy; here it is the KL to
    the frozen reference, since that is what the penalty holds down.
    """
    if controller == "ziegler":
        error = min(max(kl / target - 1, -0.2), 0.2)
        return kl_beta * (1 + error * rollouts / horizon)
    if controller == "stepwise":
        factor = 1.2 if kl > 1.5 * target else 1 / 1.2 if kl < target / 1.5 else 1.0
        return min(max(kl_beta * factor, 0.01), 1.0)
    if controller != "fixed":
        raise ValueError(f"unknown KL controller {controller!r}")
    return kl_beta


def _same_shapes(*tensors: Tensor) -> None:
    if len({tuple(tensor.shape) for tensor in tensors}) != 1:
        raise ValueError(f"shapes differ: {[tuple(tensor.shape) for tensor in tensors]}")
