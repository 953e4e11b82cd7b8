"""Experiments against each other, prefix by prefix, out of a small project of git and DVC made here."""

import re
import sys

import pytest
from architecture import ROOT
from dvc.repo import Repo
from ruamel.yaml import YAML
from synthetic_results import judged_rows, likelihoods
from toy import run

from rlhf import errors, record
from tools import compare

TRACKED = ("artifacts/judged.csv", "artifacts/val_nll", "artifacts/judge_model", "artifacts/reward")


def write(root, shift, lr=2e-4, seeds=(1, 2, 3), reward_model="r", rise=0.0, prefixes=40):
    """What one experiment leaves: its parameters, its judged rows, and the models that scored them."""
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["ppo"] |= {"seeds": list(seeds), "lr": lr}
    params["report"]["resamples"] = 500
    with (root / "params.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(params, file)
    texts = ("a fine, long\r\nfilm", "NA", "")
    rows = judged_rows(seeds=seeds, judge=shift, texts=texts, prefixes=prefixes)
    record.write_csv(root / "artifacts/judged.csv", rows.to_dict("records"))
    for policy, frame in likelihoods([f"ppo-{seed}" for seed in seeds], rise).items():
        record.write_jsonl(root / f"artifacts/val_nll/{policy}.jsonl", frame.to_dict("records"))
    record.write_text(root / "artifacts/judge_model/m", "j")
    record.write_text(root / "artifacts/reward/m", reward_model)


def commit(root):
    with Repo(str(root)) as repo:
        repo.add([str(root / path) for path in TRACKED])
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


@pytest.fixture
def call(project, monkeypatch):
    def called(*names):
        monkeypatch.chdir(project)
        monkeypatch.setattr(sys, "argv", ["compare", *names])
        compare.main()
        return (project / "reports/compare.md").read_text(encoding="utf-8")

    return called


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
    one, other = compare.read("main"), compare.read("exp-a")
    (judge, *_, nll) = compare.compare(one, other).found

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
    main = compare.read("main")
    alone = main._replace(name="other", nll={7: main.nll[1]})
    with pytest.raises(
        errors.UserError, match="main and other: expected at least one PPO seed that both ran"
    ):
        compare.compare(main, alone)
