"""Numeric primitives: tensors in, tensors out, nothing edited in place."""

import torch
from torch import Tensor, nn


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask` (bool, x's shape) is True, else 0: padding never acts, not even as NaN."""
    _same_shape(x, mask)
    return torch.where(mask, x, torch.zeros_like(x))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` over `mask`."""
    return masked(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over `mask`; 0 where the mask is empty."""
    return masked_sum(x, mask) / mask.sum().clamp_min(1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over real tokens, 0 elsewhere; variance divides by the count.

    One real token gives 0, not NaN. Follows the reference notebook's `compute_advantage`.
    """
    mean = masked_mean(x, mask)
    centred = masked(x - mean, mask)
    variance = masked_mean(centred.square(), mask)
    return centred * torch.rsqrt(variance + eps)


def kl_estimators(logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three per-sample estimators of KL(policy || reference), nats, for samples of the policy.

    With d = logprobs - ref_logprobs:  k1 = d (unbiased),  k2 = d^2 / 2 (biased, low variance),
    k3 = exp(-d) - 1 + d (unbiased, never negative). Source: J. Schulman, Approximating KL Divergence (2020).
    """
    _same_shape(logprobs, ref_logprobs)
    difference = logprobs - ref_logprobs
    return difference, difference.square() / 2, torch.exp(-difference) - 1 + difference


def token_logprobs(
    hidden: Tensor, head: nn.Linear, tokens: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, float32, nats.

    log softmax(head(hidden) / temperature)[token].   hidden [N, H], tokens [N] -> [N], [N].
    Gradients reach `hidden` alone, through the first result: the head must be frozen. Logits exist for a
    few rows at a time, which is what makes a vocabulary of 49,152 affordable on a CPU and 151,936 on a GPU.
    """
    if hidden.ndim != 2 or tokens.shape != hidden.shape[:1]:
        raise ValueError(f"expected hidden [N, H] and tokens [N], got {hidden.shape} and {tokens.shape}")
    if any(parameter.requires_grad for parameter in head.parameters()):
        raise ValueError("the language-model head must be frozen")
    return _TokenLogprobs.apply(hidden, head, tokens, temperature)


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d hidden = (W[token] - softmax @ W) / temperature, computed with the logits at hand."""

    @staticmethod
    def forward(ctx, hidden, head, tokens, temperature):
        """Log-probabilities and entropies in chunks of rows; the gradient is kept only if it is needed."""
        logprobs = hidden.new_empty(len(tokens), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        rows = max(1, 2**22 // head.weight.shape[0])
        for start in range(0, len(tokens), rows):
            chunk = slice(start, start + rows)
            logits = head(hidden[chunk]).float() / temperature
            log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
            logprobs[chunk] = log_p.gather(-1, tokens[chunk, None]).squeeze(-1)
            p = log_p.exp()
            entropy[chunk] = -(p * log_p).sum(-1)
            if gradient is not None:
                expected = p.to(hidden.dtype) @ head.weight
                gradient[chunk] = (head.weight[tokens[chunk]] - expected) / temperature
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, _grad_entropy):
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_logprobs[:, None]).to(gradient.dtype), None, None, None


def _same_shape(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape:
        raise ValueError(f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}")
