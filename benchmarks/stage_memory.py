"""The peak memory of a stage, predicted part by part from its parameters and the model's shape.

A stage's largest forward and backward passes run on the meta device, through the package's own code, while
the bytes of all living tensors are counted. Not counted: what a kernel allocates inside itself, a snapshot
being written, loading the weights, NumPy's copies of the noise, and the rollout's [B, R] tables.
"""

import math
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from benchmarks.live_bytes import LiveBytes, bytes_of, fused_attention, meta_base, tensors_of
from rlhf.config import Params, QuestionParams
from rlhf.heads import reward_head, zero_head
from rlhf.models import Lora, add_adapters, hidden_states, language_head, lora_dropout, select
from rlhf.ops import token_logprobs
from rlhf.sections import Model

STAGES = ("sft", "reward", "ppo", "sample")


class Batch(NamedTuple):
    """Rows of a prompt and a response, in tokens."""

    rows: int
    prompt: int
    response: int


class Work(NamedTuple):
    """What a stage holds, and the largest batch of each kind of pass, None where it makes no such pass.

    `train` evaluates responses with gradients, or whole texts where `reads_end`; `score` without gradients.
    """

    adapters: tuple[str, ...]
    dropout: float
    heads: tuple[str, ...]
    trains: tuple[str, ...]
    keeps_best: bool
    reads_end: bool
    train: Batch | None
    score: Batch | None
    generate: Batch | None


class Peak(NamedTuple):
    """Bytes. `kept` is what the forward pass keeps for the backward pass, `passing` what lives shortly
    beside it (logits above all); `total` is what is always there and the largest of what is not."""

    base: int
    adapters: int  # all of them, and the heads
    moments: int  # of Adam
    best: int  # the copy of the best parameters so far
    gradients: int
    kept: int
    passing: int
    scoring: int
    cache: int  # keys and values of the tokens so far, while sampling
    sampling: int  # logits, noise and hidden states beside the cache

    @property
    def total(self) -> int:
        always = self.base + self.adapters + self.moments + self.best
        return always + max(
            self.gradients + self.kept + self.passing,
            self.scoring,
            self.cache + self.sampling,
            2 * self.gradients,
        )


