"""Numeric primitives, each by hand and by a second route."""

import math

import numpy as np
import pytest
import torch
from torch import nn, tensor

from rlhf.ops import kl_estimators, masked_mean, masked_sum, token_logprobs, whiten

NAN = float("nan")
MASK = tensor([[True, True, False], [True, False, False]])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# masked_sum, masked_mean


def test_masked_sum_and_mean_by_hand():
    x = tensor([[1.0, 2.0, 1e6], [6.0, NAN, float("inf")]])
    assert masked_sum(x, MASK) == 9.0  # 1 + 2 + 6
    assert masked_mean(x, MASK) == 3.0  # over 3 real tokens, not 6, nor a mean of means
    assert masked_mean(x, torch.zeros_like(MASK)) == 0.0
    assert masked_sum(x, torch.zeros_like(MASK)) == 0.0


def test_gradient_of_a_masked_mean_ignores_what_is_masked():
    x = tensor([[1.0, 2.0, 1e6], [6.0, NAN, float("inf")]], requires_grad=True)
    masked_mean(x, MASK).backward()
    third = tensor(1.0) / 3
    assert torch.equal(x.grad, third * MASK)


@pytest.mark.parametrize("function", [masked_sum, masked_mean])
def test_a_mask_of_another_shape_is_refused(function):
    for shape in ((2, 1), (3,), (3, 2)):
        with pytest.raises(ValueError, match="shapes differ"):
            function(torch.zeros(2, 3), torch.ones(shape, dtype=torch.bool))


# whiten


def test_whiten_by_hand():
    # 1, 2, 6: mean 3, deviations -2, -1, 3, variance (4 + 1 + 9) / 3 = 14/3 (n, not n - 1).
    whitened = whiten(tensor([[1.0, 2.0, 1e6], [6.0, NAN, 0.0]]), MASK)
    std = (14 / 3) ** 0.5
    assert whitened.flatten().tolist() == pytest.approx(
        [-2 / std, -1 / std, 0, 3 / std, 0, 0], abs=1e-6
    )  # float32
    assert whitened[~MASK].tolist() == [0.0, 0.0, 0.0]


def test_whiten_against_numpy():
    x, mask = torch.randn(8, 5, dtype=torch.float64) * 3 + 7, torch.rand(8, 5) < 0.6
    real = x[mask].numpy()
    whitened = whiten(x, mask, eps=0.0)[mask].numpy()
    np.testing.assert_allclose(whitened, (real - real.mean()) / real.std(ddof=0), rtol=1e-12, atol=1e-14)
    assert whitened.mean() == pytest.approx(0, abs=1e-14)
    assert whitened.std() == pytest.approx(1, rel=1e-14)


def test_whiten_adds_eps_to_the_variance():
    # 0 and 2: variance 1, and 1 / sqrt(1 + 3) = 1/2.
    assert whiten(tensor([0.0, 2.0]), tensor([True, True]), eps=3.0).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("values", [[5.0, 1e6, NAN], [-1e6, NAN, NAN], [0.0, 1.0, 2.0]])
def test_one_real_token_whitens_to_zero(values):
    assert whiten(tensor([values]), tensor([[True, False, False]])).tolist() == [[0.0, 0.0, 0.0]]


def test_equal_tokens_and_no_tokens_whiten_to_zero():
    assert whiten(tensor([2.0, 2.0, NAN]), tensor([True, True, False])).tolist() == [0.0, 0.0, 0.0]
    assert whiten(tensor([2.0, NAN]), tensor([False, False])).tolist() == [0.0, 0.0]


# kl_estimators


def test_kl_estimators_as_printed():
    # Printed to five decimals, hence half of the last digit.
    d = tensor([-0.3315, -0.0426, 0.6351])
    k1, k2, k3 = kl_estimators(d - 2, torch.full_like(d, -2.0))
    assert k1.tolist() == pytest.approx(d.tolist(), abs=3e-7)  # -2 + d is rounded in float32
    assert k2.tolist() == pytest.approx([0.05495, 0.00091, 0.20168], abs=5e-6)
    assert k3.tolist() == pytest.approx([0.06156, 0.00092, 0.16498], abs=5e-6)


def test_kl_estimators_in_expectation_are_the_kl_of_a_categorical():
    p, q = torch.randn(2, 7, dtype=torch.float64).log_softmax(-1)
    exact = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (p, q)))
    k1, k2, k3 = (float((p.exp() * k).sum()) for k in kl_estimators(p, q))  # enumeration: every sample once
    assert k1 == pytest.approx(float(exact), rel=1e-13)
    assert k3 == pytest.approx(float(exact), rel=1e-13)
    assert abs(k2 - float(exact)) > 0.01  # biased
    assert kl_estimators(p, q)[2].min() > 0


def test_kl_of_a_policy_with_itself_is_exactly_zero():
    x = torch.randn(50) * 10
    assert all(k.eq(0).all() for k in kl_estimators(x, x.clone()))
    with pytest.raises(ValueError, match="shapes differ"):
        kl_estimators(x, x[:1])


