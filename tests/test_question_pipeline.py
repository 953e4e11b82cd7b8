"""The question answering pipeline, its real stages and run file, end to end at toy size; beside the first."""

import json
import shutil

import pytest
from malformed_tables import encoded
from pipeline_checks import (
    changed_stages,
    check_nothing_lies_about,
    check_outputs,
    check_plots,
    check_same_lock,
    only_error,
    outputs_of,
    read_yaml,
    stages_run,
)
from toy import run, set_params

from rlhf.record import read_jsonl, write_jsonl

RUN_FILE = "qa/dvc.yaml"
PARTS = ("rm", "val", "rm_test")
BELOW = {"PYTHONPATH": ".."}


def named(stages: set[str]) -> set[str]:
    """Stages of the run file as DVC names them from the root."""
    return {f"{RUN_FILE}:{stage}" for stage in stages}


@pytest.fixture
def restored(project):
    """The project, and afterwards its files as git holds them."""
    yield project
    run(project, "git", "checkout", "--quiet", ".")
    run(project, "git", "clean", "--quiet", "--force", "qa/data")


def test_every_declared_output_is_there_and_in_the_lock(project):
    outputs = outputs_of(project, "qa")
    assert len(read_yaml(project / "qa/dvc.lock")["stages"]) == 12
    assert len(outputs) == len(set(outputs)) > 25
    assert [path for path in outputs if not (project / "qa" / path).exists()] == []


def test_nothing_is_left_lying_about(project):
    check_nothing_lies_about(project)


def test_a_second_repro_runs_nothing_and_says_so(project):
    printed = run(project, "dvc", "repro", RUN_FILE)
    assert stages_run(printed) == set()
    assert "up to date" in printed


@pytest.mark.parametrize(("target", "below"), [((), False), (("dvc.yaml",), False), ((RUN_FILE,), True)])
def test_neither_pipeline_runs_a_stage_of_the_other(project, target, below):
    stages = stages_run(run(project, "dvc", "repro", "--dry", "--force", *target))
    assert {stage.startswith(RUN_FILE) for stage in stages} == {below}


def test_two_clean_clones_give_the_same_lock(project_and_clone):
    check_same_lock(*project_and_clone, "qa")


def test_outputs_name_no_path_of_this_machine_and_metrics_are_flat(project):
    check_outputs(project, "qa")


def test_every_declared_plot_has_data_a_title_and_labels(project):
    check_plots(project, "qa")


def test_preferences_come_from_the_annotator_and_the_parts_share_no_question(project):
    metrics = json.loads((project / "qa/reports/metrics/preferences.json").read_text())
    parts = {part: read_jsonl(project / f"qa/artifacts/preferences/{part}.jsonl") for part in PARTS}
    assert metrics["human"] == 0
    assert metrics["pairs"] == sum(map(len, parts.values())) > 0 < metrics["ties"]
    assert metrics["pairs"] + metrics["ties"] == (16 + 6 + 8) * 3  # questions, pairs of 3 answers
    prompts = [{pair["prompt"] for pair in pairs} for pairs in parts.values()]
    assert sum(map(len, prompts)) == len(set().union(*prompts)) == metrics["prompts"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"report.title": "Another title"}, {"report"}),
        ({"runtime.snapshot_seconds": 5}, set()),
        ({"preferences.noise": 0.2}, {"preferences", "report"}),
        ({"reward.head": "linear"}, {"reward", "report"}),
        ({"ppo.kl_beta": 0.2}, {"ppo@1", "report"}),
        ({"ppo.seeds": [1, 2]}, {"ppo@2", "sample-ppo@2", "judge", "report"}),
        ({"sample.n": 1}, {"sample@base", "sample@sft", "sample-again", "sample-ppo@1", "report"}),
        (
            {"generation.temperature": 1.0},
            {"preferences", "ppo@1", "sample@base", "sample@sft", "sample-again", "sample-ppo@1", "report"},
        ),
        ({"split.template": "{question} so"}, {"split", "preferences", "report"}),
    ],
)
def test_a_parameter_invalidates_what_reads_it_and_nothing_else(restored, changes, expected):
    set_params(restored / "qa", changes)
    assert changed_stages(restored, RUN_FILE) == named(expected)


def test_an_edit_of_the_annotator_invalidates_preferences_and_judge_and_nothing_of_the_first(restored):
    file = restored / "rlhf/annotator.py"
    file.write_text(file.read_text() + "\n# another line\n")
    assert changed_stages(restored, RUN_FILE) == named({"preferences", "judge"})
    assert changed_stages(restored) == set()


