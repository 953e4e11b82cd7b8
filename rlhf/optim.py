"""One optimiser step: unscale, refuse or skip what is not finite, measure, clip, update."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class StepNorms(NamedTuple):
    """Gradient norms before clipping, by group; None everywhere when the step was skipped."""

    total: float | None
    groups: dict[str, float | None]

    @property
    def skipped(self) -> bool:
        return self.total is None


def adamw(
    groups: dict[str, list[nn.Parameter]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """AdamW over the groups' parameters. Source: Loshchilov and Hutter 2019."""
    parameters = [parameter for group in groups.values() for parameter in group]
    return torch.optim.AdamW(parameters, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)


def loss_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Loss scaling from 256 for float16; switched off for every other dtype."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16, init_scale=256.0)


def copy_parameters(groups: dict[str, list[nn.Parameter]]) -> list[Tensor]:
    """Copies of all the groups' parameters, for `set_parameters`."""
    return [parameter.detach().clone() for group in groups.values() for parameter in group]


@torch.no_grad()
def set_parameters(groups: dict[str, list[nn.Parameter]], values: list[Tensor]) -> None:
    """Put copies that `copy_parameters` made back into the live parameters."""
    parameters = [parameter for group in groups.values() for parameter in group]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    groups: dict[str, list[nn.Parameter]],
    scaler: torch.amp.GradScaler,
    max_grad_norm: float,
) -> StepNorms:
    """Clip the joint gradient norm at `max_grad_norm`, update, clear the gradients.

    Gradients that are not finite: with loss scaling the step is skipped and the scale halves, and once the
    scale is below 2^-14 no scale will help; then, and without scaling, a `FloatingPointError` is raised
    before any parameter changes.
    """
    scaler.unscale_(optimizer)
    parameters = [parameter for group in groups.values() for parameter in group]
    finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters)
    if not finite and (not scaler.is_enabled() or scaler.get_scale() < 2**-14):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError("gradients are not finite; no update was made")
    norms = {name: _norm(group) for name, group in groups.items()}
    total = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm)) if finite else None
    if total == float("inf"):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError("the gradient norm is not finite; no update was made")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return StepNorms(total, norms if finite else dict.fromkeys(norms))


def _norm(parameters: list[nn.Parameter]) -> float:
    gradients = [p.grad.detach().float() for p in parameters if p.grad is not None]
    return float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
