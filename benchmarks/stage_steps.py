"""One stage's largest steps for real, with random weights on the CPU: what the predictions are held to."""

import contextlib
import gc
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.live_bytes import LiveBytes, bytes_of, tensors_of
from benchmarks.stage_memory import Batch, Work, work
from rlhf.batching import pad_pairs
from rlhf.config import Params, QuestionParams
from rlhf.heads import reward_head, zero_head
from rlhf.models import language_head, load_model, lora_dropout, select
from rlhf.optim import adamw, copy_parameters, loss_scaler, optimizer_step
from rlhf.randomness import stream
from rlhf.sampling import sample
from rlhf.scoring import evaluate, response_outputs, reward_logits

EOS = 0
CPU = torch.device("cpu")


class Measured(NamedTuple):
    """Bytes: what is always there (weights, adapters, heads, moments, best copy) and the peak of living
    tensors; growth of the process's resident memory from before loading to its peak in the steps, None where
    the system does not say."""

    always: int
    peak: int
    resident: int | None


def measure(stage: str, params: Params | QuestionParams, config: PretrainedConfig) -> Measured:
    """Run two steps of a stage on the largest batches that the parameters allow; the second is measured, when
    the optimiser has its moments. One text of each batch is a token shorter, so that there is padding."""
    todo, resident = work(stage, params), _resident("VmRSS")
    model, heads = _load(params, config, todo)
    groups = {name: list(heads[name].parameters()) for name in todo.trains if name in heads}
    adapters = [name for name in todo.trains if name not in heads]
    select(model, todo.adapters[-1])
    groups |= {name: select(model, name, train=True) for name in adapters}
    held = list(tensors_of(model, *heads.values()))
    if groups:
        adam = params.adam
        optimizer = adamw(groups, 1e-4, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.state)
        _step(model, heads, todo, params)
        optimizer_step(optimizer, groups, loss_scaler(CPU, torch.float32), adam.max_grad_norm)
        held += [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        held += copy_parameters(groups) if todo.keeps_best else []
    gc.collect()
    _forget_peak()
    with LiveBytes(held) as live:
        _step(model, heads, todo, params)
    peak = _resident("VmHWM")
    return Measured(bytes_of(held), live.peak, None if resident is None else peak - resident)


def _load(
    params: Params | QuestionParams, config: PretrainedConfig, todo: Work
) -> tuple[PeftModel, dict[str, nn.Module]]:
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        model = load_model(Path(folder), params.model, CPU, list(todo.adapters), 0, todo.dropout)
    head = reward_head(params.reward.head, config.hidden_size, 0, CPU)
    built = {"head": head, "values": zero_head(config.hidden_size, CPU)}
    return model, {name: built[name].requires_grad_(name in todo.trains) for name in todo.heads}


def _step(model: PeftModel, heads: dict[str, nn.Module], todo: Work, params: Params | QuestionParams) -> None:
    """What the stage does to its largest batches, with two micro-batches of training."""
    head, value_head = heads.get("head"), heads.get("values")
    if todo.generate:
        _sample(model, todo, params)
    if todo.score:
        _score(model, head, value_head, todo, params)
    if todo.trains == ("head",):
        head(torch.zeros(1, language_head(model).in_features)).sum().backward()
    for _ in range(2 if todo.train else 0):
        select(model, todo.adapters[-1], train=True)
        prompts, responses = _texts(todo.train)
        if todo.reads_end:
            loss = reward_logits(model, head, prompts, EOS, 2**31).sum()
        else:
            batch = pad_pairs(prompts, responses, EOS, CPU)
            with lora_dropout(model, 0):
                outputs = response_outputs(model, batch, value_head, 1.0)
            loss = outputs.logprobs.sum() + outputs.values.sum()
        loss.backward()


def _sample(model: PeftModel, todo: Work, params: Params | QuestionParams) -> None:
    prompts, _ = _texts(todo.generate, padded=params.generation.prefix_tokens is None)
    noise = [stream(0, "benchmarks", "noise", row) for row in range(len(prompts))]
    sample(model, prompts, noise, todo.generate.response, EOS, 1.0)


def _score(
    model: PeftModel,
    head: nn.Module,
    value_head: nn.Module | None,
    todo: Work,
    params: Params | QuestionParams,
) -> None:
    prompts, responses = _texts(todo.score)
    if not todo.reads_end:
        evaluate(model, prompts, responses, value_head, 1.0, 2**31)
        prompts = [p + r for p, r in zip(prompts, responses, strict=True)]
    with torch.no_grad():
        reward_logits(model, head, prompts, EOS, 2**31)


def _texts(batch: Batch, padded: bool = True) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses without EOS; the first text of a padded batch is a token shorter."""
    prompts = [[1 + (7 * row + i) % 13 for i in range(batch.prompt)] for row in range(batch.rows)]
    responses = [[1 + (5 * row + i) % 13 for i in range(batch.response)] for row in range(batch.rows)]
    if padded:
        (prompts if batch.prompt > 1 else responses)[0].pop()
    return prompts, responses


def _forget_peak() -> None:
    """Linux: let the peak of resident memory start again from what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(name: str) -> int | None:
    """A line of Linux's own account of this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    (line,) = [line for line in lines if line.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])
