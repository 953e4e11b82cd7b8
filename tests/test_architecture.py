"""Imports obey the design's arrows; dvc.yaml declares what each stage imports and reads, no more, no less."""

import ast
import hashlib
import re
import sys

import pytest
from architecture import ROOT, closure, imported_modules
from dvc.repo import Repo
from ruamel.yaml import YAML

yaml = YAML(typ="safe", pure=True)
PACKAGE = sorted((ROOT / "rlhf").rglob("*.py"))
STAGES = sorted(path for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__")
CACHED = ("artifacts/", "data/split/")  # what DVC holds and git does not
RUN_FILE = yaml.load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]

# What each module may import besides the standard library and the modules of the layers below its own.
THIRD_PARTY = {
    "config": {"ruamel"},
    "randomness": {"numpy"},
    "environment": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "resampling": {"numpy", "scipy"},
    "stats": {"numpy", "scipy"},
    "ops": {"torch"},
    "batching": {"torch"},
    "gguf": {"torch", "transformers", "gguf"},
    "sources": {"huggingface_hub"},
    "tokenizer": {"transformers"},
    "objectives": {"torch"},
    "optim": {"torch"},
    "models": {"torch", "transformers", "peft", "safetensors", "bitsandbytes"},
    "sampling": {"torch", "transformers", "numpy", "peft"},
    "scoring": {"torch", "peft"},
    "rollout": {"torch", "peft", "numpy"},
    "update": {"torch", "peft"},
    "judging": {"torch", "transformers", "vaderSentiment"},
    "report.figures": {"matplotlib", "numpy", "pandas"},
    "report.comparisons": {"numpy", "pandas"},
    "report.levels": {"numpy", "pandas"},
    "report.trajectory": {"pandas"},
    "report.verdict": {"pandas"},
    "report.published": {"pandas"},
    "report.results": {"pandas"},
    "report.appendix": {"pandas"},
}
LAYERS = (
    {"__init__", "errors", "strict", "randomness", "resampling", "ops", "batching", "textmetrics"},
    {"config", "record", "environment", "data", "objectives", "optim", "stats", "tokenizer"},
    {"gguf", "models", "checkpoint"},
    {"sources", "sampling", "scoring", "judging"},
    {"rollout"},
    {"update"},
    {"report.__init__", "report.markdown", "report.figures"},
    {"report.comparisons", "report.trajectory"},
    {"report.levels", "report.verdict", "report.published"},
    {"report.results", "report.tables"},
    {"report.appendix"},
)


def module_of(path) -> str:
    return ".".join(path.relative_to(ROOT / "rlhf").with_suffix("").parts)


def first_party_imports(path) -> set[str]:
    names = {name.removeprefix("rlhf.") for name in imported_modules(path) if name.startswith("rlhf.")}
    return names & {module_of(module) for module in PACKAGE}


@pytest.mark.parametrize("path", PACKAGE, ids=module_of)
def test_modules_import_only_what_their_layer_allows(path):
    outside = {name.split(".")[0] for name in imported_modules(path)} - set(sys.stdlib_module_names)
    assert outside - {"rlhf"} <= THIRD_PARTY.get(module_of(path), set())
    (layer,) = [i for i, layer in enumerate(LAYERS) if module_of(path) in layer]
    assert first_party_imports(path) <= set().union(*LAYERS[:layer], {"errors"})


def test_the_package_never_imports_stages_and_no_stage_imports_another():
    for path in PACKAGE + STAGES:
        assert not any(name.split(".")[0] == "stages" for name in imported_modules(path)), path


def test_only_stages_read_params():
    for path in PACKAGE:
        assert "rlhf.config" not in imported_modules(path), path


def script_of(command: str):
    return ROOT / (re.match(r"python -m (stages\.\w+)", command)[1].replace(".", "/") + ".py")


@pytest.mark.parametrize("name", RUN_FILE)
def test_code_dependencies_equal_the_import_closure(name):
    stage = RUN_FILE[name]
    code = {dep for dep in stage["deps"] if dep.endswith(".py")}
    assert code == closure(script_of(stage["cmd"]))
    assert "constraints.txt" in stage["deps"]
    assert stage["desc"]
    assert "frozen" not in stage


