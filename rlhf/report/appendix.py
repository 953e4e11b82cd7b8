"""The report's later sections, as markdown: the models, training, examples, provenance."""

from collections.abc import Callable
from typing import Any

import pandas as pd

from rlhf.report import markdown as md
from rlhf.report import provenance as pinned
from rlhf.report.comparisons import Agreement
from rlhf.report.results import title_of
from rlhf.stats import clopper_pearson

SHOWN_CHARACTERS = 320
EXTREMES = 3
LIMITS = """- Sentiment is scored by models and a word list. No person compared these texts.
- {judge}
- One policy model, one SFT run, one reward model, one split: variation between these is not measured.
- The prefixes come from the source that SFT and the reward model were trained on (other rows of it).
  Nothing is shown about other text.
- The PPO checkpoint is selected by the reward that PPO optimises, on other prefixes than the test's.
- The validation rows serve three ends: they choose the reward model's checkpoint by BCE and PPO's by reward,
  and they give the review NLL."""
JUDGE_LIMITS = {
    True: """The judge learnt from other rows than the reward model, but from labels of the same kind, and
  neither is always right: an error that both share looks like success.""",
    False: """The judge is a ready classifier. What it was trained on may overlap with the labels used here,
  and an error that it shares with the reward model looks like success.""",
}


def reward_model(
    metrics: dict[str, Any],
    calibration_error: float,
    weak_accuracy: float,
    judge: dict[str, Any],
    worst: list[dict],
    agreement: list[Agreement],
) -> str:
    """Section 5: quality of the reward model and of the judge, its worst errors, agreement of the three."""
    right = metrics["true_negatives"] + metrics["true_positives"]
    state = (
        f"**The reward model is weak**: its accuracy is below {md.number(weak_accuracy, 2)}."
        if metrics["accuracy"] < weak_accuracy
        else f"Not weak by this project's mark, an accuracy of {md.number(weak_accuracy, 2)}."
    )
    rows = [
        _accuracy("Reward model", right / metrics["n"], metrics["n"]),
        _accuracy("Judge", judge["accuracy"], judge["n"]),
        _accuracy("VADER", judge["vader_accuracy"], judge["n"]),
    ]
    caption = (
        "The reward model on held-out labels. Dots near the diagonal mean that its probabilities can be "
        f"read as such. n = {metrics['n']} reviews; accuracy {rows[0][2]} {rows[0][3]}, a 95% "
        "Clopper-Pearson interval"
    )
    errors = [
        [
            md.escape(row["text"], 200),
            "positive" if row["label"] else "negative",
            md.number(row["probability"]),
        ]
        for row in worst
    ]
    kappas = [[a.first, a.second, md.percent(a.share), md.number(a.kappa, 2)] for a in agreement]
    return "\n\n".join(
        [
            "## 5. Reward model and judge",
            f"{state} BCE {md.number(metrics['loss'])} nats, expected calibration error "
            f"{md.number(calibration_error)}; checkpoint of step "
            f"{metrics['selected_step']}, the lowest validation BCE. {_judge_rows(judge['train_rows'])}",
            md.table(["Classifier", "Labels", "Accuracy", "95% interval"], rows),
            md.figure(4, "reward_model", caption),
            "The reward model's worst errors:",
            md.table(["Review", "Human label", "Predicted probability of positive"], errors),
            "Agreement on the sign of sentiment over all generated texts of section 2 (reward >= 0, judged "
            "probability >= 0.5, VADER compound >= 0; where no word is in VADER's list it is 0):",
            md.table(["", "", "Agree", "Cohen's kappa"], kappas, text_columns=2),
        ]
    )


def _judge_rows(rows: int) -> str:
    if rows == 0:
        return "The judge is a ready classifier, used as it is."
    return f"The judge was trained on {rows} rows that neither the reward model nor the policy saw."


def _accuracy(name: str, accuracy: float, n: int) -> list[str]:
    bounds = clopper_pearson(round(accuracy * n), n)
    return [name, str(n), md.number(accuracy), md.interval(*bounds)]


def training(
    ppo: dict[int, dict[str, Any]], steps: int, validation_prefixes: int, units: str = "prefixes"
) -> str:
    """Section 6: training curves, selection by fixed validation, diagnostics; `ppo[seed]`: its metrics."""
    rows = [
        [
            f"PPO {seed}",
            str(m["selected_step"]) + (" (SFT itself)" if m["selected_step"] == 0 else ""),
            md.number(m["validation_reward_initial"]),
            md.number(m["validation_reward_selected"]),
            md.number(m["last_step_reward"]),
            md.number(m["last_step_kl"], 2),
        ]
        for seed, m in ppo.items()
    ]
    runs = md.count(len(ppo), "run")
    header = [
        "",
        "Selected step",
        "Validation reward, SFT",
        "selected",
        "Last training reward",
        "Last KL (nats)",
    ]
    return "\n\n".join(
        [
            "## 6. Training",
            md.table(header, rows),
            _selection(ppo, steps),
            md.figure(
                5,
                "training",
                "Training curves. Losses should fall and flatten; the PPO reward should rise "
                f"faster than its KL. n = 1 run of SFT and of the reward model, {runs} of PPO; batch "
                "means, without interval",
            ),
            md.figure(
                6,
                "validation",
                "Fixed validation along PPO. The ringed step has the highest reward and is the "
                "policy evaluated in this report; step 0 is SFT. The reward of a selected step is "
                f"optimistic, the test {units} are not part of it. n = {validation_prefixes} {units}, "
                "same noise at every check; means, without interval",
            ),
            md.figure(
                7,
                "diagnostics",
                "PPO updates step by step. A vanishing policy gradient, an exploding value "
                "gradient, many clipped tokens or repeated skips each point to another problem; gaps are "
                f"skipped updates. n = {runs}; batch values, without interval",
            ),
        ]
    )


