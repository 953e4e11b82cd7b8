"""One PPO minibatch: its gradient, whatever the micro-batches, and what an update may touch."""

import pytest
import torch
from tiny import (
    CPU,
    EOS,
    adapter_tensors,
    base_tensors,
    lora,
    perturb,
    plain_forward,
    random_texts,
    streams,
    tiny_base,
    tiny_model,
)

from rlhf.heads import reward_head, zero_head
from rlhf.models import adapter_state, add_adapters, fingerprint, select, set_adapter_state
from rlhf.objectives import gae, token_rewards
from rlhf.ops import whiten
from rlhf.optim import StepNorms, adamw, loss_scaler, optimizer_step
from rlhf.randomness import stream
from rlhf.rollout import Rollout, collect
from rlhf.scoring import RewardModel
from rlhf.update import UpdateStatistics, minibatch_backward, summarise_updates

SETTINGS = {"temperature": 1.2, "clip": 0.2, "value_clip": 0.2, "value_coef": 0.5}
PROMPTS = random_texts([3, 1, 6, 2, 4], seed=1)
RESPONSES = [[*body, EOS] for body in random_texts([5, 2, 0, 3], seed=2)] + random_texts([6], seed=3)
MASK = torch.tensor([[t < len(response) for t in range(6)] for response in RESPONSES])
MINIBATCH = [4, 0, 3, 1, 2]


def draws(name: str, scale: float) -> torch.Tensor:
    """Random numbers [B, R], also under the padding."""
    return torch.from_numpy(stream(0, "tests", name).normal(0.0, scale, (5, 6))).float()


def a_rollout(model) -> tuple[Rollout, torch.Tensor, torch.Tensor]:
    """A rollout near the policy, with its advantages and returns: some ratios and values leave the clip."""
    select(model, "ppo")
    old = draws("old", 0.3)
    with torch.no_grad():
        for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            logits = plain_forward(model, prompt + response)[0][len(prompt) - 1 : -1] / 1.2
            old[i, : len(response)] += logits.log_softmax(-1)[range(len(response)), response]
    values = draws("values", 0.3)
    rollout = Rollout(PROMPTS, RESPONSES, MASK, old, old, old, values, torch.zeros(5))
    return rollout, draws("advantages", 1.0), values + draws("returns", 0.5)


def naive_loss(model, head, rollout, advantages, returns, rows):
    """PPO's loss by its definition, a row and a token at a time, in float64; and its statistics."""
    policy, value, ratios = [], [], []
    for i in rows:
        prompt, response = rollout.prompts[i], rollout.responses[i]
        outputs = model(input_ids=torch.tensor([prompt + response]), output_hidden_states=True)
        for t, token in enumerate(response):
            column = len(prompt) + t - 1
            logits = outputs.logits[0, column].double() / 1.2
            ratio = (logits[token] - logits.logsumexp(0) - rollout.logprobs[i, t]).exp()
            bounded = ratio if 0.8 <= ratio <= 1.2 else ratio.detach().clamp(0.8, 1.2)
            advantage, target = advantages[i, t], returns[i, t]
            policy.append(-min(ratio * advantage, bounded * advantage))
            v, old = head(outputs.hidden_states[-1][0, column])[0].double(), rollout.values[i, t]
            near = v if abs(v - old) <= 0.2 else old + (v - old).sign() * 0.2
            value.append(max((v - target) ** 2, (near - target) ** 2) / 2)
            ratios.append(ratio.detach())
    policy_mean, value_mean = sum(policy) / len(policy), sum(value) / len(value)
    clipped = sum(not 0.8 <= ratio <= 1.2 for ratio in ratios) / len(ratios)
    statistics = (policy_mean.item(), value_mean.item(), (sum(ratios) / len(ratios)).item(), clipped)
    return policy_mean + 0.5 * value_mean, statistics


def gradients(parameters):
    found = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize("rows", [MINIBATCH, [2], [3, 1]])
def test_any_micro_batches_give_the_gradient_of_the_naive_loss(model, rows):
    batch = a_rollout(model)
    head = reward_head("linear", 32, 5, CPU)
    parameters = [*select(model, "ppo", train=True), *head.parameters()]
    loss, statistics = naive_loss(model, head, *batch, rows)
    if len(rows) == 5:
        assert 0.2 < statistics[3] < 0.8  # both sides of the clip are met
    loss.backward()
    expected = gradients(parameters)
    scale = max(gradient.abs().max() for gradient in expected)
    for max_tokens in (1, 12, 20, 10_000):
        found = minibatch_backward(
            model, head, *batch, rows, loss_scaler(CPU, torch.float32), max_tokens=max_tokens, **SETTINGS
        )
        assert found == pytest.approx(statistics, abs=2e-6)  # float32 sums of terms of size 1
        for ours, naive in zip(gradients(parameters), expected, strict=True):
            # Float32 through two layers and back: some 1e-6 of the largest gradient.
            torch.testing.assert_close(ours, naive, rtol=0, atol=1e-5 * scale.item())


