"""The README names what is there: modules, files, make targets, parameters, settings."""

import re

from architecture import ROOT
from ruamel.yaml import YAML

from rlhf.config import load

README = (ROOT / "README.md").read_text(encoding="utf-8")
PARAMS = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))


def test_the_tree_names_every_module_and_no_other():
    tree = README.split("## The tree")[1].split("\n## ")[0]
    modules = {path.stem for path in (ROOT / "rlhf").glob("*.py")} - {"__init__"} | {"report/"}
    named = re.findall(r"^      ((?:[a-z_]+, )*[a-z_]+/?)  ", tree, re.MULTILINE)
    assert {name for names in named for name in names.split(", ")} == modules


def test_files_that_it_names_exist():
    names = set(re.findall(r"[`(]((?:[\w.-]+/)*[\w-]+\.(?:py|md|yaml|lock|png))[`)]", README))
    assert len(names) > 4
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


def test_make_targets_that_it_names_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"repro", "test", "verify"} <= named <= set(targets)


def test_parameters_that_it_names_exist():
    named = set(
        re.findall(r"`((?:fetch|split|model|sft|reward|ppo|sample|judge|report|runtime)\.[a-z_.]+)`", README)
    )
    assert len(named) > 5
    for name in named:
        section = PARAMS
        for key in name.split("."):
            assert key in section, name
            section = section[key]


def merged(values: dict, changes: dict) -> dict:
    """Return nested values with changes; a change of a key that is not there is an error."""
    assert changes.keys() <= values.keys()
    nested = {key for key in changes if isinstance(changes[key], dict) and isinstance(values[key], dict)}
    # What people name themselves, such as labels, replaces what was there.
    deeper = {key for key in nested if changes[key].keys() <= values[key].keys()}
    return values | changes | {key: merged(values[key], changes[key]) for key in deeper}


def test_settings_that_it_shows_are_accepted(tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    yaml = YAML(typ="safe", pure=True)
    for block in blocks:
        folder = ROOT / "qa" if "answers:" in block else ROOT
        params = merged(yaml.load((folder / "params.yaml").read_text(encoding="utf-8")), yaml.load(block))
        yaml.dump(params, tmp_path / "params.yaml")
        found = load(tmp_path / "params.yaml")
        assert found.split.sha256 is None
        assert "my-data" in str(found) or "data/rated.tsv" in str(found)
