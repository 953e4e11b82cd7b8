"""Continue the test prompts with one policy and measure its fit to held-out texts:
`python -m stages.sample --policy base|sft|sft-again`, or `--policy ppo --seed 42`.
"""

import argparse

from rlhf.batching import chunks
from rlhf.checkpoint import Snapshot, Snapshots, inputs_key
from rlhf.config import load
from rlhf.environment import environment
from rlhf.errors import UserError, run
from rlhf.models import check_length, load_adapter, load_model, select, set_determinism
from rlhf.prompts import prompt_of, response_of
from rlhf.randomness import stream
from rlhf.record import Progress, read_json, read_jsonl, write_json, write_jsonl
from rlhf.rollout import collect, records
from rlhf.scoring import evaluate, load_reward
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="base, sft, sft-again or ppo")
    parser.add_argument("--seed", type=int, help="which of the policies that PPO trained")
    arguments = parser.parse_args()
    policy, adapter = named(arguments.policy, arguments.seed)
    params = load()
    generation, max_tokens = params.generation, params.model.micro_batch_tokens
    device = set_determinism(params.runtime.device, params.runtime.threads)
    trained = [f"artifacts/ppo/{policy.removeprefix('ppo-')}"] if adapter == "policy" else []
    key = inputs_key(
        [
            *(environment(params.runtime.device, params.runtime.threads), policy, params.seed),
            *(params.model, generation, params.sample, params.sft.prompt_tokens),
        ],
        [
            *("data/manifests/policy.json", "data/split/test.jsonl", "data/split/val.jsonl"),
            *("artifacts/sft", "artifacts/reward", *trained),
        ],
    )
    snapshots = Snapshots(f".checkpoints/sample-{policy}", key, params.runtime.snapshot_seconds)
    folder = locate(read_json("data/manifests/policy.json"))
    tokenizer = load_tokenizer(folder)
    eos_id = tokenizer.eos_token_id
    model = load_model(folder, params.model, device, ["sft", "reward", "policy"], params.seed)
    load_adapter(model, "sft", "artifacts/sft")
    reward = load_reward(model, "artifacts/reward", device)
    for path in trained:
        load_adapter(model, "policy", path)

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    # The noise is named by prompt and sample, never by the policy, so that every policy meets the same draws.
    # `sft-again` is SFT under other draws: a comparison in which no difference must be found.
    purpose = "again" if policy == "sft-again" else "test"
    test, val = (read_jsonl(f"data/split/{part}.jsonl") for part in ("test", "val"))
    longest = max(len(prompt_of(row, generation.prefix_tokens)) for row in test)
    longest = max(longest + generation.response_tokens, *(len(row["token_ids"]) for row in val))
    check_length(model, longest + 1)
    jobs = [(row, number) for number in range(params.sample.n) for row in test]
    batches = list(chunks(jobs, params.sample.batch_size))
    snapshot = snapshots.latest() or Snapshot(0, {}, {"rows": []})
    rows = snapshot.record["rows"]
    progress = Progress(f"sample@{policy}", len(jobs), len(rows))
    for number, batch in enumerate(batches[snapshot.step :], start=snapshot.step):
        rollout = collect(
            model,
            reward,
            None,
            [prompt_of(row, generation.prefix_tokens) for row, _ in batch],
            [stream(params.seed, "sample", purpose, row["id"], sample) for row, sample in batch],
            policy=adapter,
            response_tokens=generation.response_tokens,
            eos_id=eos_id,
            temperature=generation.temperature,
            max_tokens=max_tokens,
        )
        names = [{"id": row["id"], "sample": sample, "policy": policy} for row, sample in batch]
        rows += [n | found for n, found in zip(names, records(rollout, decode, eos_id), strict=True)]
        progress.step(len(rows), sum(map(len, rollout.responses)), reward=rollout.scores.mean().item())
        if snapshots.due():
            snapshots.save(Snapshot(number + 1, {}, {"rows": rows}))
    write_jsonl(f"artifacts/samples/{policy}.jsonl", sorted(rows, key=lambda r: (r["id"], r["sample"])))

    if policy != "sft-again":
        select(model, adapter)
        given = params.sft.prompt_tokens
        responses = [response_of(row, given, eos_id) for row in val]
        outputs = evaluate(model, [prompt_of(row, given) for row in val], responses, None, 1.0, max_tokens)
        nll = [
            {"id": row["id"], "nll": -outputs.logprobs[i].sum().item(), "tokens": len(responses[i])}
            for i, row in enumerate(val)
        ]
        per_token = sum(row["nll"] for row in nll) / sum(row["tokens"] for row in nll)
        write_jsonl(f"artifacts/val_nll/{policy}.jsonl", nll)
        write_json(f"reports/metrics/sample/{policy}.json", {"nll_per_token": per_token})
        print(f"sample@{policy}: NLL {per_token:.3f} nats per token")
    snapshots.remove()


def named(policy: str, seed: int | None) -> tuple[str, str | None]:
    """A policy's name and its adapter: none for base, `sft`, or `policy` for the one that PPO trained."""
    adapters = {"base": None, "sft": "sft", "sft-again": "sft", "ppo": "policy"}
    if policy not in adapters:
        raise UserError(f"--policy is {policy!r}: expected base, sft, sft-again or ppo")
    if (seed is None) == (policy == "ppo"):
        raise UserError(f"--policy {policy} with --seed {seed}: expected a seed for ppo, and for ppo alone")
    return policy if seed is None else f"ppo-{seed}", adapters[policy]


if __name__ == "__main__":
    run(main)
