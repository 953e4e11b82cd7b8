"""Real stages, struck at many moments, end with the bytes of a run that nobody disturbed."""

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from subprocess import Popen

import pytest
from architecture import ROOT
from ruamel.yaml import YAML
from striking import Run, run_stage, stage_server
from toy import environment, set_params, write_project

INTERRUPTED = "interrupted: run the same command again; training and sampling go on"
# RESUME_MOMENTS=all strikes at every moment there is; by default at a few of each stage, spread evenly.
EVERY = os.environ.get("RESUME_MOMENTS") == "all"
PROGRAMS = {
    "sft": "sft",
    "reward": "reward",
    "ppo@1": "ppo --seed 1",
    "sample@sft": "sample --policy sft",
    "judge-model": "judge_model",
    "preferences": "preferences",
}
REVIEWS = ("sft", "reward", "ppo@1", "sample@sft", "judge-model")
# Here SFT has dropout, the reward model learns from pairs on a frozen base, and PPO has no value head.
QUESTIONS = ("qa/sft", "qa/preferences", "qa/reward", "qa/ppo@1")
ONE_OF_EACH_PROGRAM = (*REVIEWS, "qa/preferences")
# What has to run, and where, before all of these can be struck.
FIRST = (
    *((".", stage) for stage in ("fetch", "split", "judge_model", "sft", "reward")),
    *((".", stage) for stage in ("ppo --seed 1", "sample --policy sft")),
    *(("qa", stage) for stage in ("fetch", "questions", "sft", "preferences", "reward", "ppo --seed 1")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, sources) -> Path:
    """The toy project, to be struck."""
    return write_project(tmp_path_factory.mktemp("struck"), sources)


@pytest.fixture(scope="module")
def server(folder):
    """Of stages in `folder`, in which those of `FIRST` have run."""
    with stage_server(folder) as server:
        for place, command in FIRST:
            done = run_stage(server, command, place=place)
            assert done.status == 0, done.printed
        yield server


def started(server: Popen, stage: str, moment: int | None = None, strike: str = "kill") -> Run:
    place, _, name = stage.rpartition("/")
    return run_stage(server, PROGRAMS[name], moment, strike, place)


@cache
def outputs(folder: Path, stage: str) -> list[Path]:
    """What the run file says that the stage writes."""
    place, _, name = stage.rpartition("/")
    section, _, item = name.partition("@")
    found = YAML(typ="safe", pure=True).load((folder / place / "dvc.yaml").read_text())["stages"][section]
    entries = [*found["outs"], *found.get("metrics", [])]
    paths = [path for entry in entries for path in paths_of(entry)]
    return [folder / place / re.sub(r"\$\{item\.\w+\}", item, path) for path in paths]


def paths_of(entry: str | dict[str, dict]) -> list[str]:
    """The path of a run file's output, written alone or with settings."""
    return [entry] if isinstance(entry, str) else list(entry)


def files_of(folder: Path, output: Path) -> dict[str, bytes]:
    found = [path for path in (output, *output.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def contents(folder: Path, stage: str) -> dict[str, bytes]:
    return {name: data for out in outputs(folder, stage) for name, data in files_of(folder, out).items()}


def clear(folder: Path, stage: str) -> None:
    """What DVC does before it runs a stage."""
    for out in outputs(folder, stage):
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    return [*folder.rglob(".*.partial"), *folder.rglob(".checkpoints/*")]


def some(count: int, of: int) -> list[int]:
    return list(range(of)) if EVERY else sorted({round(i * (of - 1) / (count - 1)) for i in range(count)})


def undisturbed(folder: Path, server: Popen, stage: str) -> Run:
    """A run as DVC would start it; its moments are those of every other run that starts like it."""
    clear(folder, stage)
    done = started(server, stage)
    assert done.status == 0, done.printed
    return done


def go_on(folder: Path, server: Popen, stage: str, expected: dict[str, bytes], after: str) -> str:
    """Run the stage again after a strike; it must end as if nothing had happened. Return what it printed."""
    again = started(server, stage)
    assert again.status == 0, (after, again.printed)
    assert contents(folder, stage) == expected, after
    assert leftovers(folder) == [], after
    return again.printed


@pytest.mark.parametrize(
    ("stage", "count"), [*((stage, 9) for stage in REVIEWS), *((stage, 4) for stage in QUESTIONS)]
)
def test_killed_at_many_moments_a_stage_ends_with_the_same_bytes(folder, server, stage, count):
    expected = contents(folder, stage)
    moments = undisturbed(folder, server, stage).moments
    assert contents(folder, stage) == expected
    names = {name.split()[0] for name in moments}
    assert {"open", "os.rename", "half", "written", "os.mkdir", "os.remove"} <= names
    trains = stage not in ("sample@sft", "qa/preferences")
    assert ("before" in names) is ("after" in names) is trains  # an optimiser step
    resumed = 0
    chosen = some(count, len(moments))
    for moment in chosen:
        clear(folder, stage)
        struck = started(server, stage, moment)
        assert struck.status == -signal.SIGKILL, (moments[moment], struck.printed)
        resumed += "resuming after step" in go_on(folder, server, stage, expected, moments[moment])
    print(f"{stage}: {len(chosen)} kills, {resumed} resumed")
    assert resumed >= count // 2


def test_killed_again_and_again_ppo_still_ends_with_the_same_bytes(folder, server):
    expected = contents(folder, "ppo@1")
    clear(folder, "ppo@1")
    runs = []
    while not runs or runs[-1].status != 0:
        runs.append(started(server, "ppo@1", moment=12 + 4 * len(runs)))
        assert runs[-1].status in (0, -signal.SIGKILL), runs[-1].printed
        assert len(runs) < 30
    assert len(runs) >= 3
    assert contents(folder, "ppo@1") == expected
    assert leftovers(folder) == []


@pytest.mark.parametrize("stage", ONE_OF_EACH_PROGRAM)
def test_a_full_disk_is_one_line_and_costs_nothing_but_time(folder, server, stage):
    expected = contents(folder, stage)
    moments = undisturbed(folder, server, stage).moments
    opened = [i for i, name in enumerate(moments) if name.startswith("open")]
    for moment in [opened[i] for i in some(3, len(opened))]:
        clear(folder, stage)
        struck = started(server, stage, moment, "full disk")
        assert struck.status == 1, struck.printed
        assert struck.printed.splitlines()[-1].startswith("error: No space left on device: ")
        assert "Traceback" not in struck.printed
        assert [path for path in leftovers(folder) if path.name.endswith(".partial")] == []
        go_on(folder, server, stage, expected, moments[moment])


def test_a_damaged_snapshot_is_said_and_changes_no_byte(folder, server):
    expected = contents(folder, "ppo@1")
    moments = undisturbed(folder, server, "ppo@1").moments
    third = [i for i, name in enumerate(moments) if name.startswith("written")][2]
    for both in (False, True):
        clear(folder, "ppo@1")
        assert started(server, "ppo@1", third + 2).status == -signal.SIGKILL
        newest, *older = sorted(folder.glob(".checkpoints/ppo-1/*/*.safetensors"), reverse=True)
        assert older
        for path in [newest, *older] if both else [newest]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        printed = go_on(folder, server, "ppo@1", expected, "damage")
        assert f"ppo-1: snapshot {newest.name} is damaged and not used" in printed
        assert ("resuming after step" in printed) is not both


def test_a_snapshot_of_other_inputs_is_never_resumed(folder, server):
    expected, params = contents(folder, "sft"), (folder / "params.yaml").read_text()
    late = len(started(server, "sft").moments) - 12
    try:
        set_params(folder, {"sft.lr": 0.02})
        assert started(server, "sft").status == 0
        other = contents(folder, "sft")
        assert other != expected
        (folder / "params.yaml").write_text(params)
        assert started(server, "sft", late).status == -signal.SIGKILL
        assert list(folder.glob(".checkpoints/sft/*/*.safetensors"))
        set_params(folder, {"sft.lr": 0.02})
        assert "resuming" not in started(server, "sft").printed
        assert contents(folder, "sft") == other
    finally:
        (folder / "params.yaml").write_text(params)
    go_on(folder, server, "sft", expected, "other inputs")


@pytest.mark.parametrize("stage", REVIEWS)
def test_ctrl_c_is_one_line_and_the_next_run_goes_on(folder, server, stage):
    expected = contents(folder, stage)
    moments = undisturbed(folder, server, stage).moments
    written = [i for i, name in enumerate(moments) if name.startswith("written .checkpoints")]
    for moment in (written[0] + 2, written[-1] + 2):  # a snapshot is in place by then
        clear(folder, stage)
        struck = started(server, stage, moment, "interrupt")
        assert struck.status == 130, struck.printed
        assert struck.printed.splitlines()[-1] == INTERRUPTED
        assert "Traceback" not in struck.printed
        assert "resuming after step" in go_on(folder, server, stage, expected, moments[moment])


@pytest.mark.parametrize("stage", ONE_OF_EACH_PROGRAM)
def test_killed_over_old_outputs_no_output_is_ever_half_there(folder, server, stage):
    """Without DVC nothing is removed first: each output is the old one, the new one, or absent."""
    expected = contents(folder, stage)
    moments = started(server, stage).moments
    moved = [i for i, name in enumerate(moments) if name.startswith("os.r") and ".checkpoints" not in name]
    for moment in [moved[i] for i in some(6, len(moved))]:
        assert started(server, stage, moment).status == -signal.SIGKILL
        for out in outputs(folder, stage):
            name = out.relative_to(folder).as_posix()
            whole = {k: v for k, v in expected.items() if k == name or k.startswith(f"{name}/")}
            assert files_of(folder, out) in ({}, whole), (moments[moment], name)
        go_on(folder, server, stage, expected, moments[moment])


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGINT])
def test_a_stage_that_a_user_started_is_struck_from_outside_and_goes_on(folder, server, strike):
    expected = contents(folder, "judge-model")
    clear(folder, "judge-model")
    process = Popen(
        [sys.executable, "-m", "stages.judge_model"],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # With more than sixty steps still to go, the signal cannot come too late.
    assert any(line.startswith("judge-model 3/67") for line in process.stdout)
    process.send_signal(strike)
    _, errors = process.communicate()
    if strike == signal.SIGINT:
        assert (process.returncode, errors.splitlines()[-1]) == (130, INTERRUPTED)
    else:
        assert process.returncode == -signal.SIGKILL
    assert "resuming after step" in go_on(folder, server, "judge-model", expected, strike.name)


def test_ctrl_c_while_libraries_are_imported_is_one_line():
    handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # whatever the shell has set
    program = f"import stages, signal; {handler}; signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
