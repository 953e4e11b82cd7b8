"""One optimiser step: unscale, refuse or skip what is not finite, measure, clip, update."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rlhf.errors import UserError


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
    state: str = "float32",
) -> torch.optim.Optimizer:
    """AdamW over the groups' parameters. Source: Loshchilov and Hutter 2019.

    `state` int8 keeps both moments in 8 bits by blocks of 256 numbers (bitsandbytes; Dettmers et al. 2022),
    those of parameters of fewer than 4,096 numbers in float32; raises `UserError` where the device cannot.
    """
    parameters = [parameter for group in groups.values() for parameter in group]
    settings = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    if state == "float32":
        return torch.optim.AdamW(parameters, **settings)
    _check_int8(parameters[0].device)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(parameters, **settings)


def _check_int8(device: torch.device) -> None:
    """Take a step on a throwaway parameter: what a build of bitsandbytes lacks shows only when called."""
    try:
        from bitsandbytes.optim import AdamW8bit

        trial = nn.Parameter(torch.zeros(4096, device=device))
        trial.grad = torch.zeros_like(trial)
        AdamW8bit([trial]).step()
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"adam.state is 'int8': bitsandbytes has no 8-bit AdamW for {device.type} here ({reason}); "
            "expected 'float32', or a device that it supports"
        ) from None


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
    scale is below 2^-14 no scale will help; then, without scaling, and where only the norm overflows, a
    `FloatingPointError` is raised before any parameter changes.
    """
    scaler.unscale_(optimizer)
    parameters = [parameter for group in groups.values() for parameter in group]
    norms = {name: _norm(group) for name, group in groups.items()}
    total = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    skipped = not math.isfinite(total)
    if skipped and not _scaling_skips(scaler, parameters):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError("the gradients or their norm are not finite; no update was made")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return StepNorms(None, dict.fromkeys(norms)) if skipped else StepNorms(total, norms)


def _scaling_skips(scaler: torch.amp.GradScaler, parameters: list[nn.Parameter]) -> bool:
    """The scaler sees gradients that are not finite, but not finite ones whose norm overflows."""
    finite = all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters)
    return scaler.is_enabled() and scaler.get_scale() >= 2**-14 and not finite


def _norm(parameters: list[nn.Parameter]) -> float:
    gradients = [p.grad.detach().float() for p in parameters if p.grad is not None]
    return float(torch.stack([g.norm() for g in gradients]).norm()) if gradients else 0.0
