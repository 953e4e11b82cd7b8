"""`python -m tools.verify`: hand-made locks and numbers, and a small DVC project of three stages."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from architecture import ROOT
from ruamel.yaml import YAML
from toy import environment, run

from rlhf.config import load
from rlhf.environment import environment as describe
from rlhf.errors import UserError
from rlhf.record import write_json
from tools import verify
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

yaml = YAML(typ="safe", pure=True)


def stage(deps: dict[str, str], outs: dict[str, str]) -> dict:
    """A stage as dvc.lock has it; each argument is path -> hash."""
    return {
        "deps": [{"path": path, "md5": md5} for path, md5 in deps.items()],
        "outs": [{"path": path, "md5": md5} for path, md5 in outs.items()],
    }


# fetch -> split -> sft -> sample@a, sample@b -> judge: as in this project, and none of split's parts in git.
LOCK = {
    "judge": stage({"artifacts/samples": "s.dir"}, {"judged.csv": "j"}),
    "fetch": {"outs": [{"path": "manifest.json", "md5": "m"}]},
    "split": stage({"manifest.json": "m"}, {"data/split": "d.dir", "data/split.json": "p"}),
    "sft": stage({"rlhf/models.py": "c", "data/split/sft.jsonl": "x"}, {"artifacts/sft": "f.dir"}),
    "sample@a": stage({"artifacts/sft": "f.dir"}, {"artifacts/samples/a.jsonl": "1"}),
    "sample@b": stage({"artifacts/sft": "f.dir"}, {"artifacts/samples/b.jsonl": "2"}),
}
RUN_FILE = dict.fromkeys(["fetch", "split", "sft", "sample", "judge"])


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
    ],
)
def test_every_kind_of_metric_has_its_tolerance(name, expected):
    assert tolerance(f"reports/metrics/{name}", -2.5) == expected


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


def test_in_this_project_fetch_and_split_are_the_same_on_every_machine():
    lock = yaml.load((ROOT / "dvc.lock").read_text(encoding="utf-8"))["stages"]
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


def test_the_exit_status_and_the_counts_follow_from_the_problems(capsys):
    rows = [Comparison("a", "1", "1"), Comparison("b.json", "1", "2")]
    texts = {"b.json": ('{"length": 1}', '{"length": 2}')}
    assert verify.conclude(rows, set(), texts) == 1
    assert capsys.readouterr().out.endswith("\n2 outputs, 1 identical, 1 different\n")
    assert verify.conclude(rows, {"b.json"}, texts) == 0
    assert "every metric is within its tolerance\n2 outputs" in capsys.readouterr().out


def test_other_hardware_is_named_with_the_stages_it_concerns(capsys):
    changes = verify.changed({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "4", "d": "5"})
    assert changes == ["b: 2 then, 4 now", "c: 3 then, missing now", "d: missing then, 5 now"]
    loose = verify.loose_outputs(LOCK, changes)
    assert loose == {"artifacts/sft", "artifacts/samples/a.jsonl", "artifacts/samples/b.jsonl", "judged.csv"}
    printed = capsys.readouterr().out
    assert "\n  b: 2 then, 4 now\n" in printed and "\n  judge, sft, sample@a, sample@b\n" in printed
    assert verify.loose_outputs(LOCK, []) == set()


def test_the_recorded_environment_is_held_against_the_present_one(tmp_path, capsys):
    assert verify.changed_environment(tmp_path) == []
    assert "the hardware cannot be compared" in capsys.readouterr().out
    shutil.copy(ROOT / "params.yaml", tmp_path)
    runtime = load(tmp_path / "params.yaml").runtime
    recorded = describe(runtime.device, runtime.threads)
    write_json(tmp_path / "reports/environment.json", recorded)
    assert verify.changed_environment(tmp_path) == []
    write_json(tmp_path / "reports/environment.json", recorded | {"processor": "another"})
    assert verify.changed_environment(tmp_path) == [f"processor: another then, {recorded['processor']} now"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], list(LOCK)),
        (["judge", "fetch"], ["fetch", "judge"]),
        (["judge", "sample"], ["sample@a", "sample@b", "judge"]),
        (["sample@b", "sample@b"], ["sample@b"]),
    ],
)
def test_stages_are_taken_in_the_order_of_the_run_file_and_a_matrix_is_all_its_entries(names, expected):
    assert verify.expand(names, RUN_FILE, LOCK) == expected


def test_an_unknown_stage_is_answered_with_the_known_ones():
    expected = "stage 'ppo' is unknown: expected some of fetch, judge, sample, sample@a, sample@b, sft, split"
    with pytest.raises(UserError) as error:
        verify.expand(["sft", "ppo"], RUN_FILE, LOCK)
    assert str(error.value) == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["fetch"], {}),
        (list(LOCK), {}),
        (["sft"], {"data/split/sft.jsonl": "x"}),
        (["sample@a"], {"artifacts/sft": "f.dir"}),
        (["judge"], {"artifacts/samples/a.jsonl": "1", "artifacts/samples/b.jsonl": "2"}),
        (["sample@a", "judge"], {"artifacts/sft": "f.dir", "artifacts/samples/b.jsonl": "2"}),
    ],
)
def test_inputs_are_what_other_stages_gave(chosen, expected):
    assert verify.inputs(LOCK, chosen) == expected


def test_inputs_are_copied_unless_the_clone_has_them(tmp_path, monkeypatch):
    here, clone = tmp_path / "here", tmp_path / "clone"
    (here / "folder/sub").mkdir(parents=True)
    (here / "folder/sub/file").write_text("x")
    (here / "folder/top").write_text("y")
    clone.mkdir()
    (clone / "held").write_text("from git")
    monkeypatch.chdir(here)
    md5 = verify.path_md5(Path("folder"))
    verify.copy_inputs({"folder/sub/file": "inside what is copied", "folder": md5, "held": "1"}, clone)
    assert verify.path_md5(clone / "folder") == md5
    assert (clone / "held").read_text() == "from git"


@pytest.mark.parametrize(("text", "what"), [(None, "missing"), ("other", "not what dvc.lock says")])
def test_an_input_that_is_missing_or_different_is_one_line(tmp_path, monkeypatch, text, what):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("input").write_text(text)
    with pytest.raises(UserError) as error:
        verify.copy_inputs({"input": hashlib.md5(b"right").hexdigest()}, tmp_path / "clone")
    advice = "run `dvc repro` or `dvc pull` first, or verify without naming stages"
    assert str(error.value) == f"input is {what}: {advice}"


# A folder with a name that JSON escapes, a metrics file that git holds, and an output that can be noise.
PROGRAMS = {
    "a.py": """
