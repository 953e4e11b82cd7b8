"""From judged continuations to the report's numbers: a row per policy, paired differences between policies.

The unit is the prefix, and its samples are nested in it. Policies are named base, sft and ppo-<seed>.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pandas as pd

from rlhf import stats, textmetrics
from rlhf.errors import UserError
from rlhf.randomness import stream
from rlhf.stats import HierarchicalDifference, Interval, PairedDifference


class Measure(NamedTuple):
    key: str
    name: str
    unit: str
    digits: int = 3


class Comparison(NamedTuple):
    """One difference of two policies; `group` is sft (SFT - base), seed (a PPO seed - SFT), pooled or check.

    `bca` resamples prefixes, with all seeds and samples; `percentile` does too, and for the pooled comparison
    seeds and samples as well. `adjusted_p` is Holm's, None outside the family.
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
LEVELS = {
    "positive_rate": "positive_rate",
    "nll_per_token": "nll_per_token",
    "length": "length",
    "repetition": "repetition",
    "distinct_2": "distinct_2",
}
DIFFERENCES = {
    "judge": "judge_full",
    "judge_continuation": "judge_continuation",
    "vader": "vader_full",
    "reward": "reward",
    "nll_per_token": "nll",
}
Scores = dict[str, dict[str, np.ndarray]]


def prepare(judged: pd.DataFrame, policies: list[str]) -> pd.DataFrame:
    """Order rows by policy, id and sample; add `length`, `positive`, `positive_continuation`, `limit`.

    Positive means judged probability >= 0.5 and not empty. Raises `UserError` when there are fewer than two
    prefixes, or when the policies' rows differ in id or sample, by which differences are paired.
    """
    rows = judged.assign(
        length=judged["n_tokens"].astype(float),
        positive=(judged["judge_full"] >= 0.5) & ~judged["empty"],
        positive_continuation=(judged["judge_continuation"] >= 0.5) & ~judged["empty"],
        limit=~judged["ended"],
    ).sort_values(["id", "sample"], kind="stable")
    parts = [rows[rows["policy"] == policy] for policy in policies]
    keys = [part[["id", "sample"]].to_numpy().tolist() for part in parts]
    if parts[0]["id"].nunique() < 2:
        raise UserError(f"judged rows of {policies[0]}: expected at least 2 prefixes")
    for policy, key in zip(policies, keys, strict=True):
        if key != keys[0]:
            raise UserError(f"judged rows of {policy}: expected the ids and samples of {policies[0]}")
    return pd.concat(parts, ignore_index=True)


def scores(rows: pd.DataFrame, nll: dict[str, pd.DataFrame]) -> Scores:
    """Return `[measure][policy]` arrays [prefixes, samples]; NLL is [validation rows, 1], nats per token.

    `rows` comes from `prepare`; `nll[policy]` has id, nll (nats over the sequence) and tokens, in one order.
    """
    result: Scores = {measure.key: {} for measure in MEASURES}
    first = next(iter(nll.values()))["id"].tolist()
    for policy, likelihood in nll.items():
        if likelihood["id"].tolist() != first:
            raise UserError(f"validation NLL of {policy}: expected the same ids as the other policies")
        part = rows[rows["policy"] == policy]
        for measure in MEASURES[:-1]:
            result[measure.key][policy] = part[measure.key].to_numpy(float).reshape(part["id"].nunique(), -1)
        result["nll"][policy] = (likelihood["nll"] / likelihood["tokens"]).to_numpy(float)[:, None]
    return result


