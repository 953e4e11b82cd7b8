"""Tiny random models and a tiny tokenizer, for tests that need real ones.

`write_policy_folder` makes a folder that `rlhf.models.load_base` and `rlhf.tokenizer.load_tokenizer` read
like a downloaded model; `tiny_model` skips the disk and puts adapters on a model in memory. Everything is
seeded, and nothing here reads or leaves a trace in torch's global random state.
"""

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhf.models import Lora, add_adapters, load_base, save_adapter
from rlhf.randomness import stream

VOCABULARY, EOS = 16, 0  # so few tokens that random responses end now and then
POISON = 15  # in no text that `random_texts` makes
TEXT = [5, 3, 9, 1]
CPU = torch.device("cpu")
ROTARY_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {
    "llama": ROTARY_TARGETS,
    "llama-tied": ROTARY_TARGETS,
    "qwen3": ROTARY_TARGETS,
    "gpt2": ("c_attn", "c_proj"),
}
# What a model's own files may ask of `generate`, and exact sampling must not obey.
HOSTILE = {"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "temperature": 0.1, "min_length": 50}
SENTENCES = (
    "a warm , funny and moving film .",
    "the plot is thin and the jokes are stale .",
    "it is a dull and lifeless movie that never ends .",
    "an honest , tender story with a fine cast .",
    "too long , too loud and not very good .",
    "one of the best films of the year !",
)


def tiny_base(
    architecture: str,
    seed: int = 0,
    hidden: int = 32,
    vocabulary: int = VOCABULARY,
    dtype: torch.dtype = torch.float32,
    generation: dict | None = None,
) -> nn.Module:
    """A frozen random model of two layers: llama (untied), llama-tied, qwen3, or gpt2 (learned positions).

    Weights are large (standard deviation .2, not .02), so that a wrong position or a wrong adapter moves a
    log-probability by tenths and not by rounding. `generation` goes into the model's generation_config.
    """
    rotary = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    }
    learned = {
        "vocab_size": vocabulary,
        "n_embd": hidden,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 256,
        "initializer_range": 0.2,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = {
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**rotary, tie_word_embeddings=False)),
            "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**rotary, tie_word_embeddings=True)),
            "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**rotary, head_dim=hidden // 2)),
            "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**learned)),
        }[architecture]()
    if generation:
        base.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS, **generation)
    return base.to(dtype).requires_grad_(False).eval()


def tiny_tokenizer(sentences: tuple[str, ...] = SENTENCES, vocabulary: int = 96) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on `sentences`, `<eos>` (id 0) its only special token.

    Text made of the sentences' characters survives encoding and decoding; other characters are dropped.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def write_policy_folder(
    path: Path,
    architecture: str = "llama-tied",
    seed: int = 0,
    hidden: int = 32,
    sentences: tuple[str, ...] = SENTENCES,
    generation: dict | None = None,
) -> Path:
    """Write a tiny model with its tokenizer to `path`, as `save_pretrained` does, and return `path`.

    The folder holds config.json, generation_config.json, model.safetensors and the tokenizer's files. LoRA
    targets that fit it are `TARGETS[architecture]`; `hidden` must be a multiple of 64 for NF4.
    """
    tokenizer = tiny_tokenizer(sentences)
    tiny_base(architecture, seed, hidden, len(tokenizer), generation=generation).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tiny_model(architecture: str, names: tuple[str, ...] = ("sft", "reward", "ppo"), **base):
    """A `tiny_base` under adapters `names`, each perturbed, so that no two act alike nor like the base."""
    model = add_adapters(tiny_base(architecture, **base), lora(architecture), list(names), seed=1)
    for name in names:
        perturb(model, name)
    return model


def save_tiny_adapter(folder: Path, name: str) -> None:
    """Save a perturbed adapter of the llama in `folder/base` to `folder/name`."""
    model = add_adapters(load_base(folder / "base", "float32", "none", CPU), lora("llama"), ["ppo"], seed=1)
    perturb(model, "ppo")
    save_adapter(model, "ppo", folder / name, "base")


def lora(architecture: str, rank: int = 2) -> Lora:
    """An adapter shape that fits the architecture."""
    return Lora(rank=rank, alpha=4.0, targets=TARGETS[architecture])


@torch.no_grad()
def perturb(model: nn.Module, name: str, scale: float = 0.1, seed: int = 0) -> None:
    """Add normal noise to every LoRA matrix of adapter `name`."""
    for key, parameter in model.named_parameters():
        if f".{name}." in key:
            noise = stream(seed, "tests", "perturb", key).normal(0.0, scale, parameter.shape)
            parameter.add_(torch.from_numpy(noise))


def streams(count: int, seed: int = 0) -> list[np.random.Generator]:
    """Fresh random streams, one for each row of a batch."""
    return [stream(seed, "tests", "sample", row) for row in range(count)]


def random_texts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random token ids of the given lengths, without EOS and without POISON."""
    draws = stream(seed, "tests", "texts")
    return [draws.integers(1, POISON, length).tolist() for length in lengths]


@torch.no_grad()
def plain_forward(model: nn.Module, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits [T, V] and last hidden states [T, H] of one unpadded text, by the model's ordinary forward."""
    outputs = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return outputs.logits[0], outputs.hidden_states[-1][0]


def adapter_tensors(model: nn.Module, name: str) -> dict[str, Tensor]:
    """A copy of the parameters of adapter `name`, found by name alone."""
    return {k: p.detach().clone() for k, p in model.named_parameters() if f".{name}." in k}


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter that belongs to no adapter."""
    return {k: p.detach().clone() for k, p in model.named_parameters() if "lora_" not in k}
