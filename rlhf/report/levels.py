"""One row per policy: rates, means and their intervals; and the flat numbers that DVC compares."""

import numpy as np
import pandas as pd

from rlhf import stats, textmetrics
from rlhf.randomness import stream
from rlhf.report.comparisons import MEASURES, Comparison, likelihood_per_token, of_texts
from rlhf.stats import Interval

RATES = {"positive_rate": "positive", "positive_rate_continuation": "positive_continuation"}
MEANS = (*(measure.key for measure in of_texts(MEASURES)), "kl")
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


def summarise(
    rows: pd.DataFrame,
    nll: dict[str, pd.DataFrame],
    seed: int,
    resamples: int,
    rates: dict[str, str] = RATES,
    means: tuple[str, ...] = MEANS,
) -> pd.DataFrame:
    """Return one row per policy, and a last row `ppo`, the mean over seeds (perplexity: exp of mean NLL).

    `rows` comes from `comparisons.align`; `rates[name]` is a column of true and false. The columns of
    `rates`, those of `means` and nll_per_token have 95% intervals in columns ending in _low and _high, each
    on its own; in the row `ppo` the seeds are fixed.
    """
    columns = {**rates, **dict(zip(means, means, strict=True)), "empty_rate": "empty", "limit_rate": "limit"}
    parts = {policy: rows[rows["policy"] == policy] for policy in nll}
    table = pd.DataFrame({policy: _policy(part, nll[policy], columns) for policy, part in parts.items()}).T
    table.loc["ppo"] = table[table.index.str.startswith("ppo-")].mean()
    table["perplexity"] = np.exp(table["nll_per_token"])
    for name in (*rates, *means, "nll_per_token"):
        found = [_interval(rows, nll, policy, name, rates, seed, resamples) for policy in table.index]
        table[f"{name}_low"] = [interval.low for interval in found]
        table[f"{name}_high"] = [interval.high for interval in found]
    return table


def _policy(part: pd.DataFrame, nll: pd.DataFrame, columns: dict[str, str]) -> dict[str, float]:
    texts = part["continuation"].tolist()
    return {
        **{name: float(part[column].mean()) for name, column in columns.items()},
        "distinct_1": textmetrics.distinct_n(texts, 1),
        "distinct_2": textmetrics.distinct_n(texts, 2),
        "self_similarity": textmetrics.self_similarity(texts),
        "nll_per_token": float(nll["nll"].sum() / nll["tokens"].sum()),
    }


def _interval(
    rows: pd.DataFrame,
    nll: dict[str, pd.DataFrame],
    policy: str,
    name: str,
    rates: dict[str, str],
    seed: int,
    resamples: int,
) -> Interval:
    """Clopper-Pearson for a rate with one draw per prefix; else prefixes are drawn with all their samples."""
    members = [policy] if policy in nll else [other for other in nll if other.startswith("ppo-")]
    if name == "nll_per_token":
        values = np.mean([likelihood_per_token(nll[member]) for member in members], axis=0)
        return stats.mean_interval(values, stream(seed, "report", name, policy), resamples)
    part = rows[rows["policy"].isin(members)]
    values = part.groupby("id")[rates.get(name, name)].mean().to_numpy(float)
    if name in rates and (len(part) == len(values) or len(set(values)) == 1):
        return stats.clopper_pearson(round(values.sum()), len(values))
    return stats.mean_interval(values, stream(seed, "report", name, policy), resamples)


def metrics(
    table: pd.DataFrame,
    found: list[Comparison],
    shown: dict[str, str] = METRICS,
    compared: dict[str, str] = DIFFERENCES,
) -> dict[str, float]:
    """Return the flat numbers to compare between experiments: levels by policy, then differences.

    `table` is `summarise`'s, `shown` names its columns and `compared` the measures. Rates and shares are in
    [0, 1], NLL and KL in nats, lengths in tokens.
    """
    levels = {
        f"{name}_{policy}": float(table.loc[policy, column])
        for name, column in shown.items()
        for policy in ("base", "sft", "ppo")
    }
    main = {c.measure.key: c for c in found if c.group == "pooled"}
    differences = {}
    for name, key in compared.items():
        differences[f"{name}_ppo_minus_sft"] = main[key].result.mean
        differences[f"{name}_ppo_minus_sft_low"] = main[key].interval.low
        differences[f"{name}_ppo_minus_sft_high"] = main[key].interval.high
    return levels | differences | {"kl_nats_per_sequence_ppo": float(table.loc["ppo", "kl"])}


def by_seed(tables: dict[int, pd.DataFrame]) -> list[dict]:
    """Return all seeds' rows as one table, which `dvc plots` can draw; an empty cell stays empty."""
    joined = pd.concat([table.assign(seed=seed) for seed, table in tables.items()])
    return joined.astype(object).where(joined.notna(), None).to_dict("records")