def compare(values: Scores, seeds: tuple[int, ...], seed: int, resamples: int) -> list[Comparison]:
    """Return SFT - base, each PPO seed - SFT and the pooled PPO - SFT for every measure, Holm over all.

    With one PPO seed the pooled row is that seed's, and no row is repeated.
    """
    found = []
    for measure in MEASURES:
        arrays = values[measure.key]
        found.append(_paired("sft", "SFT - base", measure, (arrays["sft"], arrays["base"]), seed, resamples))
        for s in seeds if len(seeds) > 1 else ():
            pair = (arrays[f"ppo-{s}"], arrays["sft"])
            found.append(_paired("seed", f"PPO {s} - SFT", measure, pair, seed, resamples))
        ppo = np.stack([arrays[f"ppo-{s}"] for s in seeds])
        found.append(_pooled(measure, ppo, arrays["sft"], seed, resamples))
    adjusted = stats.holm([comparison.result.p_value for comparison in found])
    return [c._replace(adjusted_p=p) for c, p in zip(found, adjusted, strict=True)]


def _paired(
    group: str, name: str, measure: Measure, pair: tuple[np.ndarray, np.ndarray], seed: int, resamples: int
) -> Comparison:
    treatment, control = (array.mean(1) for array in pair)
    result = stats.paired_difference(treatment, control, stream(seed, "report", measure.key, name), resamples)
    middle = stats.interquartile_mean(treatment - control)
    return Comparison(group, name, measure, result.bca, result.percentile, middle, result, None)


def _pooled(
    measure: Measure, treatment: np.ndarray, control: np.ndarray, seed: int, resamples: int
) -> Comparison:
    name = "PPO - SFT"
    result = stats.hierarchical_difference(
        treatment, control, stream(seed, "report", measure.key, name), resamples
    )
    per_seed = treatment.mean(2) - control.mean(1)
    bca = stats.mean_interval(per_seed.mean(0), stream(seed, "report", measure.key, name, "bca"), resamples)
    middle = stats.interquartile_mean(per_seed.ravel())
    return Comparison("pooled", name, measure, bca, result.percentile, middle, result, None)


def self_check(values: Scores, seed: int, resamples: int) -> list[Comparison]:
    """Compare SFT with itself under another noise stream (second sample - first): nothing should show.

    Empty with one sample per prefix. Outside the Holm family of `compare`, since no claim rests on it.
    """
    if values["judge_full"]["sft"].shape[1] < 2:
        return []
    return [
        _paired("check", "SFT - SFT", measure, (sft[:, 1:2], sft[:, 0:1]), seed, resamples)
        for measure, sft in ((measure, values[measure.key]["sft"]) for measure in MEASURES[:-1])
    ]


def as_table(found: list[Comparison]) -> pd.DataFrame:
    """Return one row per comparison: names, unit, mean, and low and high of the quoted interval."""
    return pd.DataFrame(
        {
            "measure": c.measure.name,
            "unit": c.measure.unit,
            "comparison": c.name,
            "pooled": c.group == "pooled",
            "mean": c.result.mean,
            "low": c.interval.low,
            "high": c.interval.high,
        }
        for c in found
    )


def metrics(table: pd.DataFrame, found: list[Comparison]) -> dict[str, float]:
    """Return the flat numbers to compare between experiments: levels by policy, then differences.

    `table` is `summarise`'s. Rates and repetition are shares, NLL and KL nats, length tokens.
    """
    levels = {
        f"{name}_{policy}": float(table.loc[policy, column])
        for name, column in LEVELS.items()
        for policy in ("base", "sft", "ppo")
    }
    main = {c.measure.key: c for c in found if c.group == "pooled"}
    differences = {}
    for name, key in DIFFERENCES.items():
        differences[f"{name}_ppo_minus_sft"] = main[key].result.mean
        differences[f"{name}_ppo_minus_sft_low"] = main[key].interval.low
        differences[f"{name}_ppo_minus_sft_high"] = main[key].interval.high
    return levels | differences | {"kl_per_sequence_ppo": float(table.loc["ppo", "kl"])}


