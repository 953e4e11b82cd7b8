"""The report on answers, later sections as markdown: reward model, examples, split and limits."""

from typing import Any

import pandas as pd

from rlhf.report import markdown as md
from rlhf.report.appendix import SHOWN_CHARACTERS, by_score, shown_texts
from rlhf.report.pairs import Accuracy

LIMITS = """- The heuristic score is a rule about style: it cannot tell a right answer from a wrong one.
- Token F1 and chrF compare with one hand-written answer each; {questions} test questions were asked. No
  person judged whether an answer is true.
- {preferences}
- One policy model, one SFT run, one reward model, one split: variation between these is not measured.
- All questions come from the same tables; nothing is shown about questions of another kind.
- The PPO checkpoint is selected by the reward that PPO optimises, on other questions than the test's.
- The validation questions serve three ends: they choose the reward model's checkpoint and PPO's, and their
  hand-written answers give the NLL."""
PREFERENCES = {
    False: """The annotator is simulated by the same rule that measures the result: its gain shows that the
  method works, not that people are served.""",
    True: """The preferences are people's, from the user's file. How they were asked is not known here, and
  the heuristic score is not what they judged by.""",
}


def reward_model(
    reward: dict[str, Any],
    preferences: dict[str, int],
    found: list[Accuracy],
    calibration_error: float,
    weak_accuracy: float,
    worst: list[dict],
) -> str:
    """Section 5: the preferences, and how well the reward model orders held-out pairs.

    `reward` and `preferences` are those stages' metrics, `found` is `pairs.accuracies`'.
    """
    state = (
        f"**The reward model is weak**: its pair accuracy is below {md.number(weak_accuracy, 2)}."
        if reward["accuracy"] < weak_accuracy
        else f"Not weak by this project's mark, a pair accuracy of {md.number(weak_accuracy, 2)}."
    )
    rows = [
        [
            group.name,
            str(group.n),
            str(group.questions),
            md.number(group.share),
            md.interval(*group.interval) if group.interval else "–",
        ]
        for group in found
    ]
    caption = (
        "The reward model on held-out pairs. Dots near the diagonal mean that its certainty can be believed; "
        "accuracy should rise with the margin. "
        f"n = {found[0].n} pairs of answers to {md.count(found[0].questions, 'question')}; bars: 95% "
        "intervals, BCa over questions with all their pairs"
    )
    return "\n\n".join(
        [
            "## 5. Preferences and reward model",
            _preferences(preferences),
            f"{state} Bradley-Terry loss {md.number(reward['loss'])} nats (chance: 0.693), expected "
            f"calibration error {md.number(calibration_error)}; checkpoint of step "
            f"{reward['selected_step']}, the lowest validation loss. Rewards are centred after "
            f"training: the raw output less {md.number(reward['mean_sft'])}, over "
            f"{md.number(reward['std_sft'])}, mean and SD over "
            f"{'the answers in the pairs' if preferences['human'] else 'samples of SFT'}.",
            md.table(["Held-out pairs", "Pairs", "Questions", "Accuracy", "95% interval"], rows),
            "Pairs of one question depend on each other, so that intervals draw questions with all their "
            "pairs (BCa; where all are right, or all wrong, Clopper-Pearson with questions as trials). The "
            "questions are not among those that the reward model learnt from. Margin: "
            + ("as given in the file" if preferences["human"] else "difference of the annotator's scores")
            + "; before noise: against what was meant, pairs of negative margin turned back.",
            md.figure(4, "reward_model", caption),
            _worst(worst),
        ]
    )


def _preferences(preferences: dict[str, int]) -> str:
    parts = [name.removeprefix("pairs_") for name in preferences if name.startswith("pairs_")]
    rows = [[part, *(str(preferences[f"{what}_{part}"]) for what in ("pairs", "ties", "flipped"))]
            for part in parts]  # fmt: skip
    said = (
        f"{preferences['pairs']} pairs of answers to {preferences['prompts']} questions, people's own, from "
        "the user's file. No annotator was simulated, so that there are no ties; turned round are pairs that "
        "the file gives a margin below 0."
        if preferences["human"]
        else f"{preferences['pairs']} pairs of answers to {preferences['prompts']} questions, "
        f"{preferences['samples_per_prompt']} samples of SFT each, judged by the simulated annotator; a pair "
        "of equal scores is a tie and left out, and noise turns some judgements round."
    )
    return f"{said}\n\n{md.table(['Part', 'Pairs', 'Ties', 'Turned round'], rows)}"


def _worst(worst: list[dict]) -> str:
    if not worst:
        return "No held-out pair is ordered wrong."
    rows = [
        [
            *(md.escape(row[name], 160) or "(empty)" for name in ("prompt", "chosen", "rejected")),
            md.number(row["margin"], 0),
            md.number(row["probability"]),
        ]
        for row in worst
    ]
    header = ["Question", "Chosen", "Rejected", "Margin", "Probability of the chosen"]
    return (
        "The pairs ordered wrong with most certainty, but for those that noise had turned round:\n\n"
        f"{md.table(header, rows, 3)}"
    )


def examples(rows: pd.DataFrame, policies: list[str], count: int) -> str:
    """Section 7, by the heuristic score; `rows` comes from `answers.prepare`."""
    return by_score(rows, policies, count, "heuristic", "the heuristic score", "questions", _example)


def _example(rows: pd.DataFrame, policies: list[str], remark: str) -> str:
    question, reference = (
        md.escape(rows[name].iloc[0], SHOWN_CHARACTERS) or "(empty)" for name in ("question", "reference")
    )
    cells = shown_texts(rows, policies, {"heuristic": 0, "chrf": 1})
    cells = [["hand-written", reference, "–", "–"], *cells]
    heading = f"**{question}**" + (f" ({remark})" if remark else "")
    return f"{heading}\n\n{md.table(['Policy', 'Answer', 'Heuristic', 'chrF'], cells, text_columns=2)}"


def split(found: dict[str, Any]) -> str:
    """The split stage's JSON: sizes, hashes, what was dropped."""
    rows = [[part, str(size), f"`{found['sha256'][part]}`"] for part, size in found["sizes"].items()]
    dropped = ", ".join(f"{reason.replace('_', ' ')} {n}" for reason, n in found["rows_dropped"].items())
    return (
        f"{md.table(['Part', 'Questions', 'sha256'], rows)}\n\n{found['rows_read']} questions read; dropped: "
        f"{dropped or 'none'}. Near-duplicates across parts: {found['near_duplicates']}."
    )


def limits(questions: int, human: bool) -> str:
    """What this study cannot show."""
    return LIMITS.format(questions=questions, preferences=PREFERENCES[human])
