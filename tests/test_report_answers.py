"""The report on answers: its numbers by hand, its sentences for each pattern of results, its whole run."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats as scipy_stats
from synthetic_answers import answer_checks, answer_rows, pair_rows, write_answers
from synthetic_results import likelihoods

from rlhf import record, stats
from rlhf.feedback import pair_summary
from rlhf.report import answer_sections, answer_verdict, answers, comparisons, levels, pairs, trajectory
from stages import report_answers

GOOD = {"accuracy": 0.9}


def study(seeds=(1, 2, 3), selected=6, human=False, reward=GOOD, rise=0.0, **shifts):
    """The verdict's sentences, the flags and the guide's signs on synthetic rows."""
    policies = ["base", "sft", *(f"ppo-{s}" for s in seeds)]
    rows, nll = answers.prepare(answer_rows(seeds=seeds, **shifts), policies), likelihoods(policies, rise)
    values = comparisons.scores(rows, nll, answers.MEASURES)
    found = comparisons.compare(values, seeds, 42, 2000, answers.MEASURES)
    table = levels.summarise(rows, nll, 42, 100, answers.RATES, answers.MEANS)
    flags, signs = answer_verdict.flags(table, rows), answers.checks(rows, table, policies)
    steps = dict.fromkeys(seeds, selected)
    said = answer_verdict.sentences(found, [], table, reward, 0.7, steps, flags, signs, human)
    return said, flags, signs


# Sentences


def test_style_that_rises_without_a_loss_of_content_is_an_improvement_of_style_alone():
    (effect, second, cost, ending, warned, missing), *_ = study()
    assert effect.startswith(
        "**PPO improved what the annotator wants**: the annotator's score (-5 to 5) differs"
    )
    assert "3 of 3 seeds show a rise" in effect and "40 questions" in effect
    assert "style rose, and a change of content is not shown" in second and "fell" not in second
    assert "from base to SFT: fell by 1.09" in cost
    assert re.match(r"\*\*Ending\*\*: 4\d\.\d% of base's answers end by themselves \(EOS\), 8\d\.\d%", ending)
    assert "from base to SFT: rose by 0.4" in ending and "from SFT to PPO: no change shown" in ending
    assert "no flag of section 4 is raised" in warned
    assert "no person was asked" in missing and "Token F1, chrF" in missing


def test_style_that_rises_while_content_falls_is_said_and_flagged():
    (_, second, _, _, warned, _), flags, _ = study(chrf=-6.0, token_f1=-0.1)
    assert "**style rose while content fell** (against" in second and "chrF: fell by 6.0" in second
    assert "Fall of chrF while the reward rises" in warned
    assert {flag.name for flag in flags if flag.raised} == {
        "Fall of chrF while the reward rises (points of 100)"
    }
    assert "style rose while content fell by one measure of the two**" in study(chrf=-6.0)[0][1]
    assert "point opposite ways" in study(chrf=-6.0, token_f1=0.1)[0][1]


def test_content_that_rises_with_style_is_said():
    assert "style rose and content rose too (" in study(chrf=6.0, token_f1=0.1)[0][1]


def test_no_effect_and_a_worse_style_are_called_so():
    still = study(heuristic=(0.0, 0.0, 0.0), reward=GOOD)[0]
    assert still[0].startswith("**An effect of PPO on what the annotator wants is not shown**")
    assert "neither style nor content is shown to change" in still[1] and "improved" not in " ".join(still)
    worse = study(heuristic=(-1.0, -1.0, -1.0), chrf=-6.0, token_f1=-0.1)[0]
    assert worse[0].startswith("**PPO worsened what the annotator wants**")
    assert "style fell and content fell too" in worse[1]


def test_a_reward_that_rises_without_the_score_raises_the_first_flag():
    warned = study(heuristic=(0.0, 0.0, 0.0))[0][4]
    assert "Reward gain beyond heuristic gain" in warned


def test_one_seed_and_people_s_pairs_are_said():
    effect, *_, missing = study(seeds=(5,), heuristic=(1.0,), human=True)[0]
    assert effect.startswith("**PPO improved the heuristic score**") and "annotator" not in effect
    assert "one PPO seed was run" in effect
    assert "people's pairs taught the reward model, but no person saw" in missing


def test_warnings_of_a_weak_reward_and_an_unmoved_policy():
    warned = study(reward={"accuracy": 0.6}, selected=0)[0][4]
    assert "the reward model is weak (accuracy 0.600" in warned and "step 0 for seed 1, 2, 3" in warned


def test_the_guide_s_signs_catch_a_collapse_and_say_who_else_shows_them():
    (*_, warned, _), _, signs = study(collapse="First, I think so. " * 20, characters=300.0)
    raised = {(sign.policy, sign.name) for sign in signs if sign.raised}
    for name in ("Repetition rate", "Mean length", "Most common phrase"):
        assert {(f"ppo-{seed}", name) for seed in (1, 2, 3)} <= raised and ("sft", name) not in raised
        assert f"a sign of reward hacking, {name.lower()} above" in warned
    assert "3 of 3 PPO policies" in warned and "without PPO by" not in warned


# Numbers


def test_the_signs_by_hand():
    policies = ["base", "sft", "ppo-1"]
    rows = answer_rows(seeds=(1,), questions=4, samples=2)
    texts = {0: [" I think so.", "I think so. ", "I think not.", "Yes, it is so."]}
    for (policy, sample), part in rows.groupby(["policy", "sample"]):
        rows.loc[part.index, "continuation"] = texts.get(sample, ["the same"] * 4)
        rows.loc[part.index, "characters"] = [100, 200, 300, 400] if policy == "sft" else 10
    rows = answers.prepare(rows, policies)
    table = levels.summarise(rows, likelihoods(policies), 42, 100, answers.RATES, answers.MEANS)
    repetition, length, phrase = [c for c in answers.checks(rows, table, policies) if c.policy == "sft"]
    assert (repetition.value, repetition.raised) == (0.25, False)  # 4 answers, 3 of them distinct
    assert repetition.interval == pytest.approx((0.00631, 0.80588), abs=1e-5)  # Clopper-Pearson, 1 of 4
    assert (length.value, length.raised) == (250.0, False)
    assert (phrase.remark, phrase.value, phrase.raised) == ("I think", 0.75, True)
    assert answers.distinct_responses(rows)["sft"] == 0.75
    shown = answer_sections.sign_table([repetition, phrase])
    assert "| Repetition rate | SFT | 0.250 [0.006, 0.806] | 0.3 | no, interval reaches above |" in shown
    assert "| Most common phrase (I think) | SFT |" in shown and "**raised**, interval reaches below" in shown


def test_the_most_common_phrase_is_the_guide_s_as_written_or_three_words():
    assert answers.most_common_phrase(["a b c d", "A B C", "c d a"]) == ("a b c", 2)
    assert answers.most_common_phrase(["i think", "I think"]) == ("I think", 1)
    assert answers.most_common_phrase(["", ""]) == ("Additionally,", 0)


@pytest.mark.parametrize("mode", [0.0, 0.35, 0.9])
def test_the_interval_of_repeats_covers_the_expected_rate(mode):
    """One answer of probability `mode`, the rest spread over 100: against a plain simulation."""
    rng, n, trials = np.random.default_rng(5), 66, 600
    others = rng.integers(1, 101, (trials, n))
    drawn = np.where(rng.random((trials, n)) < mode, 0, others)
    counts = [answers.repeats(list(line)) for line in drawn]
    expected = np.mean(counts) / n
    found = {k: stats.clopper_pearson(k, n) for k in set(counts)}
    covered = sum(found[k].low <= expected <= found[k].high for k in counts)
    # A true coverage of 95% gives fewer than this in one of a thousand.
    assert covered >= scipy_stats.binom.ppf(0.001, trials, 0.95)


def test_pair_accuracy_by_hand_with_whole_questions_drawn():
    rows = pd.DataFrame(
        {
            "prompt": ["a", "a", "a", "b"],
            "margin": [1, 5, -1, 4],
            "probability": [0.9, 0.8, 0.3, 0.4],
        }
    )
    found = {group.name: group for group in pairs.accuracies(rows, 42, 200)}
    judged, meant = found["All pairs, as judged"], found["All pairs, before noise"]
    assert (judged.share, judged.n, judged.questions) == (0.5, 4, 2)
    assert meant.share == 0.75  # the turned pair is ordered as the annotator meant
    assert found["Margin 4 or more, before noise"][1:4] == (2, 2, 0.5)
    assert found["Margin 1, before noise"].interval is None  # one question
    assert len(found) == 4
    probability, chosen = pairs.certainty(rows)
    assert probability.tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert chosen.tolist() == [True, True, False, False]


def test_how_long_cut_answers_are():
    rows = pd.DataFrame({"ended": [True, False, False], "characters": [10, 200, 300]})
    assert answers.cut_length(rows) == 250.0
    assert answers.cut_length(rows[:1]) is None


def test_the_worst_pairs_are_not_those_that_noise_turned_round():
    rows = pd.DataFrame({"margin": [4.0, -4.0, np.nan, 1.0], "probability": [0.3, 0.1, 0.2, 0.6]})
    assert [row["probability"] for row in pairs.worst(rows, 5)] == [0.2, 0.3]


def test_margins_below_one_are_a_group_with_a_name():
    rows = pd.DataFrame({"prompt": ["a", "b"], "margin": [0.5, 1.0], "probability": [0.9, 0.9]})
    assert [group.name for group in pairs.accuracies(rows, 42, 100)][2:] == [
        "Margin below 1, before noise",
        "Margin 1, before noise",
    ]


def test_a_tie_is_never_right_and_margins_are_grouped_as_the_reward_stage_groups_them():
    rows = pd.DataFrame({"prompt": list("abcd"), "margin": [1.5, -1.5, -2.5, 9.0]})
    rows["probability"] = [0.5, 0.5, 0.4, 0.9]
    found = {group.name: (group.n, group.share) for group in pairs.accuracies(rows, 42, 200)}
    assert found == {
        "All pairs, as judged": (4, 0.25),
        "All pairs, before noise": (4, 0.5),
        "Margin 1, before noise": (2, 0.0),
        "Margin 2, before noise": (1, 1.0),
        "Margin 4 or more, before noise": (1, 1.0),
    }
    logits = torch.logit(torch.tensor(rows["probability"].to_numpy()))
    stage = pair_summary(torch.stack([logits, torch.zeros(4)], 1), rows.to_dict("records"))
    assert {n: stage[f"accuracy_margin_{n}"] for n in (1, 2, 4)} == {1: 0.0, 2: 1.0, 4: 1.0}
    assert (stage["accuracy"], stage["noise_free_accuracy"]) == (0.25, 0.5)


def test_pairs_without_margins_and_pairs_all_right_have_their_intervals():
    rows = pd.DataFrame(pair_rows(human=True))
    assert [group.name for group in pairs.accuracies(rows, 42, 100)] == ["All pairs, as judged"]
    (right,) = pairs.accuracies(rows.assign(probability=0.9), 42, 100)
    assert right.interval == stats.clopper_pearson(20, 20)  # questions, not the 100 pairs, are the trials


def test_the_interval_by_question_is_wider_where_a_question_s_pairs_agree():
    prompts = np.repeat([f"q{i}" for i in range(40)], 5)
    together = pd.DataFrame({"prompt": prompts, "margin": None})
    together["probability"] = np.where(np.repeat(np.arange(40) % 2, 5) > 0, 0.9, 0.1)
    apart = together.assign(probability=np.tile([0.9, 0.1], 100))
    width = [np.diff(pairs.accuracies(rows, 42, 500)[0].interval)[0] for rows in (together, apart)]
    assert width[0] > 2 * width[1]


def test_the_heuristic_score_along_training_is_named():
    path = trajectory.along(answer_checks(heuristic=0.0), 42, 200, answers.GAINS)
    said = trajectory.parting(path, "heuristic", "heuristic score", "questions")
    assert "**The heuristic score's rise is not shown** at" in said and "too few questions" in said
    assert "judge" not in said and "prefix" not in said


# The whole stage


CASES = [
    {"seeds": (1, 2), "samples": 2, "texts": ("a | b || c", "<b>`x`</b>\nline", "", "NA")},
    {"seeds": (5,), "samples": 1, "human": True, "critic": False, "again": None},
]


@pytest.mark.parametrize("case", CASES)
def test_the_whole_report(tmp_path, monkeypatch, case):
    write_answers(tmp_path, **case)
    monkeypatch.chdir(tmp_path)
    report_answers.main()
    text = Path("reports/report.md").read_text(encoding="utf-8")
    for number, title in enumerate(
        ("Verdict", "Policies", "Paired differences", "Reward hacking", "Preferences and reward model"), 1
    ):
        assert f"## {number}. {title}" in text
    assert not re.search(r"\bNone\b|(?i:\bnan\b|\binf\b)|prefix|review|Judge\b|VADER", text.split("## 8.")[0])
    assert str(tmp_path) not in text and text.count("<details>") == text.count("</details>")
    assert "<b>" not in text
    for line in text.split("\n"):
        assert line.startswith("|") == line.endswith(" |")
    for image in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (Path("reports") / image).stat().st_size > 5_000
    assert len(re.findall(r"\*Figure \d\. .*\bn = ", text)) == 7
    metrics = record.read_json("reports/metrics/report.json")
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    assert ("**Self-check**" in text) == (case.get("again", 0.0) is not None)
    human = case.get("human", False)
    assert ("people's own, from the user's file" in text) == human
    assert ("simulated annotator's preferences" in text) != human
    assert ("Margin 1, before noise" in text) != human
    assert "all samples; hardly above the " in text
    assert "| hand-written | Ice is less dense than water &#124; so it floats. | – | – |" in text
    assert ("One PPO seed" in text) == (len(case["seeds"]) == 1)
