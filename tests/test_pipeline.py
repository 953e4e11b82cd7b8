"""The real stages and the real run file, end to end at toy size, with DVC and without it."""

import json
import re
import shutil

import pytest
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

from rlhf.record import sha256_file


def test_every_declared_output_is_there_and_in_the_lock(project):
    outputs = outputs_of(project)
    assert len(read_yaml(project / "dvc.lock")["stages"]) == 14
    assert len(outputs) == len(set(outputs)) > 30
    assert [path for path in outputs if not (project / path).exists()] == []


def test_nothing_is_left_lying_about(project):
    check_nothing_lies_about(project)


def test_a_second_repro_runs_nothing_and_says_so(project):
    assert stages_run(run(project, "dvc", "repro", "--dry")) == set()
    printed = run(project, "make", "repro")
    assert stages_run(printed) == set()
    assert "up to date" in printed


def test_outputs_name_no_path_of_this_machine_and_metrics_are_flat(project):
    check_outputs(project)


def test_every_declared_plot_has_data_a_title_and_labels(project):
    check_plots(project)


def test_two_clean_clones_give_the_same_lock(project_and_clone):
    check_same_lock(*project_and_clone)


def test_stages_run_without_dvc_whatever_the_order_of_the_rows(project, tmp_path):
    """The stages between, which read what split wrote and nothing else, run without DVC in test_resume."""
    other = tmp_path / "another place"
    shutil.copytree(project, other, ignore=shutil.ignore_patterns(".git", ".dvc", "dvc.*"))
    for written in ("data", "reports/figures", "artifacts/judged.csv", "reports/report.md"):
        path = other / written
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    header, *rows = (other / "toy/reviews.csv").read_text().splitlines(keepends=True)
    (other / "toy/reviews.csv").write_text("".join([header, *reversed(rows)]))
    set_params(other, {"fetch.reviews.sha256": {"reviews.csv": sha256_file(other / "toy/reviews.csv")}})
    for command in ("fetch", "split", "judge", "report"):
        run(other, "sh", "-c", f"umask 077 && python -m stages.{command}", TZ="Asia/Tokyo", LC_ALL="C")
    differs_by_design = {"data/manifests/reviews.json", "reports/report.md"}  # they name the file's hash
    made = [path for folder in ("data", "reports", "artifacts") for path in (project / folder).rglob("*")]
    for file in (path for path in made if path.is_file()):
        name = file.relative_to(project).as_posix()
        if name not in differs_by_design:
            assert (other / name).read_bytes() == file.read_bytes(), name


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"report.title": "Another title"}, {"report"}),
        (
            {"sample.n": 1},
            {"sample@base", "sample@sft", "sample-again", "sample-ppo@1", "sample-ppo@2", "report"},
        ),
        ({"runtime.snapshot_seconds": 5}, set()),
        ({"ppo.lr": 1e-5}, {"ppo@1", "ppo@2", "report"}),
        ({"ppo.seeds": [1, 2, 3]}, {"ppo@3", "sample-ppo@3", "judge", "report"}),
        ({"judge.lr": 0.5}, {"judge-model", "judge", "report"}),
        ({"sft.lr": 0.5}, {"sft", "report"}),
        ({"reward.weak_accuracy": 0.1}, {"reward", "report"}),
    ],
)
def test_a_parameter_invalidates_what_reads_it_and_nothing_else(project, changes, expected):
    try:
        set_params(project, changes)
        assert changed_stages(project) == expected
    finally:
        run(project, "git", "checkout", "--quiet", "params.yaml")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("rlhf/stats.py", {"report"}),
        ("rlhf/report/figures.py", {"report"}),
        ("rlhf/update.py", {"ppo@1", "ppo@2"}),
        ("rlhf/judging.py", {"judge-model", "judge"}),
        ("stages/split.py", {"split"}),
    ],
)
def test_an_edit_invalidates_the_stages_that_import_it_and_nothing_else(project, file, expected):
    try:
        (project / file).write_text((project / file).read_text() + "\n# another line\n")
        assert changed_stages(project) == expected
    finally:
        run(project, "git", "checkout", "--quiet", file)