@pytest.mark.parametrize("name", RUN_FILE)
def test_declared_parameters_are_the_sections_read(name):
    source = script_of(RUN_FILE[name]["cmd"]).read_text(encoding="utf-8")
    read = set(re.findall(r"(?:\bparams|\bload\(\))\.(?!yaml)([a-z]+)", source))
    if "asdict(params)" in source:
        read = set(yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8")))
    assert {key.split(".")[0] for key in RUN_FILE[name]["params"]} == read


def test_stages_that_declare_single_keys_read_those_alone():
    split, judge = ((ROOT / f"stages/{name}.py").read_text(encoding="utf-8") for name in ("split", "judge"))
    assert set(re.findall(r"params\.generation\S*?\.?(\w+)", split)) == {"prefix_tokens"}
    assert set(re.findall(r"params\.ppo\.(\w+)", judge)) == {"seeds"}


def keys_read(path, section: str) -> set[str]:
    """Attributes that a script takes from a local name `section` bound to `params.section`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == section
    }


def test_ppo_declares_each_of_its_keys_but_the_seeds():
    declared = {key.removeprefix("ppo.") for key in RUN_FILE["ppo"]["params"] if key.startswith("ppo.")}
    every = set(yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))["ppo"])
    assert declared == every - {"seeds"} == keys_read(ROOT / "stages/ppo.py", "ppo")


@pytest.mark.parametrize(
    "name", ["sft", "reward", "ppo", "sample", "sample-again", "sample-ppo", "judge-model"]
)
def test_a_snapshot_s_key_covers_every_declared_input(name):
    """Code is covered by what `inputs_key` itself finds loaded."""
    source = script_of(RUN_FILE[name]["cmd"]).read_text(encoding="utf-8")
    (key,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "inputs_key"
    ]
    values, files = (ast.unparse(argument) for argument in key.args)
    for dep in RUN_FILE[name]["deps"]:
        assert (
            dep.endswith(".py")
            or repr(dep) in files
            or (dep.startswith("artifacts/ppo/") and "*trained" in files)
        )
    for parameter in RUN_FILE[name]["params"]:
        section = parameter.partition(".")[0]
        named = f"params.{parameter}" if section in ("runtime", "seed") else section
        assert re.search(rf"\b{re.escape(named)}\b", values), parameter


def test_the_lock_holds_exactly_what_the_run_file_declares():
    lock = yaml.load((ROOT / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    with Repo(str(ROOT)) as repo:
        stages = {stage.addressing: stage for stage in repo.index.stages}
    assert set(lock) == set(stages)
    for name, stage in stages.items():
        paths = [str(dep) for dep in stage.deps if dep.protocol == "local" and not hasattr(dep, "params")]
        assert [dep["path"] for dep in lock[name]["deps"]] == sorted(paths), name
        assert [out["path"] for out in lock[name]["outs"]] == sorted(str(out) for out in stage.outs), name
        assert lock[name]["cmd"] == stage.cmd


def test_the_committed_results_come_from_the_committed_code():
    """Every file of the lock that git holds has the hash that the lock recorded when it was used or made."""
    lock = yaml.load((ROOT / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    entries = [entry for stage in lock.values() for entry in stage["deps"] + stage["outs"]]
    held = [e for e in entries if (ROOT / e["path"]).is_file() and not e["path"].startswith(CACHED)]
    assert len({entry["path"] for entry in held}) > 40
    for entry in held:
        assert hashlib.md5((ROOT / entry["path"]).read_bytes()).hexdigest() == entry["md5"], entry["path"]


def test_params_are_in_the_form_that_dvc_writes(tmp_path):
    """`-S` rewrites params.yaml: only the value that was set may differ afterwards."""
    round_trip, target = YAML(), tmp_path / "params.yaml"
    with target.open("w", encoding="utf-8") as file:
        round_trip.dump(round_trip.load((ROOT / "params.yaml").read_text(encoding="utf-8")), file)
    assert target.read_text(encoding="utf-8") == (ROOT / "params.yaml").read_text(encoding="utf-8")
