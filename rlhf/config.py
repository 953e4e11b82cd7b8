"""params.yaml as frozen dataclasses, read strictly: no unknown key, no missing key, no wrong type or range.

YAML 1.2 (ruamel) is used because DVC writes `1e-05` for a learning rate, which YAML 1.1 reads as a string.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf.errors import UserError
from rlhf.strict import (
    BelowOne,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Seeds,
    Several,
    Sha256,
    Text,
    parse,
)


@dataclass(frozen=True)
class Runtime:
    """`snapshot_seconds` decides no output, so no stage declares it: 0 means a snapshot after every step."""

    device: Literal["cpu", "cuda"]
    threads: Count
    snapshot_seconds: NonNegative


@dataclass(frozen=True)
class Source:
    """Where a model or a data set comes from; `rlhf.sources` gives each kind's meaning of the keys."""

    kind: Literal["wheel", "hub", "file"]
    name: Text
    revision: Text | None
    path: Text | None
    sha256: dict[str, Sha256]
    license: Text


@dataclass(frozen=True)
class Fetch:
    policy: Source
    reviews: Source
    judge: Source


@dataclass(frozen=True)
class Rows:
    """Which rows of the labelled data set are used, and under which column names."""

    text_column: Text
    label_column: Text
    where: dict[str, str]


@dataclass(frozen=True)
class Sizes:
    sft: Count
    rm: Count
    ppo: Count
    val: Several
    rm_test: Count
    test: Several


@dataclass(frozen=True)
class JudgeRows:
    """The judge's training texts: the last whole sentences of `size` reviews, at most `characters` long, and,
    if `leftover` is set, the snippets that no other part uses, those outside the token limits included."""

    where: dict[str, str]
    characters: Count
    size: Count
    leftover: bool


@dataclass(frozen=True)
class Split:
    rows: Rows
    min_tokens: Count
    max_tokens: Count
    sizes: Sizes
    judge: JudgeRows
    sha256: dict[str, Sha256] | None


@dataclass(frozen=True)
class Lora:
    rank: Count
    alpha: Positive
    targets: tuple[Text, ...]


@dataclass(frozen=True)
class Model:
    dtype: Literal["float32", "bfloat16", "float16"]
    quantization: Literal["none", "nf4"]
    lora: Lora
    micro_batch_tokens: Count


@dataclass(frozen=True)
class Adam:
    beta1: BelowOne
    beta2: BelowOne
    eps: Positive
    weight_decay: NonNegative
    max_grad_norm: Positive


@dataclass(frozen=True)
class Generation:
    prefix_tokens: Count
    response_tokens: Count
    temperature: Positive


@dataclass(frozen=True)
class Sft:
    steps: Count
    batch_size: Count
    lr: Positive


@dataclass(frozen=True)
class Reward:
    steps: Count
    batch_size: Count
    lr: Positive
    validate_every: Count
    weak_accuracy: Fraction


@dataclass(frozen=True)
class Ppo:
    """`kl_target`, for a controller that is not fixed, is in nats per token; `kl_horizon` counts rollouts."""

    seeds: Seeds
    steps: Count
    batch_size: Count
    minibatches: Count
    epochs: Count
    lr: Positive
    kl_beta: NonNegative
    kl_controller: Literal["fixed", "ziegler", "stepwise"]
    kl_target: Positive
    kl_horizon: Count
    clip: Positive
    value_clip: Positive
    value_coef: NonNegative
    gamma: Fraction
    lam: Fraction
    validate_every: Count
    validation_prefixes: Several


@dataclass(frozen=True)
class Sample:
    n: Count
    batch_size: Count


@dataclass(frozen=True)
class Judge:
    """How the judge is trained; `epochs` 0 takes a ready classifier as it is."""

    epochs: Natural
    batch_size: Count
    lr: Positive
    max_tokens: Count


@dataclass(frozen=True)
class Report:
    title: Text
    resamples: Count
    examples: Count


@dataclass(frozen=True)
class Params:
    seed: Natural
    runtime: Runtime
    fetch: Fetch
    split: Split
    model: Model
    adam: Adam
    generation: Generation
    sft: Sft
    reward: Reward
    ppo: Ppo
    sample: Sample
    judge: Judge
    report: Report


def load(path: str | Path = "params.yaml") -> Params:
    """Read and check the whole of `path`; raises `UserError` naming key, value and what was expected."""
    try:
        document = YAML(typ="safe", pure=True).load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run from the project's root") from None
    except (YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    params = parse(str(path), document, Params)
    _check_together(str(path), params)
    return params


def _check_together(path: str, params: Params) -> None:
    split, generation, ppo = params.split, params.generation, params.ppo
    wrong = [
        (
            split.min_tokens > split.max_tokens,
            f"split.min_tokens {split.min_tokens}",
            "at most split.max_tokens",
        ),
        (
            generation.prefix_tokens >= split.min_tokens,
            f"generation.prefix_tokens {generation.prefix_tokens}",
            "less than split.min_tokens, so that every row has a continuation",
        ),
        (
            ppo.batch_size % ppo.minibatches != 0,
            f"ppo.minibatches {ppo.minibatches}",
            "a divisor of ppo.batch_size",
        ),
        (
            ppo.kl_horizon < ppo.batch_size,
            f"ppo.kl_horizon {ppo.kl_horizon}",
            "at least ppo.batch_size, so that the KL coefficient stays positive",
        ),
        (
            ppo.validation_prefixes > split.sizes.val,
            f"ppo.validation_prefixes {ppo.validation_prefixes}",
            "at most split.sizes.val",
        ),
    ]
    for is_wrong, what, expected in wrong:
        if is_wrong:
            raise UserError(f"{path}: {what}: expected {expected}")