def test_what_lies_under_the_padding_changes_no_gradient(llama):
    rollout, advantages, returns = a_rollout(llama)
    head = reward_head("linear", 32, 5, CPU)
    parameters = [*select(llama, "ppo", train=True), *head.parameters()]
    results = []
    for poison in (0.0, 1e6):
        spoilt = [
            torch.where(MASK, field, poison)
            for field in (rollout.logprobs, rollout.values, advantages, returns)
        ]
        poisoned = rollout._replace(logprobs=spoilt[0], values=spoilt[1])
        scaler = loss_scaler(CPU, torch.float32)
        statistics = minibatch_backward(
            llama, head, poisoned, *spoilt[2:], MINIBATCH, scaler, max_tokens=20, **SETTINGS
        )
        results.append((statistics, gradients(parameters)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_the_eos_token_gets_a_gradient_of_its_own(llama):
    """A response of EOS alone, with an advantage there: its update makes EOS likelier after the prompt."""
    old = torch.zeros(1, 1)
    select(llama, "ppo")
    before = plain_forward(llama, PROMPTS[0])[0][-1].log_softmax(-1)[EOS]
    rollout = Rollout(
        PROMPTS[:1], [[EOS]], torch.ones(1, 1, dtype=torch.bool), old + before, old, old, old, old[0]
    )
    head = zero_head(32, CPU)
    groups = {"policy": select(llama, "ppo", train=True), "value": list(head.parameters())}
    scaler = loss_scaler(CPU, torch.float32)
    minibatch_backward(
        llama, head, rollout, old + 1, old, [0], scaler, max_tokens=9, **{**SETTINGS, "temperature": 1.0}
    )
    optimizer_step(torch.optim.SGD(groups["policy"], lr=0.01), groups, scaler, 1e9)
    assert plain_forward(llama, PROMPTS[0])[0][-1].log_softmax(-1)[EOS] > before


def one_step(model, head, seed=5, max_tokens=24):
    """The steps of stages/ppo.py once: collect, reward, advantages, one update over the whole batch."""
    rollout = collect(
        model,
        RewardModel(reward_head("linear", 32, 3, CPU), "reward", None),
        head,
        PROMPTS,
        streams(5, seed),
        policy="ppo",
        response_tokens=8,
        eos_id=EOS,
        temperature=1.2,
        max_tokens=max_tokens,
    )
    mask = rollout.response_mask
    rewards = token_rewards(rollout.scores, rollout.logprobs, rollout.ref_logprobs, mask, 0.1)
    advantages, returns = gae(rewards, rollout.values, mask, 1.0, 0.95)
    groups = {"policy": select(model, "ppo", train=True), "value": list(head.parameters())}
    optimizer, scaler = adamw(groups, 0.01, 0.9, 0.999, 1e-8, 0.01), loss_scaler(CPU, torch.float32)
    statistics = minibatch_backward(
        model,
        head,
        rollout,
        whiten(advantages, mask),
        returns,
        MINIBATCH,
        scaler,
        max_tokens=max_tokens,
        **SETTINGS,
    )
    return statistics, optimizer_step(optimizer, groups, scaler, 1.0)


def test_an_update_changes_the_policy_and_the_value_head_alone(model):
    head = zero_head(32, CPU)
    base, ppo = base_tensors(model), adapter_tensors(model, "ppo")
    frozen = {name: fingerprint(model, name) for name in ("sft", "reward")}
    statistics, norms = one_step(model, head)
    assert norms.total > 0 and not norms.skipped
    assert {name: fingerprint(model, name) for name in frozen} == frozen
    assert all(torch.equal(value, base[key]) for key, value in base_tensors(model).items())
    assert not any(torch.equal(value, ppo[key]) for key, value in adapter_tensors(model, "ppo").items())
    assert head.weight.any() and head.bias.any()
    held = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert not held  # neither left over nor given to another
    assert statistics.policy_loss != 0


@pytest.mark.parametrize("max_tokens", [24, 10_000])
def test_the_first_update_starts_at_a_ratio_of_one(model, max_tokens):
    """The policy that sampled is the policy that is updated: nothing is clipped, the ratio is 1."""
    statistics, _ = one_step(model, zero_head(32, CPU), max_tokens=max_tokens)
    assert statistics.mean_ratio == pytest.approx(1, abs=1e-6) and statistics.clip_fraction == 0


def test_the_same_seeds_give_the_same_update_bit_for_bit():
    def after(seed):
        model, head = tiny_model("llama"), zero_head(32, CPU)
        torch.manual_seed(seed * 7)  # must not matter
        one_step(model, head, seed)
        return fingerprint(model, "ppo"), head.weight.detach().numpy().tobytes()

    assert after(5) == after(5)
    assert after(5)[0] != after(6)[0]


def test_loss_scaling_scales_gradients_and_nothing_else(llama):
    batch, head = a_rollout(llama), reward_head("linear", 32, 5, CPU)
    parameters = [*select(llama, "ppo", train=True), *head.parameters()]
    results = []
    for dtype in (torch.float32, torch.float16):
        statistics = minibatch_backward(
            llama, head, *batch, MINIBATCH, loss_scaler(CPU, dtype), max_tokens=20, **SETTINGS
        )
        results.append((statistics, gradients(parameters)))
    assert results[0][0] == results[1][0]
    for plain, scaled in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(plain * 256, scaled)  # a power of two: exact


def test_a_fresh_adapter_learns_from_its_first_update():
    """LoRA starts with B = 0, where only B has a gradient; it must have one in every layer."""
    model = add_adapters(tiny_base("llama"), lora("llama"), ["sft", "reward", "ppo"], seed=1)
    perturb(model, "reward")
    set_adapter_state(model, "ppo", adapter_state(model, "sft"))
    one_step(model, zero_head(32, CPU))
    moved = {key: value for key, value in adapter_tensors(model, "ppo").items() if "lora_B" in key}
    assert moved and all(value.any() for value in moved.values())


def test_without_a_value_head_the_gradient_is_the_policy_loss_s_alone(llama):
    rollout, advantages, returns = a_rollout(llama)
    results = []
    for head, coefficient in ((None, 0.5), (zero_head(32, CPU), 0.0)):
        parameters = select(llama, "ppo", train=True)
        settings = {**SETTINGS, "value_coef": coefficient}
        scaler = loss_scaler(CPU, torch.float32)
        statistics = minibatch_backward(
            llama, head, rollout, advantages, returns, MINIBATCH, scaler, max_tokens=20, **settings
        )
        results.append((statistics, gradients(parameters)))
    (without, alone), (with_head, ignored) = results
    assert without.value_loss is None and with_head.value_loss > 0
    assert without._replace(value_loss=0.0) == with_head._replace(value_loss=0.0)
    assert all(torch.equal(a, b) for a, b in zip(alone, ignored, strict=True))


def test_updates_without_a_value_head_are_summarised_with_empty_cells():
    statistics = [UpdateStatistics(1.0, None, 1.1, 0.25), UpdateStatistics(3.0, None, 0.9, 0.75)]
    found = summarise_updates(statistics, [StepNorms(3.0, {"policy": 3.0})] * 2, 0.5)
    assert found == {
        "loss": 2.0,
        "policy_loss": 2.0,
        "value_loss": None,
        "mean_ratio": 1.0,
        "clip_fraction": 0.5,
        "policy_grad_norm": 3.0,
        "value_grad_norm": None,
        "skipped_updates": 0,
    }


def test_summarise_updates_by_hand():
    statistics = [UpdateStatistics(1.0, 2.0, 1.1, 0.25), UpdateStatistics(3.0, 4.0, 0.9, 0.75)]
    norms = [
        StepNorms(5.0, {"policy": 3.0, "value": 4.0}),
        StepNorms(None, {"policy": None, "value": None}),
    ]
    assert summarise_updates(statistics, norms, 0.5) == {
        "loss": 2.0,  # of the first alone: the second was skipped
        "policy_loss": 1.0,
        "value_loss": 2.0,
        "mean_ratio": 1.1,
        "clip_fraction": 0.25,
        "policy_grad_norm": 3.0,
        "value_grad_norm": 4.0,
        "skipped_updates": 1,
    }
    both = summarise_updates(statistics, norms[:1] * 2, 0.5)
    assert (both["loss"], both["policy_loss"], both["value_loss"], both["mean_ratio"]) == (3.5, 2.0, 3.0, 1.0)
    skipped = summarise_updates(statistics, norms[1:] * 2, 0.5)
    assert skipped.pop("skipped_updates") == 2 and set(skipped.values()) == {None}
