"""What holds of both pipelines of a toy project, and what DVC says about them; `place` is "." or "qa"."""

import json
import re
from pathlib import Path

from ruamel.yaml import YAML
from toy import run


def read_yaml(path: Path) -> dict:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def outputs_of(folder: Path, place: str = ".") -> list[str]:
    """The outputs of a pipeline's lock, in `place`."""
    lock = read_yaml(folder / place / "dvc.lock")["stages"]
    return [out["path"] for stage in lock.values() for out in stage["outs"]]


def stages_run(printed: str) -> set[str]:
    """The stages that a `dvc repro` says it runs."""
    return set(re.findall(r"Running stage '([^']+)'", printed))


def changed_stages(folder: Path, run_file: str = "dvc.yaml") -> set[str]:
    """The stages of a run file whose own code, data or parameters are not those of the last run."""
    return set(json.loads(run(folder, "dvc", "status", "--json", run_file)))


def check_same_lock(folder: Path, clone: Path, place: str = ".") -> None:
    """Every stage has the same lock in both, the clone's having run in other surroundings.

    The order of stages is left out: DVC writes a new lock as it runs, and takes stages of which neither needs
    the other in an order that may hang on Python's hash seed.
    """
    one, other = (read_yaml(project / place / "dvc.lock") for project in (folder, clone))
    assert one == other


def check_nothing_lies_about(folder: Path) -> None:
    assert run(folder, "git", "status", "--porcelain") == ""
    assert list(folder.rglob(".*.partial")) == []


def check_outputs(folder: Path, place: str = ".") -> None:
    """Outputs name no path of this machine and metrics are flat."""
    for path in (folder / place / out for out in outputs_of(folder, place)):
        for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
            assert str(folder).encode() not in file.read_bytes(), file
    for file in (folder / place / "reports/metrics").rglob("*.json"):
        assert all(isinstance(v, int | float) for v in json.loads(file.read_text()).values()), file


def check_plots(folder: Path, place: str = ".") -> None:
    """Every plot that a run file declares has data, a title and labels."""
    run_file = Path(place, "dvc.yaml").as_posix()
    found = json.loads(run(folder, "dvc", "plots", "show", "--json", f"{run_file}::"))
    assert "errors" not in found
    plots = [next(iter(plot.items())) for plot in read_yaml(folder / run_file)["plots"]]
    declared = {Path(place, name).as_posix() if "/" in name else name: plot for name, plot in plots}
    assert set(found["data"]) == set(declared)
    for name, plot in declared.items():
        (drawn,) = found["data"][name]
        content = drawn["content"]
        assert content["title"]["text"] == plot["title"]
        assert len(content["data"]["values"]) >= 2, name
        assert plot["x_label"] in json.dumps(content) and plot["y_label"] in json.dumps(content)


def only_error(folder: Path, stage: str, **variables: str) -> str:
    """Run a stage that has to fail, and return the one line in which it says why."""
    printed = run(folder, "python", "-m", f"stages.{stage}", expect=1, **variables)
    assert "Traceback" not in printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last
