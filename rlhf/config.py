"""params.yaml as frozen dataclasses, read strictly: no unknown key, no missing key, no wrong type or range.

YAML 1.2 (ruamel) is used because DVC writes `1e-05` for a learning rate, which YAML 1.1 reads as a string.
"""

import types
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf.errors import UserError


class Rule(NamedTuple):
    """A range: `holds(value)` must be true, `text` says what was expected."""

    text: str
    holds: Any


Count = Annotated[int, Rule("an integer of at least 1", lambda v: v >= 1)]
Natural = Annotated[int, Rule("an integer of at least 0", lambda v: v >= 0)]
Positive = Annotated[float, Rule("a finite number above 0", lambda v: 0 < v < float("inf"))]
NonNegative = Annotated[float, Rule("a finite number of at least 0", lambda v: 0 <= v < float("inf"))]
Fraction = Annotated[float, Rule("a number from 0 to 1", lambda v: 0 <= v <= 1)]
BelowOne = Annotated[float, Rule("a number from 0 to below 1", lambda v: 0 <= v < 1)]
Text = Annotated[str, Rule("a text that is not empty", lambda v: v.strip() != "")]
Sha256 = Annotated[
    str, Rule("64 hexadecimal digits", lambda v: len(v) == 64 and not set(v) - set("0123456789abcdef"))
]
Seeds = Annotated[
    tuple[Natural, ...], Rule("at least one seed, none twice", lambda v: len(v) > 0 and len(set(v)) == len(v))
]


@dataclass(frozen=True)
class Runtime:
    device: Literal["cpu", "cuda"]
    threads: Count


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
    val: Count
    rm_test: Count
    test: Count


@dataclass(frozen=True)
class JudgeRows:
    """The judge's training texts: the last whole sentences of `size` reviews, at most `characters` long, and,
    if `leftover` is set, the snippets that no other part uses."""

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
    seeds: Seeds
    steps: Count
    batch_size: Count
    minibatches: Count
    epochs: Count
    lr: Positive
    kl_beta: NonNegative
    clip: Positive
    value_clip: Positive
    value_coef: NonNegative
    gamma: Fraction
    lam: Fraction
    validate_every: Count
    validation_prefixes: Count


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
    except (YAMLError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    params = _parse(str(path), document, Params)
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
            ppo.validation_prefixes > split.sizes.val,
            f"ppo.validation_prefixes {ppo.validation_prefixes}",
            "at most split.sizes.val",
        ),
    ]
    for is_wrong, what, expected in wrong:
        if is_wrong:
            raise UserError(f"{path}: {what}: expected {expected}")


def _parse(key: str, value: Any, expected: Any) -> Any:
    if get_origin(expected) is Annotated:
        base, *rules = get_args(expected)
        parsed = _parse(key, value, base)
        for rule in rules:
            if not rule.holds(parsed):
                raise _wrong(key, value, rule.text)
        return parsed
    if is_dataclass(expected):
        return _parse_section(key, value, expected)
    if get_origin(expected) in (Union, types.UnionType):
        (inner,) = [option for option in get_args(expected) if option is not type(None)]
        return None if value is None else _parse(key, value, inner)
    if get_origin(expected) is Literal:
        if value not in get_args(expected) or not isinstance(value, str):
            raise _wrong(key, value, "one of " + ", ".join(get_args(expected)))
        return value
    if get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise _wrong(key, value, "a list")
        return tuple(_parse(f"{key}[{i}]", item, get_args(expected)[0]) for i, item in enumerate(value))
    if get_origin(expected) is dict:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise _wrong(key, value, "a mapping with text keys")
        return {name: _parse(f"{key}.{name}", item, get_args(expected)[1]) for name, item in value.items()}
    return _parse_scalar(key, value, expected)


def _parse_section(key: str, value: Any, expected: type) -> Any:
    if not isinstance(value, dict):
        raise _wrong(key, value, "a mapping")
    known = [field.name for field in fields(expected)]
    for name in value:
        if name not in known:
            raise UserError(f"{key}: unknown key {name!r}: expected {', '.join(known)}")
    for name in known:
        if name not in value:
            raise UserError(f"{key}: missing key {name!r}")
    hints = get_type_hints(expected, include_extras=True)
    return expected(**{name: _parse(_join(key, name), value[name], hints[name]) for name in known})


def _parse_scalar(key: str, value: Any, expected: type) -> Any:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(key, value, "a number") from None
    if type(value) is not expected:
        names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
        raise _wrong(key, value, names[expected])
    return value


def _join(key: str, name: str) -> str:
    return f"{key}: {name}" if ": " not in key and key.endswith((".yaml", ".yml")) else f"{key}.{name}"


def _wrong(key: str, value: Any, expected: str) -> UserError:
    key = key if key.isprintable() else ascii(key)[1:-1]
    return UserError(f"{key} is {value!r}: expected {expected}")
