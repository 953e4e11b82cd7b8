"""params.yaml as frozen dataclasses, read strictly: no unknown key, no missing key, no wrong type or range.

YAML 1.2 (ruamel) is used because DVC writes `1e-05` for a learning rate, which YAML 1.1 reads as a string.
"""

from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf.errors import UserError
from rlhf.sections import (
    Adam,
    Fetch,
    Generation,
    Judge,
    Model,
    PolicyFetch,
    Ppo,
    Preferences,
    QuestionSplit,
    Report,
    Reward,
    Runtime,
    Sample,
    Sft,
    Split,
)
from rlhf.strict import Natural, parse


@dataclass(frozen=True)
class Common:
    """What both pipelines have."""

    seed: Natural
    runtime: Runtime
    model: Model
    adam: Adam
    generation: Generation
    sft: Sft
    reward: Reward
    ppo: Ppo
    sample: Sample
    report: Report


@dataclass(frozen=True)
class Params(Common):
    """The movie-review pipeline: labelled texts, a trained judge."""

    fetch: Fetch
    split: Split
    judge: Judge


@dataclass(frozen=True)
class QuestionParams(Common):
    """The question answering pipeline: answered and bare questions, pairwise preferences."""

    fetch: PolicyFetch
    split: QuestionSplit
    preferences: Preferences


def load(path: str | Path = "params.yaml") -> Params | QuestionParams:
    """Read and check the whole of `path`; a section `preferences` makes it question answering.

    Raises `UserError` naming key, value and what was expected.
    """
    try:
        document = YAML(typ="safe", pure=True).load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; run from the folder that holds it") from None
    except (YAMLError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        # ruamel lets through what its constructors meet: IndexError for `!!int ''`, KeyError for `!!bool x`.
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    asks = isinstance(document, dict) and "preferences" in document
    params = parse(str(path), document, QuestionParams if asks else Params)
    _check_together(str(path), params)
    return params


def _check_together(path: str, params: Params | QuestionParams) -> None:
    ppo = params.ppo
    wrong = [
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
            ppo.kl_controller == "stepwise" and not 0.01 <= ppo.kl_beta <= 1,
            f"ppo.kl_beta {ppo.kl_beta} with ppo.kl_controller stepwise",
            "0.01 to 1, within which that controller keeps it, or another controller",
        ),
        (
            ppo.validation_prefixes > params.split.sizes.val,
            f"ppo.validation_prefixes {ppo.validation_prefixes}",
            "at most split.sizes.val",
        ),
        *(_wrong_in_reviews(params) if isinstance(params, Params) else _wrong_in_questions(params)),
    ]
    for is_wrong, what, expected in wrong:
        if is_wrong:
            raise UserError(f"{path}: {what}: expected {expected}")


def _wrong_in_reviews(params: Params) -> list[tuple[bool, str, str]]:
    split, prefix, prompt = params.split, params.generation.prefix_tokens, params.sft.prompt_tokens
    return [
        (
            split.min_tokens > split.max_tokens,
            f"split.min_tokens {split.min_tokens}",
            "at most split.max_tokens",
        ),
        (
            prefix is None or prefix >= split.min_tokens,
            f"generation.prefix_tokens {prefix}",
            "less than split.min_tokens, so that every row has a continuation",
        ),
        (
            prompt is None or prompt >= split.min_tokens,
            f"sft.prompt_tokens {prompt}",
            "less than split.min_tokens, so that every row has a continuation",
        ),
        (
            set(split.rows.labels.values()) != {0, 1},
            f"split.rows.labels {split.rows.labels}",
            "at least one value for 0 and one for 1",
        ),
        (
            split.judge is None and params.judge.epochs > 0,
            f"split.judge null with judge.epochs {params.judge.epochs}",
            "rows to train the judge on, or judge.epochs 0 for a ready classifier",
        ),
        (
            params.reward.loss != "label",
            f"reward.loss {params.reward.loss}",
            "label",
        ),
    ]


def _wrong_in_questions(params: QuestionParams) -> list[tuple[bool, str, str]]:
    prefix, prompt = params.generation.prefix_tokens, params.sft.prompt_tokens
    null = "null, since each row says where its prompt ends"
    return [
        (prefix is not None, f"generation.prefix_tokens {prefix}", null),
        (prompt is not None, f"sft.prompt_tokens {prompt}", null),
        (params.reward.loss != "pairwise", f"reward.loss {params.reward.loss}", "pairwise"),
    ]
