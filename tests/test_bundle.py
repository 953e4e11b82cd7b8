"""`python -m tools.bundle`: a real DVC project packed and put back, and bundles that nobody should trust."""

import json
import random
import re
import sys
import zipfile
from pathlib import Path

import pytest
from architecture import ROOT
from malformed_bundles import FILES, MALFORMED, RUN_FILE, bundled
from toy import run

from rlhf import errors
from tools import bundle


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """The root of a clone without outputs, as the working directory; DVC itself is left out."""
    (tmp_path / "project/.dvc").mkdir(parents=True)
    (tmp_path / "project/dvc.yaml").write_bytes(RUN_FILE)
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(bundle, "give_to_cache", list)
    return tmp_path / "project"


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in sorted(found.items())}


def contents(folder: Path) -> dict[str, bytes]:
    """The files of `tree` alone."""
    return {name: content for name, content in tree(folder).items() if content is not None}


def call(monkeypatch, *arguments: str) -> int:
    """Run the program here and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["bundle", *map(str, arguments)])
    try:
        errors.run(bundle.main)
    except SystemExit as end:
        return end.code
    return 0


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_bundle_is_one_line_and_nothing_is_written(project, monkeypatch, capsys, what):
    make, words = MALFORMED[what]
    write(project.parent / "bundle.zip", make())
    before = tree(project.parent)
    assert call(monkeypatch, "restore", "../bundle.zip", "--force") == 1
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(f"error: .*{words}.*\n", err), err
    assert tree(project.parent) == before


def test_random_damage_is_one_line_and_nothing_is_written_or_does_no_harm(project, monkeypatch, capsys):
    """A damaged byte is found, or lies where it says nothing: dates, permissions, comments."""
    sound, draws, refused = bundled(), random.Random(0), 0
    for _ in range(300):
        data, at = bytearray(sound), draws.randrange(len(sound))
        data[at : at + draws.choice((1, 2, 9))] = draws.randbytes(draws.choice((0, 1, 2, 9)))
        write(project.parent / "bundle.zip", data)
        status = call(monkeypatch, "restore", "../bundle.zip")
        err = capsys.readouterr().err
        assert re.fullmatch("error: .*\n" if status == 1 else "", err), err
        assert contents(project) == ({"dvc.yaml": RUN_FILE} if status == 1 else FILES)
        for name in [] if status == 1 else FILES.keys() - {"dvc.yaml"}:
            Path(name).unlink()
        refused += status
    assert 200 < refused < 300


def test_a_sound_bundle_is_put_in_place_and_again_changes_nothing(project, monkeypatch, capsys):
    write(project.parent / "bundle.zip", bundled())
    for _ in range(2):
        assert call(monkeypatch, "restore", "../bundle.zip") == 0
        assert contents(project) == FILES
    assert "restored 6 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("params.yaml", b"seed: 1\n"),
        ("artifacts/sft/weights", b"mine"),
        ("artifacts/sft/more", b"not in the bundle"),
        ("artifacts/sft/sub/.hidden", b"not in the bundle"),
    ],
)
def test_other_work_is_replaced_by_force_alone(project, monkeypatch, capsys, name, content):
    write(project.parent / "bundle.zip", bundled())
    write(project / name, content)
    before = tree(project)
    assert call(monkeypatch, "restore", "../bundle.zip") == 1
    expected = f"error: {name} is here with other content; --force takes the bundle's\n"
    assert capsys.readouterr().err == expected
    assert tree(project) == before
    assert call(monkeypatch, "restore", "../bundle.zip", "--force") == 0
    assert contents(project) == FILES


def test_the_first_of_several_is_named_and_files_beside_the_outputs_stay(project, monkeypatch, capsys):
    write(project.parent / "bundle.zip", bundled())
    for name in ("reports/n.json", "artifacts/sft/weights", "artifacts/other", "reports/mine.md"):
        write(project / name, b"mine")
    assert call(monkeypatch, "restore", "../bundle.zip") == 1
    assert capsys.readouterr().err.startswith("error: artifacts/sft/weights is here with other content")
    assert call(monkeypatch, "restore", "../bundle.zip", "--force") == 0
    assert contents(project) == FILES | {"artifacts/other": b"mine", "reports/mine.md": b"mine"}


def test_commands_are_never_taken_from_a_bundle(project, monkeypatch, capsys):
    write(project.parent / "bundle.zip", bundled(FILES | {"dvc.yaml": b"stages: {a: {cmd: touch hacked}}\n"}))
    assert call(monkeypatch, "restore", "../bundle.zip") == 1
    assert capsys.readouterr().err.startswith("error: dvc.yaml is here with other content")
    assert call(monkeypatch, "restore", "../bundle.zip", "--force") == 0
    assert "note: dvc.yaml is kept as it is here" in capsys.readouterr().out
    assert contents(project) == FILES


def link_outside(project: Path) -> None:
    (project.parent / "outside").mkdir()
    (project / "artifacts").symlink_to(project.parent / "outside")


IN_THE_WAY = {
    "a folder": lambda project: (project / "reports/n.json").mkdir(parents=True),
    "a file for a folder": lambda project: write(project / "artifacts/sft", b""),
    "a link to a folder outside": link_outside,
    "a link to a file outside": lambda project: (project / "params.yaml").symlink_to("/dev/null"),
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_is_in_the_way_is_never_replaced(project, monkeypatch, capsys, what):
    write(project.parent / "bundle.zip", bundled())
    IN_THE_WAY[what](project)
    before = tree(project.parent)
    assert call(monkeypatch, "restore", "../bundle.zip", "--force") == 1
    assert "cannot be put in its place" in capsys.readouterr().err
    assert tree(project.parent) == before


def test_a_missing_bundle_and_a_folder_that_is_no_project_are_one_line(project, monkeypatch, capsys):
    assert call(monkeypatch, "restore", "none.zip") == 1
    assert capsys.readouterr().err == "error: No such file or directory: none.zip\n"
    (project / "dvc.yaml").unlink()
    assert call(monkeypatch, "restore", "none.zip") == 1
    assert capsys.readouterr().err.startswith("error: dvc.yaml or .dvc is not there: run in a clone")


def test_a_run_file_here_that_is_none_is_one_line(project, monkeypatch, capsys):
    write(project.parent / "bundle.zip", bundled())
    write(project / "dvc.yaml", b"stages: [")
    assert call(monkeypatch, "restore", "../bundle.zip") == 1
    assert capsys.readouterr().err == "error: dvc.yaml is not a file of DVC's with stages\n"


def changed(name: str, content: bytes | None) -> dict[str, bytes]:
    return {n: c for n, c in (FILES | {name: content}).items() if c is not None}


@pytest.mark.parametrize(
    ("files", "target", "message"),
    [
        (changed("reports/n.json", None), "b.zip", "output reports/n.json is missing: run `dvc repro` or "),
        (changed("reports/n.json", b"2"), "b.zip", "output reports/n.json is not what dvc.lock says: run "),
        (changed("artifacts/sft/more", b"2"), "b.zip", "output artifacts/sft is not what dvc.lock says"),
        (changed("artifacts/sft/weights", b""), "b.zip", "output artifacts/sft is not what dvc.lock says"),
        (changed("dvc.lock", None), "b.zip", "dvc.lock is not there: run from the project's root, after"),
        (changed("params.yaml", None), "b.zip", "params.yaml is not there: run from the project's root"),
        (changed("dvc.lock", b"[]"), "b.zip", "dvc.lock is not a lock file of DVC"),
        (FILES, "params.yaml", "params.yaml: expected a file name that ends in .zip"),
        (FILES | {"b.zip": b"other work"}, "b.zip", "b.zip is there: expected a new name"),
        (FILES | {"b.zip/kept": b"other work"}, "b.zip", "b.zip is there: expected a new name"),
        (FILES, "b.zip", "git rev-parse failed: "),
    ],
)
def test_what_cannot_be_packed_is_one_line(project, monkeypatch, capsys, files, target, message):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.parent))
    for name, content in files.items():
        write(project / name, content)
    before = tree(project)
    assert call(monkeypatch, "pack", target) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1
    assert tree(project) == before


STAGES = """
stages:
  sft:
    cmd: mkdir artifacts/sft && cp params.yaml artifacts/sft/weights
    params: [sft.lr]
    outs: [artifacts/sft]
  ppo:
    cmd: cp artifacts/sft/weights artifacts/ppo
    params: [ppo.lr]
    deps: [artifacts/sft]
    outs: [artifacts/ppo]
  report:
    cmd: cp artifacts/ppo reports/n.txt
    deps: [artifacts/ppo]
    outs: [{reports/n.txt: {cache: false}}]
