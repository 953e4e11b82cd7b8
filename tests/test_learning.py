"""The parts together learn: small, seeded runs whose outcome is known, and the same on a 4-bit base."""

import numpy as np
import pytest
import torch
from tiny import (
    CPU,
    EOS,
    lora,
    perturb,
    random_texts,
    streams,
    tiny_base,
    write_policy_folder,
)

from rlhf.batching import chunks, micro_batches, pad_pairs
from rlhf.heads import reward_head, zero_head
from rlhf.models import (
    adapter_state,
    add_adapters,
    fingerprint,
    load_base,
    select,
    set_adapter_state,
)
from rlhf.objectives import gae, label_loss, sequence_nll, token_rewards
from rlhf.ops import masked_sum, whiten
from rlhf.optim import adamw, loss_scaler, optimizer_step
from rlhf.randomness import stream
from rlhf.rollout import collect
from rlhf.sampling import sample
from rlhf.scoring import RewardModel, evaluate, response_outputs, reward_logits
from rlhf.update import minibatch_backward

TARGET = 7  # the token that the toy reward pays for
NO_SCALING = loss_scaler(CPU, torch.float32)


def optimizer_of(groups, lr):
    return adamw(groups, lr, 0.9, 0.999, 1e-8, 0.0)


def fresh_model(*names):
    return add_adapters(tiny_base("llama"), lora("llama", rank=4), list(names), seed=1)


def test_sft_overfits_one_batch_and_then_samples_it():
    """Every text starts with a token of its own, so the best NLL is 0, and greedy text repeats the batch."""
    model = fresh_model("sft")
    texts = [[i + 1, *body, EOS] for i, body in enumerate(random_texts([5, 3, 1, 0], seed=1))]
    groups = {"policy": select(model, "sft", train=True)}
    optimizer = optimizer_of(groups, 0.02)
    losses = []
    for _ in range(60):
        losses.append(0.0)
        for indices in micro_batches([len(text) for text in texts], 16):
            batch = pad_pairs([texts[i][:1] for i in indices], [texts[i][1:] for i in indices], EOS, CPU)
            outputs = response_outputs(model, batch, None, 1.0)
            loss = sequence_nll(outputs.logprobs, batch.response_mask).sum() / len(texts)
            loss.backward()
            losses[-1] += loss.item()
        optimizer_step(optimizer, groups, NO_SCALING, 1.0)
    assert losses[0] > 2 and losses[-1] < 0.05
    greedy = sample(model, [text[:1] for text in texts], streams(4), 10, EOS, temperature=0.01)
    assert greedy == [text[1:] for text in texts]


def labelled(count, seed):
    texts = random_texts(stream(seed, "tests", "lengths").integers(2, 9, count).tolist(), seed)
    return texts, torch.tensor([TARGET in text or TARGET + 1 in text for text in texts])


def test_the_reward_model_separates_what_can_be_separated():
    model, head = fresh_model("reward"), reward_head("linear", 32, 1, CPU)
    texts, labels = labelled(128, seed=1)
    assert 0.3 < labels.float().mean() < 0.7
    groups = {"policy": select(model, "reward", train=True), "head": list(head.parameters())}
    optimizer = optimizer_of(groups, 0.01)
    for step in range(60):
        rows = [row % 128 for row in range(step * 32, step * 32 + 32)]
        logits = reward_logits(model, head, [texts[row] for row in rows], EOS, 128)
        label_loss(logits, labels[rows]).mean().backward()
        optimizer_step(optimizer, groups, NO_SCALING, 1.0)
    unseen, truth = labelled(64, seed=2)
    with torch.no_grad():
        accuracy = ((reward_logits(model, head, unseen, EOS, 256) > 0) == truth).float().mean()
    assert accuracy >= 0.9


def toy_ppo(monkeypatch, kl_beta, steps=20):
    """The loop of stages/ppo.py with the reward 2 (share of TARGET in the response) - 1.

    Returns the mean reward and the KL to the reference, nats per sequence, at every step.
    """

    def share(model, reward, texts, eos_id, max_tokens):
        return torch.tensor(
            [2 * np.mean([token == TARGET for token in text[2:]]) - 1 for text in texts]
        ).float()

    monkeypatch.setattr("rlhf.rollout.reward_scores", share)
    model, value_head = fresh_model("sft", "reward", "ppo"), zero_head(32, CPU)
    unused = RewardModel(zero_head(32, CPU), "reward", None)
    perturb(model, "sft")
    set_adapter_state(model, "ppo", adapter_state(model, "sft"))
    frozen = fingerprint(model, "sft")
    groups = {"policy": select(model, "ppo", train=True), "value": list(value_head.parameters())}
    optimizer = optimizer_of(groups, 0.005)
    rewards, kls = [], []
    settings = {"policy": "ppo", "response_tokens": 6, "eos_id": EOS, "temperature": 1.0, "max_tokens": 512}
    for step in range(steps):
        prompts = random_texts([2] * 32, seed=step)
        noise = [stream(step, "tests", "ppo", row) for row in range(32)]
        rollout = collect(model, unused, value_head, prompts, noise, **settings)
        mask, log_ratio = rollout.response_mask, rollout.logprobs - rollout.ref_logprobs
        rewards.append(rollout.scores.mean().item())
        kls.append(masked_sum(log_ratio, mask).item() / 32)
        token_level = token_rewards(rollout.scores, rollout.logprobs, rollout.ref_logprobs, mask, kl_beta)
        advantages, returns = gae(token_level, rollout.values, mask, 1.0, 0.95)
        advantages = whiten(advantages, mask)
        select(model, "ppo", train=True)
        for minibatch in chunks(stream(step, "tests", "order").permutation(32).tolist(), 16) * 2:
            minibatch_backward(
                model,
                value_head,
                rollout,
                advantages,
                returns,
                minibatch,
                NO_SCALING,
                temperature=1.0,
                clip=0.2,
                value_clip=0.2,
                value_coef=0.5,
                max_tokens=512,
            )
            optimizer_step(optimizer, groups, NO_SCALING, 1.0)
    assert fingerprint(model, "sft") == frozen
    return rewards, kls


