"""Reward and judge along PPO: what each check on the fixed validation prefixes shows against SFT, step 0."""

from typing import Any

import pandas as pd

from rlhf import stats, textmetrics
from rlhf.errors import UserError
from rlhf.randomness import stream
from rlhf.report.markdown import interval, signed

# Reward lies in [-1, 1]: half of its change is a change of probability, as the judge's is.
GAINS = {"reward": ("reward", 2), "judge": ("judge_full", 1), "vader": ("vader_full", 1)}
Gains = dict[str, tuple[str, int]]


def along(judged: pd.DataFrame, seed: int, resamples: int, gains: Gains = GAINS) -> dict[int, pd.DataFrame]:
    """Return `[seed]` a row per check: what its continuations are like, and their paired change from step 0.

    `judged` has the judged validation rows of every seed. Columns: step, n (prefixes), kl (nats per
    sequence), length (tokens), ended_rate, repetition, distinct_2 (shares); for each of `gains`, a column of
    `judged` and what it is divided by: *_gain, the mean change, *_low and *_high, its 95% BCa interval, and
    *_way, 1 or -1 where BCa and percentile interval lie above or below 0, else 0.
    """
    return {
        int(number): pd.DataFrame(_checks(rows, int(number), seed, resamples, gains))
        for number, rows in judged.groupby("seed")
    }


def _checks(rows: pd.DataFrame, number: int, seed: int, resamples: int, gains: Gains) -> list[dict[str, Any]]:
    found = []
    first = rows[rows["step"] == rows["step"].min()].sort_values("id", kind="stable")
    for step, part in rows.groupby("step"):
        part = part.sort_values("id", kind="stable")
        if part["id"].tolist() != first["id"].tolist() or len(part) < 2:
            raise UserError(
                f"validation rows of seed {number}, step {step}: expected the ids of step 0, 2 or more"
            )
        draws = stream(seed, "report", "trajectory", number, int(step))
        check = {"step": int(step), **_texts(part)}
        for name, (column, scale) in gains.items():
            after, before = (rows[column].to_numpy(float) / scale for rows in (part, first))
            check |= _gain(name, stats.paired_difference(after, before, draws, resamples))
        found.append(check)
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


def _gain(name: str, found: stats.PairedDifference) -> dict[str, float]:
    low, high = min(found.bca.low, found.percentile.low), max(found.bca.high, found.percentile.high)
    return {
        f"{name}_gain": found.mean,
        f"{name}_low": found.bca.low,
        f"{name}_high": found.bca.high,
        f"{name}_way": int(low > 0) - int(high < 0),
    }


def parting(
    path: dict[int, pd.DataFrame], key: str = "judge", name: str = "judge", many: str = "prefixes"
) -> str:
    """Say, by rule, at which checks the reward has risen from SFT while another measure has not.

    `key` is that measure's among `along`'s gains, `name` what it is called; `many` names what is checked.
    """
    checks = pd.concat([rows[rows["step"] > 0].assign(seed=number) for number, rows in path.items()])
    risen = checks[checks["reward_way"] > 0]
    flat, fallen = risen[risen[f"{key}_way"] == 0], risen[risen[f"{key}_way"] < 0]
    where = f"of the {len(risen)} checks (of {len(checks)}) where the reward's rise from SFT is shown"
    found = []
    if risen.empty:
        found = [f"At no check is a rise of the reward shown, so whether reward and {name} part is not seen."]
    elif flat.empty and fallen.empty:
        found = [
            f"**Reward and {name} rise together**: at each {where}, the {name}'s is shown too. How much each "
            "has gained at the end is compared by the first flag above."
        ]
    if len(fallen):
        listed = _listed(fallen, key, name)
        found += [f"**Reward and {name} part** at {len(fallen)} {where}; the {name} falls: {listed}."]
    if len(flat):
        found += [
            f"**The {name}'s rise is not shown** at {len(flat)} {where}: {_listed(flat, key, name)}. That is "
            f"parting, or too few {many} to see the {name}'s rise."
        ]
    return (
        f"{' '.join(found)} Shown means here: both 95% intervals, BCa and percentile, of the paired change "
        f"from step 0 leave out 0. n = {int(checks['n'].min())} validation {many}, one continuation each; "
        f"not adjusted for the number of checks. The same {many} chose the checkpoint, so its reward is "
        "optimistic."
    )


def _listed(checks: pd.DataFrame, key: str, name: str) -> str:
    return "; ".join(
        f"seed {row['seed']}, step {row['step']} (reward {_change(row, 'reward')}, "
        f"{name} {_change(row, key)})"
        for row in checks.to_dict("records")
    )


def _change(row: dict[str, Any], key: str) -> str:
    return f"{signed(row[f'{key}_gain'])} {interval(row[f'{key}_low'], row[f'{key}_high'])}"