"""
BELOW = """
stages:
  preferences:
    cmd: cp data.txt artifacts/out
    deps: [data.txt]
    params: [ppo.lr]
    outs: [artifacts/out]
"""


def test_a_real_experiment_goes_on_elsewhere_and_only_what_a_change_invalidates_reruns(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    settings = b"[core]\n    analytics = false\n    check_update = false\n"
    ignored = b"/tmp\n/cache\n/config.local\n"
    files = {"dvc.yaml": STAGES.encode(), "params.yaml": FILES["params.yaml"], "reports/.keep": b""}
    files |= {"below/dvc.yaml": BELOW.encode(), "below/data.txt": b"held by git\n"}
    files |= {"below/params.yaml": (ROOT / "qa/params.yaml").read_bytes(), "below/artifacts/.keep": b""}
    files |= {"artifacts/.keep": b"", ".dvc/config": settings, ".dvc/.gitignore": ignored}
    for name, content in files.items():
        write(here / name, content)
    run(here, "git", "init", "--quiet")
    run(here, "dvc", "repro", "dvc.yaml", "below/dvc.yaml")
    run(here, "git", "add", ".")
    run(here, "git", "commit", "--quiet", "-m", "results")
    commit = run(here, "git", "rev-parse", "HEAD").strip()
    program = ("python", "-m", "tools.bundle")
    for name in ("one.zip", "two.zip"):
        printed = run(here, *program, "pack", f"../{name}", PYTHONPATH=str(ROOT))
    assert printed.startswith("../two.zip: 6 files, ")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        members = archive.infolist()
        assert json.loads(archive.read("MANIFEST.json"))["commit"] == commit
    names = ["artifacts/ppo", "artifacts/sft/weights", "dvc.lock", "dvc.yaml", "params.yaml", "reports/n.txt"]
    assert [member.filename for member in members] == ["MANIFEST.json", *names]
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}

    for name in ("there", "changed"):
        run(tmp_path, "git", "clone", "--quiet", "here", name)
    printed = run(there, *program, "restore", "../one.zip", PYTHONPATH=str(ROOT))
    assert printed == (
        f"restored 6 files of an experiment packed at commit {commit}\n`dvc repro` has nothing to do\n"
    )
    assert run(there, "git", "status", "--porcelain") == ""
    assert json.loads(run(there, "dvc", "status", "--json", "dvc.yaml")) == {}
    assert not (
        there / "below/artifacts/out"
    ).exists()  # another pipeline's output is no affair of the bundle
    params = (there / "params.yaml").read_text()
    (there / "params.yaml").write_text(re.sub(r"(?ms)^(ppo:.*?  lr: )\S+", r"\g<1>0.5", params, count=1))
    printed = run(there, "dvc", "repro")
    ran = [name for name in ("sft", "ppo", "report") if f"Running stage '{name}'" in printed]
    assert ran == ["ppo"], printed  # its output is the same, so the report stays

    # The pipeline below is packed and put back in its own folder, and there alone.
    run(here / "below", *program, "pack", "../../below.zip", PYTHONPATH=str(ROOT))
    printed = run(there / "below", *program, "restore", "../../below.zip", PYTHONPATH=str(ROOT))
    assert printed.endswith(f"packed at commit {commit}\n`dvc repro` has nothing to do\n")
    assert (there / "below/artifacts/out").read_bytes() == b"held by git\n"
    for folder, zip_file in ((there, "../below.zip"), (there / "below", "../../one.zip")):
        printed = run(folder, *program, "restore", zip_file, "--force", expect=1, PYTHONPATH=str(ROOT))
        assert printed.startswith("error: the bundle is of another pipeline: dvc.yaml here has no stage ")

    # An input that nobody brought is named.
    (there / "below/data.txt").unlink()
    printed = run(there / "below", *program, "restore", "../../below.zip", PYTHONPATH=str(ROOT))
    assert (
        "note: data.txt, which stage preferences reads, is no part of a bundle and is not here\n" in printed
    )
    assert printed.endswith("`dvc repro` will start with preferences\n")

    # What has changed before is not passed off as the bundle's.
    there = tmp_path / "changed"
    (there / "dvc.yaml").write_text(STAGES.replace("cp artifacts/ppo", "cat artifacts/ppo >"))
    printed = run(there, *program, "restore", "../one.zip", "--force", PYTHONPATH=str(ROOT))
    assert printed.endswith("`dvc repro` will start with report\n")
    status = json.loads(run(there, "dvc", "status", "--json", "dvc.yaml"))
    assert status == {"report": ["changed command"]}
