"""Experiments against each other, text by text, out of small projects of git and DVC made here."""

import re
import sys

import pytest
from architecture import ROOT
from dvc.repo import Repo
from synthetic_answers import answer_rows
from synthetic_results import judged_rows, likelihoods, write_params
from toy import run, set_params

from rlhf import errors, record
from rlhf.report import answers
from tools import compare
from tools.compare import ANSWERS, REVIEWS

TRACKED = ("artifacts/judged.csv", "artifacts/val_nll", "artifacts/judge_model", "artifacts/reward")
QA_TRACKED = ("qa/artifacts/judged.csv", "qa/artifacts/val_nll", "qa/artifacts/reward")
NEVER_RUN = "stages: {judge: {cmd: judge, outs: [artifacts/judged.csv]}}\n"


def write(root, shift, lr=2e-4, seeds=(1, 2, 3), reward_model="r", rise=0.0, prefixes=40):
    """What one experiment leaves: its parameters, its judged rows, and the models that scored them."""
    write_params(root, "params.yaml", seeds, resamples=500)
    set_params(root, {"ppo.lr": lr})
    texts = ("a fine, long\r\nfilm", "NA", "")
    rows = judged_rows(seeds=seeds, judge=shift, texts=texts, prefixes=prefixes)
    write_artifacts(root, rows, seeds, reward_model, rise)
    record.write_text(root / "artifacts/judge_model/m", "j")


def write_qa(root, heuristic, seeds=(1, 2, 3), reward_model="r", rise=0.0, questions=40):
    """What one experiment of the second pipeline leaves."""
    write_params(root / "qa", "qa/params.yaml", seeds, resamples=500)
    rows = answer_rows(seeds=seeds, heuristic=heuristic, questions=questions)
    write_artifacts(root / "qa", rows, seeds, reward_model, rise)


def write_artifacts(folder, rows, seeds, reward_model, rise):
    """What the stages of either pipeline leave: judged rows, likelihoods, and the reward model."""
    record.write_csv(folder / "artifacts/judged.csv", rows.to_dict("records"))
    for policy, frame in likelihoods([f"ppo-{seed}" for seed in seeds], rise).items():
        record.write_jsonl(folder / f"artifacts/val_nll/{policy}.jsonl", frame.to_dict("records"))
    record.write_text(folder / "artifacts/reward/m", reward_model)


def commit(root, tracked=TRACKED):
    with Repo(str(root)) as repo:
        repo.add([str(root / path) for path in tracked])
    run(root, "git", "add", ".")
    run(root, "git", "commit", "--quiet", "-m", "results")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """main; exp-a, a branch whose PPO does better; exp-b, DVC's own, with other seeds and reward model."""
    root = tmp_path_factory.mktemp("project")
    run(root, "git", "init", "--quiet", "--initial-branch", "main")
    Repo.init(str(root)).close()
    write(root, (0.2, 0.2, 0.2))
    commit(root)
    base = run(root, "git", "rev-parse", "HEAD").strip()
    run(root, "git", "checkout", "--quiet", "-b", "exp-a")
    write(root, (0.3, 0.31, 0.32), lr=1e-3, rise=0.1)
    commit(root)
    run(root, "git", "checkout", "--quiet", "--detach", base)
    write(root, (0.2, 0.2, 0.2), seeds=(3, 1), reward_model="another")
    commit(root)
    run(root, "git", "update-ref", f"refs/exps/{base[:2]}/{base[2:]}/exp-b", "HEAD")
    run(root, "git", "checkout", "--quiet", "main")
    write(root, (0.2, 0.2, 0.2), prefixes=39)  # the working tree, not committed
    return root


@pytest.fixture(scope="module")
def qa_project(tmp_path_factory):
    """planned, which has not run; main; exp-a, whose PPO does better; exp-b, of another reward model."""
    root = tmp_path_factory.mktemp("qa_project")
    run(root, "git", "init", "--quiet", "--initial-branch", "main")
    Repo.init(str(root)).close()
    (root / "qa").mkdir()
    write_params(root / "qa", "qa/params.yaml", (1, 2, 3))
    record.write_text(root / "qa/dvc.yaml", NEVER_RUN)
    run(root, "git", "add", ".")
    run(root, "git", "commit", "--quiet", "-m", "planned")
    run(root, "git", "branch", "planned")
    (root / "qa/dvc.yaml").unlink()
    write_qa(root, (1.0, 1.0, 1.0))
    commit(root, QA_TRACKED)
    run(root, "git", "checkout", "--quiet", "-b", "exp-a")
    write_qa(root, (1.5, 2.0, 2.5), rise=0.1)
    commit(root, QA_TRACKED)
    run(root, "git", "checkout", "--quiet", "-b", "exp-b", "main")
    write_qa(root, (1.0, 1.0), seeds=(3, 1), reward_model="another")
    commit(root, QA_TRACKED)
    run(root, "git", "checkout", "--quiet", "main")
    write_qa(root, (1.0, 1.0, 1.0), questions=39)  # the working tree, not committed
    return root


