"""What `make verify` concludes from two locks and from two versions of a number, by hand."""

import math

import pytest
from architecture import ROOT
from locks import LOCK, stage

from tools.comparison import (
    MISSING,
    Comparison,
    compare_locks,
    largest_difference,
    model_stages,
    numbers,
    outside_tolerance,
    overlap,
    problems,
    tolerance,
)
from tools.verify import read_lock


def test_locks_are_compared_output_by_output():
    committed = {"one": stage({}, {"same": "1", "other": "2"}), "two": stage({}, {"gone": "3"})}
    new = {"one": stage({}, {"same": "1", "other": "4"}), "three": {"outs": [{"path": "come", "md5": "5"}]}}
    assert compare_locks(committed, new, {}) == [
        Comparison("same", "1", "1"),
        Comparison("other", "2", "4"),
        Comparison("gone", "3", MISSING),
        Comparison("come", MISSING, "5"),
    ]


@pytest.mark.parametrize(
    ("locked", "held", "new", "shown"),
    [
        ("1", "1", "1", "1"),
        ("1", "1", "2", "1"),
        ("1", "9", "1", "9"),  # the committed file is not what the lock says of it
        ("9", "1", "1", "9"),  # the lock alone is wrong
    ],
)
def test_the_committed_file_and_the_lock_both_have_to_be_right(locked, held, new, shown):
    locks = [{"stage": stage({}, {"metrics.json": md5})} for md5 in (locked, new)]
    assert compare_locks(*locks, {"metrics.json": held}) == [Comparison("metrics.json", shown, new)]


def test_numbers_of_json_have_dotted_keys_and_leave_out_what_is_no_number():
    text = '{"a": 1, "b": {"c": [2.5, "3", null]}, "weak": false}'
    assert numbers(text, ".json") == {"a": 1.0, "b.c.0": 2.5}
    assert numbers("not JSON", ".json") == {}


def test_numbers_of_csv_have_a_column_and_a_row():
    text = 'step,text,loss\n1,"2, or\nthree",\n2,x,0.5\n'
    assert numbers(text, ".csv") == {"step, row 1": 1.0, "step, row 2": 2.0, "loss, row 2": 0.5}
    assert numbers("", ".csv") == {}


@pytest.mark.parametrize(
    ("old", "new", "suffix", "expected"),
    [
        ('{"a": 1, "b": -2}', '{"a": 1.25, "b": -2.5}', ".json", (0.5, "b")),
        ('{"a": 1}', '{ "a": 1.0 }', ".json", None),
        ('{"a": true, "b": "x"}', '{"a": false, "b": "y"}', ".json", None),
        ('{"a": 1}', '{"b": 1}', ".json", (math.inf, "a")),
        ("x,y\n1,2\n3,4\n", "x,y\n1,2\n3.5,4.25\n", ".csv", (0.5, "x, row 2")),
        ("x\n1\n", "x\n1\n2\n", ".csv", (math.inf, "x, row 2")),
        ("x\nnan\n", "x\nnan\n", ".csv", None),
        ("x\nnan\n", "x\n1\n", ".csv", (math.inf, "x, row 1")),
        ("x\ninf\n", "x\ninf\n", ".csv", None),
    ],
)
def test_the_largest_difference_names_its_place(old, new, suffix, expected):
    assert largest_difference(old, new, suffix) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sample/sft.json:nll_per_token", 0.02),
        ("sample/ppo-42.json:nll_per_token", 0.1),
        ("report.json:nll_per_token_base", 0.02),
        ("report.json:nll_per_token_ppo", 0.1),
        ("report.json:nll_per_token_ppo_minus_sft_low", 0.1),
        ("report.json:positive_rate_ppo", 0.1),
        ("report.json:kl_per_sequence_ppo", 1.0),
        ("report.json:reward_ppo_minus_sft", 0.15),
        ("report.json:length_sft", 5.0),
        ("reward.json:accuracy", 0.03),
        ("reward.json:n", 0.0),
        ("reward.json:anything_else", 0.5),  # a fifth of 2.5
        ("ppo/42.json:last_step_kl", 1.0),
        ("ppo/42.json:last_step_reward", 0.15),
        ("reward.json:loss", 0.05),
        ("reward.json:mean_sft", 0.3),
        ("report.json:heuristic_ppo_minus_sft", 0.5),
        ("report.json:chrf_sft", 3.0),
    ],
)
def test_every_kind_of_metric_has_its_tolerance(name, expected):
    assert tolerance(f"reports/metrics/{name}", -2.5) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("preferences.json:pairs_rm", 40.0),
        ("preferences.json:human", 0.0),
        ("reward.json:n", 12.0),
        ("reward.json:accuracy", 0.1),
        ("reward.json:accuracy_margin_2", 0.3),
        ("reward.json:loss", 0.05),
    ],
)
def test_counts_that_follow_from_samples_have_wider_ones_in_question_answering(name, expected):
    assert tolerance(f"qa/reports/metrics/{name}", 100.0) == expected


def test_only_what_is_outside_its_tolerance_is_named():
    old = '{"accuracy": 0.75, "length_sft": 20, "n": 256, "selected_step": 8, "gone": 1}'
    new = '{"accuracy": 0.71875, "length_sft": 25, "n": 255, "selected_step": 4}'
    assert outside_tolerance("m.json", old, new) == [
        "m.json: accuracy was 0.75, is 0.71875: tolerance 0.03",
        "m.json: n was 256.0, is 255.0: tolerance 0",
        "m.json: gone was 1.0, is missing: tolerance 0.2",
    ]
    assert outside_tolerance("m.json", '{"accuracy": 0.75}', '{"accuracy": 0.734375}') == []


def test_paths_overlap_only_along_whole_names():
    assert overlap("a/b", "a/b") and overlap("a", "a/b/c") and overlap("a/b/c", "a")
    assert not overlap("a/b", "a/bc") and not overlap("a/b", "b")


def test_the_stages_that_compute_with_a_model_are_found_through_files_and_folders():
    assert model_stages(LOCK) == {"sft", "sample@a", "sample@b", "judge"}
    assert model_stages({}) == set()


@pytest.mark.parametrize("run_file", ["dvc.yaml", "qa/dvc.yaml"])
def test_in_this_project_fetch_and_split_are_the_same_on_every_machine(run_file):
    lock = read_lock(ROOT, run_file)
    assert set(lock) - model_stages(lock) == {"fetch", "split"}


def test_on_the_same_hardware_every_difference_is_a_problem():
    rows = [Comparison("a.json", "1", "1"), Comparison("b.json", "1", "2")]
    texts = {"b.json": ('{"length": 1}', '{"length": 2}')}
    assert problems(rows, set(), texts) == ["b.json: different, and expected to be the same on every machine"]
    assert problems(rows[:1], set(), {}) == []


def test_on_other_hardware_a_model_may_differ_within_tolerances():
    rows = [Comparison(path, "1", "2") for path in ("near.json", "far.json", "adapter", "log.csv")]
    texts = {
        "near.json": ('{"length": 1}', '{"length": 2}'),
        "far.json": ('{"length": 1}', '{"length": 7}'),
        "log.csv": ("length\n1\n", "length\n9\n"),
    }
    loose = {row.path for row in rows}
    assert problems(rows, loose, texts) == ["far.json: length was 1.0, is 7.0: tolerance 5"]
    assert len(problems([Comparison("adapter", "1", MISSING)], loose, {})) == 1
    assert len(problems([Comparison("data/split", "1", "2")], loose, {})) == 1