def test_ppo_raises_a_toy_reward_and_a_large_kl_coefficient_holds_it_back(monkeypatch):
    rewards, kls = toy_ppo(monkeypatch, kl_beta=0.02)
    held_rewards, held_kls = toy_ppo(monkeypatch, kl_beta=1.0)
    assert kls[0] == held_kls[0] == 0 and rewards[0] == held_rewards[0] < -0.8
    assert np.mean(rewards[-5:]) > 0.5 and np.mean(kls[-5:]) > 5
    assert np.mean(held_rewards[-5:]) < -0.6 and np.mean(held_kls[-5:]) < 0.5


@pytest.fixture(params=["llama-tied", "qwen3"])
def quantised(request, tmp_path):
    """A 4-bit model under three adapters; bitsandbytes wants sizes that 64 divides."""
    folder = write_policy_folder(tmp_path / "base", request.param, hidden=64)
    base = load_base(folder, "float32", "nf4", CPU)
    kinds = {type(module).__name__ for name, module in base.named_modules() if name.endswith("_proj")}
    assert kinds == {"Linear4bit"}
    model = add_adapters(base, lora(request.param), ["sft", "reward", "ppo"], seed=1)
    for name in ("sft", "reward", "ppo"):
        perturb(model, name, scale=0.2)
    return model


TEXTS = random_texts([7, 3, 5], seed=6)


def gradients(model):
    """Every gradient of the PPO adapter for one likelihood."""
    parameters = select(model, "ppo", train=True)
    batch = pad_pairs([text[:1] for text in TEXTS], [text[1:] for text in TEXTS], EOS, CPU)
    response_outputs(model, batch, None, 1.0).logprobs.sum().backward()
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def views(model):
    """Log-probabilities under every adapter and under the base, in evaluation mode, without gradients."""
    found = []
    for name in ("sft", "reward", "ppo", None):
        select(model, name)
        pairs = [text[:1] for text in TEXTS], [text[1:] for text in TEXTS]
        found.append(evaluate(model, *pairs, None, 1.0, 100).logprobs)
    return found


def test_every_adapter_on_a_4_bit_base_is_nearest_to_itself_on_the_float_base(quantised, tmp_path):
    base = load_base(tmp_path / "base", "float32", "none", CPU)
    full = add_adapters(base, lora("llama"), ["sft", "reward", "ppo"], seed=1)
    for name in ("sft", "reward", "ppo"):
        perturb(full, name, scale=0.2)
    distances = torch.tensor([[(a - b).abs().mean() for b in views(full)] for a in views(quantised)])
    assert distances.argmin(1).tolist() == [0, 1, 2, 3]
    assert (distances.diagonal() > 0.01).all()  # 16 levels a weight cannot be exact: it is really 4-bit


def test_no_4_bit_layer_believes_in_such_a_cpu(monkeypatch, tmp_path):
    """As if on a CPU with AVX512-BF16, where bitsandbytes would repack each layer's weights."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    base = load_base(write_policy_folder(tmp_path / "base", hidden=64), "float32", "nf4", CPU)
    layers = [module for module in base.modules() if type(module).__name__ == "Linear4bit"]
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)


def test_evaluation_first_keeps_4_bit_gradients_and_outputs(quantised):
    """On CPUs with AVX512-BF16 bitsandbytes repacks weights at the first evaluation; that must not show."""
    before_any = [gradient.clone() for gradient in gradients(quantised)]
    first = views(quantised)
    after = gradients(quantised)
    assert all(gradient is not None and gradient.any() for gradient in after)
    assert all(torch.equal(a, b) for a, b in zip(before_any, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, views(quantised), strict=True))


def test_evaluation_without_any_training_before_it_keeps_4_bit_gradients(quantised):
    views(quantised)
    assert all(gradient is not None and gradient.any() for gradient in gradients(quantised))


def test_4_bit_sampling_is_a_row_s_own_business(quantised):
    select(quantised, "ppo")
    together = sample(quantised, TEXTS, streams(3), 6, EOS, 1.0)
    alone = [sample(quantised, [t], [streams(3)[i]], 6, EOS, 1.0)[0] for i, t in enumerate(TEXTS)]
    assert together == alone
