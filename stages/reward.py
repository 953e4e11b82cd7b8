"""Reward model: learn a score from labelled texts, or from preferences between answers:
`python -m stages.reward`.
"""

import torch
from peft import PeftModel
from torch import Tensor

from rlhf.batching import micro_batches
from rlhf.checkpoint import Best, Snapshots, inputs_key, restore_training, training_snapshot
from rlhf.config import load
from rlhf.environment import environment
from rlhf.errors import run
from rlhf.feedback import LABELS, PAIRS, centre_of
from rlhf.heads import reward_head, save_head
from rlhf.models import (
    check_length,
    compute_dtype,
    fingerprint,
    load_model,
    save_adapter,
    select,
    set_determinism,
)
from rlhf.optim import adamw, copy_parameters, loss_scaler, optimizer_step, set_parameters
from rlhf.randomness import epoch_order
from rlhf.record import Progress, read_json, read_jsonl, replacing, write_csv, write_json, write_jsonl
from rlhf.scoring import closing_outputs, reward_logits
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer

LABELLED = ("data/split/rm.jsonl", "data/split/val.jsonl", "data/split/rm_test.jsonl")
PREFERRED = (
    "artifacts/preferences/rm.jsonl",
    "artifacts/preferences/val.jsonl",
    "artifacts/preferences/rm_test.jsonl",
)
SAMPLES = "artifacts/preferences/samples.jsonl"


