"""Score every continuation with the frozen judge and with VADER: `python -m stages.judge`."""

from rlhf.config import load
from rlhf.errors import run
from rlhf.judging import encode, load_classifier, positive_probabilities, vader_compound
from rlhf.models import set_determinism
from rlhf.record import read_jsonl, write_csv


def main() -> None:
    params = load()
    device = set_determinism(params.runtime.device, params.runtime.threads)
    model, tokenizer = load_classifier("artifacts/judge_model", device)
    judged = []
    for policy in ["base", "sft", *(f"ppo-{seed}" for seed in params.ppo.seeds)]:
        rows = read_jsonl(f"artifacts/samples/{policy}.jsonl")
        for row in rows:
            del row["token_ids"]
        for scope, field in (("full", "full_text"), ("continuation", "continuation")):
            texts = [row[field] for row in rows]
            scores = positive_probabilities(model, encode(tokenizer, texts, params.judge.max_tokens))
            for row, probability, compound in zip(rows, scores, vader_compound(texts), strict=True):
                row[f"judge_{scope}"], row[f"vader_{scope}"] = probability, compound
        judged += rows
        print(f"judge: {policy}: {len(rows)} continuations", flush=True)
    write_csv("artifacts/judged.csv", judged)


if __name__ == "__main__":
    run(main)
