"""Losses and returns, each by hand, by a second route, and with poison under the padding."""

import math

import pytest
import torch
from torch import tensor

from rlhf import objectives
from rlhf.objectives import (
    gae,
    label_loss,
    next_kl_beta,
    policy_loss,
    reward_to_go,
    sequence_nll,
    token_rewards,
    value_loss,
)

NAN = float("nan")
LENGTHS = (1, 3, 5)  # one token, fewer than the maximum, the maximum
MASK = torch.arange(5) < tensor(LENGTHS)[:, None]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draws(number: int) -> list[torch.Tensor]:
    return list(torch.randn(number, 3, 5, dtype=torch.float64))


def test_sequence_nll_weighs_sequences_equally():
    # (1 + 2 + 3) / 3 = 2 and 8 / 1 = 8: each sequence its own mean. A token mean would be 14 / 4.
    logprobs = tensor([[-1.0, -2.0, -3.0], [-8.0, NAN, 1e6]], requires_grad=True)
    nll = sequence_nll(logprobs, tensor([[True] * 3, [True, False, False]]))
    assert nll.tolist() == [2.0, 8.0]
    nll.sum().backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1 / 3, -1 / 3, -1 / 3, -1, 0, 0], rel=1e-7)
    assert sequence_nll(tensor([[NAN]]), tensor([[False]])).tolist() == [0.0]


@pytest.mark.parametrize(("x", "y"), [(0.0, 1), (2.0, 1), (2.0, 0), (-3.0, 1), (-3.0, 0)])
def test_label_loss_is_the_negative_log_likelihood(x, y):
    logit = tensor([x], dtype=torch.float64, requires_grad=True)
    probability = 1 / (1 + math.exp(-x))
    loss = label_loss(logit, tensor([y]))
    assert loss.item() == pytest.approx(-math.log(probability if y else 1 - probability), rel=1e-14)
    loss.sum().backward()
    assert logit.grad.item() == pytest.approx(probability - y, rel=1e-14)


def test_label_loss_gives_one_value_per_row_and_never_overflows():
    assert label_loss(tensor([1000.0, 1000.0, -1000.0]), tensor([0, 1, 1])).tolist() == [1000.0, 0.0, 1000.0]


def test_scores_are_centred_and_bounded():
    logits = torch.linspace(-9, 9, 19, dtype=torch.float64)
    scores = objectives.score_from_logit(logits)
    torch.testing.assert_close(scores, torch.tanh(logits / 2), rtol=0, atol=1e-15)
    assert objectives.score_from_logit(tensor([-1000.0, 0.0, 1000.0])).tolist() == [-1.0, 0.0, 1.0]


def test_the_score_lands_on_the_last_real_token():
    zeros = torch.zeros(3, 5)
    rewards = token_rewards(tensor([1.0, 2.0, 3.0]), zeros, zeros.clone(), MASK, kl_beta=0.5)
    assert rewards.tolist() == [[1, 0, 0, 0, 0], [0, 0, 2, 0, 0], [0, 0, 0, 0, 3]]


def test_the_kl_penalty_by_hand():
    # Less likely than under the reference is rewarded: -1/4 (-2 - -1) = 1/4; -1/4 (-1 - -3) = -1/2, plus 2.
    logprobs, ref_logprobs = tensor([[-2.0, -1.0, NAN]]), tensor([[-1.0, -3.0, 1e6]])
    rewards = token_rewards(tensor([2.0]), logprobs, ref_logprobs, tensor([[True, True, False]]), 0.25)
    assert rewards.tolist() == [[0.25, 1.5, 0.0]]


def test_rewards_sum_to_the_score_less_beta_times_the_sequence_kl():
    logprobs, ref_logprobs, _ = draws(3)
    scores = torch.randn(3, dtype=torch.float64)
    rewards = token_rewards(scores, logprobs, ref_logprobs, MASK, 0.1)
    for row, length in enumerate(LENGTHS):
        kl = logprobs[row, :length].sum() - ref_logprobs[row, :length].sum()
        assert rewards[row].sum().item() == pytest.approx((scores[row] - 0.1 * kl).item(), rel=1e-12)


@pytest.mark.parametrize(("scores", "mask"), [(2, MASK), (3, MASK & tensor([[True], [False], [True]]))])
def test_rewards_need_a_score_and_a_token_for_each_sequence(scores, mask):
    with pytest.raises(ValueError, match="one score for each sequence, and at least one real token"):
        token_rewards(torch.zeros(scores), torch.zeros(3, 5), torch.zeros(3, 5), mask, 0.1)


