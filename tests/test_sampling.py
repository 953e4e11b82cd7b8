"""Sampling: an exact draw from the full distribution, and each row its own business."""

import numpy as np
import pytest
import torch
from scipy import stats
from tiny import EOS, HOSTILE, VOCABULARY, plain_forward, random_texts, streams, tiny_model
from transformers import DynamicCache

from rlhf.models import select
from rlhf.sampling import gumbel_noise, sample

PROMPTS = random_texts([3, 1, 6, 2, 4, 9, 3, 2], seed=1)
LIMIT = 10


def sampled(model, prompts=PROMPTS, noise=None, limit=LIMIT, temperature=1.0):
    noise = noise or streams(len(prompts), seed=5)
    return sample(model, prompts, noise, limit, EOS, temperature)


def sampled_naively(model, prompts, noise, limit, temperature):
    """One row at a time: no cache, no padding, the whole text again for every token."""
    responses = []
    for prompt, stream in zip(prompts, noise, strict=True):
        response: list[int] = []
        while len(response) < limit and EOS not in response:
            logits = plain_forward(model, prompt + response)[0][-1].double().numpy()
            gumbel = -np.log(stream.standard_exponential(VOCABULARY))
            response.append(int(np.argmax(logits / temperature + gumbel)))
        responses.append(response)
    return responses


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_cached_padded_sampling_equals_the_naive_loop(model, temperature):
    select(model, "ppo")
    responses = sampled(model, temperature=temperature)
    naive = sampled_naively(model, PROMPTS, streams(8, seed=5), LIMIT, temperature)
    assert responses == naive
    assert len({len(response) for response in responses}) > 1  # some ended before others


@pytest.mark.parametrize("name", ["sft", None])
def test_the_active_adapter_is_the_one_that_samples(llama, name):
    select(llama, "ppo")
    other = sampled(llama)
    select(llama, name)
    assert sampled(llama) == sampled_naively(llama, PROMPTS, streams(8, seed=5), LIMIT, 1.0) != other


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("generation", [None, HOSTILE])
def test_frequencies_are_those_of_the_full_softmax(generation, temperature):
    """Chi-square over 4,000 draws with a fixed seed; a false alarm has probability 1e-4 per new seed."""
    model = tiny_model("llama", generation=generation)
    select(model, "ppo")
    logits = plain_forward(model, PROMPTS[0])[0][-1].double()
    expected = 4000 * torch.softmax(logits / temperature, 0).numpy()
    draws = sampled(model, PROMPTS[:1] * 4000, streams(4000), 1, temperature)
    counts = np.bincount([draw[0] for draw in draws], minlength=VOCABULARY)
    rare = expected < 5  # the approximation's rule of thumb: such cells count together
    cells = [np.append(column[~rare], column[rare].sum()) for column in (counts, expected)]
    cells = [column[:-1] if cells[1][-1] == 0 else column for column in cells]
    assert len(cells[0]) >= 6
    assert stats.chisquare(*cells).pvalue > 1e-4


def test_hostile_generation_settings_change_no_token():
    friendly, hostile = tiny_model("llama"), tiny_model("llama", generation=HOSTILE)
    assert hostile.get_base_model().generation_config.top_k == 1
    for model in (friendly, hostile):
        select(model, "ppo")
    assert sampled(friendly) == sampled(hostile)


def test_gumbel_noise_follows_its_distribution_and_its_stream():
    noise = gumbel_noise(streams(3), 5000)
    assert noise.shape == (3, 5000) and noise.dtype == torch.float32
    for row in noise.numpy():  # Kolmogorov-Smirnov; a false alarm has probability 1e-4 per row and new seed
        assert stats.kstest(row, stats.gumbel_r.cdf).pvalue > 1e-4
    assert torch.equal(gumbel_noise(streams(3)[2:], 5000)[0], noise[2])
    assert np.abs(np.corrcoef(noise.numpy()) - np.eye(3)).max() < 0.06  # 4 / sqrt(5000)


def test_every_response_ends_with_its_only_eos_or_is_full(model):
    select(model, "ppo")
    responses = sampled(model, PROMPTS * 4, streams(32))
    ended = [response for response in responses if response[-1] == EOS]
    full = [response for response in responses if response[-1] != EOS]
    assert ended and full
    assert all(EOS not in response[:-1] and len(response) <= LIMIT for response in ended)
    assert all(EOS not in response and len(response) == LIMIT for response in full)


def test_a_limit_of_one_gives_one_token_and_a_longer_limit_only_adds(model):
    select(model, "ppo")
    responses = sampled(model)
    for limit in (1, 2, 5):
        assert sampled(model, limit=limit) == [response[:limit] for response in responses]


def test_a_row_depends_on_no_other_row(model):
    """Alone, in a batch, in another order, beside copies: one prompt and one stream give one response."""
    select(model, "ppo")
    prompts = PROMPTS * 2
    together = sampled(model, prompts, streams(16, seed=5))
    alone = [sampled(model, [p], [streams(16, seed=5)[i]])[0] for i, p in enumerate(prompts)]
    assert together == alone
    order = [7, 15, 0, 3, 9, 1]
    noise = streams(16, seed=5)
    part = sampled(model, [prompts[i] for i in order], [noise[i] for i in order])
    assert part == [together[i] for i in order]
    twins = sampled(model, PROMPTS[:1] * 2, [streams(1)[0], streams(1)[0]])
    assert twins[0] == twins[1]


def test_rows_that_ended_leave_the_batch_and_the_others_go_on(monkeypatch, model):
    select(model, "ppo")
    kept = []
    original = DynamicCache.batch_select_indices

    def counting(cache, indices):
        kept.append(indices.tolist())
        return original(cache, indices)

    monkeypatch.setattr(DynamicCache, "batch_select_indices", counting)
    responses = sampled(model, temperature=1.5, limit=25)
    assert kept and kept[0] != list(range(len(kept[0])))
    assert responses == sampled_naively(model, PROMPTS, streams(8, seed=5), 25, 1.5)


def test_sampling_leaves_no_trace(llama):
    """No gradient, no global random state, no input edited in place."""
    select(llama, "ppo", train=True)
    prompts, state = [list(prompt) for prompt in PROMPTS], torch.get_rng_state()
    sampled(llama, prompts)
    assert prompts == PROMPTS
    assert torch.equal(torch.get_rng_state(), state)
    assert not llama.training


@pytest.mark.parametrize(
    ("prompts", "count", "max_tokens", "temperature"),
    [([[1], []], 2, 4, 1.0), ([[1], [2]], 1, 4, 1.0), ([[1], [2]], 2, 0, 1.0), ([[1], [2]], 2, 4, 0.0)],
)
def test_impossible_requests_are_refused(llama, prompts, count, max_tokens, temperature):
    with pytest.raises(ValueError, match="expected a stream for each prompt"):
        sample(llama, prompts, streams(count), max_tokens, EOS, temperature)
