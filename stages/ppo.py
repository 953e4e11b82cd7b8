"""PPO with a KL penalty to the frozen SFT policy, one run per seed: `python -m stages.ppo --seed 42`.

The numbers in the comments are the steps that the README describes.
"""

import argparse
import dataclasses

from rlhf.batching import chunks
from rlhf.checkpoint import Best, Snapshots, inputs_key, restore_training, training_snapshot
from rlhf.config import load
from rlhf.environment import environment
from rlhf.errors import run
from rlhf.heads import save_head, zero_head
from rlhf.models import (
    adapter_state,
    check_length,
    compute_dtype,
    fingerprint,
    load_adapter,
    load_model,
    save_adapter,
    select,
    set_adapter_state,
    set_determinism,
)
from rlhf.objectives import gae, next_kl_beta, reward_to_go, token_rewards
from rlhf.ops import whiten
from rlhf.optim import adamw, copy_parameters, loss_scaler, optimizer_step, set_parameters
from rlhf.prompts import prompt_of
from rlhf.randomness import epoch_order, stream
from rlhf.record import Progress, read_json, read_jsonl, replacing, write_csv, write_json, write_jsonl
from rlhf.rollout import collect, records, summarise
from rlhf.scoring import load_reward
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer
from rlhf.update import minibatch_backward, summarise_updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True)
    seed = parser.parse_args().seed
    params = load()
    ppo, adam, generation = params.ppo, params.adam, params.generation
    device = set_determinism(params.runtime.device, params.runtime.threads)
    key = inputs_key(
        [
            *(environment(params.runtime.device, params.runtime.threads), seed, params.seed),
            *(params.model, adam, generation, dataclasses.replace(ppo, seeds=())),
        ],
        [
            *("data/manifests/policy.json", "data/split/ppo.jsonl", "data/split/val.jsonl"),
            *("artifacts/sft", "artifacts/reward"),
        ],
    )
    snapshots = Snapshots(f".checkpoints/ppo-{seed}", key, params.runtime.snapshot_seconds)
    max_tokens = params.model.micro_batch_tokens
    manifest = read_json("data/manifests/policy.json")
    folder = locate(manifest)
    tokenizer = load_tokenizer(folder)
    eos_id = tokenizer.eos_token_id

    # 1. One base, three adapters: `sft` is the frozen reference, `reward` the frozen judge of texts, and
    #    `ppo` starts as a copy of `sft`. The value head, where advantages need one, starts at zero.
    model = load_model(folder, params.model, device, ["sft", "reward", "ppo"], params.seed)
    load_adapter(model, "sft", "artifacts/sft")
    reward = load_reward(model, "artifacts/reward", device)
    set_adapter_state(model, "ppo", adapter_state(model, "sft"))
    value_head = zero_head(model.config.hidden_size, device) if ppo.advantage == "gae" else None
    frozen = {name: fingerprint(model, name) for name in ("sft", "reward")}

    groups = {"policy": select(model, "ppo", train=True)}
    if value_head is not None:
        groups["value"] = list(value_head.parameters())
    optimizer = adamw(groups, ppo.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.state)
    scaler = loss_scaler(device, compute_dtype(model))

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    def prompts_of(rows: list[dict]) -> list[list[int]]:
        return [prompt_of(row, generation.prefix_tokens) for row in rows]

    prompts = prompts_of(read_jsonl("data/split/ppo.jsonl"))
    validation_rows = read_jsonl("data/split/val.jsonl")[: ppo.validation_prefixes]
    longest = max(map(len, prompts + prompts_of(validation_rows)))
    check_length(model, longest + generation.response_tokens + 1)
    settings = {
        "policy": "ppo",
        "response_tokens": generation.response_tokens,
        "eos_id": eos_id,
        "temperature": generation.temperature,
        "max_tokens": max_tokens,
    }

    def validate(step: int) -> tuple[dict, list[dict]]:
        """The same prompts and the same noise at every check, so that only the policy differs."""
        noise = [stream(params.seed, "ppo", "validation", row) for row in range(len(validation_rows))]
        rollout = collect(model, reward, value_head, prompts_of(validation_rows), noise, **settings)
        texts = records(rollout, decode, eos_id)
        names = [{"step": step, "id": row["id"]} for row in validation_rows]
        return (
            {"step": step, **summarise(rollout, decode, eos_id)},
            [name | text for name, text in zip(names, texts, strict=True)],
        )

    # A run that was interrupted goes on after its last snapshot, to the same bytes.
    if snapshot := snapshots.latest():
        best, done = restore_training(snapshot, optimizer, scaler), snapshot.step
        log, validations, texts, kl_beta = (
            snapshot.record[name] for name in ("log", "validations", "texts", "kl_beta")
        )
    else:
        first, texts = validate(0)
        log, validations, kl_beta, done = [], [first], ppo.kl_beta, 0
        best = Best(0, first["reward"], copy_parameters(groups))

    progress = Progress(f"ppo@{seed}", ppo.steps, done)
    for step in range(done, ppo.steps):
        # 2. Sample a batch of responses; evaluate them under the policy and the reference; score them.
        rows = epoch_order(seed, "ppo", len(prompts), step, ppo.batch_size)
        noise = [stream(seed, "ppo", "sample", step, row) for row in range(len(rows))]
        rollout = collect(model, reward, value_head, [prompts[i] for i in rows], noise, **settings)
        mask = rollout.response_mask

        # 3. Per-token rewards: the KL penalty everywhere, the score on the last token.
        rewards = token_rewards(rollout.scores, rollout.logprobs, rollout.ref_logprobs, mask, kl_beta)

        # 4. Advantages by GAE and returns from the raw advantages, or rewards to go for both; then the
        #    advantages are whitened.
        if value_head is not None:
            advantages, returns = gae(rewards, rollout.values, mask, ppo.gamma, ppo.lam)
        else:
            advantages = returns = reward_to_go(rewards, mask, ppo.gamma)
        advantages = whiten(advantages, mask)

        # 5. Several epochs over the batch, in shuffled minibatches. Each evaluates its rows again, with
        #    gradients; takes the clipped policy and value losses; clips the gradient; updates once.
        select(model, "ppo", train=True)
        statistics, norms = [], []
        for epoch in range(ppo.epochs):
            order = stream(seed, "ppo", "minibatches", step, epoch).permutation(len(rows)).tolist()
            for minibatch in chunks(order, ppo.batch_size // ppo.minibatches):
                statistics.append(
                    minibatch_backward(
                        model,
                        value_head,
                        rollout,
                        advantages,
                        returns,
                        minibatch,
                        scaler,
                        temperature=generation.temperature,
                        clip=ppo.clip,
                        value_clip=ppo.value_clip,
                        value_coef=ppo.value_coef,
                        max_tokens=max_tokens,
                    )
                )
                norms.append(optimizer_step(optimizer, groups, scaler, adam.max_grad_norm))

        log.append(
            {
                "step": step + 1,
                **summarise(rollout, decode, eos_id),
                **summarise_updates(statistics, norms, ppo.value_coef),
                "kl_beta": kl_beta,
            }
        )
        kl_beta = next_kl_beta(
            ppo.kl_controller, kl_beta, log[-1]["kl_per_token"], ppo.kl_target, len(rows), ppo.kl_horizon
        )
        shown = {name: log[-1][name] for name in ("reward", "kl", "loss", "length", "policy_grad_norm")}
        progress.step(step + 1, int(mask.sum()), **shown)

        # 6. Fixed validation; the policy with the highest validation reward is the one selected.
        if (step + 1) % ppo.validate_every == 0 or step + 1 == ppo.steps:
            validation, more = validate(step + 1)
            validations.append(validation)
            texts += more
            print(f"ppo@{seed} validation {validation}", flush=True)
            if validation["reward"] > best.value:
                best = Best(step + 1, validation["reward"], copy_parameters(groups))
        if snapshots.due():
            logs = {"log": log, "validations": validations, "texts": texts, "kl_beta": kl_beta}
            snapshots.save(training_snapshot(step + 1, optimizer, scaler, best, **logs))

    # 7. What was frozen must still be what it was; then write the last and the selected policy.
    for name, expected in frozen.items():
        if fingerprint(model, name) != expected:
            raise RuntimeError(f"the frozen adapter {name!r} changed during PPO")
    with replacing(f"artifacts/ppo/{seed}") as output:
        save_adapter(model, "ppo", output / "last", manifest["source"]["name"])
        if value_head is not None:
            save_head(value_head, output / "last" / "value_head.safetensors")
        set_parameters(groups, best.parameters)
        save_adapter(model, "ppo", output, manifest["source"]["name"])
        if value_head is not None:
            save_head(value_head, output / "value_head.safetensors")
    write_csv(f"reports/plots/ppo/{seed}.csv", log)
    write_csv(f"reports/plots/ppo_validation/{seed}.csv", validations)
    write_jsonl(f"artifacts/ppo_validation/{seed}.jsonl", texts)
    write_json(
        f"reports/metrics/ppo/{seed}.json",
        {
            "selected_step": best.step,
            "validation_reward_initial": validations[0]["reward"],
            "validation_reward_selected": best.value,
            "last_step_reward": log[-1]["reward"],
            "last_step_kl": log[-1]["kl"],
        },
    )
    snapshots.remove()


if __name__ == "__main__":
    run(main)
