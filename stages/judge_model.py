"""Train the judge on its own labels, or take a ready classifier as it is: `python -m stages.judge_model`."""

from rlhf.checkpoint import Snapshots, inputs_key
from rlhf.config import load
from rlhf.environment import environment
from rlhf.errors import run
from rlhf.judging import (
    encode,
    load_classifier,
    positive_probabilities,
    save_classifier,
    train_classifier,
    vader_compound,
)
from rlhf.models import set_determinism
from rlhf.record import read_json, read_jsonl, replacing, write_json
from rlhf.sources import locate


def main() -> None:
    params = load()
    judge = params.judge
    device = set_determinism(params.runtime.device, params.runtime.threads)
    key = inputs_key(
        [environment(params.runtime.device, params.runtime.threads), params.seed, judge],
        [
            *("data/manifests/judge.json", "data/split/judge.jsonl", "data/split/rm_test.jsonl"),
        ],
    )
    snapshots = Snapshots(".checkpoints/judge-model", key, params.runtime.snapshot_seconds)
    model, tokenizer = load_classifier(locate(read_json("data/manifests/judge.json")), device)
    rows, held_out = (read_jsonl(f"data/split/{part}.jsonl") for part in ("judge", "rm_test"))

    if judge.epochs:
        train_classifier(
            model,
            encode(tokenizer, [row["text"] for row in rows], judge.max_tokens),
            [row["label"] for row in rows],
            epochs=judge.epochs,
            batch_size=judge.batch_size,
            lr=judge.lr,
            seed=params.seed,
            snapshots=snapshots,
        )
    texts = [row["text"] for row in held_out]
    probabilities = positive_probabilities(model, encode(tokenizer, texts, judge.max_tokens))
    metrics = {
        "accuracy": accuracy([p >= 0.5 for p in probabilities], held_out),
        "vader_accuracy": accuracy([score >= 0 for score in vader_compound(texts)], held_out),
        "n": len(held_out),
        "train_rows": len(rows) if judge.epochs else 0,
    }
    with replacing("artifacts/judge_model") as output:
        save_classifier(model, tokenizer, output)
    write_json("reports/metrics/judge_model.json", metrics)
    snapshots.remove()
    print(f"judge-model: accuracy {metrics['accuracy']:.3f}, VADER {metrics['vader_accuracy']:.3f}")


def accuracy(positive: list[bool], rows: list[dict]) -> float:
    return sum(p == bool(row["label"]) for p, row in zip(positive, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    run(main)
