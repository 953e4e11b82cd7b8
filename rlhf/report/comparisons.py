"""From judged continuations to paired differences between policies.

The unit is the prefix, and its samples are nested in it. Policies are named base, sft and ppo-<seed>;
sft-again is SFT under other random numbers.
"""

import itertools
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pandas as pd

from rlhf import stats
from rlhf.errors import UserError
from rlhf.randomness import stream
from rlhf.stats import HierarchicalDifference, Interval, PairedDifference, VarianceRatio


class Measure(NamedTuple):
    key: str
    name: str
    unit: str
    digits: int = 3


class Unit(NamedTuple):
    """What is sampled, one value each: `one` and `many` as the report calls it, and the texts of the NLL."""

    one: str
    many: str
    text: str
    texts: str


class Comparison(NamedTuple):
    """One difference of two policies; `group` is sft (SFT - base), seed (a PPO seed - SFT), pooled or check.

    `bca` resamples prefixes, with all seeds and samples; `percentile` does too, and for the pooled comparison
    seeds and samples as well. `adjusted_p` is Holm's over the family, None before the family is known.
    """

    group: str
    name: str
    measure: Measure
    bca: Interval
    percentile: Interval
    interquartile_mean: float
    result: PairedDifference | HierarchicalDifference
    adjusted_p: float | None

    @property
    def interval(self) -> Interval:
        """The interval that text and figures quote: the one with the most sources of variation."""
        return self.percentile if self.group == "pooled" else self.bca


class Noise(NamedTuple):
    """How many times the prefixes PPO - SFT would need under independent random numbers; None: undefined."""

    measure: Measure
    ratio: VarianceRatio | None


class Outcome(NamedTuple):
    """Binary outcomes of two policies on n prefixes: how many turned positive or negative, McNemar's p."""

    name: str
    n: int
    gained: int
    lost: int
    p_value: float


class Agreement(NamedTuple):
    """How often two raters call the same texts positive, and Cohen's kappa."""

    first: str
    second: str
    share: float
    kappa: float


PREFIX = Unit("prefix", "prefixes", "review", "reviews")
MEASURES = (
    Measure("judge_full", "Judge, full text", "probability"),
    Measure("judge_continuation", "Judge, continuation", "probability"),
    Measure("vader_full", "VADER, full text", "compound, -1 to 1"),
    Measure("vader_continuation", "VADER, continuation", "compound, -1 to 1"),
    Measure("reward", "Reward", "-1 to 1"),
    Measure("length", "Length", "tokens", 1),
    Measure("repetition", "Repetition", "share"),
    Measure("nll", "NLL of held-out reviews", "nats per token"),
)
TEXTS = ("policy", "id", "prefix", "continuation", "full_text", "question", "reference")
Scores = dict[str, dict[str, np.ndarray]]


def read_rows(source: str | Path | IO[str]) -> pd.DataFrame:
    """Read judged rows; texts stay as they were written, whether empty, "NA" or with line ends inside."""
    return pd.read_csv(
        source,
        keep_default_na=False,
        na_values={"kl": [""], "reward": [""]},
        dtype=dict.fromkeys(TEXTS, str),
        lineterminator="\n",
    )


def prepare(judged: pd.DataFrame, policies: list[str]) -> pd.DataFrame:
    """`align` rows of the trained judge, with `positive`, `positive_continuation`.

    Positive means judged probability >= 0.5 and not empty.
    """
    rows = judged.assign(
        positive=(judged["judge_full"] >= 0.5) & ~judged["empty"],
        positive_continuation=(judged["judge_continuation"] >= 0.5) & ~judged["empty"],
    )
    return align(rows, policies)


def align(judged: pd.DataFrame, policies: list[str]) -> pd.DataFrame:
    """Order rows by policy, id and sample; add `length` (tokens) and `limit` (cut there).

    Raises `UserError` when there are fewer than two prefixes, or when the policies' rows differ in id or
    sample, by which differences are paired.
    """
    rows = judged.assign(length=judged["n_tokens"].astype(float), limit=~judged["ended"])
    rows = rows.sort_values(["id", "sample"], kind="stable")
    parts = [rows[rows["policy"] == policy] for policy in policies]
    keys = [part[["id", "sample"]].to_numpy().tolist() for part in parts]
    if parts[0]["id"].nunique() < 2:
        raise UserError(f"judged rows of {policies[0]}: expected at least 2 prefixes")
    for policy, key in zip(policies, keys, strict=True):
        if key != keys[0]:
            raise UserError(f"judged rows of {policy}: expected the ids and samples of {policies[0]}")
    return pd.concat(parts, ignore_index=True)