def test_people_s_preferences_are_taken_instead_of_samples(project, tmp_path):
    """Without DVC; what follows reads them as it reads the annotator's."""
    other = tmp_path / "with preferences"
    shutil.copytree(project, other, ignore=shutil.ignore_patterns(".git", ".dvc"))
    texts = [row["question"] for row in read_jsonl(other / "qa/data/questions.jsonl")]
    pairs = [
        {"Q": prompt, "better": better, "worse": worse, "by": ""}
        for prompt, better, worse in zip(texts[:20], texts[20:40], texts[40:60], strict=True)
    ]
    (other / "qa/data/pairs.csv").write_bytes(encoded("csv", [*pairs[:-1], pairs[-1] | {"by": "3"}]))
    columns = {"prompt": "Q", "chosen": "better", "rejected": "worse", "margin": "by"}
    changes = {f"preferences.pairs.{name}_column": column for name, column in columns.items()}
    set_params(other / "qa", changes | {"preferences.pairs.file": "data/pairs.csv"})
    printed = run(other / "qa", "python", "-m", "stages.preferences", **BELOW)
    assert "/90" not in printed  # no sample of the 90
    metrics = json.loads((other / "qa/reports/metrics/preferences.json").read_text())
    assert (metrics["human"], metrics["pairs"], metrics["ties"], metrics["prompts"]) == (1, 20, 0, 20)
    run(other / "qa", "python", "-m", "stages.reward", **BELOW)
    tested = read_jsonl(other / "qa/artifacts/reward_test.jsonl")
    assert tested and {row["prompt"] for row in tested} <= set(texts[:20])


def test_written_preferences_invalidate_the_preferences_stage_alone(restored):
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_jsonl(restored / "qa/data/preferences.jsonl", [pair])
    assert changed_stages(restored, RUN_FILE) == named({"preferences"})


def test_a_table_of_another_name_takes_the_place_of_what_a_stage_read(restored):
    """DVC follows the file that the parameters name."""
    set_params(restored / "qa", {"preferences.pairs.file": "data/pairs.csv"})
    (restored / "qa/data/pairs.csv").write_text("prompt,chosen,rejected\n")
    assert changed_stages(restored, RUN_FILE) == named({"preferences", "report"})


@pytest.mark.parametrize(
    ("changes", "stage", "message"),
    [
        (
            {"split.template": "Question:"},
            "fetch",
            "params.yaml: split.template is 'Question:': expected a text with {question} in it once",
        ),
        (
            {"ppo.kl_horizon": 3},
            "fetch",
            "params.yaml: ppo.kl_horizon 3: expected at least ppo.batch_size",
        ),
        ({"reward.loss": "label"}, "fetch", "params.yaml: reward.loss label: expected pairwise"),
        ({"split.sizes.ppo": 900}, "questions", "split.sizes needs"),
        ({"split.sha256": {"sft": "0" * 64}}, "questions", "split.sha256 differs for ppo, rm"),
    ],
)
def test_a_bad_parameter_gives_one_line_and_loses_nothing(restored, changes, stage, message):
    set_params(restored / "qa", changes)
    assert message in only_error(restored / "qa", stage, **BELOW)
    run(restored, "git", "checkout", "--quiet", "qa/params.yaml")
    assert run(restored, "git", "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("file", "content", "stage", "message"),
    [
        (
            "answers.csv",
            'A,Q\n" ",the film is dull .\n',
            "questions",
            "answers.csv, line 2: answer is empty",
        ),
        (
            "questions.jsonl",
            '{"text": "the film is dull ."}\n',
            "questions",
            "questions.jsonl, line 1: no column 'question': it has ['text']",
        ),
        (
            "preferences.jsonl",
            '{"prompt": "a", "chosen": "b", "rejected": "b"}\n',
            "preferences",
            "preferences.jsonl, line 1: chosen and rejected are the same text: 'b'",
        ),
    ],
)
def test_a_bad_row_gives_one_line_and_loses_nothing(restored, file, content, stage, message):
    (restored / "qa/data" / file).write_text(content)
    assert message in only_error(restored / "qa", stage, **BELOW)
    run(restored, "git", "checkout", "--quiet", f"qa/data/{file}")
    assert run(restored, "git", "status", "--porcelain") == ""


def test_an_experiment_reruns_ppo_and_what_follows_and_can_be_compared(project):
    try:
        lower = "qa/params.yaml:ppo.lr=1e-5"
        printed = run(project, "dvc", "exp", "run", "-S", lower, "--name", "slow-qa", RUN_FILE)
        assert stages_run(printed) == named({"ppo@1", "sample-ppo@1", "judge", "report"})
        assert read_yaml(project / "qa/params.yaml")["ppo"]["lr"] == 1e-5
        found = json.loads(run(project, "dvc", "metrics", "diff", "HEAD", "--json"))
        assert found and {name.startswith("qa/reports/metrics/") for name in found} == {True}
        assert "qa/reports/metrics/report.json" in found
    finally:
        run(project, "git", "checkout", "--quiet", ".")
        run(project, "dvc", "checkout", "--quiet")
    assert changed_stages(project, RUN_FILE) == set()