def main() -> None:
    params = load()
    reward, adam, max_tokens = params.reward, params.adam, params.model.micro_batch_tokens
    device = set_determinism(params.runtime.device, params.runtime.threads)
    pairwise = reward.loss == "pairwise"
    feedback, files = (PAIRS, (*PREFERRED, SAMPLES)) if pairwise else (LABELS, LABELLED)
    key = inputs_key(
        [environment(params.runtime.device, params.runtime.threads), params.seed, params.model, adam, reward],
        ["data/manifests/policy.json", *files],
    )
    snapshots = Snapshots(".checkpoints/reward", key, params.runtime.snapshot_seconds)
    manifest = read_json("data/manifests/policy.json")
    folder = locate(manifest)
    eos_id = load_tokenizer(folder).eos_token_id
    model = load_model(folder, params.model, device, ["reward"], params.seed)
    head = reward_head(reward.head, model.config.hidden_size, params.seed, device)
    rows = dict(zip(("rm", "val", "rm_test"), map(read_jsonl, files[:3]), strict=True))
    samples = [row["token_ids"] for row in read_jsonl(SAMPLES)] if pairwise else []
    texts = {part: [feedback.texts(row) for row in found] for part, found in rows.items()}
    flat = [text for part in texts.values() for row in part for text in row] + samples
    check_length(model, max(map(len, flat)) + 1)

    groups = {"head": list(head.parameters())}
    if reward.adapter:
        groups = {"policy": select(model, "reward", train=True)} | groups
    else:
        # Nothing below the head changes, so that the head's inputs are computed once.
        select(model, None)
        states = frozen_states(model, flat, eos_id, max_tokens)

    def logits_of(found: list[list[int]]) -> Tensor:
        """The reward model's logit for each text."""
        if reward.adapter:
            return reward_logits(model, head, found, eos_id, max_tokens)
        return head(torch.stack([states[tuple(text)] for text in found])).squeeze(-1)

    def row_logits(part: str, indices: list[int]) -> Tensor:
        """The reward model's logits for rows of a part and each of their k texts: [n, k]."""
        return logits_of([text for i in indices for text in texts[part][i]]).view(len(indices), -1)

    @torch.no_grad()
    def quality_on(part: str) -> tuple[Tensor, dict]:
        logits = row_logits(part, list(range(len(rows[part]))))
        return logits, feedback.summarise(logits, rows[part])

    optimizer = adamw(groups, reward.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.state)
    scaler = loss_scaler(device, compute_dtype(model))
    done, log, validations, best = 0, [], [], None
    if snapshot := snapshots.latest():
        best = restore_training(snapshot, optimizer, scaler)
        done, log, validations = snapshot.step, snapshot.record["log"], snapshot.record["validations"]
    progress = Progress("reward", reward.steps, done)
    for step in range(done, reward.steps):
        batch = epoch_order(params.seed, "reward", len(rows["rm"]), step, reward.batch_size)
        lengths = [max(map(len, texts["rm"][i])) * len(texts["rm"][i]) for i in batch]
        loss = 0.0
        for chosen in micro_batches(lengths, max_tokens):
            part = [batch[i] for i in chosen]
            losses = feedback.losses(row_logits("rm", part), [rows["rm"][i] for i in part])
            part_loss = losses.sum() / len(batch)
            scaler.scale(part_loss).backward()
            loss += part_loss.item()
        norms = optimizer_step(optimizer, groups, scaler, adam.max_grad_norm)
        loss = None if norms.skipped else loss
        log.append({"step": step + 1, "loss": loss, "grad_norm": norms.total})
        progress.step(
            step + 1, sum(len(t) + 1 for i in batch for t in texts["rm"][i]), loss=loss, grad_norm=norms.total
        )
        if (step + 1) % reward.validate_every == 0 or step + 1 == reward.steps:
            _, quality = quality_on("val")
            validations.append({"step": step + 1, "loss": quality["loss"], "accuracy": quality["accuracy"]})
            print(f"reward validation {validations[-1]}", flush=True)
            if best is None or quality["loss"] < best.value:
                best = Best(step + 1, quality["loss"], copy_parameters(groups))
        if snapshots.due():
            logs = {"log": log, "validations": validations}
            snapshots.save(training_snapshot(step + 1, optimizer, scaler, best, **logs))

    set_parameters(groups, best.parameters)
    logits, quality = quality_on("rm_test")
    with torch.no_grad():
        centre = centre_of(logits_of(samples)) if pairwise else None
    metrics = {"selected_step": best.step, **quality, "weak": quality["accuracy"] < reward.weak_accuracy}
    if centre:
        metrics |= {"mean_sft": centre.mean, "std_sft": centre.deviation}
    with replacing("artifacts/reward") as output:
        output.mkdir()
        if reward.adapter:
            save_adapter(model, "reward", output, manifest["source"]["name"])
        save_head(head, output / "head.safetensors")
        write_json(
            output / "reward.json",
            {
                "score": "(logit - mean) / deviation" if centre else "2 sigmoid(logit) - 1",
                "centre": centre,
                "adapter": reward.adapter,
                "base": manifest["source"]["name"],
                "base_revision": manifest["source"]["revision"],
                "fingerprint": fingerprint(model, "reward") if reward.adapter else None,
            },
        )
    write_jsonl("artifacts/reward_test.jsonl", feedback.predictions(logits, rows["rm_test"]))
    write_csv("reports/plots/reward.csv", log)
    write_csv("reports/plots/reward_validation.csv", validations)
    write_json("reports/metrics/reward.json", metrics)
    snapshots.remove()
    print(f"reward: accuracy {metrics['accuracy']:.3f} on {metrics['n']} held-out rows")
    if metrics["weak"]:
        print(f"reward: WEAK, its accuracy is below {reward.weak_accuracy}: PPO's results are unreliable")


@torch.no_grad()
def frozen_states(
    model: PeftModel, texts: list[list[int]], eos_id: int, max_tokens: int
) -> dict[tuple[int, ...], Tensor]:
    """The frozen base's closing state [H] of each distinct text."""
    distinct = sorted({tuple(text) for text in texts})
    states = closing_outputs(model, lambda found: found, list(map(list, distinct)), eos_id, max_tokens)
    return dict(zip(distinct, states, strict=True))


if __name__ == "__main__":
    run(main)
