"""Preferences between answers: people's own, or simulated on samples of SFT: `python -m stages.preferences`.

Pairs in the table `preferences.pairs` are people's, and nothing is sampled then. An empty file asks for
simulation.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.annotator import heuristic, preferences
from rlhf.batching import chunks
from rlhf.checkpoint import Snapshot, Snapshots, inputs_key
from rlhf.config import QuestionParams, load
from rlhf.environment import environment
from rlhf.errors import UserError, run
from rlhf.models import check_length, load_adapter, load_model, select, set_determinism
from rlhf.prompts import answer_ids, prompt_of, question_ids
from rlhf.questions import asked, divided, read_preferences
from rlhf.randomness import stream
from rlhf.record import Progress, read_json, read_jsonl, replacing, write_json, write_jsonl
from rlhf.sampling import sample
from rlhf.sources import locate
from rlhf.tokenizer import encoder, load_tokenizer

PARTS = ("rm", "val", "rm_test")
Encode = Callable[[str], list[int]]


def main() -> None:
    params = load()
    device = set_determinism(params.runtime.device, params.runtime.threads)
    key = inputs_key(
        [
            *(environment(params.runtime.device, params.runtime.threads), params.seed),
            *(params.model, params.generation, params.preferences, params.split),
        ],
        [
            *("data/manifests/policy.json", params.preferences.pairs.file, "data/split/rm.jsonl"),
            *("data/split/val.jsonl", "data/split/rm_test.jsonl", "data/split/test.jsonl", "artifacts/sft"),
        ],
    )
    snapshots = Snapshots(".checkpoints/preferences", key, params.runtime.snapshot_seconds)
    folder = locate(read_json("data/manifests/policy.json"))
    tokenizer = load_tokenizer(folder)
    human = read_preferences(params.preferences.pairs)
    if human:
        pairs, samples, left_out = written(params, human, encoder(folder, tokenizer))
        ties = dict.fromkeys(PARTS, 0)
    else:
        samples, left_out = sampled(params, folder, device, tokenizer, snapshots), 0
        pairs, ties = judged(params, samples)
    for part in PARTS:
        if not pairs[part]:
            raise UserError(f"no preference is left for part {part}; {ties[part]} pairs were ties")
    with replacing("artifacts/preferences") as output:
        output.mkdir()
        for part in PARTS:
            write_jsonl(output / f"{part}.jsonl", pairs[part])
        write_jsonl(output / "samples.jsonl", samples)
    metrics = summarise(pairs, ties) | {
        "human": int(bool(human)),
        "left_out": left_out,
        "samples_per_prompt": 0 if human else params.preferences.samples,
    }
    write_json("reports/metrics/preferences.json", metrics)
    snapshots.remove()
    print(f"preferences: {metrics['pairs']} pairs, {metrics['ties']} ties, {metrics['flipped']} turned round")


def written(
    params: QuestionParams, human: list[dict], encode: Encode
) -> tuple[dict[str, list[dict]], list[dict], int]:
    """People's pairs, cut into parts by their prompts; their distinct answers, in place of samples; and how
    many pairs were left out.

    Left out are pairs to a test question and pairs with more than `split.max_tokens` tokens in an answer and
    its question.
    """
    tested = {asked(row["question"]) for row in read_jsonl("data/split/test.jsonl")}
    tokenised = [pair | encoded(pair, params.split.template, encode) for pair in human]
    usable = [
        pair
        for pair in tokenised
        if asked(pair["prompt"]) not in tested
        and max(len(pair["chosen_ids"]), len(pair["rejected_ids"])) <= params.split.max_tokens
    ]
    sizes = {part: getattr(params.split.sizes, part) for part in PARTS}
    left_out = len(human) - len(usable)
    why = "are too long or ask a test question: left out"
    source = f"{params.preferences.pairs.file}, of which {left_out} pairs {why}"
    pairs = {
        part: [{"id": f"{part}-{i:05d}"} | pair for i, pair in enumerate(chosen)]
        for part, chosen in divided(usable, sizes, params.seed, source).items()
    }
    if left_out:
        print(f"preferences: {left_out} pairs {why}")
    texts = {
        (pair["prompt"], pair[kind]): {"prompt": pair["prompt"], "answer": pair[kind], "token_ids": pair[ids]}
        for pair in pairs["rm"]
        for kind, ids in (("chosen", "chosen_ids"), ("rejected", "rejected_ids"))
    }
    return pairs, list(texts.values()), left_out


def encoded(pair: dict, template: str, encode: Encode) -> dict:
    prompt = question_ids(encode, template, pair["prompt"])
    return {
        "chosen_ids": prompt + answer_ids(encode, pair["chosen"]),
        "rejected_ids": prompt + answer_ids(encode, pair["rejected"]),
    }


def sampled(
    params: QuestionParams,
    folder: Path,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    snapshots: Snapshots,
) -> list[dict]:
    """SFT's answers to the questions of every part, `preferences.samples` to each."""
    generation, wanted = params.generation, params.preferences
    model = load_model(folder, params.model, device, ["sft"], params.seed)
    load_adapter(model, "sft", "artifacts/sft")
    select(model, "sft")
    jobs = [
        (part, row, number)
        for part in PARTS
        for row in read_jsonl(f"data/split/{part}.jsonl")
        for number in range(wanted.samples)
    ]
    longest = max(len(prompt_of(row, generation.prefix_tokens)) for _, row, _ in jobs)
    check_length(model, longest + generation.response_tokens + 1)
    batches = list(chunks(jobs, wanted.batch_size))
    snapshot = snapshots.latest() or Snapshot(0, {}, {"rows": []})
    rows = snapshot.record["rows"]
    progress = Progress("preferences", len(jobs), len(rows))
    for done, batch in enumerate(batches[snapshot.step :], start=snapshot.step + 1):
        prompts = [prompt_of(row, generation.prefix_tokens) for _, row, _ in batch]
        noise = [stream(params.seed, "preferences", "sample", row["id"], n) for _, row, n in batch]
        responses = sample(
            model,
            prompts,
            noise,
            generation.response_tokens,
            tokenizer.eos_token_id,
            generation.temperature,
        )
        rows += [
            {
                "part": part,
                "id": row["id"],
                "prompt": row["question"],
                "answer": tokenizer.decode(response, skip_special_tokens=True).strip(),
                "token_ids": prompt + response,
            }
            for (part, row, _), prompt, response in zip(batch, prompts, responses, strict=True)
        ]
        progress.step(len(rows), sum(map(len, responses)))
        if snapshots.due():
            snapshots.save(Snapshot(done, {}, {"rows": rows}))
    return rows


