"""The reference's published figures stand in the report of its own model, and in no other."""

import dataclasses

import pytest
from synthetic_results import judged_rows, likelihoods

from rlhf import config
from rlhf.report import comparisons, levels, published

REWARD = {"true_negatives": 40, "true_positives": 50, "n": 100}


@pytest.fixture(scope="module")
def numbers():
    policies = ["base", "sft", "ppo-1"]
    rows, nll = comparisons.prepare(judged_rows(seeds=(1,)), policies), likelihoods(policies)
    found = comparisons.compare(comparisons.scores(rows, nll), (1,), 42, 200)
    return levels.summarise(rows, nll, 42, 200), found


def settings(name):
    params = dataclasses.asdict(config.load())
    params["fetch"]["policy"]["name"] = name
    return params


def test_another_model_gets_no_such_section(numbers):
    assert published.section(settings("Qwen/Qwen3-0.6B-Base"), *numbers, REWARD) == ""


def test_the_reference_s_model_gets_its_figures_beside_ours(numbers):
    table, found = numbers
    text = published.section(settings("Qwen/Qwen3-4B-Base"), table, found, REWARD)
    # 22, 23 and 27 of 40, and 121 of 128, are the shares that the notebook prints.
    for share in ("55.0% [38.5, 70.7] of 40", "57.5% [", "67.5% [", "94.5% ["):
        assert share in text
    for figure in ("+0.092 [-0.048, 0.226]", "4.527", "3.517", "3.525"):
        assert figure in text
    main = next(c for c in found if c.group == "pooled" and c.measure.key == "judge_full")
    assert f"+{main.result.mean:.3f} [" in text and "90.0% [" in text
    assert f"| {table.loc['ppo', 'nll_per_token']:.3f} [" in text


def test_the_protocols_are_listed_with_the_parameters_of_this_run(numbers):
    params = settings("Qwen/Qwen3-4B-Base")
    params["ppo"] |= {"steps": 7, "batch_size": 5, "minibatches": 3, "epochs": 2, "seeds": [1, 2, 3, 4]}
    text = published.section(params, *numbers, REWARD)
    assert (
        "| PPO | 96 batches of 8, 2 updates each, lr 1e-5 | 7 batches of 5, 6 updates each, lr 0.0002 |"
        in text
    )
    assert "| PPO runs | 1 | 4 |" in text
    assert "proves little" in text