def test_gae_by_hand():
    # gamma 1/2, lambda 1/4, so gamma lambda = 1/8; values 1/2, 1, 1/4; rewards 1, 0, 2; then padding.
    # delta = (1 + 1/2 - 1/2, 0 + 1/8 - 1, 2 - 1/4) = (1, -7/8, 7/4)
    # A_2 = 7/4;  A_1 = -7/8 + 7/32 = -21/32;  A_0 = 1 - 21/256 = 235/256
    rewards, values = tensor([[1.0, 0.0, 2.0, 1e6, NAN]]), tensor([[0.5, 1.0, 0.25, NAN, 1e6]])
    advantages, returns = gae(rewards, values, MASK[1:2], gamma=0.5, lam=0.25)
    assert advantages.tolist() == [[235 / 256, -21 / 32, 7 / 4, 0, 0]]
    assert returns.tolist() == [[235 / 256 + 1 / 2, -21 / 32 + 1, 2, 0, 0]]  # raw advantage + value


def test_gae_is_zero_before_the_first_real_token_too():
    values = tensor([[NAN, 2.0]])
    advantages, returns = gae(torch.ones(1, 2), values, tensor([[False, True]]), gamma=1.0, lam=1.0)
    assert (advantages.tolist(), returns.tolist()) == ([[0.0, -1.0]], [[0.0, 1.0]])  # 1 - 2, and the reward


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.8, 0.0), (0.0, 0.7), (1.0, 1.0)])
def test_gae_is_the_double_sum(gamma, lam):
    rewards, values, _ = draws(3)
    advantages, returns = gae(rewards, values, MASK, gamma, lam)
    for row, length in enumerate(LENGTHS):
        r, v = rewards[row, :length].tolist(), [*values[row, :length].tolist(), 0.0]
        for t in range(length):
            terms = ((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, length))
            expected = sum(terms)
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-14)
            assert returns[row, t].item() == pytest.approx(expected + v[t], abs=1e-14)


def test_gae_without_discount_returns_the_reward_to_go():
    rewards, values, _ = draws(3)
    _, returns = gae(rewards, values, MASK, gamma=1.0, lam=1.0)
    for row, length in enumerate(LENGTHS):
        for t in range(length):  # whatever the values are
            assert returns[row, t].item() == pytest.approx(rewards[row, t:length].sum().item(), abs=1e-14)


