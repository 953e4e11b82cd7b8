"""Continue the test prefixes with one policy and measure its fit to held-out reviews:
`python -m stages.sample --policy base|sft|ppo-<seed>`.
"""

import argparse

from rlhf.batching import chunks
from rlhf.config import load
from rlhf.errors import UserError, run
from rlhf.models import Lora, add_adapters, load_adapter, load_base, load_head, select, set_determinism
from rlhf.randomness import stream
from rlhf.record import Progress, read_json, read_jsonl, write_json, write_jsonl
from rlhf.sampling import sample
from rlhf.scoring import evaluate, reward_scores
from rlhf.sources import locate
from rlhf.textmetrics import repetition
from rlhf.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", required=True, help="base, sft or ppo-<seed>")
    policy = parser.parse_args().policy
    params = load()
    generation, max_tokens = params.generation, params.model.micro_batch_tokens
    device = set_determinism(params.runtime.device, params.runtime.threads)
    folder = locate(read_json("data/manifests/policy.json"))
    tokenizer = load_tokenizer(folder)
    eos_id = tokenizer.eos_token_id
    base = load_base(folder, params.model.dtype, params.model.quantization, device)
    model = add_adapters(base, Lora(**vars(params.model.lora)), ["sft", "reward", "policy"], params.seed)
    load_adapter(model, "sft", "artifacts/sft")
    load_adapter(model, "reward", "artifacts/reward")
    reward_head = load_head("artifacts/reward/head.safetensors", device)
    adapter = active_adapter(policy)
    if adapter == "policy":
        load_adapter(model, "policy", f"artifacts/ppo/{policy.removeprefix('ppo-')}")

    rows = []
    # Row-major in the sample's number: the noise is named by prefix and sample, never by the policy, so
    # that every policy meets the same draws.
    jobs = [(row, number) for number in range(params.sample.n) for row in read_jsonl("data/split/test.jsonl")]
    progress = Progress(f"sample@{policy}", len(jobs))
    for batch in chunks(jobs, params.sample.batch_size):
        prompts = [row["token_ids"][: generation.prefix_tokens] for row, _ in batch]
        noise = [stream(params.seed, "sample", "test", row["id"], number) for row, number in batch]
        select(model, adapter)
        responses = sample(model, prompts, noise, generation.response_tokens, eos_id, generation.temperature)
        own = evaluate(model, prompts, responses, None, generation.temperature, max_tokens)
        reference = own
        if adapter != "sft":
            select(model, "sft")
            reference = evaluate(model, prompts, responses, None, generation.temperature, max_tokens)
        texts = [p + r for p, r in zip(prompts, responses, strict=True)]
        scores = reward_scores(model, reward_head, texts, eos_id, max_tokens)
        for i, (row, number) in enumerate(batch):
            continuation = tokenizer.decode(responses[i], skip_special_tokens=True)
            rows.append(
                {
                    "id": row["id"],
                    "sample": number,
                    "policy": policy,
                    "prefix": tokenizer.decode(prompts[i]),
                    "continuation": continuation,
                    "full_text": tokenizer.decode(texts[i], skip_special_tokens=True),
                    "token_ids": responses[i],
                    "n_tokens": len(responses[i]),
                    "ended": responses[i][-1] == eos_id,
                    "empty": not continuation.strip(),
                    "repetition": repetition(continuation),
                    "kl": (own.logprobs[i].sum() - reference.logprobs[i].sum()).item(),
                    "reward": scores[i].item(),
                }
            )
        progress.step(len(rows), sum(map(len, responses)), reward=scores.mean().item())
    select(model, adapter)
    val = read_jsonl("data/split/val.jsonl")
    reviews = [row["token_ids"] + [eos_id] for row in val]
    outputs = evaluate(model, [r[:1] for r in reviews], [r[1:] for r in reviews], None, 1.0, max_tokens)
    nll = [
        {"id": row["id"], "nll": -outputs.logprobs[i].sum().item(), "tokens": len(reviews[i]) - 1}
        for i, row in enumerate(val)
    ]
    write_jsonl(f"artifacts/samples/{policy}.jsonl", sorted(rows, key=lambda r: (r["id"], r["sample"])))
    write_jsonl(f"artifacts/val_nll/{policy}.jsonl", nll)
    per_token = sum(row["nll"] for row in nll) / sum(row["tokens"] for row in nll)
    write_json(f"reports/metrics/sample/{policy}.json", {"nll_per_token": per_token})
    print(f"sample@{policy}: review NLL {per_token:.3f} nats per token")


def active_adapter(policy: str) -> str | None:
    """The adapter that a policy's name means: none for base, `sft`, or the trained `policy`."""
    if policy.startswith("ppo-") and policy.removeprefix("ppo-").isdigit():
        return "policy"
    if policy not in ("base", "sft"):
        raise UserError(f"--policy is {policy!r}: expected base, sft or ppo-<seed>")
    return {"base": None, "sft": "sft"}[policy]


if __name__ == "__main__":
    run(main)