# token_logprobs


def frozen_head(hidden_size: int, vocabulary: int, dtype=torch.float32, bias: bool = False) -> nn.Linear:
    return nn.Linear(hidden_size, vocabulary, bias=bias).to(dtype).requires_grad_(False)


def by_autograd(hidden, head, tokens, temperature, weights):
    """log_softmax and gather in float64: log-probabilities, entropy, gradient of sum(weights x logprobs)."""
    wide = hidden.detach().double().requires_grad_()
    bias = None if head.bias is None else head.bias.double()
    log_p = (nn.functional.linear(wide, head.weight.double(), bias) / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, tokens[:, None]).squeeze(-1)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), -(log_p.exp() * log_p).sum(-1).detach(), wide.grad


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("dtype", "bias", "close", "close_gradient"),
    [
        # float32 logits of size about 3: a few roundings of 2^-23 each, also where the input is float64.
        (torch.float32, False, 3e-6, 3e-6),
        (torch.float64, True, 3e-6, 3e-6),
        # bfloat16 keeps 8 bits: logits near 3 err by 2^-8 (twice that at temperature 1/2), and the gradient,
        # of size about 1, is rounded four times more.
        (torch.bfloat16, False, 2**-5, 2**-5),
    ],
)
def test_token_logprobs_against_autograd(dtype, bias, close, close_gradient, temperature):
    head = frozen_head(6, 11, dtype, bias)
    hidden = (torch.randn(9, 6) * 2).to(dtype).requires_grad_()
    tokens, weights = torch.randint(11, (9,)), torch.randn(9)
    logprobs, entropy = token_logprobs(hidden, head, tokens, temperature)
    (logprobs * weights).sum().backward()
    expected_logprobs, expected_entropy, expected_gradient = by_autograd(
        hidden, head, tokens, temperature, weights
    )
    assert (logprobs.dtype, entropy.dtype, hidden.grad.dtype) == (torch.float32, torch.float32, dtype)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=close)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=close)
    torch.testing.assert_close(hidden.grad.double(), expected_gradient, rtol=0, atol=close_gradient)
    assert not entropy.requires_grad


def test_token_logprobs_by_finite_differences():
    # Results are float32, so steps must be wide: 6e-8 / 0.01 rounding and 0.01^2 curvature, below 1e-4 here.
    head, tokens = frozen_head(3, 5, torch.float64), tensor([4, 0])
    hidden = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda h: token_logprobs(h, head, tokens, 0.7)[0].double(), hidden, eps=1e-2, atol=1e-4, rtol=0
    )


def test_token_logprobs_across_chunk_borders():
    # 2^22 logits at a time: 1,024 rows of 4,096, so 2,049 rows are chunks of 1,024, 1,024 and 1.
    head, hidden = frozen_head(2, 2**12), torch.randn(2049, 2, requires_grad=True)
    tokens, weights = torch.randint(2**12, (2049,)), torch.randn(2049)
    logprobs, entropy = token_logprobs(hidden, head, tokens)
    (logprobs * weights).sum().backward()
    expected = by_autograd(hidden, head, tokens, 1.0, weights)
    # float32 near ln 4096 = 8.3 has steps of 2^-20; one such step in every log-probability is 8.3 x 2^-20 =
    # 8e-6 in the entropy.
    for found, wanted in zip((logprobs, entropy, hidden.grad), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_limits_of_the_distribution():
    head = frozen_head(1, 8)
    flat = token_logprobs(torch.zeros(1, 1), head, tensor([3]))
    assert [x.item() for x in flat] == pytest.approx([-math.log(8), math.log(8)], rel=2e-7)
    favourite = head.weight.flatten().argmax()
    sure = token_logprobs(torch.full((1, 1), 1e6), head, favourite[None])
    assert [x.item() for x in sure] == [0.0, 0.0]  # probabilities of 0 give no NaN


def test_token_logprobs_leave_their_arguments_alone_and_need_no_gradient():
    head, hidden, tokens = frozen_head(4, 6), torch.randn(3, 4), tensor([0, 5, 2])
    before = [x.clone() for x in (hidden, head.weight, tokens)]
    logprobs, _ = token_logprobs(hidden, head, tokens, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, head.weight, tokens), strict=True))
    assert not logprobs.requires_grad
    assert [len(x) for x in token_logprobs(hidden[:0], head, tokens[:0])] == [0, 0]


def test_token_logprobs_refuse_wrong_shapes_and_a_trainable_head():
    head = frozen_head(4, 6)
    for hidden, tokens in ((torch.zeros(2, 3, 4), torch.zeros(2, 3)), (torch.zeros(2, 4), torch.zeros(3))):
        with pytest.raises(ValueError, match=r"hidden \[N, H\] and tokens \[N\]"):
            token_logprobs(hidden, head, tokens.long())
    with pytest.raises(ValueError, match="must be frozen"):
        token_logprobs(torch.zeros(2, 4), head.requires_grad_(True), tensor([0, 1]))