from pathlib import Path
for name in ("ß", "sub/two", "B"):
    Path("a", name).parent.mkdir(parents=True, exist_ok=True)
    Path("a", name).write_text(name, encoding="utf-8")
""",
    "b.py": """
import json
n = len(open("a/sub/two").read())
json.dump({"n": n, "half": n / 2}, open("b.json", "w"))
open("b.txt", "w").write("b" * n)
""",
    "c.py": """
import os
data = os.urandom(9) if "NOISE" in os.environ else open("b.txt", "rb").read()
open("c.bin", "wb").write(data)
""",
}
PROJECT = {
    "a": {"cmd": "python a.py", "deps": ["a.py"], "outs": ["a"]},
    "b": {
        "cmd": "python b.py",
        "deps": ["b.py", "a/sub/two"],
        "outs": ["b.txt"],
        "metrics": [{"b.json": {"cache": False}}],
    },
    "c": {"cmd": "python c.py", "deps": ["c.py", "b.txt"], "outs": ["c.bin"]},
}


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> Path:
    """A project whose results `dvc repro` has made and git holds."""
    folder = tmp_path_factory.mktemp("committed")
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "dvc.yaml").write_text(json.dumps({"stages": PROJECT}))
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text("[core]\n    analytics = false\n    check_update = false\n")
    (folder / ".dvc/.gitignore").write_text("/tmp\n/cache\n/config.local\n")
    run(folder, "git", "init", "--quiet")
    run(folder, "dvc", "repro")
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "--quiet", "-m", "results")
    return folder


@pytest.fixture
def project(committed, tmp_path, monkeypatch) -> Path:
    """That project as the working directory, in a clean shell, with a temporary folder that is empty."""
    monkeypatch.chdir(committed)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return committed


def statuses(printed: str) -> dict[str, str]:
    """Output -> identical or different, of the lines that compare."""
    lines = [line.split() for line in printed.splitlines()]
    return {words[0]: words[3] for words in lines if words[3:] in (["identical"], ["different"])}


def test_folders_are_hashed_as_dvc_hashes_them(project):
    outs = {
        out["path"]: out["md5"] for s in verify.read_stages(Path("dvc.lock")).values() for out in s["outs"]
    }
    assert set(outs) == {"a", "b.txt", "b.json", "c.bin"}
    assert outs["a"].endswith(".dir")
    assert {path: verify.path_md5(project / path) for path in outs} == outs


def test_a_committed_result_is_reproduced_in_a_clone_that_goes(project, tmp_path, capfd):
    assert verify.verify([]) == 0
    printed = capfd.readouterr().out
    assert statuses(printed) == dict.fromkeys(["a", "b.txt", "b.json", "c.bin"], "identical")
    assert printed.endswith("4 outputs, 4 identical, 0 different\n")
    assert printed.startswith("note: HEAD has no reports/environment.json")
    assert [f"Running stage '{name}'" in printed for name in "abc"] == [True] * 3
    assert list(tmp_path.iterdir()) == []
    assert run(project, "git", "status", "--porcelain") == ""


def test_another_committed_number_is_shown_and_one_stage_runs_on_a_copied_input(project, tmp_path, capfd):
    before = run(project, "git", "rev-parse", "HEAD").strip()
    Path("b.json").write_text('{"n": 7, "half": 3.0}')
    run(project, "git", "commit", "--quiet", "-a", "-m", "tampered")
    Path("b.py").write_text("an uncommitted edit")
    try:
        assert verify.verify(["b"], str(tmp_path / "kept")) == 1
    finally:
        run(project, "git", "reset", "--quiet", "--hard", before)
    printed = capfd.readouterr().out
    assert printed.startswith("note: uncommitted changes are not part of what is verified\n")
    assert statuses(printed) == {"b.txt": "identical", "b.json": "different"}
    assert "largest difference: 0.5 in half\n" in printed
    assert printed.endswith("2 outputs, 1 identical, 1 different\n")
    assert "Running stage 'a'" not in printed and "Running stage 'c'" not in printed
    assert json.loads((tmp_path / "kept/b.json").read_text()) == {"n": 7, "half": 3.5}


def test_a_stage_that_writes_noise_is_different(project, monkeypatch, capfd):
    monkeypatch.setenv("NOISE", "1")
    assert verify.verify(["c"]) == 1
    printed = capfd.readouterr().out
    assert statuses(printed) == {"c.bin": "different"}
    assert printed.endswith("1 outputs, 0 identical, 1 different\n")


def test_a_user_s_mistake_is_one_line_and_status_1(project):
    printed = run(project, "python", "-m", "tools.verify", "d", expect=1, PYTHONPATH=str(ROOT))
    assert printed.splitlines()[-1] == "error: stage 'd' is unknown: expected some of a, b, c"
    assert "Traceback" not in printed


def test_a_folder_to_keep_must_be_new_and_a_project_must_be_a_repository(project, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="expected a folder that does not exist yet"):
        verify.verify([], str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"git status failed: .*not a git repository"):
        verify.verify([])


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError])
def test_the_clone_goes_whatever_happens(project, tmp_path, monkeypatch, error):
    def fail(command: list[str], folder: Path, variables: dict[str, str]) -> int:
        assert folder.parent == tmp_path and (folder / "dvc.yaml").exists()
        raise error

    monkeypatch.setattr(verify, "run_to_the_end", fail)
    with pytest.raises(error):
        verify.verify([])
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_an_error(project, monkeypatch):
    monkeypatch.setattr(verify, "run_to_the_end", lambda *_: 255)
    with pytest.raises(UserError, match="dvc repro ended with status 255"):
        verify.verify([])
