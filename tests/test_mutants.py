"""The table of mutants fits the code, and its program tells killed, survived and broken apart."""

import ast
import os
import subprocess
import sys

import pytest
from mutant_table import MUTANTS
from mutants import ROOT, as_markdown, mutated

PROGRAM = """
import numpy  # once, before the forks
from mutants import MUTANTS, main

real = next(mutant for mutant in MUTANTS if mutant.name == "epochs-all-alike")
same = real._replace(name="equivalent", new='"order", int(epoch))')
broken = real._replace(name="broken", new='"order", epoch')
absent = real._replace(name="absent", old="not in the file")
print("status", main(["epochs-all-alike"]))
print("status", main([], (real, same, broken)))
print("status", main([], (absent,)))
"""
KILLED = "tests/test_randomness.py::test_epochs_differ_from_each_other_and_by_seed_and_stage"


def test_the_table_is_large_and_names_every_mutant_once():
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 32
    assert len(as_markdown(MUTANTS).splitlines()) == len(names) + 2


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_one_edit_that_parses_and_means_something_else(mutant):
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(mutated(mutant, source))) != ast.dump(ast.parse(source))


@pytest.mark.parametrize("target", sorted({test for mutant in MUTANTS for test in mutant.tests}))
def test_every_target_exists(target):
    file, _, name = target.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not name or name.partition("[")[0] in functions


@pytest.mark.parametrize("count", [0, 2])
def test_an_old_text_must_occur_exactly_once(count):
    mutant = MUTANTS[0]
    with pytest.raises(ValueError, match=f"{mutant.name}: {mutant.file} holds its old text {count} times"):
        mutated(mutant, mutant.old * count)


def test_a_real_mutant_is_killed_and_an_equivalent_one_survives():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[:3] == [
        f"epochs-all-alike rlhf/randomness.py {KILLED}",
        "1 mutants, 1 killed, 0 survived",
        "status 0",
    ]
    assert lines[3:5] == [lines[0], "equivalent rlhf/randomness.py SURVIVED"]
    assert lines[5].startswith("broken rlhf/randomness.py ERROR, pytest's exit status is ")
    assert lines[6:] == [
        "3 mutants, 1 killed, 1 survived, 1 broken",
        "status 1",
        "absent: rlhf/randomness.py holds its old text 0 times: expected once",
        "status 1",
    ]