def scores(
    rows: pd.DataFrame, nll: dict[str, pd.DataFrame], measures: tuple[Measure, ...] = MEASURES
) -> Scores:
    """Return `[measure][policy]` arrays [prefixes, samples]; NLL is [validation rows, 1], nats per token.

    `rows` comes from `align` and has a column for each measure but `nll`; `nll[policy]` has id, nll (nats
    over the sequence) and tokens, in one order.
    """
    values: Scores = {measure.key: {} for measure in measures}
    for policy, part in rows.groupby("policy", sort=False):
        for measure in of_texts(measures):
            values[measure.key][policy] = part[measure.key].to_numpy(float).reshape(part["id"].nunique(), -1)
    first = next(iter(nll.values()))[["id", "tokens"]].to_numpy().tolist()
    for policy, likelihood in nll.items():
        if likelihood[["id", "tokens"]].to_numpy().tolist() != first:
            raise UserError(f"validation NLL of {policy}: expected the ids and lengths of the other policies")
        values["nll"][policy] = likelihood_per_token(likelihood)[:, None]
    return values


def of_texts(measures: tuple[Measure, ...]) -> tuple[Measure, ...]:
    """Return the measures of what a policy wrote: all but the NLL, which has neither samples nor noise."""
    return tuple(measure for measure in measures if measure.key != "nll")


def likelihood_per_token(likelihood: pd.DataFrame) -> np.ndarray:
    """Return one value per text [rows] whose mean is the NLL per token over all texts' tokens."""
    return linearised_ratio(*(likelihood[name].to_numpy(float) for name in ("nll", "tokens")))


def linearised_ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return one value per row [rows] whose mean is the ratio R = sum(above) / sum(below).

    value = R + (above - R below) / mean(below): the ratio R linearised (Cochran 1977, section 6.4), so that
    the variance of the values is the one of R, in which rows with more below weigh more.
    """
    ratio = above.sum() / below.sum()
    return ratio + (above - ratio * below) / below.mean()


def compare(
    values: Scores,
    seeds: tuple[int, ...],
    seed: int,
    resamples: int,
    measures: tuple[Measure, ...] = MEASURES,
) -> list[Comparison]:
    """Return SFT - base, each PPO seed - SFT and the pooled PPO - SFT for every measure, Holm over all.

    With one PPO seed the pooled row is that seed's, and no row is repeated.
    """
    found = []
    for measure in measures:
        arrays = values[measure.key]
        found.append(paired("sft", "SFT - base", measure, arrays["sft"], arrays["base"], seed, resamples))
        for s in seeds if len(seeds) > 1 else ():
            one = arrays[f"ppo-{s}"]
            found.append(paired("seed", f"PPO {s} - SFT", measure, one, arrays["sft"], seed, resamples))
        ppo = np.stack([arrays[f"ppo-{s}"] for s in seeds])
        found.append(pooled("PPO - SFT", measure, ppo, arrays["sft"], seed, resamples))
    return adjusted(found)


def adjusted(family: list[Comparison]) -> list[Comparison]:
    """Return the family with Holm's p-values."""
    p_values = stats.holm([comparison.result.p_value for comparison in family])
    return [c._replace(adjusted_p=p) for c, p in zip(family, p_values, strict=True)]


def paired(
    group: str, name: str, measure: Measure, treatment: np.ndarray, control: np.ndarray, seed: int, n: int
) -> Comparison:
    """Compare two policies' scores [prefixes, samples] with n resamples; `adjusted_p` is still None."""
    treatment, control = treatment.mean(1), control.mean(1)
    result = stats.paired_difference(treatment, control, stream(seed, "report", measure.key, name), n)
    middle = stats.interquartile_mean(treatment - control)
    return Comparison(group, name, measure, result.bca, result.percentile, middle, result, None)