@pytest.fixture
def called(monkeypatch):
    def write(root, *arguments):
        monkeypatch.chdir(root)
        monkeypatch.setattr(sys, "argv", ["compare", *arguments])
        compare.main()
        folder = root / "qa" if "qa" in arguments else root
        return (folder / "reports/compare.md").read_text(encoding="utf-8")

    return write


@pytest.fixture
def call(project, called):
    return lambda *names: called(project, *names)


@pytest.fixture
def call_qa(qa_project, called):
    return lambda *names: called(qa_project, "--pipeline", "qa", *names)


def test_each_experiment_is_compared_to_the_first_on_the_same_prefixes(call):
    text = call("main", "exp-a", "exp-b")
    opening, better, same = text.split("\n## ")
    assert "The control is main." in opening and "all 15 tests" in " ".join(opening.split())
    assert better.startswith("exp-a - main\n")
    # The synthetic rows differ by the shifts alone: 0.1, 0.11, 0.12 on every prefix; NLL by 0.1.
    assert "**Shown** on 40 prefixes: Judge, full text rose by 0.110 [" in better
    assert "NLL of held-out reviews rose by 0.100 [" in better
    assert "**Not shown**: a difference in VADER, full text" in better
    assert "| `ppo.lr` | 0.0002 | 0.001 |" in better and "ppo.steps" not in better
    assert re.search(r"\| \+0\.100 \| \+0\.110 \| \+0\.120 \| 0\.010 \|", better)
    assert same.startswith("exp-b - main\n") and "no difference." in same
    assert not re.search(r"\bNone\b|(?i:\bnan\b)", text)


def test_seeds_that_one_side_lacks_and_measures_of_other_models_are_left_out(call):
    section = call("main", "exp-b").split("\n## ")[1]
    assert "PPO 1 | PPO 3 |" in section and "PPO 2" not in section
    assert "Left out, since other models scored the two: Reward." in section
    assert "| Reward" not in section and "| Judge, full text" in section
    assert "| `ppo.seeds` | \\[1, 2, 3\\] | \\[3, 1\\] |" in section


def test_scores_are_paired_by_prefix_seed_and_sample(project, monkeypatch):
    monkeypatch.chdir(project)
    one, other = (compare.read(name, REVIEWS) for name in ("main", "exp-a"))
    (judge, *_, nll) = compare.compare(one, other, REVIEWS).found

    def means(experiment):
        rows = experiment.judged[experiment.judged["policy"].str.startswith("ppo-")]
        return rows.groupby("id")["judge_full"].mean()

    differences = (means(other) - means(one)).to_numpy()
    assert judge.result.mean == pytest.approx(differences.mean(), abs=1e-12)
    # Both have the same noise, of 0.05 and more: only row for row it cancels.
    assert judge.bca.high - judge.bca.low < 1e-9 and one.judged["judge_full"].std() > 0.05
    assert (judge.result.n, nll.result.n) == (40, 40)
    assert one.judged["continuation"].str.contains("long\r\nfilm").any()


