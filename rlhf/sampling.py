"""Exact sampling from a policy, one named random stream per row."""

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import DynamicCache

from rlhf.models import language_head


def gumbel_noise(streams: list[np.random.Generator], vocabulary: int) -> Tensor:
    """Standard Gumbel noise [B, V] float32, row i from `streams[i]`: -log E with E exponential.

    E is drawn in float64, so that the upper tail (small E) is not cut off at float32's resolution.
    """
    rows = [stream.standard_exponential(vocabulary).astype(np.float32) for stream in streams]
    return -torch.from_numpy(np.stack(rows)).log_()


@torch.no_grad()
def sample(
    model: PeftModel,
    prompts: list[list[int]],
    streams: list[np.random.Generator],
    max_tokens: int,
    eos_id: int,
    temperature: float,
) -> list[list[int]]:
    """Sample one response per prompt under the active adapter; each ends with EOS or has `max_tokens`.

    token = argmax(logits / temperature + Gumbel noise) is an exact draw from softmax(logits / temperature)
    (Gumbel 1954), the full distribution whatever the model's generation_config says, and a row's draw
    depends on its own stream alone. Rows that have ended leave the batch once they are a quarter of it.
    """
    if len(streams) != len(prompts) or not all(prompts) or max_tokens < 1 or temperature <= 0:
        raise ValueError(
            "expected a stream for each prompt, no empty prompt, max_tokens >= 1, temperature > 0"
        )
    backbone, head = model.get_base_model().base_model, language_head(model)
    device = head.weight.device
    width = max(map(len, prompts))
    input_ids = torch.tensor([[eos_id] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    responses: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # rows[i] is the prompt that batch row i continues
    cache = DynamicCache()
    for _ in range(max_tokens):
        hidden = backbone(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        logits = head(hidden).float() / temperature
        noise = gumbel_noise([streams[row] for row in rows], logits.shape[1]).to(device)
        tokens = (logits + noise).argmax(1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not _ended(responses[row], eos_id):
                responses[row].append(token)
        live = [i for i, row in enumerate(rows) if not _ended(responses[row], eos_id)]
        if not live:
            break
        input_ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        if len(live) <= len(rows) * 3 // 4:
            keep = torch.tensor(live, device=device)
            cache.batch_select_indices(keep)
            input_ids, positions, mask = input_ids[keep], positions[keep], mask[keep]
            rows = [rows[i] for i in live]
    return responses


def _ended(response: list[int], eos_id: int) -> bool:
    return bool(response) and response[-1] == eos_id
