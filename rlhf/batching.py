"""Lists of token ids into padded tensors, grouped by length so that little of a batch is padding."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Prompts left-padded to P and responses right-padded to R, side by side."""

    input_ids: Tensor  # [B, P + R]
    attention_mask: Tensor  # [B, P + R] bool
    response_mask: Tensor  # [B, R] bool


def pad_pairs(
    prompts: Sequence[list[int]], responses: Sequence[list[int]], pad_id: int, device: torch.device
) -> Batch:
    """Pad prompts on the left and responses on the right, so that responses share their first column."""
    if len(prompts) != len(responses) or not prompts:
        raise ValueError(f"expected as many responses as prompts, got {len(prompts)} and {len(responses)}")
    width, height = max(map(len, prompts)), max(map(len, responses))
    ids, mask = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        left, right = width - len(prompt), height - len(response)
        ids.append([pad_id] * left + prompt + response + [pad_id] * right)
        mask.append([False] * left + [True] * (len(prompt) + len(response)) + [False] * right)
    attention_mask = torch.tensor(mask, device=device)
    return Batch(torch.tensor(ids, device=device), attention_mask, attention_mask[:, width:])


def micro_batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Group indices of similar `lengths` so that each padded group has `max_tokens` tokens at most.

    A single item longer than that is a group of its own. Longest first: memory peaks at the start.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def chunks(items: list, size: int) -> list[list]:
    """Cut a list into consecutive pieces of `size`; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
