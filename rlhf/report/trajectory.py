"""Reward and judge along PPO: what each check on the fixed validation prefixes shows against SFT, step 0."""

from typing import Any

import pandas as pd

from rlhf import stats, textmetrics
from rlhf.errors import UserError
from rlhf.randomness import stream
from rlhf.report.markdown import interval, signed

# Reward lies in [-1, 1]: half of its change is a change of probability, as the judge's is.
GAINS = {"reward": ("reward", 2), "judge": ("judge_full", 1), "vader": ("vader_full", 1)}


def along(judged: pd.DataFrame, seed: int, resamples: int) -> dict[int, pd.DataFrame]:
    """Return `[seed]` a row per check: what its continuations are like, and their paired change from step 0.

    `judged` has the judged validation rows of every seed. Columns: step, n (prefixes), kl (nats per
    sequence), length (tokens), ended_rate, repetition, distinct_2 (shares); for reward (as probability),
    judge (probability) and vader (compound): *_gain, the mean change, *_low and *_high, its 95% BCa interval,
    and *_way, 1 or -1 where BCa and percentile interval lie above or below 0, else 0.
    """
    return {
        int(number): pd.DataFrame(_checks(rows, int(number), seed, resamples))
        for number, rows in judged.groupby("seed")
    }


def _checks(rows: pd.DataFrame, number: int, seed: int, resamples: int) -> list[dict[str, Any]]:
    found = []
    first = rows[rows["step"] == rows["step"].min()].sort_values("id", kind="stable")
    for step, part in rows.groupby("step"):
        part = part.sort_values("id", kind="stable")
        if part["id"].tolist() != first["id"].tolist() or len(part) < 2:
            raise UserError(
                f"validation rows of seed {number}, step {step}: expected the ids of step 0, 2 or more"
            )
        draws = stream(seed, "report", "trajectory", number, int(step))
        gains = [_gain(name, part, first, draws, resamples) for name in GAINS]
        found.append({"step": int(step), **_texts(part), **gains[0], **gains[1], **gains[2]})
    return found


def _texts(part: pd.DataFrame) -> dict[str, float]:
    return {
        "n": len(part),
        "kl": float(part["kl"].mean()),
        "length": float(part["n_tokens"].mean()),
        "ended_rate": float(part["ended"].mean()),
        "repetition": float(part["repetition"].mean()),
        "distinct_2": textmetrics.distinct_n(part["continuation"].tolist(), 2),
    }


def _gain(name: str, part: pd.DataFrame, first: pd.DataFrame, draws: Any, resamples: int) -> dict[str, float]:
    column, scale = GAINS[name]
    after, before = (rows[column].to_numpy(float) / scale for rows in (part, first))
    found = stats.paired_difference(after, before, draws, resamples)
    low, high = min(found.bca.low, found.percentile.low), max(found.bca.high, found.percentile.high)
    return {
        f"{name}_gain": found.mean,
        f"{name}_low": found.bca.low,
        f"{name}_high": found.bca.high,
        f"{name}_way": int(low > 0) - int(high < 0),
    }


def parting(path: dict[int, pd.DataFrame]) -> str:
    """Say, by rule, at which checks the reward has risen from SFT while the judge has not."""
    checks = pd.concat([rows[rows["step"] > 0].assign(seed=number) for number, rows in path.items()])
    risen = checks[checks["reward_way"] > 0]
    flat, fallen = risen[risen["judge_way"] == 0], risen[risen["judge_way"] < 0]
    where = f"of the {len(risen)} checks (of {len(checks)}) where the reward's rise from SFT is shown"
    found = []
    if risen.empty:
        found = ["At no check is a rise of the reward shown, so whether reward and judge part is not seen."]
    elif flat.empty and fallen.empty:
        found = [
            f"**Reward and judge rise together**: at each {where}, the judge's is shown too. How much each "
            "has gained at the end is compared by the first flag above."
        ]
    if len(fallen):
        found += [f"**Reward and judge part** at {len(fallen)} {where}; the judge falls: {_listed(fallen)}."]
    if len(flat):
        found += [
            f"**The judge's rise is not shown** at {len(flat)} {where}: {_listed(flat)}. That is parting, or "
            "too few prefixes to see the judge's rise."
        ]
    return (
        f"{' '.join(found)} Shown means here: both 95% intervals, BCa and percentile, of the paired change "
        f"from step 0 leave out 0. n = {int(checks['n'].min())} validation prefixes, one continuation each; "
        "not adjusted for the number of checks. The same prefixes chose the checkpoint, so its reward is "
        "optimistic."
    )


def _listed(checks: pd.DataFrame) -> str:
    return "; ".join(
        f"seed {row.seed}, step {row.step} (reward {signed(row.reward_gain)} "
        f"{interval(row.reward_low, row.reward_high)}, judge {signed(row.judge_gain)} "
        f"{interval(row.judge_low, row.judge_high)})"
        for row in checks.itertuples()
    )