def judged(params: QuestionParams, samples: list[dict]) -> tuple[dict[str, list[dict]], dict[str, int]]:
    """All pairs of answers to one question, as the annotator prefers; and each part's number of ties."""
    pairs, ties = {part: [] for part in PARTS}, dict.fromkeys(PARTS, 0)
    for answers in chunks(samples, params.preferences.samples):
        part, name = answers[0]["part"], answers[0]["id"]
        scores = [heuristic(answer["answer"]) for answer in answers]
        draws = stream(params.seed, "preferences", "noise", name)
        found, tied = preferences(scores, params.preferences.noise, draws)
        ties[part] += tied
        pairs[part] += [
            {
                "id": f"{name}-{preference.chosen}-{preference.rejected}",
                "prompt": answers[0]["prompt"],
                "chosen": answers[preference.chosen]["answer"],
                "rejected": answers[preference.rejected]["answer"],
                "margin": preference.margin,
                "chosen_ids": answers[preference.chosen]["token_ids"],
                "rejected_ids": answers[preference.rejected]["token_ids"],
            }
            for preference in found
        ]
    return pairs, ties


def summarise(pairs: dict[str, list[dict]], ties: dict[str, int]) -> dict[str, int]:
    """Counts, overall and by part."""
    flipped = {part: sum((pair["margin"] or 0) < 0 for pair in found) for part, found in pairs.items()}
    return {
        "prompts": sum(len({pair["prompt"] for pair in found}) for found in pairs.values()),
        "pairs": sum(map(len, pairs.values())),
        "ties": sum(ties.values()),
        "flipped": sum(flipped.values()),
        **{f"pairs_{part}": len(found) for part, found in pairs.items()},
        **{f"ties_{part}": count for part, count in ties.items()},
        **{f"flipped_{part}": count for part, count in flipped.items()},
    }


if __name__ == "__main__":
    run(main)