def outcomes(rows: pd.DataFrame, seeds: tuple[int, ...]) -> list[Outcome]:
    """Compare `positive` of SFT to base and of every PPO seed to SFT, on the first sample of each prefix."""
    first = rows[rows["sample"] == rows["sample"].min()]
    positive = {policy: part["positive"].to_numpy(bool) for policy, part in first.groupby("policy")}
    pairs = [("SFT - base", "sft", "base"), *((f"PPO {s} - SFT", f"ppo-{s}", "sft") for s in seeds)]
    found = []
    for name, treatment, control in pairs:
        after, before = positive[treatment], positive[control]
        gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
        found.append(Outcome(name, len(after), gained, lost, stats.mcnemar_exact(after, before)))
    return found


def agreement(rows: pd.DataFrame) -> list[Agreement]:
    """Compare reward (>= 0), judge (>= 0.5) and VADER (> 0) on the full texts of all policies, in pairs."""
    calls = {
        "Reward model": rows["reward"] >= 0,
        "Judge": rows["judge_full"] >= 0.5,
        "VADER": rows["vader_full"] > 0,
    }
    return [
        Agreement(a, b, float((calls[a] == calls[b]).mean()), stats.cohen_kappa(calls[a], calls[b]))
        for a, b in itertools.combinations(calls, 2)
    ]


def noise_ratio(values: Scores, policies: list[str]) -> float | None:
    """Variance of `judge_full` differences to SFT under common noise, over that under independent noise.

    Below 1, common random numbers make the comparison sharper. None with one sample, or without variance.
    """
    sft = values["judge_full"]["sft"]
    if sft.shape[1] < 2:
        return None
    common = np.mean([np.var(values["judge_full"][p][:, 0] - sft[:, 0]) for p in policies])
    independent = np.mean([np.var(values["judge_full"][p][:, 0] - sft[:, 1]) for p in policies])
    return float(common / independent) if independent > 0 else None


def summarise(rows: pd.DataFrame, nll: dict[str, pd.DataFrame], seed: int, resamples: int) -> pd.DataFrame:
    """Return one row per policy, and a last row `ppo`, the mean over seeds (perplexity: exp of mean NLL)."""
    table = pd.DataFrame({policy: _policy(rows[rows["policy"] == policy], nll[policy]) for policy in nll}).T
    table.loc["ppo"] = table[table.index.str.startswith("ppo-")].mean()
    table["perplexity"] = np.exp(table["nll_per_token"])
    for name, column in (
        ("positive_rate", "positive"),
        ("positive_rate_continuation", "positive_continuation"),
    ):
        intervals = [_rate_interval(rows, policy, column, seed, resamples) for policy in table.index]
        table[f"{name}_low"] = [interval.low for interval in intervals]
        table[f"{name}_high"] = [interval.high for interval in intervals]
    return table


def _policy(part: pd.DataFrame, nll: pd.DataFrame) -> dict[str, float]:
    texts = part["continuation"].tolist()
    means = {
        "positive_rate": "positive",
        "positive_rate_continuation": "positive_continuation",
        **{measure.key: measure.key for measure in MEASURES[:-1]},
        "kl": "kl",
        "empty_rate": "empty",
        "limit_rate": "limit",
    }
    return {
        **{name: float(part[column].mean()) for name, column in means.items()},
        "distinct_1": textmetrics.distinct_n(texts, 1),
        "distinct_2": textmetrics.distinct_n(texts, 2),
        "self_similarity": textmetrics.self_similarity(texts),
        "nll_per_token": float(nll["nll"].sum() / nll["tokens"].sum()),
    }


def _rate_interval(rows: pd.DataFrame, policy: str, column: str, seed: int, resamples: int) -> Interval:
    """Clopper-Pearson for one draw per prefix; else prefixes are resampled with all their draws."""
    part = rows[rows["policy"].str.startswith("ppo-") if policy == "ppo" else rows["policy"] == policy]
    per_prefix = part.groupby("id")[column].mean().to_numpy(float)
    if len(part) == len(per_prefix) or len(set(per_prefix)) == 1:
        return stats.clopper_pearson(round(per_prefix.sum()), len(per_prefix))
    return stats.mean_interval(per_prefix, stream(seed, "report", column, policy), resamples)