def work(stage: str, params: Params | QuestionParams) -> Work:
    """The worst that the parameters allow. Adapters and heads are named as in the stages."""
    longest, tokens, ppo = params.split.max_tokens, params.model.micro_batch_tokens, params.ppo
    prompt, response = params.generation.prefix_tokens or longest, params.generation.response_tokens
    three = ("sft", "reward", "policy")
    if stage == "sft":
        rows, length = micro_batch(params.sft.batch_size, longest + 1, tokens)
        train = Batch(rows, 1, length - 1)
        return Work(("sft",), params.sft.lora_dropout, (), ("sft",), False, False, train, None, None)
    if stage == "reward":
        texts = 2 if params.reward.loss == "pairwise" else 1
        rows, length = micro_batch(params.reward.batch_size, texts * longest, tokens)
        batch = Batch(texts * rows, length // texts, 1)
        trains = ("reward", "head") if params.reward.adapter else ("head",)
        train, score = (batch, None) if params.reward.adapter else (None, batch)
        return Work(("reward",), 0.0, ("head",), trains, True, True, train, score, None)
    if stage == "ppo":
        rows = max(ppo.batch_size, ppo.validation_prefixes)
        minibatch = ppo.batch_size // ppo.minibatches
        values = ("values",) if ppo.advantage == "gae" else ()
        train, score = (_batch(n, prompt, response, tokens) for n in (minibatch, rows))
        generate, heads = Batch(rows, prompt, response), ("head", *values)
        return Work(three, 0.0, heads, ("policy", *values), True, False, train, score, generate)
    rows = params.sample.batch_size
    score, generate = _batch(rows, prompt, response, tokens), Batch(rows, prompt, response)
    return Work(three, 0.0, ("head",), (), False, False, None, score, generate)


def micro_batch(rows: int, longest: int, max_tokens: int) -> tuple[int, int]:
    """Rows and length of the largest micro-batch of `rows` sequences of at most `longest` tokens."""
    shapes = ((min(rows, max(1, max_tokens // length)), length) for length in range(2, longest + 1))
    return max(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def _batch(rows: int, prompt: int, response: int, max_tokens: int) -> Batch:
    return Batch(min(rows, max(1, max_tokens // (prompt + response))), prompt, response)


def predict(stage: str, params: Params | QuestionParams, config: PretrainedConfig) -> Peak:
    """The peak of one stage on the longest texts that the parameters allow."""
    todo = work(stage, params)
    base = meta_base(
        config, weights_dtype(params.model), params.model.quantization, params.model.gradient_checkpointing
    )
    static = bytes_of(tensors_of(base))
    with torch.device("meta"):
        model = add_adapters(base, Lora(**vars(params.model.lora)), list(todo.adapters), 0, todo.dropout)
    heads = _heads(todo, params, config.hidden_size)
    trained = _trained(model, heads, todo)
    held = list(tensors_of(model, *heads.values()))
    gradients = bytes_of(trained)
    kept, passing = _training(model, heads, todo, held, trained) if todo.train else (0, 0)
    cache, sampling = _sampling(model, todo.generate, held, params) if todo.generate else (0, 0)
    return Peak(
        base=static,
        adapters=bytes_of(held) - static,
        moments=sum(moment_bytes(parameter.numel(), params.adam.state) for parameter in trained),
        best=gradients if todo.keeps_best else 0,
        gradients=gradients,
        kept=kept,
        passing=passing,
        scoring=_scoring(model, heads, todo, held) if todo.score else 0,
        cache=cache,
        sampling=sampling,
    )


def weights_dtype(model: Model) -> torch.dtype:
    """The dtype of the base's weights; both that `half` may mean have two bytes."""
    return torch.bfloat16 if model.dtype == "half" else getattr(torch, model.dtype)


def moment_bytes(numbers: int, state: str) -> int:
    """Adam's state for a parameter of so many numbers: two moments of 4 bytes each and a step count of 4; as
    int8 one byte each and a float32 scale for every 256, from 4,096 numbers on (bitsandbytes' own limit)."""
    if state == "float32":
        return 8 * numbers + 4
    return 2 * (numbers + 4 * math.ceil(numbers / 256)) if numbers >= 4096 else 8 * numbers


def _heads(todo: Work, params: Params | QuestionParams, hidden_size: int) -> dict[str, nn.Module]:
    meta = torch.device("meta")
    with meta:
        build = {
            "head": lambda: reward_head(params.reward.head, hidden_size, 0, meta).requires_grad_(False),
            "values": lambda: zero_head(hidden_size, meta),
        }
        return {name: build[name]() for name in todo.heads}


def _trained(model: PeftModel, heads: dict[str, nn.Module], todo: Work) -> list[nn.Parameter]:
    select(model, todo.adapters[-1])
    found: list[nn.Parameter] = []
    for name in todo.trains:
        if name in heads:
            found += heads[name].requires_grad_(True).parameters()
        else:
            found += select(model, name, train=True)
    return found


def _training(
    model: PeftModel, heads: dict[str, nn.Module], todo: Work, held: list[Tensor], trained: list[nn.Parameter]
) -> tuple[int, int]:
    """What a micro-batch needs beside the gradients of those before it, to which it adds its own."""
    evaluate = _closing if todo.reads_end else _responses
    head = heads.get("head") if todo.reads_end else heads.get("values")
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in trained]
    with LiveBytes([*held, *gradients]) as live, fused_attention(), lora_dropout(model, 0):
        before = live.now
        loss = evaluate(model, head, todo.train)
        kept = live.now - before
        loss.backward()
    return kept, live.peak - before - kept


@torch.no_grad()
def _scoring(model: PeftModel, heads: dict[str, nn.Module], todo: Work, held: list[Tensor]) -> int:
    with LiveBytes(held) as live, fused_attention():
        before, batch = live.now, todo.score
        if not todo.reads_end:
            _responses(model, heads.get("values"), batch)
            batch = batch._replace(response=batch.response + 1)  # EOS
        _closing(model, heads["head"], batch)
    return live.peak - before


def _responses(model: PeftModel, value_head: nn.Module | None, batch: Batch) -> Tensor:
    """The tensors of `scoring.response_outputs`, whose own selection of real tokens needs values."""
    hidden = _hidden(model, batch)
    index = torch.zeros(batch.rows * batch.response, dtype=torch.long, device="meta")
    before = hidden[:, batch.prompt - 1 : -1][index, index]
    logprobs, _ = token_logprobs(before, language_head(model), index)
    return logprobs.sum() if value_head is None else logprobs.sum() + value_head(before.float()).sum()


def _closing(model: PeftModel, head: nn.Module, batch: Batch) -> Tensor:
    """The tensors of `scoring.closing_outputs`."""
    hidden = _hidden(model, batch)
    index = torch.zeros(batch.rows, dtype=torch.long, device="meta")
    return head(hidden[index, index].float()).sum()


def _hidden(model: PeftModel, batch: Batch) -> Tensor:
    shape = (batch.rows, batch.prompt + batch.response)
    ids = torch.zeros(shape, dtype=torch.long, device="meta")
    return hidden_states(model, ids, torch.ones(shape, dtype=torch.bool, device="meta"))


@torch.no_grad()
def _sampling(
    model: PeftModel, batch: Batch, held: list[Tensor], params: Params | QuestionParams
) -> tuple[int, int]:
    """The first and the last step of `sampling.sample`; prompts of one length need no padding."""
    rows, prompt, response = batch
    with LiveBytes(held, padded=params.generation.prefix_tokens is None) as live, fused_attention():
        before, cache = live.now, DynamicCache()
        _sampling_step(model, cache, rows, prompt, prompt)
        for layer in cache.layers:
            shape = (rows, layer.keys.shape[1], prompt + response - 2, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.new_empty(shape), layer.values.new_empty(shape)
        _sampling_step(model, cache, rows, 1, prompt + response - 1)
        cached = bytes_of(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return cached, live.peak - before - cached


def _sampling_step(model: PeftModel, cache: DynamicCache, rows: int, new: int, total: int) -> None:
    backbone = model.get_base_model().base_model
    ids = torch.zeros(rows, new, dtype=torch.long, device="meta")
    mask = torch.ones(rows, total, dtype=torch.long, device="meta")
    hidden = backbone(
        input_ids=ids, attention_mask=mask, position_ids=ids, past_key_values=cache, use_cache=True
    ).last_hidden_state[:, -1]
    logits = language_head(model)(hidden).float() / 1.0
    noise = -torch.empty_like(logits).log_()
    (logits + noise).argmax(1)