def test_the_same_revisions_give_the_same_bytes(call):
    assert call("main", "exp-a") == call("main", "exp-a")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("main",), "revisions main: expected two or more, none twice"),
        (("main", "exp-a", "main"), "none twice"),
        (("main", "exp-z"), "exp-z: unknown Git revision"),
        (("main", "workspace"), "main and workspace: expected the same test prefixes, 39 of 40 are common"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(call, names, message):
    with pytest.raises(errors.UserError, match=message) as found:
        call(*names)
    assert "\n" not in str(found.value)


def test_rows_that_the_cache_has_lost_are_asked_for(call, project):
    hidden = project / ".dvc/cache.hidden"
    (project / ".dvc/cache").rename(hidden)
    try:
        with pytest.raises(errors.UserError, match=r"main: artifacts/\S+ is not in DVC's cache: `dvc pull"):
            call("main", "exp-a")
    finally:
        hidden.rename(project / ".dvc/cache")


def test_experiments_without_a_common_seed_are_refused(project, monkeypatch):
    monkeypatch.chdir(project)
    main = compare.read("main", REVIEWS)
    alone = main._replace(name="other", nll={7: main.nll[1]})
    with pytest.raises(
        errors.UserError, match="main and other: expected at least one PPO seed that both ran"
    ):
        compare.compare(main, alone, REVIEWS)


def test_answers_are_compared_question_by_question(call_qa, qa_project):
    text = call_qa("main", "exp-a", "exp-b")
    opening, better, same = text.split("\n## ")
    words = " ".join(opening.split())
    assert "all 19 tests" in words and "the same test questions" in words and "on these questions" in words
    assert "no person judged these answers. Columns are" in words
    # Half a point of the shift is one point of the score: +1, +2, +3 on every question; NLL by 0.1.
    assert "**Shown** on 40 questions: Heuristic score rose by 2.00 [" in better
    assert "NLL of reference answers rose by 0.100 [" in better
    assert "**Not shown**: a difference in Reward, Token F1, chrF, Length" in better
    assert re.search(r"\| \+1\.00 \| \+2\.00 \| \+3\.00 \| 1\.00 \|", better)
    assert same.startswith("exp-b - main\n") and "no difference." in same
    assert not re.search(r"\bNone\b|(?i:\bnan|prefix|review|judge,|vader|sentiment)", text)
    assert not (qa_project / "reports").exists()


def test_answers_are_paired_by_question_seed_and_sample(qa_project, monkeypatch):
    monkeypatch.chdir(qa_project)
    one, other = (compare.read(name, ANSWERS) for name in ("main", "exp-a"))
    shift = other.judged["policy"].map({"ppo-1": 0.01, "ppo-2": 0.02, "ppo-3": 0.06}).fillna(0)
    other = other._replace(judged=other.judged.assign(token_f1=other.judged["token_f1"] + shift))
    found = {c.measure.key: c for c in compare.compare(one, other, ANSWERS).found}
    assert list(found) == [measure.key for measure in answers.MEASURES]
    for key in ("heuristic", "token_f1"):
        merged = one.judged.merge(other.judged, on=["policy", "id", "sample"])
        rows = merged[merged["policy"].str.startswith("ppo-")]
        mean = (rows[f"{key}_y"] - rows[f"{key}_x"]).mean()
        assert mean > 0.02 and found[key].result.mean == pytest.approx(mean, abs=1e-12)
        # Only row for row the noise of the two cancels.
        assert found[key].bca.high - found[key].bca.low < 1e-9 and one.judged[key].std() > 0.05


def test_reward_is_left_out_where_the_reward_models_of_answers_differ(call_qa):
    section = call_qa("main", "exp-b").split("\n## ")[1]
    assert "Left out, since other models scored the two: Reward." in section
    assert "| Reward" not in section and "| Heuristic score (" in section
    assert "PPO 1 | PPO 3 |" in section and "PPO 2" not in section


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("main", "workspace"), "main and workspace: expected the same test questions, 39 of 40 are common"),
        (("main", "planned"), "planned: expected a whole run .*, qa/artifacts/judged.csv is not there"),
        (("main",), "revisions main: expected two or more, none twice"),
    ],
)
def test_answers_that_cannot_be_compared_are_said_in_one_line(call_qa, names, message):
    with pytest.raises(errors.UserError, match=message) as found:
        call_qa(*names)
    assert "\n" not in str(found.value)


def test_a_revision_without_the_second_pipeline_is_said_in_one_line(project, called):
    with pytest.raises(
        errors.UserError, match=r"main: expected a whole run of the pipeline, qa/params\.yaml is not there$"
    ):
        called(project, "main", "exp-a", "--pipeline", "qa")


@pytest.mark.parametrize("params", ["a: [", "[]", "ppo: {}", "ppo: {seeds: 3}", "ppo: {seeds: [{}]}"])
def test_parameters_that_are_none_are_said_in_one_line(qa_project, called, params):
    path = qa_project / "qa/params.yaml"
    before = path.read_bytes()
    try:
        path.write_text(params)
        with pytest.raises(errors.UserError, match=r"^workspace: expected ") as found:
            called(qa_project, "main", "workspace", "--pipeline", "qa")
    finally:
        path.write_bytes(before)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("column", "what"),
    [("question", "test questions"), ("reference", "reference answers to the test questions")],
)
def test_the_same_ids_with_other_texts_are_refused(qa_project, monkeypatch, column, what):
    monkeypatch.chdir(qa_project)
    main = compare.read("main", ANSWERS)
    texts = main.judged[column].where(main.judged["id"] != "test-007", "Another?")
    other = main._replace(name="other", judged=main.judged.assign(**{column: texts}))
    with pytest.raises(
        errors.UserError, match=f"main and other: expected the same {what}, 39 of 41 are common"
    ):
        compare.compare(main, other, ANSWERS)


@pytest.mark.parametrize(("given", "option"), [((), ""), (("PIPELINE=qa",), " --pipeline qa")])
def test_make_passes_the_pipeline_on(given, option):
    printed = run(ROOT, "make", "--dry-run", "compare", *given, "EXPS=main exp-a")
    assert f"python -m tools.compare{option} main exp-a" in " ".join(printed.split())
