"""Score every continuation with the frozen judge and with VADER: `python -m stages.judge`."""

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.config import load
from rlhf.errors import run
from rlhf.judging import encode, load_classifier, positive_probabilities, vader_compound
from rlhf.models import set_determinism
from rlhf.record import read_jsonl, write_csv

TEXTS = {"full": "full_text", "continuation": "continuation"}


def main() -> None:
    params = load()
    device = set_determinism(params.runtime.device, params.runtime.threads)
    model, tokenizer = load_classifier("artifacts/judge_model", device)
    judged = []
    for policy in ["base", "sft", "sft-again", *(f"ppo-{seed}" for seed in params.ppo.seeds)]:
        rows = read_jsonl(f"artifacts/samples/{policy}.jsonl")
        judged += score(model, tokenizer, rows, ("full", "continuation"), params.judge.max_tokens)
        print(f"judge: {policy}: {len(rows)} continuations", flush=True)
    write_csv("artifacts/judged.csv", judged)

    # What PPO wrote at each of its checks shows whether reward and judge part along the way.
    checked = []
    for seed in params.ppo.seeds:
        rows = [{"seed": seed} | row for row in read_jsonl(f"artifacts/ppo_validation/{seed}.jsonl")]
        checked += score(model, tokenizer, rows, ("full",), params.judge.max_tokens)
        print(f"judge: ppo-{seed} along training: {len(rows)} continuations", flush=True)
    write_csv("artifacts/judged_validation.csv", checked)


def score(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    scopes: tuple[str, ...],
    max_tokens: int,
) -> list[dict]:
    """Return the rows without token ids and with judge_* and vader_* of each scope, full or continuation."""
    judged = [{name: value for name, value in row.items() if name != "token_ids"} for row in rows]
    for scope in scopes:
        texts = [row[TEXTS[scope]] for row in rows]
        probabilities = positive_probabilities(model, encode(tokenizer, texts, max_tokens))
        for row, probability, compound in zip(judged, probabilities, vader_compound(texts), strict=True):
            row[f"judge_{scope}"], row[f"vader_{scope}"] = probability, compound
    return judged


if __name__ == "__main__":
    run(main)
