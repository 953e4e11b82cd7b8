"""How often does a sampled token depend on its batch? `python -m benchmarks.batch_invariance`

Samples the test prefixes from SFT with the same noise at batch sizes 1, 7 and 64, and counts the
continuations and tokens that differ from those of batch size 1. Needs data/split and artifacts/sft.
"""

from rlhf.batching import chunks
from rlhf.config import load
from rlhf.errors import run
from rlhf.models import load_adapter, load_model, select, set_determinism
from rlhf.randomness import stream
from rlhf.record import Progress, read_json, read_jsonl
from rlhf.sampling import sample
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer

BATCH_SIZES = (1, 7, 64)


def main() -> None:
    params = load()
    generation = params.generation
    device = set_determinism(params.runtime.device, params.runtime.threads)
    folder = locate(read_json("data/manifests/policy.json"))
    eos_id = load_tokenizer(folder).eos_token_id
    model = load_model(folder, params.model, device, ["sft"], params.seed)
    load_adapter(model, "sft", "artifacts/sft")
    select(model, "sft")
    rows = read_jsonl("data/split/test.jsonl")

    found = {}
    for batch_size in BATCH_SIZES:
        progress, found[batch_size] = Progress(f"batches of {batch_size}", len(rows)), []
        for batch in chunks(rows, batch_size):
            prompts = [row["token_ids"][: generation.prefix_tokens] for row in batch]
            noise = [stream(params.seed, "sample", "test", row["id"], 0) for row in batch]
            new = sample(model, prompts, noise, generation.response_tokens, eos_id, generation.temperature)
            found[batch_size] += new
            progress.step(len(found[batch_size]), sum(map(len, new)))
    for batch_size in BATCH_SIZES[1:]:
        print(f"{batch_size} against 1: {describe(found[1], found[batch_size])}")


def describe(ones: list[list[int]], others: list[list[int]]) -> str:
    """Count continuations that differ, and the tokens before and at the first difference: what follows a
    different token is no longer comparable."""
    differing = sum(a != b for a, b in zip(ones, others, strict=True))
    compared = sum(
        next((i + 1 for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        for a, b in zip(ones, others, strict=True)
    )
    return f"{differing} of {compared} tokens differ, in {differing} of {len(ones)} continuations"


if __name__ == "__main__":
    run(main)
