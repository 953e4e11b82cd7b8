"""Supervised fine-tuning: adapt the base model to review text, or to answers: `python -m stages.sft`."""

from rlhf.batching import micro_batches, pad_pairs
from rlhf.checkpoint import Snapshots, inputs_key, restore_training, training_snapshot
from rlhf.config import load
from rlhf.environment import environment
from rlhf.errors import run
from rlhf.models import (
    check_length,
    compute_dtype,
    load_model,
    lora_dropout,
    save_adapter,
    select,
    set_determinism,
)
from rlhf.objectives import sequence_nll
from rlhf.optim import adamw, loss_scaler, optimizer_step
from rlhf.prompts import prompt_of, response_of
from rlhf.randomness import epoch_order, named_seed
from rlhf.record import Progress, read_json, read_jsonl, replacing, write_csv
from rlhf.scoring import response_outputs
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer


def main() -> None:
    params = load()
    sft, adam = params.sft, params.adam
    device = set_determinism(params.runtime.device, params.runtime.threads)
    key = inputs_key(
        [environment(params.runtime.device, params.runtime.threads), params.seed, params.model, adam, sft],
        ["data/manifests/policy.json", "data/split/sft.jsonl"],
    )
    snapshots = Snapshots(".checkpoints/sft", key, params.runtime.snapshot_seconds)
    manifest = read_json("data/manifests/policy.json")
    folder = locate(manifest)
    eos_id = load_tokenizer(folder).eos_token_id
    model = load_model(folder, params.model, device, ["sft"], params.seed, sft.lora_dropout)
    # A review's first token has nothing before it, so it is the prompt and the rest is the response; a
    # question is the prompt of its answer.
    examples = [
        (prompt_of(row, sft.prompt_tokens), response_of(row, sft.prompt_tokens, eos_id))
        for row in read_jsonl("data/split/sft.jsonl")
    ]

    check_length(model, max(len(prompt) + len(response) for prompt, response in examples))
    parameters = {"policy": select(model, "sft", train=True)}
    optimizer = adamw(parameters, sft.lr, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.state)
    scaler = loss_scaler(device, compute_dtype(model))
    done, log = 0, []
    if snapshot := snapshots.latest():
        restore_training(snapshot, optimizer, scaler)
        done, log = snapshot.step, snapshot.record["log"]
    progress = Progress("sft", sft.steps, done)
    for step in range(done, sft.steps):
        batch = [examples[i] for i in epoch_order(params.seed, "sft", len(examples), step, sft.batch_size)]
        lengths = [len(prompt) + len(response) for prompt, response in batch]
        loss = 0.0
        for number, indices in enumerate(micro_batches(lengths, params.model.micro_batch_tokens)):
            prompts, responses = zip(*(batch[i] for i in indices), strict=True)
            padded = pad_pairs(prompts, responses, eos_id, device)
            with lora_dropout(model, named_seed(params.seed, "sft", "dropout", step, number)):
                outputs = response_outputs(model, padded, None, temperature=1.0)
                part = sequence_nll(outputs.logprobs, padded.response_mask).sum() / len(batch)
                scaler.scale(part).backward()
            loss += part.item()
        norms = optimizer_step(optimizer, parameters, scaler, adam.max_grad_norm)
        loss = None if norms.skipped else loss
        log.append({"step": step + 1, "loss": loss, "grad_norm": norms.total})
        progress.step(step + 1, sum(lengths), loss=loss, grad_norm=norms.total)
        if snapshots.due():
            snapshots.save(training_snapshot(step + 1, optimizer, scaler, log=log))

    with replacing("artifacts/sft") as output:
        save_adapter(model, "sft", output, manifest["source"]["name"])
    write_csv("reports/plots/sft.csv", log)
    snapshots.remove()


if __name__ == "__main__":
    run(main)
