"""Given tokens, not sampled ones: what a policy, the value head and the reward model say of them."""

from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlhf.batching import Batch, micro_batches, pad_pairs
from rlhf.models import hidden_states, language_head, select
from rlhf.objectives import score_from_logit
from rlhf.ops import token_logprobs


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


def reward_logits(
    model: PeftModel, head: nn.Linear, texts: list[list[int]], eos_id: int, max_tokens: int
) -> Tensor:
    """The reward model's logit for each text: its head on the final EOS's hidden state.   -> [B] float32.

    A text's own EOS tokens are removed and exactly one is appended, so a response that ended and one that
    was cut off are read alike. The adapter must have been selected; gradients flow if they are enabled.
    """
    device = head.weight.device
    closed = [[token for token in text if token != eos_id] + [eos_id] for text in texts]
    order, logits = [], []
    for indices in micro_batches([len(text) for text in closed], max_tokens):
        batch = pad_pairs([[]] * len(indices), [closed[i] for i in indices], eos_id, device)
        hidden = hidden_states(model, batch.input_ids, batch.attention_mask)
        last = batch.attention_mask.sum(1) - 1
        states = hidden[torch.arange(len(indices), device=device), last]
        logits.append(head(states.float()).squeeze(-1))
        order += indices
    return torch.cat(logits)[torch.tensor(order, device=device).argsort()]


@torch.no_grad()
def reward_scores(
    model: PeftModel, head: nn.Linear, texts: list[list[int]], eos_id: int, max_tokens: int
) -> Tensor:
    """The frozen reward model's score of each text, 2 sigmoid(logit) - 1.   -> [B] in [-1, 1]."""
    select(model, "reward")
    return score_from_logit(reward_logits(model, head, texts, eos_id, max_tokens))
