"""One row per policy: rates, means and their intervals; and the flat numbers that DVC compares."""

import numpy as np
import pandas as pd

from rlhf import stats, textmetrics
from rlhf.randomness import stream
from rlhf.report.comparisons import TEXT_MEASURES, Comparison, likelihood_per_token
from rlhf.stats import Interval

RATES = {"positive_rate": "positive", "positive_rate_continuation": "positive_continuation"}
MEANS = (*(measure.key for measure in TEXT_MEASURES), "kl")
METRICS = {
    "positive_rate": "positive_rate",
    "nll_per_token": "nll_per_token",
    "length_tokens": "length",
    "repetition_share": "repetition",
    "distinct_2_share": "distinct_2",
}
DIFFERENCES = {
    "judge_probability": "judge_full",
    "judge_probability_continuation": "judge_continuation",
    "vader_compound": "vader_full",
    "reward_score": "reward",
    "nll_per_token": "nll",
}


def summarise(rows: pd.DataFrame, nll: dict[str, pd.DataFrame], seed: int, resamples: int) -> pd.DataFrame:
    """Return one row per policy, and a last row `ppo`, the mean over seeds (perplexity: exp of mean NLL).

    `rows` comes from `comparisons.prepare`. The columns of `RATES`, those of `MEANS` and nll_per_token have
    95% intervals in columns ending in _low and _high, each on its own; in the row `ppo` the seeds are fixed.
    """
    table = pd.DataFrame({policy: _policy(rows[rows["policy"] == policy], nll[policy]) for policy in nll}).T
    table.loc["ppo"] = table[table.index.str.startswith("ppo-")].mean()
    table["perplexity"] = np.exp(table["nll_per_token"])
    for name in (*RATES, *MEANS, "nll_per_token"):
        found = [_interval(rows, nll, policy, name, seed, resamples) for policy in table.index]
        table[f"{name}_low"] = [interval.low for interval in found]
        table[f"{name}_high"] = [interval.high for interval in found]
    return table


def _policy(part: pd.DataFrame, nll: pd.DataFrame) -> dict[str, float]:
    texts = part["continuation"].tolist()
    means = RATES | {name: name for name in MEANS} | {"empty_rate": "empty", "limit_rate": "limit"}
    return {
        **{name: float(part[column].mean()) for name, column in means.items()},
        "distinct_1": textmetrics.distinct_n(texts, 1),
        "distinct_2": textmetrics.distinct_n(texts, 2),
        "self_similarity": textmetrics.self_similarity(texts),
        "nll_per_token": float(nll["nll"].sum() / nll["tokens"].sum()),
    }


def _interval(
    rows: pd.DataFrame, nll: dict[str, pd.DataFrame], policy: str, name: str, seed: int, resamples: int
) -> Interval:
    """Clopper-Pearson for a rate with one draw per prefix; else prefixes are drawn with all their samples."""
    members = [policy] if policy in nll else [other for other in nll if other.startswith("ppo-")]
    if name == "nll_per_token":
        values = np.mean([likelihood_per_token(nll[member]) for member in members], axis=0)
        return stats.mean_interval(values, stream(seed, "report", name, policy), resamples)
    part = rows[rows["policy"].isin(members)]
    values = part.groupby("id")[RATES.get(name, name)].mean().to_numpy(float)
    if name in RATES and (len(part) == len(values) or len(set(values)) == 1):
        return stats.clopper_pearson(round(values.sum()), len(values))
    return stats.mean_interval(values, stream(seed, "report", name, policy), resamples)


def metrics(table: pd.DataFrame, found: list[Comparison]) -> dict[str, float]:
    """Return the flat numbers to compare between experiments: levels by policy, then differences.

    `table` is `summarise`'s. Rates and shares are in [0, 1], NLL and KL in nats, lengths in tokens.
    """
    levels = {
        f"{name}_{policy}": float(table.loc[policy, column])
        for name, column in METRICS.items()
        for policy in ("base", "sft", "ppo")
    }
    main = {c.measure.key: c for c in found if c.group == "pooled"}
    differences = {}
    for name, key in DIFFERENCES.items():
        differences[f"{name}_ppo_minus_sft"] = main[key].result.mean
        differences[f"{name}_ppo_minus_sft_low"] = main[key].interval.low
        differences[f"{name}_ppo_minus_sft_high"] = main[key].interval.high
    return levels | differences | {"kl_nats_per_sequence_ppo": float(table.loc["ppo", "kl"])}
