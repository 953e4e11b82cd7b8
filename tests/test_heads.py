"""Heads: what they compute, where their first weights come from, and that a file keeps their bits."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import CPU
from torch import nn

from rlhf.errors import UserError
from rlhf.heads import load_head, reward_head, save_head, zero_head

KINDS = ("linear", "mlp")


def states() -> torch.Tensor:
    return torch.linspace(-2, 2, 24).reshape(3, 8)


def test_a_zero_head_values_everything_at_zero():
    head = zero_head(8, CPU)
    assert head(states()).tolist() == [[0.0]] * 3
    assert all(parameter.requires_grad for parameter in head.parameters())


def test_the_mlp_is_two_layers_with_a_rectifier_between():
    head = reward_head("mlp", 8, 3, CPU)
    shapes = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    assert shapes == {"0.weight": (4, 8), "0.bias": (4,), "2.weight": (1, 4), "2.bias": (1,)}
    first, second = head[0], head[2]
    with torch.no_grad():
        first.bias.copy_(torch.tensor([0.5, -0.5, 0.25, 0.0]))
        second.bias.fill_(0.125)
        hidden = (states() @ first.weight.T + first.bias).clamp_min(0)
        expected = hidden @ second.weight.T + second.bias
        assert (hidden == 0).any() and (hidden > 0).any()
        torch.testing.assert_close(head(states()), expected, rtol=0, atol=1e-6)


def test_the_linear_head_is_one_layer():
    head = reward_head("linear", 8, 3, CPU)
    torch.testing.assert_close(head(states()), states() @ head.weight.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_come_from_the_seed_alone_and_fill_their_range(kind):
    def weights(seed):
        layers = [
            module for module in reward_head(kind, 64, seed, CPU).modules() if isinstance(module, nn.Linear)
        ]
        return [(layer.weight.detach(), layer.bias.detach(), layer.in_features) for layer in layers]

    torch.manual_seed(1)  # must not matter
    first = weights(3)
    torch.manual_seed(2)
    again, other = weights(3), weights(4)
    for (weight, bias, inputs), (same, _, _), (different, _, _) in zip(first, again, other, strict=True):
        assert weight.dtype == torch.float32 and not bias.any()
        assert torch.equal(weight, same) and not torch.equal(weight, different)
        bound = inputs**-0.5
        assert 0.8 * bound < weight.abs().max() <= bound
        assert weight.min() < -0.5 * bound and weight.max() > 0.5 * bound


def test_the_layers_of_the_mlp_draw_from_streams_of_their_own():
    head = reward_head("mlp", 8, 3, CPU)
    scaled = head[0].weight[0, :4] * 8**0.5, head[2].weight[0] * 4**0.5
    assert not torch.allclose(*scaled)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_comes_back_the_same_and_frozen(tmp_path, kind):
    head = reward_head(kind, 8, 3, CPU)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1)
    save_head(head, tmp_path / "head.safetensors")
    back = load_head(tmp_path / "head.safetensors", CPU)
    assert torch.equal(back(states()), head(states()))
    assert not any(parameter.requires_grad for parameter in back.parameters())
    save_head(back, tmp_path / "other_name.safetensors")
    assert (tmp_path / "other_name.safetensors").read_bytes() == (tmp_path / "head.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("kind", "name"), [("linear", "weight"), ("linear", "bias"), ("mlp", "0.bias"), ("mlp", "2.weight")]
)
def test_a_head_that_lacks_a_tensor_or_has_one_too_many_is_refused_in_one_line(tmp_path, kind, name):
    path = tmp_path / "head.safetensors"
    save_head(reward_head(kind, 8, 3, CPU), path)
    tensors = load_file(path)
    for changed in (
        {key: value for key, value in tensors.items() if key != name},
        tensors | {"extra": torch.zeros(1)},
        tensors | {name: torch.zeros(3, 3, 3)},
    ):
        save_file(changed, path)
        with pytest.raises(
            UserError, match=r"head\.safetensors: expected a head's weights and biases"
        ) as caught:
            load_head(path, CPU)
        assert "\n" not in str(caught.value)
