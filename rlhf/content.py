"""What an answer says, held against a hand-written one: overlap of words and of characters."""

import re
from collections import Counter

from sacrebleu.metrics import CHRF

_CHRF = CHRF()


def chrf(answer: str, reference: str) -> float:
    """Character n-gram F-score, 0 to 100, n up to 6, recall weighing twice (Popović 2015), by sacrebleu."""
    return _CHRF.sentence_score(answer, [reference]).score


def token_f1(answer: str, reference: str) -> float:
    """F1 over words as a bag, lower-cased, without punctuation, in [0, 1].

    2 p r / (p + r), p and r the shared words over the answer's and the reference's. Source: Rajpurkar et al.
    2016 (SQuAD), but articles count.
    """
    words, expected = (Counter(re.findall(r"\w+", text.lower())) for text in (answer, reference))
    shared = (words & expected).total()
    return 2 * shared / (words.total() + expected.total()) if shared else 0.0