def pooled(
    name: str, measure: Measure, treatment: np.ndarray, control: np.ndarray, seed: int, n: int
) -> Comparison:
    """Compare scores [seeds, prefixes, samples] to a control's [prefixes, samples] with n resamples."""
    draws = stream(seed, "report", measure.key, name)
    result = stats.hierarchical_difference(treatment, control, draws, n)
    per_seed = treatment.mean(2) - control.mean(1)
    bca = stats.mean_interval(per_seed.mean(0), stream(seed, "report", measure.key, name, "bca"), n)
    middle = stats.interquartile_mean(per_seed.ravel())
    return Comparison("pooled", name, measure, bca, result.percentile, middle, result, None)


def self_check(
    values: Scores, seed: int, resamples: int, measures: tuple[Measure, ...] = MEASURES
) -> list[Comparison]:
    """Compare SFT with itself under another noise stream, a family of its own: nothing should show.

    Empty where no `sft-again` was sampled. NLL has no noise, and is left out.
    """
    if "sft-again" not in values[measures[0].key]:
        return []
    found = []
    for measure in of_texts(measures):
        again, sft = (values[measure.key][policy] for policy in ("sft-again", "sft"))
        found.append(paired("check", "SFT again - SFT", measure, again, sft, seed, resamples))
    return adjusted(found)


def noise(
    values: Scores,
    seeds: tuple[int, ...],
    seed: int,
    resamples: int,
    measures: tuple[Measure, ...] = MEASURES,
) -> list[Noise]:
    """Measure what common random numbers bring: PPO - SFT against PPO - SFT again, for every text measure.

    Empty where no `sft-again` was sampled.
    """
    if "sft-again" not in values[measures[0].key]:
        return []
    found = []
    for measure in of_texts(measures):
        means = {policy: array.mean(1) for policy, array in values[measure.key].items()}
        ppo = np.stack([means[f"ppo-{s}"] for s in seeds])
        draws = stream(seed, "report", measure.key, "noise")
        ratio = stats.variance_ratio(ppo, means["sft"], means["sft-again"], draws, resamples)
        found.append(Noise(measure, ratio))
    return found


def as_table(found: list[Comparison]) -> pd.DataFrame:
    """Return one row per comparison: names, unit, mean, and low and high of the quoted interval.

    new_low and new_high: the interval over new seeds; the quoted one where there is none.
    """
    return pd.DataFrame(
        {
            "measure": c.measure.name,
            "unit": c.measure.unit,
            "comparison": c.name,
            "pooled": c.group == "pooled",
            "mean": c.result.mean,
            **dict(zip(("low", "high", "new_low", "new_high"), (*c.interval, *new_seeds(c)), strict=True)),
        }
        for c in found
    )


def new_seeds(comparison: Comparison) -> Interval:
    """The interval over new seeds; the quoted one where seeds play no part, or where there is only one."""
    found = comparison.result.new_seeds if comparison.group == "pooled" else None
    return found or comparison.interval


def outcomes(rows: pd.DataFrame, seeds: tuple[int, ...], outcome: str = "positive") -> list[Outcome]:
    """Compare `outcome` of SFT to base and of every PPO seed to SFT, on the first sample of each prefix."""
    first = rows[rows["sample"] == rows["sample"].min()]
    positive = {policy: part[outcome].to_numpy(bool) for policy, part in first.groupby("policy")}
    pairs = [("SFT - base", "sft", "base"), *((f"PPO {s} - SFT", f"ppo-{s}", "sft") for s in seeds)]
    found = []
    for name, treatment, control in pairs:
        after, before = positive[treatment], positive[control]
        gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
        found.append(Outcome(name, len(after), gained, lost, stats.mcnemar_exact(after, before)))
    return found


def agreement(rows: pd.DataFrame) -> list[Agreement]:
    """Compare reward (>= 0), judge (>= 0.5) and VADER (>= 0) on the full texts of all policies, in pairs."""
    calls = {
        "Reward model": rows["reward"] >= 0,
        "Judge": rows["judge_full"] >= 0.5,
        "VADER": rows["vader_full"] >= 0,
    }
    return [
        Agreement(a, b, float((calls[a] == calls[b]).mean()), stats.cohen_kappa(calls[a], calls[b]))
        for a, b in itertools.combinations(calls, 2)
    ]
