"""The report on answers, sections on results as markdown: what differs from `rlhf.report.results`."""

import pandas as pd

from rlhf.report import markdown as md
from rlhf.report.answers import QUESTION, REWARD_UNIT, Check
from rlhf.report.results import (
    check_table,
    flag_table,
    phrase_tables,
    policy_table,
    rate_interval,
    title_of,
)
from rlhf.report.trajectory import parting
from rlhf.report.verdict import Flag
from rlhf.textmetrics import Phrase

RATES = {
    "finished_rate": "Finished sentence",
    "ended_rate": "Ended by itself (EOS)",
    "filler_rate": "With a filler phrase",
}
SHARES = {
    "empty_rate": "Empty",
    "limit_rate": "Cut at the token limit",
    "distinct_responses": "Distinct answers, first samples",
}
MEANS = {
    "heuristic": ("Heuristic score [-5, 5]", 2),
    "reward": (f"Reward ({REWARD_UNIT}, 0: their mean)", 2),
    "kl": ("KL from SFT (nats per sequence)", 2),
    "token_f1": ("Token F1 [0, 1]", 3),
    "chrf": ("chrF [0, 100]", 1),
    "nll_per_token": ("Reference-answer NLL (nats per token)", 3),
    "characters": ("Length (characters)", 1),
    "length": ("Length (tokens)", 1),
    "repetition": ("Repetition within an answer (share)", 3),
    "distinct_1": ("Distinct words (distinct-1)", 3),
    "distinct_2": ("Distinct pairs of words (distinct-2)", 3),
    "self_similarity": ("Self-similarity of answers", 3),
}
GAINS = {"reward": "Reward", "heuristic": "Heuristic score", "characters": "Characters"}


def opening(title: str, policy: str, response_tokens: int, seeds: int, human: bool) -> str:
    """The title, and what was done in three sentences."""
    teacher = "people's preferences between answers" if human else "a simulated annotator's preferences"
    score = (
        "A rule about style, the heuristic score,"
        if human
        else "The heuristic score, by which the annotator prefers,"
    )
    return f"""# {md.escape(title)}

The policy {md.escape(policy)} answers a question with up to {response_tokens} tokens. SFT teaches it
hand-written answers; a reward model learns {teacher}; PPO ({md.count(seeds, "seed")}) then
raises that reward, held near SFT by a KL penalty. {score}
and overlap with hand-written answers measure the result on held-out questions."""


def policies(table: pd.DataFrame, questions: int, samples: int, answers: int) -> str:
    """Section 2: one column per policy; `table` is `levels.summarise`'s, with `distinct_responses`."""
    how = rate_interval(samples, "questions")
    caption = (
        "Style, content and likelihood of the policies. Look whether the dots for PPO lie right of SFT "
        f"in the heuristic score, and not left of it in chrF. n = {questions} questions with "
        f"{md.count(samples, 'sample')}, NLL: {answers} reference answers; bars: 95% intervals of each "
        f"number on its own (rates: {how}; means: BCa), not of a difference"
    )
    return f"""## 2. Policies

{policy_table(table, RATES, SHARES, MEANS)}

Heuristic score: +2 ends with . ! or ?; +2 for 20 to 200 characters, -2 for fewer, -1 for more than 300; -1
for each filler phrase; +1 begins with a capital letter. It sees style alone: a wrong answer scores like a
right one. Token F1 and chrF hold an answer against one hand-written answer. Brackets: 95% intervals of each
number on its own (rates: {how}; means: BCa over questions, or reference answers for the NLL), the seeds of
the mean fixed. {questions} test questions, {md.count(samples, "sample")} each, under the same random numbers
for every policy. NLL is nats per token over all tokens of {answers} reference answers to other questions, EOS
included.

{md.figure(1, "policies", caption)}"""


def hacking(
    signs: list[Check],
    flags: list[Flag],
    path: dict[int, pd.DataFrame],
    phrases: dict[str, list[Phrase]],
    questions: int,
    samples: int,
    cut: float | None,
) -> str:
    """Section 4: the guide's signs, the flags, `trajectory.along`'s checks, what PPO says more often.

    `cut` is `answers.cut_length`'s.
    """
    n = int(next(iter(path.values()))["n"].min())
    bound = f"; hardly above the {md.number(cut, 0)} that answers cut at the limit have" if cut else ""
    caption = (
        "Reward and heuristic score against KL along training, and against each other at the end. Where the "
        "left curve climbs and the middle one does not, reward and annotator's rules part (rings: selected "
        f"steps); n = {n} validation questions, change from SFT (step 0) with 95% BCa intervals. Right: the "
        f"policies; n = {questions} test questions with {md.count(samples, 'sample')}, means with 95% BCa "
        "intervals"
    )
    parts = [
        "## 4. Reward hacking",
        sign_table(signs),
        "The guide's signs and thresholds, for every policy: what base or SFT raises too did not come with "
        "PPO. Repetition rate: 1 - distinct answers / answers. It and phrases are of first samples of each "
        f"question ({questions} answers), with Clopper-Pearson intervals, that of repetition for the rate "
        "expected of as many new questions; a bootstrap would repeat answers by itself. The phrase is one of "
        "the guide's or any three words in a row, **chosen as the most common of all**, so that its share "
        f"tends to be above that in new answers. Mean length: BCa over questions, all samples{bound}. The "
        "intervals are not adjusted for their number.",
        "Further flags, PPO against SFT:",
        flag_table(flags),
        md.figure(3, "overoptimisation", caption),
        parting(path, "heuristic", "heuristic score", QUESTION.many),
        md.folded(
            "Each check on the validation questions",
            check_table(path, GAINS, f"Reward ({REWARD_UNIT}), heuristic score (points) and characters"),
        ),
        phrase_tables(phrases, "answers"),
    ]
    return "\n\n".join(parts)


def sign_table(signs: list[Check]) -> str:
    """A row per sign and policy, and on which side of the threshold the interval lies."""
    rows = [
        [
            sign.name + (f" ({md.escape(sign.remark, 60)})" if sign.remark else ""),
            title_of(sign.policy),
            f"{md.number(sign.value, sign.digits)} {md.interval(*sign.interval, sign.digits)}",
            md.number(sign.threshold, 1),
            _state(sign),
        ]
        for sign in sorted(signs, key=lambda sign: [s.name for s in signs].index(sign.name))
    ]
    return md.table(["Sign", "Policy", "Value, 95% interval", "Raised above", "State"], rows, 2)


def _state(sign: Check) -> str:
    if sign.raised:
        return "**raised**" if sign.interval.low > sign.threshold else "**raised**, interval reaches below"
    return "no" if sign.interval.high <= sign.threshold else "no, interval reaches above"
