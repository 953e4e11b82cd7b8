"""One optimiser step: what it measures, what it clips, and what it refuses."""

import sys

import pytest
import torch
from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary
from torch import nn

from rlhf.errors import UserError
from rlhf.optim import StepNorms, adamw, loss_scaler, optimizer_step

CPU = torch.device("cpu")
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def unscaled() -> torch.amp.GradScaler:
    return loss_scaler(CPU, torch.float32)


def three_four_twelve() -> dict[str, list[nn.Parameter]]:
    groups = {"policy": [parameter(1.0), parameter(2.0)], "value": [parameter(3.0)]}
    for p, gradient in zip([*groups["policy"], *groups["value"]], (3.0, 4.0, 12.0), strict=True):
        p.grad = torch.tensor([gradient])
    return groups


def sgd(groups) -> torch.optim.SGD:
    return torch.optim.SGD([p for group in groups.values() for p in group], lr=1.0)


def test_adam_settings_reach_the_optimiser_and_every_group():
    groups = {"policy": [parameter(1.0), parameter(2.0)], "value": [parameter(3.0)]}
    optimizer = adamw(groups, lr=0.25, beta1=0.5, beta2=0.75, eps=0.125, weight_decay=0.0625)
    assert isinstance(optimizer, torch.optim.AdamW)
    found = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in found] == [id(p) for group in groups.values() for p in group]
    for group in optimizer.param_groups:
        chosen = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        assert chosen == {"lr": 0.25, "betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.0625}


@pytest.mark.parametrize(
    ("changes", "gradients", "expected"),
    [
        # First step: m = g, v = g^2 after bias correction, so 1 - lr g / (|g| + eps).
        ({"eps": 1.0}, [1.0], 1 - 0.1 * 1 / (1 + 1)),
        ({"eps": 3.0}, [1.0], 1 - 0.1 * 1 / (1 + 3)),
        # Decay is decoupled: 1 (1 - lr wd) - lr.
        ({"weight_decay": 0.5}, [1.0], 1 - 0.1 * 0.5 - 0.1),
        # beta1 = 1/2, beta2 = 0, g = 1 then 3: m = 1/4 + 3/2 = 7/4, over 1 - 1/4 is 7/3; sqrt(v) = 3.
        ({"beta1": 0.5, "beta2": 0.0}, [1.0, 3.0], 1 - 0.1 - 0.1 * (7 / 3) / 3),
        # beta1 = 0, beta2 = 1/2, g = 1 then 3: m = 3; v = 1/4 + 9/2 = 19/4, over 3/4 is 19/3.
        ({"beta1": 0.0, "beta2": 0.5}, [1.0, 3.0], 1 - 0.1 - 0.1 * 3 / (19 / 3) ** 0.5),
    ],
)
def test_adam_updates_by_hand(changes, gradients, expected):
    groups = {"policy": [parameter(1.0)]}
    optimizer = adamw(groups, **{**ADAM, **changes})
    for gradient in gradients:
        groups["policy"][0].grad = torch.tensor([gradient])
        optimizer_step(optimizer, groups, unscaled(), max_grad_norm=100.0)
    assert groups["policy"][0].item() == pytest.approx(expected, abs=3e-7)  # a few float32 roundings near 1


def test_norms_are_taken_before_clipping_by_group():
    # sqrt(9 + 16) = 5 and 12; together sqrt(25 + 144) = 13. All exact in float32.
    groups = three_four_twelve()
    assert optimizer_step(sgd(groups), groups, unscaled(), 1.0) == StepNorms(
        13.0, {"policy": 5.0, "value": 12.0}
    )


def test_clipping_is_joint():
    # Every gradient shrinks by the same 1/13, to norm 1: 1 - 3/13, 2 - 4/13, 3 - 12/13.
    groups = three_four_twelve()
    optimizer_step(sgd(groups), groups, unscaled(), max_grad_norm=1.0)
    values = [p.item() for group in groups.values() for p in group]
    # torch divides by 13 + 1e-6: a relative 8e-8, beside float32's 6e-8.
    assert values == pytest.approx([1 - 3 / 13, 2 - 4 / 13, 3 - 12 / 13], abs=4e-7)


def test_below_the_limit_nothing_is_clipped():
    groups = three_four_twelve()
    optimizer_step(sgd(groups), groups, unscaled(), max_grad_norm=14.0)
    assert [p.item() for group in groups.values() for p in group] == [-2.0, -2.0, -9.0]


def test_gradients_are_cleared_and_a_group_without_gradients_has_norm_zero():
    groups = three_four_twelve()
    groups["value"][0].grad = None
    norms = optimizer_step(sgd(groups), groups, unscaled(), 1.0)
    assert norms == StepNorms(5.0, {"policy": 5.0, "value": 0.0})
    assert not norms.skipped
    assert all(p.grad is None for group in groups.values() for p in group)
    assert groups["value"][0].item() == 3.0


@pytest.mark.parametrize(
    ("dtype", "enabled"), [(torch.float16, True), (torch.bfloat16, False), (torch.float32, False)]
)
def test_only_float16_is_scaled(dtype, enabled):
    scaler = loss_scaler(CPU, dtype)
    assert scaler.is_enabled() is enabled
    assert scaler.scale(torch.tensor(2.0)).item() == (512.0 if enabled else 2.0)


def half_precision_backward(scaler, groups, slope: float) -> None:
    """Leave the gradient `slope` on "policy", through float16, where scale x slope > 65,504 is infinite."""
    scaler.scale((groups["policy"][0].half() * slope).sum()).backward()
    groups["value"][0].grad = torch.full_like(groups["value"][0], scaler.get_scale())


def test_float16_overflow_skips_the_step_and_halves_the_scale():
    groups = {"policy": [parameter(1.0)], "value": [parameter(2.0)]}
    optimizer, scaler = adamw(groups, **ADAM), loss_scaler(CPU, torch.float16)
    half_precision_backward(scaler, groups, 300.0)  # 256 x 300 = 76,800: infinite
    norms = optimizer_step(optimizer, groups, scaler, max_grad_norm=1.0)
    assert norms == StepNorms(None, {"policy": None, "value": None})
    assert norms.skipped
    assert scaler.get_scale() == 128.0
    assert (groups["policy"][0].item(), groups["value"][0].item()) == (1.0, 2.0)
    assert groups["policy"][0].grad is groups["value"][0].grad is None
    assert not optimizer.state  # Adam's moments did not see the infinite gradient

    half_precision_backward(scaler, groups, 300.0)  # 128 x 300 = 38,400: fits, exact in float16
    norms = optimizer_step(optimizer, groups, scaler, max_grad_norm=1.0)
    assert norms.groups == {"policy": 300.0, "value": 1.0}  # of the unscaled gradients
    assert norms.total == pytest.approx((300**2 + 1) ** 0.5, rel=2e-7)  # float32
    assert scaler.get_scale() == 128.0
    assert groups["policy"][0].item() == pytest.approx(0.9, abs=1e-6)  # Adam's first step is lr; eps is 1e-8


def test_gradients_that_no_scale_can_save_are_an_error_in_the_end():
    groups = {"policy": [parameter(1.0)]}
    optimizer, scaler = adamw(groups, **ADAM), loss_scaler(CPU, torch.float16)
    skipped = 0
    with pytest.raises(FloatingPointError, match="not finite"):
        while skipped < 100:
            scaler.scale(groups["policy"][0] * float("nan")).sum().backward()
            skipped += optimizer_step(optimizer, groups, scaler, max_grad_norm=1.0).skipped
    assert skipped == 23  # scales 2^8 .. 2^-14
    assert groups["policy"][0].item() == 1.0


def test_scaling_changes_no_update():
    # A scale of 256 is a power of two: unscaling is exact, the clipped updates are the same bits.
    results = []
    for dtype in (torch.float16, torch.float32):
        groups, scaler = three_four_twelve(), loss_scaler(CPU, dtype)
        scaler.scale(torch.zeros(1))  # creates the scale
        for p in (p for group in groups.values() for p in group):
            p.grad *= scaler.get_scale()
        norms = optimizer_step(sgd(groups), groups, scaler, max_grad_norm=1.0)
        results.append((norms, [p.item() for group in groups.values() for p in group]))
    assert results[0] == results[1]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("group", ["policy", "value"])
def test_without_scaling_a_gradient_that_is_not_finite_is_an_error(bad, group):
    groups = three_four_twelve()
    groups[group][-1].grad[0] = bad
    optimizer = adamw(groups, **ADAM)
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer_step(optimizer, groups, unscaled(), max_grad_norm=1.0)
    assert [p.item() for members in groups.values() for p in members] == [1.0, 2.0, 3.0]
    assert all(p.grad is None for members in groups.values() for p in members)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_finite_gradients_whose_norm_overflows_are_an_error_too(dtype):
    # 1e30 squared is beyond float32: the norm is infinite, and clipping by it would zero every gradient
    # while weight decay still moved the parameters. The reference notebook raises.
    groups, scaler = {"policy": [parameter(1.0, 1.0)]}, loss_scaler(CPU, dtype)
    optimizer = adamw(groups, **{**ADAM, "weight_decay": 0.01})
    scaler.scale(groups["policy"][0] * 1e30).sum().backward()
    with pytest.raises(FloatingPointError):
        optimizer_step(optimizer, groups, scaler, max_grad_norm=1.0)
    assert groups["policy"][0].tolist() == [1.0, 1.0]


def test_float32_is_torchs_own_adamw():
    assert type(adamw({"policy": [parameter(1.0)]}, **ADAM)) is torch.optim.AdamW


def test_the_int8_state_is_int8_for_large_parameters_alone():
    large, small = nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64, 63))
    groups = {"policy": [large], "value": [small]}
    optimizer = adamw(groups, **ADAM, state="int8")
    for p in (large, small):
        p.grad = torch.full_like(p, 0.25)
    optimizer_step(optimizer, groups, unscaled(), max_grad_norm=100.0)
    moments = [[optimizer.state[p][name].dtype for name in ("state1", "state2")] for p in (large, small)]
    assert moments == [[torch.uint8] * 2, [torch.float32] * 2]
    # Adam's first step is lr whatever the gradient; the moments are rounded after it, not before.
    assert all(torch.allclose(p, torch.tensor(0.9), rtol=0, atol=1e-6) for p in (large, small))


