"""Reward and judge along training: changes by hand, and for each pattern the sentence that must appear."""

import pandas as pd
import pytest
from synthetic_results import validation_rows

from rlhf import errors
from rlhf.report import results, trajectory


def path(**settings):
    return trajectory.along(validation_rows(**settings), 42, 500)


def test_the_change_from_step_zero_is_paired_by_prefix():
    rows = validation_rows(seeds=(1,), steps=(0, 24), prefixes=2)
    rows["reward"] = [0.2, -0.4, 0.6, 0.4]  # changes 0.4 and 0.8, of reward: half of that as probability
    rows["judge_full"] = [0.5, 0.1, 0.4, 0.3]  # changes -0.1 and 0.2
    rows["kl"] = [0.0, 0.0, 1.0, 2.0]
    rows = rows.sample(frac=1, random_state=1)  # the order of rows means nothing
    first, last = trajectory.along(rows, 42, 500)[1].to_dict("records")
    assert (first["reward_gain"], first["reward_way"], first["step"], first["kl"]) == (0, 0, 0, 0)
    assert last["kl"] == 1.5 and last["n"] == 2 and last["step"] == 24
    assert last["reward_gain"] == pytest.approx(0.3) and last["judge_gain"] == pytest.approx(0.05)
    assert (last["reward_low"], last["reward_high"]) == pytest.approx((0.2, 0.4))
    assert (last["reward_way"], last["judge_way"]) == (1, 0)


def test_checks_on_other_prefixes_are_refused():
    rows = validation_rows(seeds=(3,))
    rows.loc[rows.index[-1], "id"] = "val-999"
    with pytest.raises(
        errors.UserError, match=r"validation rows of seed 3, step 24: expected the ids of step 0"
    ):
        trajectory.along(rows, 42, 100)


def test_reward_and_judge_that_rise_together_do_not_part():
    said = trajectory.parting(path())
    assert said.startswith("**Reward and judge rise together**: at each of the 6 checks (of 6)")
    assert "n = 16 validation prefixes" in said and "not adjusted" in said
    assert "part**" not in said


def test_a_judge_that_stays_is_called_unseen_and_not_apart():
    said = trajectory.parting(path(judge=0.0, seeds=(1,)))
    assert said.startswith("**The judge's rise is not shown** at ")
    assert "seed 1, step 24 (reward +0." in said and "too few prefixes" in said
    assert "**Reward and judge part**" not in said


def test_a_judge_that_falls_while_the_reward_rises_parts_from_it():
    said = trajectory.parting(path(judge=-0.2))
    assert said.startswith("**Reward and judge part** at 6 of the 6 checks (of 6)")
    assert "the judge falls: seed 1, step 12" in said and "together" not in said


def test_without_a_rise_of_the_reward_nothing_is_said_of_parting():
    said = trajectory.parting(path(reward=0.0, judge=-0.3, seeds=(2,)))
    assert said.startswith("At no check is a rise of the reward shown")
    assert "**" not in said


def test_every_check_is_in_the_table():
    text = results._check_table(path(seeds=(1, 2)))
    assert text.count("| PPO ") == 6
    assert "| PPO 1 | 0 | 0.00 | – | – | – |" in text


def test_a_row_per_check_and_seed_with_what_the_figure_needs():
    found = path()
    assert list(found) == [1, 2, 3]
    assert all(
        isinstance(rows, pd.DataFrame) and rows["step"].tolist() == [0, 12, 24] for rows in found.values()
    )
