"""Small float32 heads on a model's hidden states: the value head and the reward model's."""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rlhf.errors import UserError
from rlhf.models import load_tensors
from rlhf.randomness import stream


def zero_head(hidden_size: int, device: torch.device) -> nn.Linear:
    """A linear head [H] -> [1] of zeros: before training every value is 0."""
    head = nn.Linear(hidden_size, 1, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head.to(device)


def reward_head(kind: str, hidden_size: int, seed: int, device: torch.device) -> nn.Module:
    """A seeded head [H] -> [1]: `linear`, or `mlp`, H -> H/2 -> ReLU -> 1, as in the question answering
    reference. Weights U(-1/sqrt(inputs), 1/sqrt(inputs)), biases zero."""
    head = _layers(kind, hidden_size)
    layers = [module for module in head.modules() if isinstance(module, nn.Linear)]
    for index, layer in enumerate(layers):
        bound = layer.in_features**-0.5
        names = (index,) if index else ()
        values = stream(seed, "models", "head", *names).uniform(-bound, bound, tuple(layer.weight.shape))
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(values))
            layer.bias.zero_()
    return head.to(device)


def _layers(kind: str, hidden_size: int) -> nn.Module:
    if kind == "linear":
        return nn.Linear(hidden_size, 1, dtype=torch.float32)
    half = hidden_size // 2
    return nn.Sequential(
        nn.Linear(hidden_size, half, dtype=torch.float32), nn.ReLU(), nn.Linear(half, 1, dtype=torch.float32)
    )


def save_head(head: nn.Module, path: Path) -> None:
    """Write a head's weights and biases as safetensors."""
    path.write_bytes(save({k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}))


def load_head(path: str | Path, device: torch.device) -> nn.Module:
    """Load a head that `save_head` wrote, frozen; which kind it is shows in its tensors' names."""
    tensors = load_tensors(path)
    kind = "mlp" if "0.weight" in tensors else "linear"
    first = tensors.get("0.weight" if kind == "mlp" else "weight", Tensor())
    head = _layers(kind, first.shape[1] if first.ndim == 2 else 1)
    expected = {key: value.shape for key, value in head.state_dict().items()}
    if {key: value.shape for key, value in tensors.items()} != expected or first.numel() == 0:
        raise UserError(f"{path}: expected a head's weights and biases, found {sorted(tensors)}")
    head.load_state_dict(tensors)
    return head.to(device).requires_grad_(False)