def test_an_experiment_reruns_ppo_and_what_follows_and_can_be_compared(project):
    try:
        printed = run(project, "dvc", "exp", "run", "-S", "ppo.lr=1e-5", "--name", "slow")
        assert stages_run(printed) == {"ppo@1", "ppo@2", "sample-ppo@1", "sample-ppo@2", "judge", "report"}
        assert read_yaml(project / "params.yaml")["ppo"]["lr"] == 1e-5
        found = json.loads(run(project, "dvc", "metrics", "diff", "HEAD", "--json"))
        assert "reports/metrics/report.json" in found
        assert all(
            isinstance(change["new"], int | float) for file in found.values() for change in file.values()
        )
        view = (
            "--drop",
            ".*",
            "--keep",
            "Experiment|params.yaml:ppo.lr|judge_probability_ppo|reports/metrics/report.json:nll_per_token_ppo",
            "--csv",
        )
        shown = run(project, "dvc", "exp", "show", *view)
        assert "slow" in shown and "ppo.lr" in shown and "judge_probability_ppo_minus_sft" in shown
        assert "report.json:nll_per_token_ppo_minus_sft" in shown
        assert "sft.lr" not in shown
    finally:
        run(project, "git", "checkout", "--quiet", ".")
        run(project, "dvc", "checkout", "--quiet")
    assert changed_stages(project) == set()


def test_the_other_commands_of_the_readme(project, tmp_path):
    verified = run(project, "make", "verify", "STAGES=split report")
    assert re.search(r"(\d+) outputs, \1 identical, 0 different", verified), verified
    run(project, "make", "report-html")
    assert (project / "reports/report.html").exists()
    run(project, "make", "export", "POLICY=ppo-1", f"TO={tmp_path / 'policy'}")
    assert (tmp_path / "policy/adapter_model.safetensors").exists()
    run(project, "make", "bundle", f"ZIP={tmp_path / 'run.zip'}")
    run(project, "make", "restore", f"ZIP={tmp_path / 'run.zip'}")
    prompt = ("--policy", "sft", "--policy", "ppo-1", "the film is")
    assert run(project, "python", "-m", "rlhf.generate", *prompt).count("the film is") >= 2
    assert changed_stages(project) == set()


def test_a_sweep_runs_two_at_a_time_and_gives_what_a_single_run_gives(project, tmp_path):
    settings = ("-S", "ppo.kl_beta=0.1,0.2", "-S", "ppo.seeds=[1]")
    queued = run(project, "dvc", "exp", "run", "--queue", "--name", "sweep", *settings)
    assert queued.count("Queued experiment") == 2
    run(project, "dvc", "queue", "start", "--jobs", "2")
    for name in ("sweep-1", "sweep-2"):
        run(project, "dvc", "queue", "logs", "--follow", name)
    printed = run(project, "make", "compare", "EXPS=HEAD sweep-1 sweep-2")
    assert "reports/compare.md" in printed
    report = (project / "reports/compare.md").read_text()
    assert "sweep-1" in report and "sweep-2" in report and "ppo.kl_beta" in report

    alone = tmp_path / "alone"
    shutil.copytree(project, alone, ignore=shutil.ignore_patterns(".git", ".dvc"))
    set_params(alone, {"ppo.kl_beta": 0.2})
    run(alone, "python", "-m", "stages.ppo", "--seed", "1")
    name = "reports/plots/ppo/1.csv"
    experiments = run(project, "git", "for-each-ref", "--format=%(refname)", "refs/exps").split()
    (sweep,) = [reference for reference in experiments if reference.endswith("/sweep-2")]
    assert run(project, "git", "show", f"{sweep}:{name}") == (alone / name).read_text()
    assert (project / name).read_text() != (alone / name).read_text()
    run(project, "git", "clean", "--quiet", "-d", "--force", "reports")


@pytest.mark.parametrize(
    ("changes", "stage", "message"),
    [
        ({"ppo.lr": -1.0}, "fetch", "params.yaml: ppo.lr is -1.0: expected a finite number above 0"),
        ({"split.sizes.sft": 4800}, "split", "split.sizes needs"),
        ({"split.sha256": {"sft": "0" * 64}}, "split", "split.sha256 differs for judge, ppo, rm"),
        ({"split.rows.label_column": "source"}, "split", "label is 'snippets': expected 0 or 1"),
        ({"fetch.reviews.sha256": {"reviews.csv": "0" * 64}}, "fetch", "reviews.csv"),
        (
            {"model.lora.targets": ["nothing"]},
            "sft",
            "model.lora.targets names 'nothing': expected layers among",
        ),
    ],
)
def test_a_bad_input_gives_one_line_and_loses_nothing(project, changes, stage, message):
    before = changed_stages(project)
    try:
        set_params(project, changes)
        assert message in only_error(project, stage)
    finally:
        run(project, "git", "checkout", "--quiet", "params.yaml")
    assert changed_stages(project) == before
