"""Rewards from preferences: the Bradley-Terry loss and the centred score, by hand and by a second route."""

import math

import pytest
import torch
from torch import tensor

from rlhf.objectives import Centre, label_loss, pairwise_loss, score_from_logit


@pytest.mark.parametrize(("chosen", "rejected"), [(0.0, 0.0), (2.0, -1.0), (-1.0, 2.0), (7.5, 7.25)])
def test_pairwise_loss_by_hand(chosen, rejected):
    """P(chosen is preferred) = e^c / (e^c + e^r), as Bradley and Terry write it; gradient P - 1, 1 - P."""
    rewards = tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    probability = math.exp(chosen) / (math.exp(chosen) + math.exp(rejected))
    loss = pairwise_loss(rewards[:1], rewards[1:])
    assert loss.tolist() == pytest.approx([-math.log(probability)], rel=1e-13)
    loss.sum().backward()
    assert rewards.grad.tolist() == pytest.approx([probability - 1, 1 - probability], rel=1e-13)


def test_pairwise_loss_is_that_of_the_difference_and_never_overflows():
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = pairwise_loss(chosen, rejected)
    expected = label_loss(chosen - rejected, torch.ones(5))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert pairwise_loss(tensor([1000.0, -1000.0]), tensor([0.0, 0.0])).tolist() == [0.0, 1000.0]


def test_a_constant_added_to_both_rewards_changes_no_preference():
    chosen, rejected = tensor([0.5, -2.0, 3.0]), tensor([0.25, 1.0, 3.0])  # exact in float32 with 64 added
    assert torch.equal(pairwise_loss(chosen + 64, rejected + 64), pairwise_loss(chosen, rejected))


def test_a_centre_gives_scores_of_mean_0_and_deviation_1():
    logits = torch.linspace(-4, 9, 17, dtype=torch.float64) ** 2
    centre = Centre(logits.mean().item(), logits.std(correction=0).item())
    scores = score_from_logit(logits, centre)
    assert scores.mean().item() == pytest.approx(0, abs=1e-14)
    assert scores.std(correction=0).item() == pytest.approx(1, rel=1e-14)
    assert score_from_logit(tensor([1.0, 3.0, -5.0]), Centre(1.0, 4.0)).tolist() == [0.0, 0.5, -1.5]


def test_a_pair_needs_both_rewards():
    with pytest.raises(ValueError, match="shapes differ"):
        pairwise_loss(torch.zeros(2), torch.zeros(1))
