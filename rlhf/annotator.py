"""A simulated annotator: rules that score an answer's style, and preferences by those scores."""

from itertools import combinations
from typing import NamedTuple

import numpy as np

FILLERS = ("i think", "maybe", "perhaps", "it depends")


class Preference(NamedTuple):
    """Answers `chosen` and `rejected`, by number; `margin` is the difference of their scores, negative where
    noise turned the judgement round."""

    chosen: int
    rejected: int
    margin: int


def is_finished(answer: str) -> bool:
    """Whether the answer ends as a sentence does."""
    return answer.endswith((".", "!", "?"))


def fillers(answer: str) -> int:
    """How many of the filler phrases the answer holds, each counted once."""
    return sum(phrase in answer.lower() for phrase in FILLERS)


def heuristic(answer: str) -> int:
    """The annotator's score of an answer without white space around it, from -5 to 5.

    +2 ends with . ! or ?;   +2 for 20 to 200 characters, -2 for fewer than 20, -1 for more than 300;
    -1 for each filler phrase;   +1 begins with a capital letter. Source: `score_response` of the question
    answering reference. It sees style alone: a wrong answer scores like a right one.
    """
    length = len(answer)
    fits = 2 if 20 <= length <= 200 else -2 if length < 20 else -1 if length > 300 else 0
    return 2 * is_finished(answer) + fits - fillers(answer) + answer[:1].isupper()


def preferences(scores: list[int], noise: float, stream: np.random.Generator) -> tuple[list[Preference], int]:
    """Judge all pairs of answers to one question; return the preferences and the number of ties, which have
    none. Each judgement is turned round with probability `noise`."""
    found, ties = [], 0
    for first, second in combinations(range(len(scores)), 2):
        margin = scores[first] - scores[second]
        if margin == 0:
            ties += 1
            continue
        better, worse = (first, second) if margin > 0 else (second, first)
        if stream.random() < noise:
            found.append(Preference(worse, better, -abs(margin)))
        else:
            found.append(Preference(better, worse, abs(margin)))
    return found, ties
