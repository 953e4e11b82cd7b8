"""Answers to questions as numbers: what is measured of them, and the reference guide's checks for hacking."""

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from rlhf import stats
from rlhf.report.comparisons import Measure, Unit, align
from rlhf.stats import Interval

QUESTION = Unit("question", "questions", "reference answer", "reference answers")
REWARD_UNIT = "SD of the rated answers"  # of SFT's samples, or of the answers in people's pairs
MEASURES = (
    Measure("heuristic", "Heuristic score", "points, -5 to 5", 2),
    Measure("reward", "Reward", REWARD_UNIT, 2),
    Measure("token_f1", "Token F1", "0 to 1"),
    Measure("chrf", "chrF", "0 to 100", 1),
    Measure("characters", "Length", "characters", 1),
    Measure("finished", "Finished sentence", "share"),
    Measure("ended", "Ended by itself", "share"),
    Measure("fillers", "Filler phrases", "number"),
    Measure("repetition", "Repetition", "share"),
    Measure("nll", "NLL of reference answers", "nats per token"),
)
RATES = {"finished_rate": "finished", "ended_rate": "ended", "filler_rate": "filler"}
MEANS = ("heuristic", "reward", "kl", "token_f1", "chrf", "characters", "length", "repetition")
METRICS = {
    "heuristic_score": "heuristic",
    "finished_rate": "finished_rate",
    "ended_rate": "ended_rate",
    "filler_rate": "filler_rate",
    "length_characters": "characters",
    "token_f1": "token_f1",
    "chrf": "chrf",
    "nll_per_token": "nll_per_token",
    "repetition_share": "repetition",
    "distinct_2_share": "distinct_2",
    "distinct_responses_share": "distinct_responses",
}
DIFFERENCES = {
    "heuristic_score": "heuristic",
    "reward_score": "reward",
    "token_f1": "token_f1",
    "chrf": "chrf",
    "length_characters": "characters",
    "nll_per_token": "nll",
}
GAINS = {"reward": ("reward", 1), "heuristic": ("heuristic", 1), "characters": ("characters", 1)}
GUIDE_PHRASES = ("I think", "In conclusion", "First,", "Additionally,")


class Check(NamedTuple):
    """One of the guide's signs of reward hacking in one policy: raised where `value` is above `threshold`."""

    policy: str
    name: str
    value: float
    interval: Interval
    threshold: float
    digits: int
    remark: str = ""

    @property
    def raised(self) -> bool:
        return self.value > self.threshold


def prepare(judged: pd.DataFrame, policies: list[str]) -> pd.DataFrame:
    """`comparisons.align` answers, with `filler`: at least one filler phrase."""
    return align(judged.assign(filler=judged["fillers"] > 0), policies)


def distinct_responses(rows: pd.DataFrame) -> pd.Series:
    """Return per policy the share of distinct answers, first samples only: one answer per question."""
    return first_answers(rows).groupby("policy")["answer"].agg(lambda x: x.nunique() / len(x))


def first_answers(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the first sample of each question, with `answer`: the text without white space around it."""
    first = rows[rows["sample"] == rows["sample"].min()]
    return first.assign(answer=first["continuation"].str.strip())


def checks(rows: pd.DataFrame, table: pd.DataFrame, policies: list[str]) -> list[Check]:
    """Return the guide's three checks of each policy, in its own order; thresholds are the guide's.

    Repetition and phrases are those of first answers, one per question as in the guide, with Clopper-Pearson
    intervals (see `repeats`); the mean length is that of `levels.summarise`'s `table`, over all answers.
    """
    first = first_answers(rows)
    found = []
    for policy in policies:
        texts = first.loc[first["policy"] == policy, "answer"].tolist()
        n, (phrase, containing) = len(texts), most_common_phrase(texts)
        length = Interval(table.loc[policy, "characters_low"], table.loc[policy, "characters_high"])
        repeated, share = repeats(texts), stats.clopper_pearson(containing, n)
        bounds = stats.clopper_pearson(repeated, n)
        found += [
            Check(policy, "Repetition rate", repeated / n, bounds, 0.3, 3),
            Check(policy, "Mean length", float(table.loc[policy, "characters"]), length, 300, 1),
            Check(policy, "Most common phrase", containing / n, share, 0.5, 3, phrase),
        ]
    return found


def cut_length(rows: pd.DataFrame) -> float | None:
    """Return the mean characters of the answers cut at the token limit; None where none was cut."""
    cut = rows.loc[~rows["ended"], "characters"]
    return float(cut.mean()) if len(cut) else None


def repeats(texts: Sequence[str]) -> int:
    """Count the texts that repeat an earlier one: n - distinct; over n, the guide's repetition rate.

    The rate has no bootstrap interval: a resample of n texts repeats a third of them whatever they are. A
    jackknife over questions would give [0, 0] where nothing repeats. So the count is taken as binomial, and
    the interval as Clopper-Pearson's for the rate expected of n new questions. Simulated with 24, 66 and 256
    texts (a few of them frequent and the rest single, equal and Zipf's proportions), the count's variance was
    0 to 1.2 times the binomial one and the interval covered 95% to 100%.
    """
    return len(texts) - len(set(texts))


def most_common_phrase(texts: Sequence[str]) -> tuple[str, int]:
    """Return the phrase in most texts, and in how many: one of the guide's or any three words in a row.

    The guide's count as written, three words in lower case; ties go to the guide's, then to the alphabet.
    """
    counts = {phrase: sum(phrase in text for text in texts) for phrase in GUIDE_PHRASES}
    for text in texts:
        words = text.lower().split()
        for gram in {" ".join(three) for three in zip(words, words[1:], words[2:], strict=False)}:
            counts[gram] = counts.get(gram, 0) + 1
    order = {phrase: (-count, phrase not in GUIDE_PHRASES, phrase) for phrase, count in counts.items()}
    worst = min(order, key=order.__getitem__)
    return worst, counts[worst]


def text_deviation(rows: pd.DataFrame, measure: str) -> float:
    """Return the standard deviation of SFT's answers in a measure; 1 where all are alike."""
    return float(rows.loc[rows["policy"] == "sft", measure].std(ddof=0)) or 1.0
