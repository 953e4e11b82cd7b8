"""Who computes in which dtype; half precision, 4-bit weights, recomputed blocks and adapter dropout."""

import csv
import json

import pytest
import torch
from tiny import CPU, EOS, base_tensors, lora, perturb, random_texts, streams, tiny_base, write_policy_folder
from torch import nn

from rlhf import models
from rlhf.batching import pad_pairs
from rlhf.errors import UserError
from rlhf.heads import reward_head
from rlhf.models import add_adapters, fingerprint, load_base, lora_dropout, select
from rlhf.objectives import label_loss, sequence_nll
from rlhf.optim import adamw, copy_parameters, loss_scaler, optimizer_step
from rlhf.record import write_csv
from rlhf.sampling import sample
from rlhf.scoring import evaluate, response_outputs, reward_logits

TEXTS = random_texts([9, 4, 7, 6], seed=3)
PROMPTS, RESPONSES = [text[:2] for text in TEXTS], [text[2:] for text in TEXTS]
NAMES = ("sft", "reward", "ppo")


def perturbed(base, architecture="llama", dropout=0.0, names=NAMES):
    model = add_adapters(base, lora(architecture), list(names), seed=1, dropout=dropout)
    for name in names:
        perturb(model, name)
    return model


def mean_nll(model, temperature=1.0):
    outputs = response_outputs(model, pad_pairs(PROMPTS, RESPONSES, EOS, CPU), None, temperature)
    return sequence_nll(outputs.logprobs, pad_pairs(PROMPTS, RESPONSES, EOS, CPU).response_mask).mean()


