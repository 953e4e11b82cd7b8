"""`python -m tools.verify`: a hand-made lock, and a small DVC project of three stages."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from architecture import ROOT
from locks import LOCK
from toy import environment, run

from rlhf.config import load
from rlhf.environment import environment as describe
from rlhf.errors import UserError
from rlhf.record import write_json
from tools import verify
from tools.comparison import Comparison, outputs

RUN_FILE = dict.fromkeys(["fetch", "split", "sft", "sample", "judge"])


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


def test_a_lock_s_paths_are_read_as_they_are_from_the_root(tmp_path):
    stage = {"deps": [{"path": "../rlhf/ops.py"}, {"path": "data/a"}], "outs": [{"path": "reports/b"}]}
    (tmp_path / "qa").mkdir()
    (tmp_path / "qa/dvc.lock").write_text(json.dumps({"stages": {"one": stage, "two": {"cmd": "true"}}}))
    lock = verify.read_lock(tmp_path, "qa/dvc.yaml")
    assert [dep["path"] for dep in lock["one"]["deps"]] == ["rlhf/ops.py", "qa/data/a"]
    assert lock["one"]["outs"] == [{"path": "qa/reports/b"}]
    with pytest.raises(UserError, match=r"HEAD has no dvc\.lock: expected a committed DVC project"):
        verify.read_lock(tmp_path, "dvc.yaml")


# A folder with a name that JSON escapes, a metrics file that git holds, an output that can be noise; and a
# second pipeline in a folder of its own, which reads a program and nothing else of the first.
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
BELOW = {
    "d": {"cmd": "python ../a.py", "deps": ["../a.py"], "outs": ["a"]},
    "e": {"cmd": "python ../b.py", "deps": ["../b.py", "a/sub/two"], "outs": ["b.txt", "b.json"]},
}


@pytest.fixture(scope="module")
def committed(tmp_path_factory) -> Path:
    """A project whose results `dvc repro` has made and git holds."""
    folder = tmp_path_factory.mktemp("committed")
    for name, text in PROGRAMS.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "dvc.yaml").write_text(json.dumps({"stages": PROJECT}))
    (folder / "below").mkdir()
    (folder / "below/dvc.yaml").write_text(json.dumps({"stages": BELOW}))
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text("[core]\n    analytics = false\n    check_update = false\n")
    (folder / ".dvc/.gitignore").write_text("/tmp\n/cache\n/config.local\n")
    run(folder, "git", "init", "--quiet")
    run(folder, "dvc", "repro", "dvc.yaml", "below/dvc.yaml")
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
    outs = outputs(verify.read_lock(Path(), "dvc.yaml"))
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


def test_a_pipeline_in_a_folder_is_reproduced_alone_there(project, capfd):
    assert verify.verify([], run_file="below/dvc.yaml") == 0
    printed = capfd.readouterr().out
    assert statuses(printed) == dict.fromkeys(["below/a", "below/b.txt", "below/b.json"], "identical")
    assert "Running stage 'below/dvc.yaml:d'" in printed and "Running stage 'a'" not in printed


def test_one_stage_of_a_pipeline_in_a_folder_runs_on_an_input_copied_from_there(project, capfd):
    assert verify.verify(["e"], run_file="below/dvc.yaml") == 0
    printed = capfd.readouterr().out
    assert statuses(printed) == {"below/b.txt": "identical", "below/b.json": "identical"}
    assert "Running stage 'below/dvc.yaml:d'" not in printed


def test_a_user_s_mistake_is_one_line_and_status_1(project):
    command = ("python", "-m", "tools.verify", "--run-file", "below/dvc.yaml", "c")
    printed = run(project, *command, expect=1, PYTHONPATH=str(ROOT))
    assert printed.splitlines()[-1] == "error: stage 'c' is unknown: expected some of d, e"
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
