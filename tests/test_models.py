"""Adapters and heads on one frozen base: who is trainable, who acts, and what the disk gives back."""

import hashlib
import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny import CPU, TEXT, adapter_tensors, base_tensors, lora, perturb, plain_forward, tiny_base, tiny_model

from rlhf import heads, models
from rlhf.errors import UserError
from rlhf.heads import reward_head, zero_head
from rlhf.models import Lora, add_adapters, fingerprint, select


def logits_of(model):
    return plain_forward(model, TEXT)[0]


def trainable(model) -> set[str]:
    return {key for key, parameter in model.named_parameters() if parameter.requires_grad}


def test_select_leaves_exactly_the_named_adapter_trainable(model):
    for name in ("ppo", "sft", None, "reward", "ppo"):
        for train in (True, False):
            model.requires_grad_(True)  # whatever it was before
            parameters = select(model, name, train=train)
            expected = adapter_tensors(model, name)
            assert {id(p) for p in parameters} == {
                id(p) for key, p in model.named_parameters() if f".{name}." in key
            }
            assert trainable(model) == (set(expected) if train else set())
            assert not any(module.training for module in model.modules())
    assert not trainable(model)


def test_none_is_the_base_exactly_and_switching_round_trips(architecture):
    model, alone = tiny_model(architecture), tiny_base(architecture)
    views = {}
    for name in ("sft", None, "ppo", "reward", None, "sft", "ppo", None, "reward"):
        select(model, name)
        now = logits_of(model)
        assert torch.equal(now, views.setdefault(name, now))
    assert torch.equal(views[None], logits_of(alone))
    assert len({view.numpy().tobytes() for view in views.values()}) == 4


def test_an_unknown_adapter_is_an_error(llama):
    with pytest.raises(ValueError, match="other"):
        select(llama, "other")


def test_the_adapter_acts_as_its_equation_says():
    """(W + alpha / rank B A) x, with the sum folded into a plain model's weights."""
    model, merged = tiny_model("llama"), tiny_base("llama")
    with torch.no_grad():
        for target, weight in merged.named_parameters():
            parts = [t for k, t in adapter_tensors(model, "ppo").items() if target[: -len("weight")] in k]
            if parts:
                a, b = parts  # rank 2, alpha 4
                weight += 4 / 2 * b @ a
    select(model, "ppo")
    torch.testing.assert_close(logits_of(model), logits_of(merged), rtol=0, atol=2e-5)


def test_fresh_adapters_change_nothing_and_differ_by_name(architecture):
    base = tiny_base(architecture)
    before = logits_of(base)
    model = add_adapters(base, lora(architecture), ["sft", "ppo"], seed=1)
    for name in ("sft", "ppo"):
        select(model, name)
        assert torch.equal(logits_of(model), before)
        a_parts = [t for key, t in adapter_tensors(model, name).items() if "lora_A" in key]
        assert all(0.5 < t.abs().max() * t.shape[1] ** 0.5 <= 1 for t in a_parts)  # fills (-bound, bound)
    assert fingerprint(model, "sft") != fingerprint(model, "ppo")
    sft = models.adapter_state(model, "sft")
    assert not all(torch.equal(sft[key], value) for key, value in models.adapter_state(model, "ppo").items())


def test_initialisation_depends_on_seed_and_name_alone():
    def states(names, seed, global_seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            model = add_adapters(tiny_base("llama"), lora("llama"), names, seed)
        return {name: fingerprint(model, name) for name in names}

    first = states(["sft", "ppo"], seed=1, global_seed=1)
    assert states(["ppo", "reward", "sft"], seed=1, global_seed=2)["ppo"] == first["ppo"]
    assert states(["sft"], seed=1, global_seed=3)["sft"] == first["sft"]
    assert states(["sft"], seed=2, global_seed=1)["sft"] != first["sft"]


def test_adapters_are_float32_on_a_bfloat16_base():
    base = tiny_base("llama", dtype=torch.bfloat16)
    model = add_adapters(base, lora("llama"), ["sft", "ppo"], seed=1)
    perturb(model, "ppo")
    assert all(t.dtype == torch.float32 for n in ("sft", "ppo") for t in adapter_tensors(model, n).values())
    select(model, "ppo", train=True)
    hidden = models.hidden_states(model, torch.tensor([TEXT]), torch.ones(1, 4, dtype=torch.bool))
    assert hidden.dtype == torch.bfloat16
    hidden.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in select(model, "ppo"))