def gradients(model, seed=None):
    """The SFT loss and every gradient of adapter ppo; with a seed, under the adapter's dropout."""
    parameters = select(model, "ppo", train=True)
    if seed is None:
        loss = mean_nll(model)
        loss.backward()
    else:
        with lora_dropout(model, seed):
            loss = mean_nll(model)
            loss.backward()
    found = [loss.detach()] + [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def seen(model):
    """What the active adapter samples, and what it says of given responses."""
    responses = sample(model, PROMPTS, streams(4), 6, EOS, 1.0)
    return responses, evaluate(model, PROMPTS, RESPONSES, None, 1.0, 20)


def equal(first, second) -> bool:
    return all(map(torch.equal, first, second))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models on disk, with sizes that bitsandbytes can pack."""
    root = tmp_path_factory.mktemp("folders")
    return {name: write_policy_folder(root / name, name, hidden=64) for name in ("llama", "qwen3", "gpt2")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_heads_log_probabilities_and_losses_are_float32(architecture, dtype):
    model = perturbed(tiny_base(architecture, dtype=dtype), architecture)
    head = reward_head("linear", 32, 3, CPU)
    batch = pad_pairs(PROMPTS, RESPONSES, EOS, CPU)
    parameters = select(model, "ppo", train=True)
    assert all(value.dtype == dtype for value in base_tensors(model).values())
    assert models.hidden_states(model, batch.input_ids, batch.attention_mask).dtype == dtype
    outputs = response_outputs(model, batch, head, 1.0)
    logits = reward_logits(model, head, TEXTS, EOS, 100)
    losses = (
        sequence_nll(outputs.logprobs, batch.response_mask),
        label_loss(logits, torch.tensor([1, 0, 1, 0])),
    )
    assert {value.dtype for value in (*outputs, logits, *losses)} == {torch.float32}
    (losses[0].mean() + losses[1].mean() + outputs.values.mean()).backward()
    trained = [*parameters, *head.parameters()]
    assert {p.dtype for p in trained} == {p.grad.dtype for p in trained} == {torch.float32}
    full = perturbed(tiny_base(architecture), architecture)
    with torch.no_grad():  # rounded weights, so near the float32 model and not equal to it
        select(full, "ppo")
        distance = (response_outputs(full, batch, head, 1.0).logprobs - outputs.logprobs).abs().max()
    assert 0 < distance < (0.5 if dtype == torch.bfloat16 else 0.1)


@pytest.mark.parametrize(
    ("device", "native", "chosen"),
    [("cpu", None, "bfloat16"), ("cuda", True, "bfloat16"), ("cuda", False, "float16")],
)
def test_half_is_what_the_device_computes_in_and_says_so(monkeypatch, capsys, device, native, chosen):
    def supported(including_emulation: bool = True) -> bool:
        return including_emulation or native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert models.torch_dtype("half", torch.device(device)) == getattr(torch, chosen)
    assert capsys.readouterr().out == f"model.dtype half: {chosen} on {device}\n"
    assert models.torch_dtype("float32", torch.device(device)) == torch.float32
    assert capsys.readouterr().out == ""


def test_a_half_precision_base_is_loaded_as_such(folders):
    assert load_base(folders["llama"], "half", "none", CPU).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_in_a_4_bit_base_all_but_the_matrices_of_the_blocks_is_float32(folders, architecture, dtype):
    """And it multiplies in its own dtype: that is what decides whether losses are scaled."""
    base = load_base(folders[architecture], dtype, "nf4", CPU)
    kinds = {name: parameter.dtype for name, parameter in base.named_parameters()}
    assert {kind for name, kind in kinds.items() if "proj" in name} == {torch.uint8}
    assert {kind for name, kind in kinds.items() if "proj" not in name} == {torch.float32}
    layer = base.model.layers[0].mlp.up_proj
    assert layer.compute_dtype == models.compute_dtype(perturbed(base, architecture)) == getattr(torch, dtype)
    model = perturbed(load_base(folders[architecture], dtype, "none", CPU), architecture)
    assert models.compute_dtype(model) == getattr(torch, dtype)


def test_float16_overflow_skips_sft_steps_until_the_scale_fits(tmp_path):
    """The gradient of logits / 2e-5 leaves float16's range at scale 256 and comes back at a smaller one."""
    model = perturbed(tiny_base("llama", dtype=torch.float16))
    groups = {"policy": select(model, "ppo", train=True)}
    optimizer, scaler = adamw(groups, 1e-3, 0.9, 0.999, 1e-8, 0.01), loss_scaler(CPU, torch.float16)
    before, log = copy_parameters(groups), []
    while not log or log[-1]["grad_norm"] is None:
        loss = mean_nll(model, temperature=2e-5)
        assert torch.isfinite(loss)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        norms = optimizer_step(optimizer, groups, scaler, 1.0)
        log.append({"step": len(log) + 1, "loss": None if norms.skipped else 1.0, "grad_norm": norms.total})
        if norms.skipped:
            assert scaler.get_scale() == scale / 2 and norms.groups == {"policy": None}
            assert equal(copy_parameters(groups), before) and not optimizer.state
    assert len(log) > 1 and scaler.get_scale() == 256 / 2 ** (len(log) - 1)
    assert not equal(copy_parameters(groups), before)
    write_csv(tmp_path / "log.csv", log)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["loss"] == row["grad_norm"] == "" for row in rows[:-1])
    assert float(rows[-1]["grad_norm"]) == norms.total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_probabilities_that_are_not_finite_move_nothing_and_end_in_an_error(dtype):
    base = tiny_base("llama", dtype=dtype)
    base.lm_head.weight.fill_(torch.finfo(dtype).max)
    model = perturbed(base)
    groups = {"policy": select(model, "ppo", train=True)}
    optimizer, scaler = adamw(groups, 1e-3, 0.9, 0.999, 1e-8, 0.01), loss_scaler(CPU, dtype)
    before, skipped = copy_parameters(groups), 0
    with pytest.raises(FloatingPointError, match="not finite"):
        for _ in range(100):
            loss = mean_nll(model)
            assert not torch.isfinite(loss)
            scaler.scale(loss).backward()
            skipped += optimizer_step(optimizer, groups, scaler, 1.0).skipped
    assert skipped == (23 if dtype == torch.float16 else 0)  # the scale goes from 2^8 below 2^-14
    assert equal(copy_parameters(groups), before) and not optimizer.state
    assert all(parameter.grad is None for parameter in groups["policy"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_4_bit_model_trains_samples_and_is_the_same_after_saving(tmp_path, folders, architecture, dtype):
    folder = folders[architecture]
    model = perturbed(load_base(folder, dtype, "nf4", CPU), architecture)
    groups = {"policy": select(model, "ppo", train=True)}
    frozen = {name: fingerprint(model, name) for name in ("sft", "reward")}
    optimizer, scaler = adamw(groups, 1e-2, 0.9, 0.999, 1e-8, 0.0), loss_scaler(CPU, getattr(torch, dtype))
    losses = []
    for _ in range(6):
        losses.append(mean_nll(model))
        scaler.scale(losses[-1]).backward()
        assert not optimizer_step(optimizer, groups, scaler, 1.0).skipped
    assert losses[-1] < losses[0] - 0.1
    assert frozen == {name: fingerprint(model, name) for name in ("sft", "reward")}
    fresh = add_adapters(load_base(folder, dtype, "nf4", CPU), lora(architecture), list(NAMES), seed=9)
    for name in NAMES:
        models.save_adapter(model, name, tmp_path / name, "base")
        models.load_adapter(fresh, name, tmp_path / name)
    for name in (*NAMES, None):
        views = []
        for one in (model, fresh):
            select(one, name)
            views.append(seen(one))
        assert views[0][0] == views[1][0] and equal(views[0][1], views[1][1])


def saved_bytes(model) -> int:
    """What autograd keeps of one forward pass, each storage once, the model's own tensors apart."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    select(model, "ppo", train=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mean_nll(model)
    return sum(size for pointer, (size, _) in kept.items() if pointer not in own)


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [("llama", "none"), ("qwen3", "none"), ("gpt2", "none"), ("qwen3", "nf4")],
)
def test_recomputed_blocks_give_the_same_gradients_and_keep_less(folders, architecture, quantization):
    plain, recomputed = (
        perturbed(load_base(folders[architecture], "float32", quantization, CPU, again), architecture)
        for again in (False, True)
    )
    state = torch.get_rng_state()
    expected, found = gradients(plain), gradients(recomputed)
    assert len(found) > 8 and all(gradient.any() for gradient in found)
    assert equal(expected, found)
    assert torch.equal(torch.get_rng_state(), state)  # GPT-2's own dropout, 0.1 in its config, drew nothing
    assert not any(module.training for module in recomputed.modules())
    assert saved_bytes(recomputed) < saved_bytes(plain) / 2
    for name in ("ppo", None):
        for model in (plain, recomputed):
            select(model, name)
        views = [seen(model) for model in (plain, recomputed)]
        assert views[0][0] == views[1][0] and equal(views[0][1], views[1][1])


def test_blocks_are_computed_once_more_in_the_backward_pass_alone(folders):
    base = load_base(folders["llama"], "float32", "none", CPU, gradient_checkpointing=True)
    model, calls = perturbed(base), []
    base.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    evaluate(model, PROMPTS, RESPONSES, None, 1.0, 100)
    assert len(calls) == 1
    select(model, "ppo", train=True)
    loss = mean_nll(model)
    assert len(calls) == 2
    loss.backward()
    assert len(calls) == 3


def test_a_model_whose_blocks_are_not_known_is_refused():
    with pytest.raises(UserError, match=r"^model\.gradient_checkpointing is true: .* not Linear$"):
        models.recompute_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_named_by_its_seed_and_leaves_no_trace(folders, recompute):
    model = perturbed(load_base(folders["gpt2"], "float32", "none", CPU, recompute), "gpt2", dropout=0.5)
    plain, state = gradients(model), torch.get_rng_state()
    first = gradients(model, seed=7)
    torch.rand(3)
    assert equal(gradients(model, seed=7), first)
    assert not equal(gradients(model, seed=8), first)
    assert not equal(first, plain)
    assert equal(gradients(model), plain)  # and outside it is off again
    torch.set_rng_state(state)
    gradients(model, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())


def test_dropout_acts_the_same_where_blocks_are_recomputed(folders):
    first, second = (
        perturbed(load_base(folders["llama"], "float32", "none", CPU, again), dropout=0.3)
        for again in (False, True)
    )
    assert equal(gradients(first, seed=5), gradients(second, seed=5))


def test_only_the_active_adapters_dropout_is_on_and_an_error_turns_it_off(folders):
    model = perturbed(load_base(folders["gpt2"], "float32", "none", CPU), "gpt2", dropout=0.5)
    select(model, "reward")
    with pytest.raises(KeyError), lora_dropout(model, 1):
        on = [name for name, module in model.named_modules() if module.training]
        assert len(on) == 6 and all(name.endswith(".lora_dropout.reward") for name in on)
        raise KeyError
    assert not any(module.training for module in model.modules())


def test_without_dropout_nothing_happens_at_all(tmp_path, folders):
    model = perturbed(load_base(folders["llama"], "float32", "none", CPU))
    plain, state = gradients(model), torch.get_rng_state()
    with lora_dropout(model, 7):
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), state)  # not even the generator is put back
    assert equal(gradients(model, seed=7), plain)
    models.save_adapter(model, "ppo", tmp_path, "base")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0.0
