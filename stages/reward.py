"""Reward model: learn a review's sentiment from human labels: `python -m stages.reward`."""

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlhf.batching import micro_batches
from rlhf.checkpoint import Best, Snapshots, inputs_key, restore_training, training_snapshot
from rlhf.config import load
from rlhf.environment import environment
from rlhf.errors import run
from rlhf.models import (
    Lora,
    add_adapters,
    fingerprint,
    load_base,
    new_head,
    save_adapter,
    save_head,
    select,
    set_determinism,
)
from rlhf.objectives import label_loss
from rlhf.optim import adamw, copy_parameters, loss_scaler, optimizer_step, set_parameters
from rlhf.randomness import epoch_order
from rlhf.record import Progress, read_json, read_jsonl, replacing, write_csv, write_json, write_jsonl
from rlhf.scoring import reward_logits
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer


def main() -> None:
    params = load()
    reward, adam, max_tokens = params.reward, params.adam, params.model.micro_batch_tokens
    device = set_determinism(params.runtime.device, params.runtime.threads)
    key = inputs_key(
        [environment(params.runtime.device, params.runtime.threads), params.seed, params.model, adam, reward],
        [
            *("constraints.txt", "data/manifests/policy.json", "data/split/rm.jsonl"),
            *("data/split/val.jsonl", "data/split/rm_test.jsonl"),
        ],
    )
    snapshots = Snapshots(".checkpoints/reward", key, params.runtime.snapshot_seconds)
    manifest = read_json("data/manifests/policy.json")
    folder = locate(manifest)
    eos_id = load_tokenizer(folder).eos_token_id
    base = load_base(folder, params.model.dtype, params.model.quantization, device)
    model = add_adapters(base, Lora(**vars(params.model.lora)), ["reward"], params.seed)
    head = new_head(base.config.hidden_size, params.seed, device)
    rows = {part: read_jsonl(f"data/split/{part}.jsonl") for part in ("rm", "val", "rm_test")}

    groups = {"policy": select(model, "reward", train=True), "head": list(head.parameters())}
    optimizer = adamw(groups, reward.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay)
    scaler = loss_scaler(device, base.dtype)
    done, log, validations, best = 0, [], [], None
    if snapshot := snapshots.latest():
        best = restore_training(snapshot, optimizer, scaler)
        done, log, validations = snapshot.step, snapshot.record["log"], snapshot.record["validations"]
    progress = Progress("reward", reward.steps, done)
    for step in range(done, reward.steps):
        chosen = epoch_order(params.seed, "reward", len(rows["rm"]), step, reward.batch_size)
        batch = [rows["rm"][i] for i in chosen]
        loss = 0.0
        for indices in micro_batches([len(row["token_ids"]) for row in batch], max_tokens):
            part = [batch[i] for i in indices]
            logits = reward_logits(model, head, [row["token_ids"] for row in part], eos_id, max_tokens)
            part_loss = label_loss(logits, labels_of(part, device)).sum() / len(batch)
            scaler.scale(part_loss).backward()
            loss += part_loss.item()
        norms = optimizer_step(optimizer, groups, scaler, adam.max_grad_norm)
        loss = None if norms.skipped else loss
        log.append({"step": step + 1, "bce": loss, "grad_norm": norms.total})
        tokens = sum(len(row["token_ids"]) + 1 for row in batch)
        progress.step(step + 1, tokens, bce=loss, grad_norm=norms.total)
        if (step + 1) % reward.validate_every == 0 or step + 1 == reward.steps:
            logits = predict(model, head, rows["val"], eos_id, max_tokens)
            quality = summarise(logits, labels_of(rows["val"], device))
            validations.append({"step": step + 1, "bce": quality["bce"], "accuracy": quality["accuracy"]})
            print(f"reward validation {validations[-1]}", flush=True)
            if best is None or quality["bce"] < best.value:
                best = Best(step + 1, quality["bce"], copy_parameters(groups))
        if snapshots.due():
            logs = {"log": log, "validations": validations}
            snapshots.save(training_snapshot(step + 1, optimizer, scaler, best, **logs))

    set_parameters(groups, best.parameters)
    logits = predict(model, head, rows["rm_test"], eos_id, max_tokens)
    metrics = {"selected_step": best.step, **summarise(logits, labels_of(rows["rm_test"], device))}
    metrics["weak"] = metrics["accuracy"] < reward.weak_accuracy
    with replacing("artifacts/reward") as output:
        save_adapter(model, "reward", output, manifest["source"]["name"])
        save_head(head, output / "head.safetensors")
        write_json(
            output / "reward.json",
            {
                "task": "binary label, score = 2 sigmoid(logit) - 1",
                "base": manifest["source"]["name"],
                "base_revision": manifest["source"]["revision"],
                "fingerprint": fingerprint(model, "reward"),
            },
        )
    write_jsonl(
        "artifacts/reward_test.jsonl",
        [
            {"id": row["id"], "text": row["text"], "label": row["label"], "probability": probability}
            for row, probability in zip(rows["rm_test"], logits.sigmoid().tolist(), strict=True)
        ],
    )
    write_csv("reports/plots/reward.csv", log)
    write_csv("reports/plots/reward_validation.csv", validations)
    write_json("reports/metrics/reward.json", metrics)
    snapshots.remove()
    print(f"reward: accuracy {metrics['accuracy']:.3f} on {metrics['n']} held-out reviews")
    if metrics["weak"]:
        print(f"reward: WEAK, its accuracy is below {reward.weak_accuracy}: PPO's results are unreliable")


def labels_of(rows: list[dict], device: torch.device) -> Tensor:
    return torch.tensor([row["label"] for row in rows], device=device)


@torch.no_grad()
def predict(model: PeftModel, head: nn.Linear, rows: list[dict], eos_id: int, max_tokens: int) -> Tensor:
    """Logits of the reward model for each row's text."""
    return reward_logits(model, head, [row["token_ids"] for row in rows], eos_id, max_tokens)


def summarise(logits: Tensor, labels: Tensor) -> dict[str, float | int]:
    """Quality of the predictions `logits > 0`, as flat numbers."""
    positive, truth = logits > 0, labels.bool()
    return {
        "accuracy": (positive == truth).float().mean().item(),
        "bce": label_loss(logits, labels).mean().item(),
        "n": len(labels),
        "true_negatives": (~positive & ~truth).sum().item(),
        "false_positives": (positive & ~truth).sum().item(),
        "false_negatives": (~positive & truth).sum().item(),
        "true_positives": (positive & truth).sum().item(),
    }


if __name__ == "__main__":
    run(main)
