"""Write the report on answers, its figures, and the metrics that `dvc metrics diff` compares:
`python -m stages.report_answers`.
"""

import dataclasses

import pandas as pd

from rlhf import config, errors, record, stats
from rlhf.environment import environment
from rlhf.report import (
    answer_appendix,
    answer_figures,
    answer_sections,
    answer_verdict,
    answers,
    appendix,
    comparisons,
    figures,
    levels,
    pairs,
    provenance,
    results,
    tables,
    trajectory,
)

WORST_PAIRS = 5


def main() -> None:
    params = config.load()
    seeds = params.ppo.seeds
    policies = ["base", "sft", *(f"ppo-{seed}" for seed in seeds)]

    # 1. Read what the stages before have measured.
    judged = comparisons.read_rows("artifacts/judged.csv")
    again = ["sft-again"] if "sft-again" in set(judged["policy"]) else []
    rows = answers.prepare(judged, policies)
    nll = {p: pd.DataFrame(record.read_jsonl(f"artifacts/val_nll/{p}.jsonl")) for p in policies}
    reward = record.read_json("reports/metrics/reward.json")
    preferences = record.read_json("reports/metrics/preferences.json")
    human = bool(preferences["human"])
    held_out = pd.DataFrame(record.read_jsonl("artifacts/reward_test.jsonl"))
    ppo = {seed: record.read_json(f"reports/metrics/ppo/{seed}.json") for seed in seeds}
    selected = {seed: found["selected_step"] for seed, found in ppo.items()}
    logs = {seed: pd.read_csv(f"reports/plots/ppo/{seed}.csv") for seed in seeds}
    validation = {seed: pd.read_csv(f"reports/plots/ppo_validation/{seed}.csv") for seed in seeds}

    # 2. Numbers.
    resamples, measures = params.report.resamples, answers.MEASURES
    values = comparisons.scores(answers.prepare(judged, policies + again), nll, measures)
    found = comparisons.compare(values, seeds, params.seed, resamples, measures)
    checks = comparisons.self_check(values, params.seed, resamples, measures)
    noise = comparisons.noise(values, seeds, params.seed, resamples, measures)
    table = levels.summarise(rows, nll, params.seed, resamples, answers.RATES, answers.MEANS)
    table["distinct_responses"] = answers.distinct_responses(rows)
    table.loc["ppo", "distinct_responses"] = table.loc[policies[2:], "distinct_responses"].mean()
    checked = comparisons.read_rows("artifacts/judged_validation.csv")
    path = trajectory.along(checked, params.seed, resamples, answers.GAINS)
    accuracies = pairs.accuracies(held_out, params.seed, resamples)
    probability, chosen = pairs.certainty(held_out)
    curve = pd.DataFrame(stats.calibration_curve(probability, chosen))
    signs = answers.checks(rows, table, policies)
    flags = answer_verdict.flags(table, rows)
    sentences = answer_verdict.sentences(
        found, checks, table, reward, params.reward.weak_accuracy, selected, flags, signs, human
    )

    # 3. Figures, as one folder that appears whole.
    with record.replacing("reports/figures") as folder:
        folder.mkdir()
        shown = table.loc[policies].rename(index=results.title_of)
        figures.policies(folder / "policies.png", shown, answer_figures.PANELS)
        figures.differences(folder / "differences.png", comparisons.as_table(found))
        answer_figures.overoptimisation(folder / "overoptimisation.png", path, selected, shown)
        answer_figures.reward_model(folder / "reward_model.png", curve, accuracies)
        figures.training(
            folder / "training.png",
            pd.read_csv("reports/plots/sft.csv"),
            pd.read_csv("reports/plots/reward.csv"),
            pd.read_csv("reports/plots/reward_validation.csv"),
            logs,
            "Bradley-Terry loss (nats)",
            f"({answers.REWARD_UNIT})",
        )
        figures.validation(folder / "validation.png", validation, selected, f"({answers.REWARD_UNIT})")
        figures.diagnostics(folder / "diagnostics.png", logs)

    # 4. Text and metrics.
    described = environment(params.runtime.device, params.runtime.threads)
    settings = dataclasses.asdict(params)
    del settings["runtime"]["snapshot_seconds"]  # decides no output
    questions, samples = values["heuristic"]["sft"].shape
    sections = [
        answer_sections.opening(
            params.report.title,
            params.fetch.policy.name,
            params.generation.response_tokens,
            len(seeds),
            human,
        ),
        results.verdict(sentences),
        answer_sections.policies(table, questions, samples, len(nll["sft"])),
        tables.differences(
            found,
            checks,
            noise,
            comparisons.outcomes(rows, seeds, "ended"),
            resamples,
            answers.QUESTION,
            "Ended by itself (EOS)",
        ),
        answer_sections.hacking(
            signs, flags, path, results.overused(rows), questions, samples, answers.cut_length(rows)
        ),
        answer_appendix.reward_model(
            reward,
            preferences,
            accuracies,
            stats.expected_calibration_error(probability, chosen),
            params.reward.weak_accuracy,
            pairs.worst(held_out, WORST_PAIRS),
        ),
        appendix.training(ppo, params.ppo.steps, params.ppo.validation_prefixes, answers.QUESTION.many),
        answer_appendix.examples(rows, policies, params.report.examples),
        provenance.section(
            {"policy": record.read_json("data/manifests/policy.json")},
            answer_appendix.split(record.read_json("data/split.json")),
            settings,
            described,
            answer_appendix.limits(questions, human),
        ),
    ]
    record.write_text("reports/report.md", "\n\n".join(sections) + "\n")
    record.write_json("reports/environment.json", described)
    record.write_csv("reports/plots/ppo_by_seed.csv", levels.by_seed(logs))
    record.write_csv("reports/plots/ppo_validation_by_seed.csv", levels.by_seed(validation))
    metrics = levels.metrics(table, found, answers.METRICS, answers.DIFFERENCES)
    record.write_json("reports/metrics/report.json", metrics)
    print("wrote reports/report.md")


if __name__ == "__main__":
    errors.run(main)