def test_reward_to_go_by_hand():
    # gamma 1/2. Row 0: 4. Row 1: 1 + (2 + 4/2)/2 = 3, 2 + 4/2 = 4, 4. What is under the mask counts nothing.
    rewards = tensor([[4.0, 1e6, NAN], [1.0, 2.0, 4.0]])
    mask = tensor([[True, False, False], [True, True, True]])
    assert reward_to_go(rewards, mask, 0.5).tolist() == [[4.0, 0.0, 0.0], [3.0, 4.0, 4.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reward_to_go_is_the_double_sum_and_gae_without_values(gamma):
    rewards = draws(1)[0]
    found = reward_to_go(rewards, MASK, gamma)
    for row, length in enumerate(LENGTHS):
        for t in range(length):
            expected = sum(gamma ** (k - t) * rewards[row, k].item() for k in range(t, length))
            assert found[row, t].item() == pytest.approx(expected, abs=1e-14)
    assert not found[~MASK].any()
    for advantages_or_returns in gae(rewards, torch.zeros_like(rewards), MASK, gamma, lam=1.0):
        assert torch.equal(advantages_or_returns, found)


def test_policy_loss_by_hand():
    # clip 1/4; ratios 2, 2, 1/2, 1/2, 1 with advantages 1, -1, 1, -1, 3.
    # 2, +1: clipped to 5/4, -1.25.     2, -1: the worse side stays, 2.
    # 1/2, +1: stays, -0.5.             1/2, -1: clipped to 3/4, 0.75.      1: -3.     Mean -0.75 / 5.
    logprobs = tensor([[2.0, 2.0, 0.5, 0.5, 1.0]]).log().requires_grad_()
    advantages = tensor([[1.0, -1.0, 1.0, -1.0, 3.0]])
    result = policy_loss(logprobs, torch.zeros(1, 5), advantages, MASK[2:], clip=0.25)
    assert result.loss.item() == pytest.approx((-1.25 + 2 - 0.5 + 0.75 - 3) / 5, abs=1e-7)
    assert result.mean_ratio.item() == pytest.approx(6 / 5, rel=1e-7)
    assert result.clip_fraction.item() == pytest.approx(4 / 5, rel=1e-7)
    result.loss.backward()  # no gradient where the clipped side counts; else -A ratio / 5
    assert logprobs.grad.flatten().tolist() == pytest.approx([0, 2 / 5, -0.5 / 5, 0, -3 / 5], abs=1e-7)


@pytest.mark.parametrize(("bound", "advantage"), [(1.25, 1.0), (0.75, -1.0)])
@pytest.mark.parametrize(("beyond", "clipped"), [(-1e-9, False), (0.0, False), (1e-9, True)])
def test_clipping_starts_exactly_at_its_bounds(bound, advantage, beyond, clipped):
    # exp(log(5/4)), exp(log(3/4)) and their distance to 1 are exact in float64: at the bound is still inside.
    ratio = tensor([[1 + (bound - 1) * (1 + beyond)]], dtype=torch.float64)
    logprobs, zero = ratio.log().requires_grad_(), torch.zeros_like(ratio)
    loss, _, clip_fraction = policy_loss(logprobs, zero, zero + advantage, ratio > 0, clip=0.25)
    loss.backward()
    inside = ratio.item() * -advantage
    assert loss.item() == pytest.approx(bound * -advantage if clipped else inside, rel=1e-15)
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else inside, rel=1e-15)
    assert clip_fraction.item() == clipped


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    logprobs, advantages, _ = draws(3)
    ours, theirs = logprobs.clone().requires_grad_(), logprobs.clone().requires_grad_()
    result = policy_loss(ours, logprobs, advantages, MASK, clip=0.2)
    result.loss.backward()
    (-(theirs * advantages)[MASK].sum() / sum(LENGTHS)).backward()
    assert (result.mean_ratio.item(), result.clip_fraction.item()) == (1.0, 0.0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("value", "old", "target", "expected", "gradient"),
    [
        (1.0, 0.0, 2.0, 0.5 * 1.75**2, 0.0),  # clipped to 1/4: (1/4 - 2)^2 = 3.0625 beats (1 - 2)^2
        (1.0, 0.0, 0.0, 0.5 * 1.0, 1.0),  # clipped to 1/4: 1/16 does not beat 1
        (-1.0, 0.0, -2.0, 0.5 * 1.75**2, 0.0),  # the same below
        (0.125, 0.0, 1.0, 0.5 * 0.875**2, -0.875),  # inside: no clipping
        (5.25, 5.0, 7.0, 0.5 * 1.75**2, -1.75),  # around the old value, not around 0
    ],
)
def test_value_loss_by_hand(value, old, target, expected, gradient):
    values, mask = tensor([[value, NAN]], requires_grad=True), tensor([[True, False]])
    loss = value_loss(values, tensor([[old, 0.0]]), tensor([[target, 0.0]]), mask, clip=0.25)
    assert loss.item() == expected
    loss.backward()
    assert values.grad[0, 0].item() == gradient


def everything(a, b, c, mask) -> dict[str, torch.Tensor]:
    """Every loss, statistic and gradient of three [B, R] tensors, by name."""
    a = a.clone().requires_grad_()
    policy, value = policy_loss(a, b, c, mask, 0.2), value_loss(a, b, c, mask, 0.2)
    found = {"nll": sequence_nll(a, mask), "policy": policy.loss, "value": value}
    gradients = {f"d {k}": torch.autograd.grad(v.sum(), a, retain_graph=True)[0] for k, v in found.items()}
    advantages, returns = gae(a.detach(), b, mask, 0.9, 0.8)
    scores = torch.ones(len(a), dtype=a.dtype)
    rewards = token_rewards(scores, a.detach(), b, mask, 0.1)
    statistics = {"ratio": policy.mean_ratio, "clipped": policy.clip_fraction}
    statistics |= {"to go": reward_to_go(b, mask, 0.9)}
    return found | gradients | statistics | {"advantages": advantages, "returns": returns, "rewards": rewards}


NAMES = list(everything(*torch.zeros(3, 3, 5), MASK))


@pytest.mark.parametrize("poison", [1e6, -1e6, NAN, float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_what_lies_under_the_padding_changes_nothing(name, poison):
    inputs = draws(3)
    poisoned = [torch.where(MASK, x, poison * sign) for x, sign in zip(inputs, (1, -1, 1), strict=True)]
    assert torch.equal(everything(*poisoned, MASK)[name], everything(*inputs, MASK)[name])


@pytest.mark.parametrize("name", NAMES)
def test_more_padding_and_another_row_order_change_nothing(name):
    inputs, order = draws(3), tensor([2, 0, 1])
    wider = [torch.nn.functional.pad(x, (0, 2), value=1.0)[order] for x in inputs]
    found = everything(*wider, torch.nn.functional.pad(MASK, (0, 2))[order])[name]
    expected = everything(*inputs, MASK)[name]
    if expected.ndim:
        expected = expected[order]
    if expected.ndim == 2:
        assert not found[:, 5:].any()
        found = found[:, :5]
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)  # sums in another order


@pytest.mark.parametrize("name", ["policy", "value"])
def test_rows_weighted_by_their_tokens_sum_to_the_whole(name):
    inputs = draws(3)
    rows = [everything(*(x[i : i + 1] for x in inputs), MASK[i : i + 1]) for i in range(3)]
    whole = everything(*inputs, MASK)
    weights = [length / sum(LENGTHS) for length in LENGTHS]
    for key, join in ((name, sum), (f"d {name}", torch.cat)):
        parts = [row[key] * weight for row, weight in zip(rows, weights, strict=True)]
        torch.testing.assert_close(join(parts), whole[key], rtol=1e-13, atol=1e-15)


def test_no_argument_is_edited():
    inputs = [*draws(3), MASK]
    before = [x.clone() for x in inputs]
    everything(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(before, inputs, strict=True))


@pytest.mark.parametrize(
    ("function", "n_tensors", "settings"),
    [
        (sequence_nll, 1, ()),
        (reward_to_go, 1, (1.0,)),
        (gae, 2, (1.0, 1.0)),
        (policy_loss, 3, (0.2,)),
        (value_loss, 3, (0.2,)),
    ],
)
def test_shapes_must_agree(function, n_tensors, settings):
    for wrong in range(n_tensors + 1):
        arguments = [torch.zeros(3, 5)] * n_tensors + [MASK]
        arguments[wrong] = arguments[wrong][:, :1]  # would broadcast
        with pytest.raises(ValueError, match="shapes differ"):
            function(*arguments, *settings)


@pytest.mark.parametrize(
    ("kl", "expected"), [(12.0, 0.150768), (6.0, 0.15), (0.0, 0.149232), (6.6, 0.150384)]
)
def test_zieglers_controller(kl, expected):
    """beta 0.15, target 6, horizon 10,000, 256 rollouts: 1 +- 0.2 x 0.0256, and 1 + 0.1 x 0.0256."""
    assert next_kl_beta("ziegler", 0.15, kl, 6.0, 256, 10_000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kl_beta", "kl", "expected"),
    [
        (0.1, 0.0301, 0.12),  # above 1.5 x 0.02
        (0.1, 0.0299, 0.1),
        (0.1, 0.0134, 0.1),
        (0.1, 0.0133, 0.1 / 1.2),  # below 0.02 / 1.5
        (0.1, -0.01, 0.1 / 1.2),  # the k1 estimate can be negative
        (0.9, 1.0, 1.0),
        (0.011, 0.0, 0.01),
    ],
)
def test_the_stepwise_controller_and_its_bounds(kl_beta, kl, expected):
    assert next_kl_beta("stepwise", kl_beta, kl, 0.02, 8, 1) == pytest.approx(expected, rel=1e-12)


def test_a_fixed_coefficient_stays_and_another_name_is_an_error():
    assert next_kl_beta("fixed", 0.05, 100.0, 0.02, 8, 1) == 0.05
    with pytest.raises(ValueError, match="unknown KL controller 'adaptive'"):
        next_kl_beta("adaptive", 0.05, 0.0, 0.02, 8, 1)


@pytest.mark.parametrize("controller", ["ziegler", "stepwise"])
def test_a_controller_brings_the_kl_to_its_target(controller):
    """A stand-in for training in which the KL is 0.02 / beta: only beta = 0.2 meets the target of 0.1."""
    kl_beta = 0.9
    for _ in range(400):
        kl_beta = next_kl_beta(controller, kl_beta, 0.02 / kl_beta, 0.1, 64, 640)
    assert 0.1 / 1.5 / 1.2 < 0.02 / kl_beta < 0.1 * 1.5 * 1.2