@pytest.mark.parametrize("targets", [("c_attn",), ("q_proj", "c_attn"), ("proj",)])
def test_a_target_that_matches_nothing_is_one_line_with_candidates(targets):
    with pytest.raises(UserError, match=rf"model\.lora\.targets names '{targets[-1]}'") as caught:
        add_adapters(tiny_base("llama"), Lora(2, 4.0, targets), ["sft"], seed=1)
    assert "\n" not in str(caught.value)
    assert "k_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("llama", tiny.ROTARY_TARGETS),
        ("qwen3", tiny.ROTARY_TARGETS),
        ("gpt2", ("c_attn", "c_fc", "c_proj")),
    ],
)
def test_all_linear_means_every_matrix_of_the_blocks_and_is_written_out(tmp_path, architecture, expected):
    model = add_adapters(tiny_base(architecture), Lora(2, 4.0, (models.ALL_LINEAR,)), ["sft"], seed=1)
    adapted = {key.split(".lora_A")[0] for key in adapter_tensors(model, "sft") if "lora_A" in key}
    matrices = {key for key, value in tiny_base(architecture).named_parameters() if value.ndim == 2}
    inside = {key for key in matrices if ".layers." in key or ".h." in key}
    assert {name.removeprefix("base_model.model.") + ".weight" for name in adapted} == inside
    models.save_adapter(model, "sft", tmp_path, "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(expected)
    fresh = add_adapters(tiny_base(architecture), Lora(2, 4.0, expected), ["sft"], seed=1)
    assert fingerprint(fresh, "sft") == fingerprint(model, "sft")


@pytest.mark.parametrize("targets", [(models.ALL_LINEAR, "q_proj"), ("q_proj", models.ALL_LINEAR)])
def test_all_linear_stands_alone(targets):
    with pytest.raises(
        UserError, match=r"names 'all-linear': expected layers among .*, or all-linear alone$"
    ):
        add_adapters(tiny_base("llama"), Lora(2, 4.0, targets), ["sft"], seed=1)


def test_copied_state_is_equal_and_shares_no_memory(llama):
    state = models.adapter_state(llama, "sft")
    models.set_adapter_state(llama, "ppo", state)
    select(llama, "sft")
    view = logits_of(llama)
    select(llama, "ppo")
    assert torch.equal(logits_of(llama), view)
    frozen = fingerprint(llama, "sft")
    kept = {key: value.clone() for key, value in state.items()}
    perturb(llama, "ppo", seed=3)
    assert fingerprint(llama, "sft") == frozen
    assert all(torch.equal(value, kept[key]) for key, value in state.items())
    next(iter(state.values())).add_(1.0)
    assert fingerprint(llama, "sft") == frozen


def test_a_fingerprint_sees_one_changed_bit_of_its_adapter_alone(llama):
    before = {name: fingerprint(llama, name) for name in ("sft", "reward", "ppo")}
    parameter = select(llama, "ppo")[-1]
    with torch.no_grad():
        parameter.view(-1)[-1] = torch.nextafter(parameter.view(-1)[-1], torch.tensor(9.0))
    after = {name: fingerprint(llama, name) for name in before}
    assert [name for name in before if before[name] != after[name]] == ["ppo"]


def test_a_saved_adapter_has_the_same_bytes_in_another_process(elsewhere):
    """Its seven targets, as a set, would come in another order for all but 1 in 5,040 hash seeds."""
    here, there = (
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (elsewhere / name).iterdir()}
        for name in ("adapter", "again")
    )
    assert sorted(here) == ["adapter_config.json", "adapter_model.safetensors"]
    assert here == there
    config = json.loads((elsewhere / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base" and config["inference_mode"]
    assert config["target_modules"] == sorted(tiny.ROTARY_TARGETS)


def test_peft_alone_loads_a_saved_adapter_and_sees_the_same(elsewhere):
    base = models.load_base(elsewhere / "base", "float32", "none", CPU)
    model = add_adapters(base, lora("llama-tied"), ["ppo"], seed=5)
    models.load_adapter(model, "ppo", elsewhere / "adapter")
    for here, there in zip(plain_forward(model, TEXT), torch.load(elsewhere / "views.pt"), strict=True):
        assert torch.equal(here, there)


def test_saving_asks_the_network_nothing(tmp_path, llama, monkeypatch):
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *where, **_: asked.append(where) or [])
    models.save_adapter(llama, "ppo", tmp_path, "owner/base")
    models.adapter_state(llama, "ppo")
    assert asked == []


def test_an_adapter_survives_the_disk_and_saving_disturbs_nothing(tmp_path, model, architecture):
    select(model, "ppo", train=True)
    view, before = logits_of(model), trainable(model)
    models.save_adapter(model, "ppo", tmp_path / "a" / "b", "base")
    assert trainable(model) == before and torch.equal(logits_of(model), view)
    select(model, "sft")
    assert len(select(model, "ppo", train=True)) == len(before) and trainable(model) == before
    fresh = add_adapters(tiny_base(architecture), lora(architecture), ["reward", "other"], seed=9)
    models.load_adapter(fresh, "other", tmp_path / "a" / "b")
    select(fresh, "other")
    assert torch.equal(logits_of(fresh), view)


@pytest.mark.parametrize("broken", ["rank", "alpha", "targets", "truncated", "empty"])
def test_an_adapter_that_does_not_fit_is_one_line_of_error(tmp_path, llama, broken):
    fitting = lora("llama")
    shapes = {"rank": lora("llama", rank=3), "targets": Lora(2, 4.0, ("q_proj",))}
    shapes["alpha"] = fitting._replace(alpha=8.0)
    other = add_adapters(tiny_base("llama"), shapes.get(broken, fitting), ["ppo"], seed=1)
    models.save_adapter(other, "ppo", tmp_path, "base")
    file = tmp_path / "adapter_model.safetensors"
    if broken in ("truncated", "empty"):
        file.write_bytes(file.read_bytes()[: 1000 if broken == "truncated" else 0])
    before = fingerprint(llama, "ppo")
    with pytest.raises(UserError) as caught:
        models.load_adapter(llama, "ppo", tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert fingerprint(llama, "ppo") == before


def test_a_file_that_holds_no_head_is_one_line_of_error(tmp_path):
    save_file({"something": torch.zeros(3)}, tmp_path / "head.safetensors")
    with pytest.raises(UserError, match="expected a head's weights and biases, found \\['something'\\]"):
        heads.load_head(tmp_path / "head.safetensors", CPU)


def test_the_value_head_is_zero_and_the_reward_head_comes_from_its_seed():
    value = zero_head(32, CPU)
    assert not value.weight.any() and not value.bias.any() and value.weight.requires_grad
    first, second, other = (reward_head("linear", 32, seed, CPU) for seed in (7, 7, 8))
    assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, other.weight)
    assert first.weight.dtype == torch.float32 and not first.bias.any()
    assert 0.5 < first.weight.abs().max() * 32**0.5 <= 1


def test_a_head_survives_the_disk_bit_for_bit_and_comes_back_frozen(tmp_path):
    head = reward_head("linear", 32, 7, CPU)
    torch.nn.init.constant_(head.bias, 0.1)
    heads.save_head(head, tmp_path / "head.safetensors")
    loaded = heads.load_head(tmp_path / "head.safetensors", CPU)
    assert torch.equal(loaded.weight, head.weight) and torch.equal(loaded.bias, head.bias)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    (tmp_path / "head.safetensors").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"head\.safetensors"):
        heads.load_head(tmp_path / "head.safetensors", CPU)


def test_load_base_gives_the_saved_weights_frozen_and_in_evaluation_mode(tmp_path):
    folder = tiny.write_policy_folder(tmp_path / "base", "gpt2")
    base = models.load_base(folder, "float32", "none", CPU)
    expected = base_tensors(tiny_base("gpt2", vocabulary=96))
    assert all(torch.equal(value, expected[key]) for key, value in base_tensors(base).items())
    assert not base.training and not trainable(base)
    assert models.load_base(folder, "bfloat16", "none", CPU).dtype == torch.bfloat16


def test_determinism_needs_the_device_that_it_is_asked_for():
    threads = torch.get_num_threads()
    try:
        assert models.set_determinism("cpu", 3) == CPU
        assert torch.get_num_threads() == 3 and torch.are_deterministic_algorithms_enabled()
        if not torch.cuda.is_available():
            with pytest.raises(UserError, match=r"runtime\.device is 'cuda'"):
                models.set_determinism("cuda", 1)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_a_base_whose_weights_are_not_all_there_is_one_line_of_error(tmp_path):
    folder = tiny.write_policy_folder(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"^base: weights are missing, such as model\.layers\.0\.mlp\.down_proj"
    ):
        models.load_base(folder, "float32", "none", CPU)
