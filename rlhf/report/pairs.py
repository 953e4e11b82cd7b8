"""The reward model on held-out pairs: accuracy by question, by margin, and whether its certainty is right."""

from typing import NamedTuple

import numpy as np
import pandas as pd

from rlhf import stats
from rlhf.randomness import stream
from rlhf.report.comparisons import linearised_ratio
from rlhf.stats import Interval

WIDEST = 4  # margins of so much or more are one group


class Accuracy(NamedTuple):
    """The share of n pairs, to so many questions, that are ordered right; no interval for one question."""

    name: str
    n: int
    questions: int
    share: float
    interval: Interval | None


def accuracies(pairs: pd.DataFrame, seed: int, resamples: int) -> list[Accuracy]:
    """Accuracy on all pairs; where margins are known, also before noise, and by margin before noise.

    `pairs` has the columns prompt, margin (of the annotator's scores, negative where noise turned the pair
    round, or none) and probability (that the chosen answer is the preferred one).
    """
    agrees = pairs["probability"] > 0.5
    groups = {"All pairs, as judged": (pairs, agrees)}
    known = pairs["margin"].notna()
    if known.any():
        pairs = pairs[known]
        # A tie agrees with no side, whichever way round noise has put the pair.
        meant = agrees[known].where(pairs["margin"] > 0, pairs["probability"] < 0.5)
        width = pairs["margin"].abs().clip(upper=WIDEST).astype(int)
        groups["All pairs, before noise"] = (pairs, meant)
        for margin in sorted(width.unique()):
            size = {0: "below 1", WIDEST: f"{WIDEST} or more"}.get(margin, margin)
            groups[f"Margin {size}, before noise"] = (
                pairs[width == margin],
                meant[width == margin],
            )
    return [_accuracy(name, *group, seed, resamples) for name, group in groups.items()]


def _accuracy(name: str, pairs: pd.DataFrame, right: pd.Series, seed: int, resamples: int) -> Accuracy:
    """Questions are drawn with all their pairs; where all pairs are right, or all wrong, they are trials."""
    by_question = right.groupby(pairs["prompt"]).agg(["sum", "size"])
    above, below = (by_question[column].to_numpy(float) for column in ("sum", "size"))
    share, questions = float(above.sum() / below.sum()), len(below)
    bounds = None
    if questions > 1 and share in (0, 1):
        bounds = stats.clopper_pearson(round(share * questions), questions)
    elif questions > 1:
        draws = stream(seed, "report", "pairs", name)
        bounds = stats.mean_interval(linearised_ratio(above, below), draws, resamples)
    return Accuracy(name, len(right), questions, share, bounds)


def certainty(pairs: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability of the answer that the model prefers, 0.5 to 1, and whether that was chosen.

    Which answer of a pair comes first means nothing: a pair says the same turned round.
    """
    probability = pairs["probability"].to_numpy(float)
    return np.maximum(probability, 1 - probability), probability > 0.5


def worst(pairs: pd.DataFrame, count: int) -> list[dict]:
    """Return at most `count` pairs that are ordered wrong, the most certain first.

    Pairs that noise has turned round are not among them: to order such a pair as judged is what is wrong.
    """
    wrong = pairs[(pairs["probability"] < 0.5) & ~(pairs["margin"] < 0)]
    return wrong.nsmallest(count, "probability").to_dict("records")