def _selection(ppo: dict[int, dict[str, Any]], steps: int) -> str:
    last = sum(m["selected_step"] == steps for m in ppo.values())
    if last == 0:
        return f"No seed's selected step is the last of {steps}: on validation, longer training did not help."
    return (
        f"The last of {steps} steps is selected for {last} of {md.count(len(ppo), 'seed')}: there the reward "
        "was not seen to stop rising, and these results are those of this length of training, not its limit."
    )


def examples(rows: pd.DataFrame, policies: list[str], count: int) -> str:
    """Section 7, of the judge's probability; `rows` comes from `comparisons.prepare`."""
    return by_score(rows, policies, count, "judge_full", "the judged probability", "prefixes", _example)


def by_score(
    rows: pd.DataFrame,
    policies: list[str],
    count: int,
    measure: str,
    score: str,
    units: str,
    example: Callable[[pd.DataFrame, list[str], str], str],
) -> str:
    """Section 7: the first `count` ids in order, then the largest gains and losses; first samples.

    `rows` comes from `comparisons.align`, and its column `measure` is called `score`. `example` writes the
    rows of one id, one per policy, with a remark.
    """
    first = rows[rows["sample"] == rows["sample"].min()]
    judged = first.pivot(index="id", columns="policy", values=measure)
    ppo = [policy for policy in policies if policy.startswith("ppo-")]
    gain = (judged[ppo].mean(axis=1) - judged["sft"]).sort_index()
    ordered = gain.sort_values(kind="stable")
    losses = ordered[ordered < 0].index[:EXTREMES]
    gains = gain[gain > 0].sort_values(ascending=False, kind="stable").index[:EXTREMES]
    return "\n\n".join(
        [
            "## 7. Examples",
            f"The first {min(count, len(gain))} test {units} in id order, first sample each: chosen "
            "before any score was seen. All texts are as generated, unedited; some offend.",
            *(example(first[first["id"] == name], policies, "") for name in gain.index[:count]),
            "### Largest gains and losses",
            f"**Chosen by score, not representative**: the {units} where {score} differs "
            "most from SFT's, mean over PPO seeds, first sample.",
            *(
                example(first[first["id"] == name], policies, f"gain {md.signed(gain[name], 2)}")
                for name in gains
            ),
            *(
                example(first[first["id"] == name], policies, f"loss {md.signed(gain[name], 2)}")
                for name in losses
            ),
        ]
    )


def shown_texts(rows: pd.DataFrame, policies: list[str], measures: dict[str, int]) -> list[list[str]]:
    """Return a line per policy: its name, its text, and each of `measures` to so many digits."""
    by_policy = rows.set_index("policy")
    cells = []
    for policy in policies:
        row = by_policy.loc[policy]
        text = md.escape(row["continuation"], SHOWN_CHARACTERS) or "(empty)"
        end = "" if row["ended"] else " (cut at the limit)"
        numbers = [md.number(row[measure], digits) for measure, digits in measures.items()]
        cells.append([title_of(policy), text + end, *numbers])
    return cells


def _example(rows: pd.DataFrame, policies: list[str], remark: str) -> str:
    cells = shown_texts(rows, policies, {"judge_full": 2})
    prefix = md.escape(rows["prefix"].iloc[0], SHOWN_CHARACTERS) or "(empty)"
    heading = f"**{prefix} …**" + (f" ({remark})" if remark else "")
    return f"{heading}\n\n{md.table(['Policy', 'Continuation', 'Judged'], cells, text_columns=2)}"


def provenance(
    manifests: dict[str, dict],
    split: dict[str, Any],
    params: dict[str, Any],
    environment: dict[str, str],
) -> str:
    """Section 8, with the limits of what a judge can show; `split` is the split stage's JSON."""
    limits = LIMITS.format(judge=JUDGE_LIMITS[params["judge"]["epochs"] > 0])
    return pinned.section(manifests, _split(split), params, environment, limits)


def _split(split: dict[str, Any]) -> str:
    rows = [
        [part, str(size), md.percent(split["label_balance"][part]), f"`{split['sha256'][part]}`"]
        for part, size in split["sizes"].items()
    ]
    dropped = ", ".join(f"{reason.replace('_', ' ')} {n}" for reason, n in split["rows_dropped"].items())
    return (
        f"{md.table(['Part', 'Rows', 'Positive', 'sha256'], rows)}\n\n"
        f"{split['rows_read']} rows read; dropped: {dropped or 'none'}. "
        f"Near-duplicates across parts: {split['near_duplicates']}. Test prefixes that also start a "
        f"training row: {split['test_prefixes_in_training']}."
    )
