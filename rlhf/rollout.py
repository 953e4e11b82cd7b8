"""From prompts to everything a PPO update needs: sample, score, and place per-token rewards."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn

from rlhf.models import select
from rlhf.ops import kl_estimators, masked_mean, masked_sum
from rlhf.sampling import sample
from rlhf.scoring import RewardModel, evaluate, reward_scores
from rlhf.textmetrics import repetition


class Rollout(NamedTuple):
    """One batch of sampled responses with all that is fixed before the update."""

    prompts: list[list[int]]
    responses: list[list[int]]
    response_mask: Tensor  # [B, R] bool
    logprobs: Tensor  # [B, R] under the policy that sampled
    ref_logprobs: Tensor  # [B, R] under the frozen SFT policy
    entropy: Tensor  # [B, R]
    values: Tensor  # [B, R]
    scores: Tensor  # [B] frozen reward model


@torch.no_grad()
def collect(
    model: PeftModel,
    reward: RewardModel,
    value_head: nn.Linear | None,
    prompts: list[list[int]],
    streams: list[np.random.Generator],
    *,
    policy: str | None,
    response_tokens: int,
    eos_id: int,
    temperature: float,
    max_tokens: int,
) -> Rollout:
    """Sample from adapter `policy` (None: the base); evaluate under it and under the frozen `sft`; score with
    `reward`. Without a value head the values are 0."""
    select(model, policy)
    responses = sample(model, prompts, streams, response_tokens, eos_id, temperature)
    own = evaluate(model, prompts, responses, value_head, temperature, max_tokens)
    reference = own
    if policy != "sft":
        select(model, "sft")
        reference = evaluate(model, prompts, responses, None, temperature, max_tokens)
    texts = [p + r for p, r in zip(prompts, responses, strict=True)]
    scores = reward_scores(model, reward, texts, eos_id, max_tokens)
    lengths = torch.tensor([len(r) for r in responses], device=scores.device)
    columns = torch.arange(own.logprobs.shape[1], device=scores.device)
    return Rollout(
        prompts,
        responses,
        columns < lengths[:, None],
        own.logprobs,
        reference.logprobs,
        own.entropy,
        own.values,
        scores,
    )


def summarise(rollout: Rollout, decode: Callable[[list[int]], str], eos_id: int) -> dict[str, float]:
    """A rollout as flat numbers: over-optimisation shows in the ones beside the reward.

    reward: mean score. kl: k1 estimate of KL(policy || SFT), nats per sequence; kl_k3: the k3 estimate of the
    same, never negative; kl_per_token: k1 per token. ended_rate: share that stopped by EOS. length: tokens,
    EOS included. repetition: share of repeated word 3-grams. entropy: nats per token.
    """
    responses, mask = rollout.responses, rollout.response_mask
    k1, _, k3 = kl_estimators(rollout.logprobs, rollout.ref_logprobs)
    return {
        "reward": rollout.scores.mean().item(),
        "kl": (masked_sum(k1, mask) / len(responses)).item(),
        "kl_k3": (masked_sum(k3, mask) / len(responses)).item(),
        "kl_per_token": masked_mean(k1, mask).item(),
        "ended_rate": sum(response[-1] == eos_id for response in responses) / len(responses),
        "length": sum(map(len, responses)) / len(responses),
        "repetition": sum(repetition(decode(response)) for response in responses) / len(responses),
        "entropy": masked_mean(rollout.entropy, mask).item(),
    }


def records(rollout: Rollout, decode: Callable[[list[int]], str], eos_id: int) -> list[dict]:
    """Each sequence of a rollout as a row to write down; kl is the k1 estimate, nats per sequence."""
    rows = []
    for i, (prompt, response) in enumerate(zip(rollout.prompts, rollout.responses, strict=True)):
        continuation, mask = decode(response), rollout.response_mask[i]
        rows.append(
            {
                "prefix": decode(prompt),
                "continuation": continuation,
                "full_text": decode(prompt + response),
                "token_ids": response,
                "n_tokens": len(response),
                "ended": response[-1] == eos_id,
                "empty": not continuation.strip(),
                "repetition": repetition(continuation),
                "kl": (
                    masked_sum(rollout.logprobs[i], mask) - masked_sum(rollout.ref_logprobs[i], mask)
                ).item(),
                "reward": rollout.scores[i].item(),
            }
        )
    return rows