def descend(state: str, steps: int = 60) -> list[float]:
    """Least squares on a matrix of 8,192 numbers: the losses."""
    draws = torch.Generator().manual_seed(1)
    target = torch.randn(64, 128, generator=draws)
    weights = nn.Parameter(torch.zeros(64, 128))
    groups, losses = {"policy": [weights]}, []
    optimizer = adamw(groups, **{**ADAM, "weight_decay": 0.01}, state=state)
    for _ in range(steps):
        loss = (weights - target).square().mean()
        loss.backward()
        optimizer_step(optimizer, groups, unscaled(), max_grad_norm=1.0)
        losses.append(loss.item())
    return losses


def test_int8_descends_like_float32_and_not_exactly_so():
    exact, rounded = descend("float32"), descend("int8")
    assert rounded != exact and rounded == descend("int8")
    assert exact[-1] < 0.05 * exact[0]
    assert max(abs(a - b) for a, b in zip(exact, rounded, strict=True)) < 0.05 * exact[0]


def test_float16_overflow_skips_an_int8_step_too():
    weights = nn.Parameter(torch.ones(64, 64))
    groups, scaler = {"policy": [weights]}, loss_scaler(CPU, torch.float16)
    optimizer = adamw(groups, **ADAM, state="int8")
    scaler.scale((weights.half() * 300).sum()).backward()  # 256 x 300 = 76,800: infinite
    assert optimizer_step(optimizer, groups, scaler, 1.0).skipped
    assert not optimizer.state and bool((weights == 1).all())
    scaler.scale((weights.half() * 300).sum()).backward()
    assert not optimizer_step(optimizer, groups, scaler, 1.0).skipped
    assert bool((weights < 1).all())


def test_where_8_bit_adam_is_not_built_in_the_error_is_one_line(monkeypatch):
    """What bitsandbytes puts in the place of its compiled library when that cannot be loaded."""
    absent = ErrorHandlerMockBNBNativeLibrary("libbitsandbytes_cpu.so: cannot open shared object file")
    monkeypatch.setattr("bitsandbytes.backends.cpu.ops.lib", absent)
    groups = {"policy": [nn.Parameter(torch.ones(64, 64))]}
    with pytest.raises(UserError, match=r"^adam\.state is 'int8': .* for cpu here .*'float32'") as caught:
        adamw(groups, **ADAM, state="int8")
    assert "\n" not in str(caught.value)
    assert isinstance(adamw(groups, **ADAM), torch.optim.AdamW)


def test_without_bitsandbytes_int8_is_one_line_of_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=r"^adam\.state is 'int8'"):
        adamw({"policy": [parameter(1.0)]}, **ADAM, state="int8")
