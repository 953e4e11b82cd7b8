"""Imports obey the design's arrows; run files declare what each stage imports and reads, no more, no less."""

import ast
import hashlib
import posixpath
import re
import sys
from pathlib import Path

import pytest
from architecture import ROOT, closure, imported_modules
from dvc.repo import Repo
from ruamel.yaml import YAML

yaml = YAML(typ="safe", pure=True)
PACKAGE = sorted((ROOT / "rlhf").rglob("*.py"))
STAGES = sorted(path for path in (ROOT / "stages").glob("*.py") if path.stem != "__init__")
CACHED = ("artifacts/", "data/split/")  # what DVC holds and git does not
PIPELINES = {".": "python -m ", "qa": "PYTHONPATH=.. python -m "}  # folder -> how its stages start
RUN_FILES = {
    folder: yaml.load((ROOT / folder / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    for folder in PIPELINES
}
ALL_STAGES = [(folder, name) for folder, stages in RUN_FILES.items() for name in stages]
PROGRAMS = {"generate", "pin"}  # of the package: for people, and no stage's
SNAPSHOTTING = {"sft", "preferences", "reward", "ppo", "sample", "sample-again", "sample-ppo", "judge-model"}
PARAMS = [ROOT / "params.yaml", ROOT / "qa/params.yaml", *ROOT.glob("presets/*"), *ROOT.glob("qa/presets/*")]

# What each module may import besides the standard library and the modules of the layers below its own.
THIRD_PARTY = {
    "config": {"ruamel"},
    "randomness": {"numpy"},
    "annotator": {"numpy"},
    "content": {"sacrebleu"},
    "tables": {"datasets", "pyarrow"},
    "environment": {"torch"},
    "checkpoint": {"torch", "safetensors"},
    "resampling": {"numpy", "scipy"},
    "stats": {"numpy", "scipy"},
    "ops": {"torch"},
    "batching": {"torch"},
    "gguf": {"torch", "transformers", "gguf"},
    "hub": {"huggingface_hub"},
    "tokenizer": {"transformers"},
    "special_tokens": {"transformers"},
    "objectives": {"torch"},
    "optim": {"torch", "bitsandbytes"},
    "feedback": {"torch"},
    "models": {"torch", "transformers", "peft", "safetensors", "bitsandbytes"},
    "heads": {"torch", "safetensors"},
    "sampling": {"torch", "transformers", "numpy", "peft"},
    "scoring": {"torch", "peft"},
    "rollout": {"torch", "peft", "numpy"},
    "update": {"torch", "peft"},
    "judging": {"torch", "transformers", "vaderSentiment"},
    "report.drawing": {"matplotlib", "numpy", "pandas"},
    "report.figures": {"matplotlib", "numpy", "pandas"},
    "report.comparisons": {"numpy", "pandas"},
    "report.levels": {"numpy", "pandas"},
    "report.trajectory": {"pandas"},
    "report.verdict": {"pandas"},
    "report.published": {"pandas"},
    "report.results": {"pandas"},
    "report.appendix": {"pandas"},
    "report.answers": {"pandas"},
    "report.pairs": {"numpy", "pandas"},
    "report.answer_figures": {"numpy", "pandas"},
    "report.answer_sections": {"pandas"},
    "report.answer_verdict": {"pandas"},
    "report.answer_appendix": {"pandas"},
    "generate": {"torch"},
    "pin": {"huggingface_hub", "ruamel"},
}
LAYERS = (
    {"__init__", "errors", "randomness", "resampling", "ops", "batching", "textmetrics", "prompts"}
    | {"strict", "tables", "annotator", "content"},
    {"sections", "record", "environment", "data", "objectives", "optim", "stats"},
    {"config", "questions", "tokenizer", "special_tokens", "gguf", "hub", "models"}
    | {"checkpoint", "feedback"},
    {"sources", "heads", "sampling", "judging"},
    {"scoring"},
    {"rollout"},
    {"update"},
    {"report.__init__", "report.markdown", "report.drawing"},
    {"report.figures", "report.comparisons", "report.trajectory", "report.provenance"},
    {"report.levels", "report.verdict", "report.published", "report.answers", "report.pairs"},
    {"report.results", "report.tables", "report.answer_figures"},
    {"report.appendix", "report.answer_sections", "report.answer_verdict"},
    {"report.answer_appendix"},
    PROGRAMS,
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


def test_only_stages_and_programs_read_params_and_nothing_imports_these():
    for path in PACKAGE:
        imported = imported_modules(path)
        assert "rlhf.config" not in imported or module_of(path) in PROGRAMS, path
        assert not imported & {f"rlhf.{name}" for name in PROGRAMS}, path


def script_of(folder: str, name: str) -> Path:
    """The program behind a stage, started as its pipeline's stages are."""
    start, _, rest = RUN_FILES[folder][name]["cmd"].partition("stages.")
    assert start == PIPELINES[folder]
    return ROOT / f"stages/{rest.split()[0]}.py"


def from_the_root(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


@pytest.mark.parametrize(("folder", "name"), ALL_STAGES)
def test_code_dependencies_equal_the_import_closure(folder, name):
    stage = RUN_FILES[folder][name]
    declared = {from_the_root(folder, dep) for dep in stage["deps"]}
    assert {dep for dep in declared if dep.endswith(".py")} == closure(script_of(folder, name))
    assert "constraints.txt" in declared
    assert stage["desc"]
    assert "frozen" not in stage


@pytest.mark.parametrize(("folder", "name"), ALL_STAGES)
def test_declared_parameters_are_the_sections_read(folder, name):
    source = script_of(folder, name).read_text(encoding="utf-8")
    read = set(re.findall(r"(?:\bparams|\bload\(\))\.(?!yaml)([a-z]+)", source))
    if "asdict(params)" in source:
        read = set(yaml.load((ROOT / folder / "params.yaml").read_text(encoding="utf-8")))
    assert {key.split(".")[0] for key in RUN_FILES[folder][name]["params"]} == read


def test_stages_that_declare_single_keys_read_those_alone():
    names = ("split", "judge", "judge_answers")
    split, judge, answers = ((ROOT / f"stages/{name}.py").read_text(encoding="utf-8") for name in names)
    assert set(re.findall(r"params\.generation\S*?\.?(\w+)", split)) == {"prefix_tokens"}
    assert set(re.findall(r"params\.ppo\.(\w+)", judge)) == {"seeds"}
    assert set(re.findall(r"load\(\)\.ppo\.(\w+)", answers)) == {"seeds"}


def keys_read(path, section: str) -> set[str]:
    """Attributes that a script takes from a local name `section` bound to `params.section`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == section
    }


@pytest.mark.parametrize("folder", PIPELINES)
def test_ppo_declares_each_of_its_keys_but_the_seeds(folder):
    keys = RUN_FILES[folder]["ppo"]["params"]
    declared = {key.removeprefix("ppo.") for key in keys if key.startswith("ppo.")}
    every = set(yaml.load((ROOT / folder / "params.yaml").read_text(encoding="utf-8"))["ppo"])
    assert declared == every - {"seeds"} == keys_read(ROOT / "stages/ppo.py", "ppo")


def texts_behind(node: ast.AST, tree: ast.Module) -> set[str]:
    """Every text in an expression, and in what is assigned to the names that it uses."""
    assigned = [
        (target.id, n.value)
        for n in ast.walk(tree)
        if isinstance(n, ast.Assign)
        for target in ast.walk(n.targets[0])
        if isinstance(target, ast.Name)
    ]
    found, todo, seen = set(), [node], set()
    while todo:
        for part in ast.walk(todo.pop()):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.add(part.value)
            elif isinstance(part, ast.Name) and part.id not in seen:
                seen.add(part.id)
                todo += [value for name, value in assigned if name == part.id]
    return found


@pytest.mark.parametrize(("folder", "name"), [stage for stage in ALL_STAGES if stage[1] in SNAPSHOTTING])
def test_a_snapshot_s_key_covers_every_declared_input(folder, name):
    """The code and the pinned packages are covered by what `inputs_key` itself finds."""
    tree = ast.parse(script_of(folder, name).read_text(encoding="utf-8"))
    (key,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "inputs_key"
    ]
    values, files = ast.unparse(key.args[0]), texts_behind(key.args[1], tree)
    for dep in RUN_FILES[folder][name]["deps"]:
        assert (
            dep.endswith((".py", "constraints.txt"))
            or dep in files
            or (dep.startswith("${") and f"params.{dep[2:-1]}" in ast.unparse(key.args[1]))
            or (dep.startswith("artifacts/ppo/") and "artifacts/ppo/" in files)
        ), dep
    for parameter in RUN_FILES[folder][name]["params"]:
        section = parameter.partition(".")[0]
        named = f"params.{parameter}" if section in ("runtime", "seed") else section
        assert re.search(rf"\b{re.escape(named)}\b", values), parameter


@pytest.mark.parametrize("folder", PIPELINES)
def test_no_parameter_becomes_part_of_a_shell_s_text(folder):
    """DVC quotes what `${item}` becomes, `--seed '1; rm x'`; a piece of it, `${item.seed}`, it does not."""
    commands = [stage["cmd"] for stage in RUN_FILES[folder].values()]
    assert {found for cmd in commands for found in re.findall(r"\$\{.*?\}", cmd)} == {"${item}"}


def test_every_stage_that_keeps_snapshots_is_looked_at():
    keeping = {script.stem for script in STAGES if "Snapshots(" in script.read_text(encoding="utf-8")}
    assert keeping == {script_of(*stage).stem for stage in ALL_STAGES if stage[1] in SNAPSHOTTING}


def locked(folder: str) -> dict:
    return yaml.load((ROOT / folder / "dvc.lock").read_text(encoding="utf-8"))["stages"]


@pytest.mark.parametrize("folder", PIPELINES)
def test_the_lock_holds_exactly_what_the_run_file_declares(folder):
    lock = locked(folder)
    with Repo(str(ROOT)) as repo:
        run_file = str(ROOT / folder / "dvc.yaml")
        stages = {stage.name: stage for stage in repo.index.stages if stage.path == run_file}
    assert set(lock) == set(stages)
    for name, stage in stages.items():
        deps = [dep.def_path for dep in stage.deps if dep.protocol == "local" and not hasattr(dep, "params")]
        assert [dep["path"] for dep in lock[name]["deps"]] == sorted(deps), name
        outs = [out.def_path for out in stage.outs]
        assert [out["path"] for out in lock[name]["outs"]] == sorted(outs), name
        assert lock[name]["cmd"] == stage.cmd


@pytest.mark.parametrize("folder", PIPELINES)
def test_the_committed_results_come_from_the_committed_code(folder):
    """Every file of the lock that git holds has the hash that the lock recorded when it was used or made."""
    entries = [entry for stage in locked(folder).values() for entry in stage["deps"] + stage["outs"]]
    files = {(entry["path"], entry["md5"]) for entry in entries if not entry["path"].startswith(CACHED)}
    held = [(ROOT / folder / path, md5) for path, md5 in files if (ROOT / folder / path).is_file()]
    assert len(held) > 40
    for path, md5 in held:
        assert hashlib.md5(path.read_bytes()).hexdigest() == md5, path


@pytest.mark.parametrize("path", PARAMS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_params_are_in_the_form_that_dvc_writes(path, tmp_path):
    """`-S` rewrites the file: only the value that was set may differ afterwards."""
    round_trip, target = YAML(), tmp_path / "params.yaml"
    with target.open("w", encoding="utf-8") as file:
        round_trip.dump(round_trip.load(path.read_text(encoding="utf-8")), file)
    assert target.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
