"""Write reports/report.md with its figures, and the metrics that `dvc metrics diff` compares."""

import dataclasses

import numpy as np
import pandas as pd

from rlhf import config, errors, record, stats
from rlhf.environment import environment
from rlhf.report import (
    appendix,
    comparisons,
    figures,
    levels,
    published,
    results,
    tables,
    trajectory,
    verdict,
)

WORST_ERRORS = 5


def main() -> None:
    params = config.load()
    seeds = params.ppo.seeds
    policies = ["base", "sft", *(f"ppo-{seed}" for seed in seeds)]

    # 1. Read what the stages before have measured.
    judged = comparisons.read_rows("artifacts/judged.csv")
    again = ["sft-again"] if "sft-again" in set(judged["policy"]) else []
    rows = comparisons.prepare(judged, policies)
    nll = {p: pd.DataFrame(record.read_jsonl(f"artifacts/val_nll/{p}.jsonl")) for p in policies}
    reward = record.read_json("reports/metrics/reward.json")
    judge = record.read_json("reports/metrics/judge_model.json")
    reward_test = pd.DataFrame(record.read_jsonl("artifacts/reward_test.jsonl"))
    ppo = {seed: record.read_json(f"reports/metrics/ppo/{seed}.json") for seed in seeds}
    selected = {seed: found["selected_step"] for seed, found in ppo.items()}
    logs = {seed: pd.read_csv(f"reports/plots/ppo/{seed}.csv") for seed in seeds}
    validation = {seed: pd.read_csv(f"reports/plots/ppo_validation/{seed}.csv") for seed in seeds}

    # 2. Numbers.
    resamples = params.report.resamples
    values = comparisons.scores(comparisons.prepare(judged, policies + again), nll)
    found = comparisons.compare(values, seeds, params.seed, resamples)
    checks = comparisons.self_check(values, params.seed, resamples)
    noise = comparisons.noise(values, seeds, params.seed, resamples)
    table = levels.summarise(rows, nll, params.seed, resamples)
    checked = comparisons.read_rows("artifacts/judged_validation.csv")
    path = trajectory.along(checked, params.seed, resamples)
    curve = pd.DataFrame(stats.calibration_curve(reward_test["probability"], reward_test["label"]))
    flags = verdict.flags(table)
    sentences = verdict.sentences(
        found,
        checks,
        table.loc["ppo", "kl"],
        reward["accuracy"],
        params.reward.weak_accuracy,
        selected,
        flags,
    )

    # 3. Figures, as one folder that appears whole.
    with record.replacing("reports/figures") as folder:
        folder.mkdir()
        shown = table.loc[policies].rename(index=results.title_of)
        figures.policies(folder / "policies.png", shown)
        figures.differences(folder / "differences.png", comparisons.as_table(found))
        figures.overoptimisation(folder / "overoptimisation.png", path, selected, shown)
        figures.reward_model(folder / "reward_model.png", curve, confusion(reward))
        figures.training(
            folder / "training.png",
            pd.read_csv("reports/plots/sft.csv"),
            pd.read_csv("reports/plots/reward.csv"),
            pd.read_csv("reports/plots/reward_validation.csv"),
            logs,
        )
        figures.validation(folder / "validation.png", validation, selected)
        figures.diagnostics(folder / "diagnostics.png", logs)

    # 4. Text and metrics.
    described = environment(params.runtime.device, params.runtime.threads)
    settings = dataclasses.asdict(params)
    del settings["runtime"]["snapshot_seconds"]  # decides no output
    prefixes, samples = values["judge_full"]["sft"].shape
    sections = [
        results.opening(
            params.report.title,
            params.fetch.policy.name,
            params.generation.prefix_tokens,
            params.generation.response_tokens,
            len(seeds),
        ),
        results.verdict(sentences),
        results.policies(table, prefixes, samples, len(nll["sft"])),
        tables.differences(found, checks, noise, comparisons.outcomes(rows, seeds), resamples),
        results.overoptimisation(flags, path, results.overused(rows), prefixes, samples),
        appendix.reward_model(
            reward,
            stats.expected_calibration_error(reward_test["probability"], reward_test["label"]),
            params.reward.weak_accuracy,
            judge,
            worst(reward_test),
            comparisons.agreement(rows),
        ),
        appendix.training(ppo, params.ppo.steps, params.ppo.validation_prefixes),
        appendix.examples(rows, policies, params.report.examples),
        appendix.provenance(
            {p: record.read_json(f"data/manifests/{p}.json") for p in ("policy", "reviews", "judge")},
            record.read_json("data/split.json"),
            settings,
            described,
        ),
        published.section(settings, table, found, reward),
    ]
    record.write_text("reports/report.md", "\n\n".join(filter(None, sections)) + "\n")
    record.write_json("reports/environment.json", described)
    record.write_csv("reports/plots/ppo_by_seed.csv", levels.by_seed(logs))
    record.write_csv("reports/plots/ppo_validation_by_seed.csv", levels.by_seed(validation))
    record.write_json("reports/metrics/report.json", levels.metrics(table, found))
    print("wrote reports/report.md")


def confusion(reward: dict) -> np.ndarray:
    """Return counts [human label, prediction]."""
    names = [["true_negatives", "false_positives"], ["false_negatives", "true_positives"]]
    return np.array([[reward[name] for name in line] for line in names])


def worst(reward_test: pd.DataFrame) -> list[dict]:
    """Return the test rows whose probability is furthest from the human label."""
    error = (reward_test["probability"] - reward_test["label"]).abs()
    order = error.sort_values(ascending=False, kind="stable").index[:WORST_ERRORS]
    return reward_test.loc[order].to_dict("records")


if __name__ == "__main__":
    errors.run(main)
