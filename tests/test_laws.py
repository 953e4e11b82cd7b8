"""Laws that hold for all numbers, not only for those of the tests by hand.

The examples are the same in every run: derandomised, no database, no deadline.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.batching import micro_batches, pad_pairs
from rlhf.objectives import gae, next_kl_beta
from rlhf.ops import whiten

CPU = torch.device("cpu")


def examples(count: int):
    return settings(max_examples=count, derandomize=True, database=None, deadline=None)


IDS = st.lists(st.integers(0, 99), min_size=1, max_size=7)


@examples(100)
@given(st.lists(st.tuples(IDS, st.just([]) | IDS), min_size=1, max_size=6), st.integers(0, 99))
def test_padding_adds_nothing_and_loses_nothing(pairs, pad_id):
    prompts, responses = map(list, zip(*pairs, strict=True))
    batch = pad_pairs(prompts, responses, pad_id, CPU)
    for row, (prompt, response) in enumerate(pairs):
        mask, kept = batch.attention_mask[row], batch.response_mask[row]
        assert batch.input_ids[row][mask].tolist() == prompt + response
        assert kept.tolist() == [True] * len(response) + [False] * (len(kept) - len(response))
        assert set(batch.input_ids[row][~mask].tolist()) <= {pad_id}


@examples(150)
@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 99))
def test_micro_batches_hold_every_index_once_within_the_limit(lengths, limit):
    groups = micro_batches(lengths, limit)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(len(g) == 1 or max(lengths[i] for i in g) * len(g) <= limit for g in groups)


@st.composite
def masked_rows(
    draw, low: float = -9.0, high: float = 9.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two tables [B, R] of numbers and a mask that is True up to each row's own length."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    number = st.floats(-9, 9, width=32)
    cells = st.lists(number, min_size=rows * columns, max_size=rows * columns)
    first, second = (torch.tensor(draw(cells), dtype=torch.float64).reshape(rows, columns) for _ in range(2))
    lengths = torch.tensor(draw(st.lists(st.integers(1, columns), min_size=rows, max_size=rows)))
    return first, second, torch.arange(columns) < lengths[:, None]


@examples(100)
@given(masked_rows(), st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_the_sum_over_all_later_steps(table, gamma, lam):
    """A_t = sum over l of (gamma lam)^l delta_(t+l), by its definition: Schulman et al. 2016, equation 16."""
    rewards, values, mask = table
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert not advantages[~mask].any() and not returns[~mask].any()
    for row in range(len(mask)):
        length = int(mask[row].sum())
        v = [*values[row, :length].tolist(), 0.0]
        delta = [rewards[row, t].item() + gamma * v[t + 1] - v[t] for t in range(length)]
        sums = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        assert advantages[row, :length].tolist() == pytest.approx(sums, abs=1e-12)
        totals = [sums[t] + v[t] for t in range(length)]
        assert returns[row, :length].tolist() == pytest.approx(totals, abs=1e-12)


@examples(100)
@given(masked_rows())
def test_whitened_numbers_have_mean_0_and_deviation_1(table):
    numbers, _, mask = table
    whitened, spread = whiten(numbers, mask)[mask], numbers[mask].std(correction=0).item()
    assert not whiten(numbers, mask)[~mask].any()
    assert whitened.mean().item() == pytest.approx(0, abs=1e-9)
    # variance / (variance + 1e-8) is what the epsilon leaves of 1.
    assert whitened.square().mean().item() == pytest.approx(spread**2 / (spread**2 + 1e-8), abs=1e-9)


@examples(150)
@given(
    st.sampled_from(["fixed", "ziegler", "stepwise"]),
    st.floats(0.01, 1),
    st.lists(st.floats(-5, 1e6), max_size=30),
    st.floats(1e-3, 10),
    st.integers(1, 256),
)
def test_the_kl_coefficient_stays_positive_and_bounded(controller, beta, found, target, rollouts):
    horizon = 256  # params.yaml asks for at least as many as rollouts
    for kl in found:
        after = next_kl_beta(controller, beta, kl, target, rollouts, horizon)
        assert 0.8 * beta * (1 - 1e-12) <= after <= 1.2 * beta * (1 + 1e-12)
        assert after > 0 and (controller != "stepwise" or 0.01 <= after <= 1)
        beta = after
