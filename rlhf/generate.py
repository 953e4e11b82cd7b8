"""Look at what policies write: `python -m rlhf.generate --policy sft --policy ppo-42 "the film is"`.

Prompts are arguments, or the lines of a file (`--file FILE`) or of the standard input (`--file -`). Texts are
sampled as in the evaluation, and with the same random numbers for every policy. In the folder of the question
answering pipeline (`cd qa`, with PYTHONPATH=..) a prompt is a question.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import nn

from rlhf.batching import chunks
from rlhf.config import Common, QuestionParams, load
from rlhf.errors import UserError, run
from rlhf.models import load_adapter, load_model, select, set_determinism
from rlhf.prompts import question_ids
from rlhf.randomness import stream
from rlhf.record import read_json
from rlhf.sampling import sample
from rlhf.sections import Generation
from rlhf.sources import locate
from rlhf.tokenizer import encoder, load_tokenizer


class Job(NamedTuple):
    """One text to be continued; number and sample count from 0 and name its random stream."""

    number: int
    sample: int
    tokens: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf.generate", description="Continue prompts with one or several policies."
    )
    parser.add_argument(
        "--policy", action="append", required=True, help="base, sft or ppo-<seed>; repeatable"
    )
    parser.add_argument("--file", metavar="FILE", help="take one prompt from each line; - is standard input")
    parser.add_argument("--samples", type=int, default=1, help="continuations of each prompt (default: 1)")
    parser.add_argument("--seed", type=int, help="of the random numbers (default: that of params.yaml)")
    parser.add_argument("prompts", metavar="PROMPT", nargs="*")
    arguments = parser.parse_args()
    params = load()
    seed = params.seed if arguments.seed is None else arguments.seed
    for name, value, least in (("--samples", arguments.samples, 1), ("--seed", seed, 0)):
        if value < least:
            raise UserError(f"{name} is {value}: expected an integer of at least {least}")
    policies = list(dict.fromkeys(arguments.policy))
    for policy in policies:
        adapter_folder(policy, params)
    prompts = checked(arguments.prompts + (lines(arguments.file) if arguments.file else []))
    show(policies, prompts, arguments.samples, seed, params)


def adapter_folder(policy: str, params: Common) -> Path | None:
    """Return where a policy's adapter lies, None for the base; raises `UserError` where it is not there."""
    known = {"base": None, "sft": ("artifacts/sft", "sft")}
    known |= {f"ppo-{seed}": (f"artifacts/ppo/{seed}", f"ppo@{seed}") for seed in params.ppo.seeds}
    if policy not in known:
        raise UserError(f"policy {policy!r} is unknown: expected one of {', '.join(known)}")
    if known[policy] is None:
        return None
    folder, stage = known[policy]
    if not (Path(folder) / "adapter_model.safetensors").is_file():
        raise UserError(f"policy {policy}: {folder} is not there yet: run `dvc repro {stage}` or `dvc pull`")
    return Path(folder)


def lines(name: str) -> list[str]:
    """Return the lines of a UTF-8 file, or of the standard input for `-`."""
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"--file {name}: not valid UTF-8: {error}") from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def checked(prompts: list[str]) -> list[str]:
    """Return the prompts; raises `UserError` for none at all, an empty one, or one that is not text."""
    if not prompts:
        raise UserError('no prompt: expected some, as in `python -m rlhf.generate --policy sft "the film"`')
    for number, prompt in enumerate(prompts, start=1):
        if not prompt.strip():
            raise UserError(f"prompt {number} is empty: expected some words to continue")
        if prompt.encode("utf-8", "ignore").decode("utf-8") != prompt:
            raise UserError(f"prompt {number} is {prompt!r}: expected valid UTF-8")
    return prompts


def show(policies: list[str], prompts: list[str], samples: int, seed: int, params: Common) -> None:
    """Print each prompt with its continuation under each policy; blank lines between prompts and samples."""
    folder = locate(read_json("data/manifests/policy.json"))
    tokenizer = load_tokenizer(folder)

    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    encode = encoder(folder, tokenizer)
    template = params.split.template if isinstance(params, QuestionParams) else "{question}"
    encoded = [question_ids(encode, template, prompt) for prompt in prompts]
    model = load_policies(folder, policies, params)
    positions = getattr(model.config, "max_position_embeddings", None)
    check_lengths(encoded, params.generation.response_tokens, positions)
    jobs = [Job(n, s, tokens) for n, tokens in enumerate(encoded) for s in range(samples)]
    width = max(map(len, policies))
    for batch in chunks(jobs, params.sample.batch_size):
        answers = {
            policy: continued(model, policy, batch, seed, tokenizer.eos_token_id, params.generation)
            for policy in policies
        }
        for row, job in enumerate(batch):
            for policy, responses in answers.items():
                print(
                    block(policy, width, text_of(job.tokens, responses[row], tokenizer.eos_token_id, decode))
                )
            print(flush=True)


def continued(
    model: nn.Module, policy: str, batch: list[Job], seed: int, eos_id: int, generation: Generation
) -> list[list[int]]:
    """Return a policy's responses; the noise is named by prompt and sample, never by the policy."""
    select(model, None if policy == "base" else policy)
    noise = [stream(seed, "generate", "sample", job.number, job.sample) for job in batch]
    prompts = [job.tokens for job in batch]
    return sample(model, prompts, noise, generation.response_tokens, eos_id, generation.temperature)


def load_policies(folder: Path, policies: list[str], params: Common) -> nn.Module:
    """Load the base model with one adapter for each policy that has one."""
    adapters = {policy: path for policy in policies if (path := adapter_folder(policy, params)) is not None}
    device = set_determinism(params.runtime.device, params.runtime.threads)
    model = load_model(folder, params.model, device, list(adapters) or ["none"], params.seed)
    for policy, path in adapters.items():
        load_adapter(model, policy, path)
    return model


def check_lengths(encoded: list[list[int]], response_tokens: int, positions: int | None) -> None:
    """Raise `UserError` for a prompt without tokens, or with more than leave room for the continuation."""
    for number, tokens in enumerate(encoded, start=1):
        if not tokens:
            raise UserError(f"prompt {number} is empty: the tokenizer gives no token for it")
        if positions is not None and len(tokens) + response_tokens > positions:
            most = positions - response_tokens
            raise UserError(f"prompt {number} has {len(tokens)} tokens: expected at most {most}")


def text_of(prompt: list[int], response: list[int], eos_id: int, decode: Callable[[list[int]], str]) -> str:
    """Return a prompt with its continuation, and how that ended where it did not end as a text does."""
    text = decode(prompt + response)
    if response[-1] != eos_id:
        return f"{text} … (cut at {len(response)} tokens)"
    return text if text != decode(prompt) else f"{text} (ended at once)"


def block(policy: str, width: int, text: str) -> str:
    """Return a policy's name and its text, further lines below the first."""
    return f"{policy + ':':{width + 1}} " + text.replace("\n", "\n" + " " * (width + 2))


if __name__ == "__main__":
    run(main)
