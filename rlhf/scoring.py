"""Given tokens, not sampled ones: what a policy, the value head and the reward model say of them."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlhf.batching import Batch, micro_batches, pad_pairs
from rlhf.heads import load_head
from rlhf.models import hidden_states, language_head, load_adapter, select
from rlhf.objectives import Centre, score_from_logit
from rlhf.ops import token_logprobs
from rlhf.record import read_json


class RewardModel(NamedTuple):
    """A frozen reward model: its head on the hidden states of adapter `adapter` (None: of the base)."""

    head: nn.Module
    adapter: str | None
    centre: Centre | None


class Evaluation(NamedTuple):
    """A policy's view of given responses; [B, R] float32, 0 outside the response mask."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


def response_outputs(
    model: PeftModel, batch: Batch, value_head: nn.Linear | None, temperature: float
) -> Evaluation:
    """Evaluate the responses of `batch` under the active adapter, with gradients if they are enabled.

    The token at response column t is predicted by the hidden state one position earlier, and valued there:
    columns P-1 .. T-2 of the hidden states. Logits are made for real response tokens only.
    """
    mask = batch.response_mask
    start = batch.input_ids.shape[1] - mask.shape[1]
    if start == 0 or not batch.attention_mask[:, start - 1].all():
        raise ValueError("expected at least one token in every prompt: nothing predicts a first token")
    hidden = hidden_states(model, batch.input_ids, batch.attention_mask)
    before = hidden[:, start - 1 : -1][mask]
    tokens = batch.input_ids[:, start:][mask]
    logprobs, entropy = token_logprobs(before, language_head(model), tokens, temperature)
    values = value_head(before.float()).squeeze(-1) if value_head is not None else torch.zeros_like(entropy)
    return Evaluation(*(_scatter(x, mask) for x in (logprobs, entropy, values)))


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)


@torch.no_grad()
def evaluate(
    model: PeftModel,
    prompts: list[list[int]],
    responses: list[list[int]],
    value_head: nn.Linear | None,
    temperature: float,
    max_tokens: int,
) -> Evaluation:
    """`response_outputs` for any number of pairs, in micro-batches of `max_tokens` padded tokens."""
    device = language_head(model).weight.device
    shape = (len(prompts), max(map(len, responses)))
    result = Evaluation(*(torch.zeros(shape, device=device) for _ in Evaluation._fields))
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    for indices in micro_batches(lengths, max_tokens):
        batch = pad_pairs([prompts[i] for i in indices], [responses[i] for i in indices], 0, device)
        part = response_outputs(model, batch, value_head, temperature)
        for whole, piece in zip(result, part, strict=True):
            whole[indices, : piece.shape[1]] = piece
    return result


def closing_outputs(
    model: PeftModel,
    head: Callable[[Tensor], Tensor],
    texts: list[list[int]],
    eos_id: int,
    max_tokens: int,
) -> Tensor:
    """What `head` [N, H] -> [N, ...] makes of the hidden state on the EOS that closes each text.

    A text's own EOS tokens are removed and exactly one is appended, so a response that ended and one that
    was cut off are read alike. The adapter must have been selected; gradients flow if they are enabled.
    """
    device = language_head(model).weight.device
    closed = [[token for token in text if token != eos_id] + [eos_id] for text in texts]
    order, outputs = [], []
    for indices in micro_batches([len(text) for text in closed], max_tokens):
        batch = pad_pairs([[]] * len(indices), [closed[i] for i in indices], eos_id, device)
        hidden = hidden_states(model, batch.input_ids, batch.attention_mask)
        last = batch.attention_mask.sum(1) - 1
        states = hidden[torch.arange(len(indices), device=device), last]
        outputs.append(head(states.float()))
        order += indices
    return torch.cat(outputs)[torch.tensor(order, device=device).argsort()]


def reward_logits(
    model: PeftModel, head: nn.Module, texts: list[list[int]], eos_id: int, max_tokens: int
) -> Tensor:
    """The reward model's logit for each text, as `closing_outputs`.   -> [B] float32."""
    return closing_outputs(model, lambda states: head(states).squeeze(-1), texts, eos_id, max_tokens)


@torch.no_grad()
def reward_scores(
    model: PeftModel, reward: RewardModel, texts: list[list[int]], eos_id: int, max_tokens: int
) -> Tensor:
    """The frozen reward model's score of each text (`score_from_logit`).   -> [B]."""
    select(model, reward.adapter)
    return score_from_logit(reward_logits(model, reward.head, texts, eos_id, max_tokens), reward.centre)


def load_reward(model: PeftModel, folder: str | Path, device: torch.device) -> RewardModel:
    """Load what the reward stage saved: its adapter, if it has one, into adapter `reward` of the model."""
    folder = Path(folder)
    described = read_json(folder / "reward.json")
    if described["adapter"]:
        load_adapter(model, "reward", folder)
    centre = Centre(*described["centre"]) if described["centre"] else None
    return RewardModel(
        load_head(folder / "head.safetensors", device), "reward" if described["adapter"] else None, centre
    )
