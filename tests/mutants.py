"""Guard the guards: small wrong edits of the code, one at a time, each of which a test must notice.

`python tests/mutants.py [--list] [name ...]` copies the project to a temporary folder, makes each edit of
`mutant_table` there, runs the tests that should kill it, and fails if one survives.
"""

import argparse
import importlib
import logging
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "params.yaml", "qa/params.yaml", "dvc.yaml", "constraints.txt")
COPIED = ("rlhf", "stages", "tests", *FILES)
# Slow to import and no part of the project: imported once, before the forks.
LIBRARIES = (
    "scipy.stats",
    "peft",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.gpt2.modeling_gpt2",
)


def main(arguments: list[str], table: tuple[Mutant, ...] = MUTANTS) -> int:
    """Run the named mutants of `table`, or all of them; return 0 when every one was killed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the table as markdown and run nothing")
    parser.add_argument("names", nargs="*", help="the mutants to run; all of them if none is named")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - {mutant.name for mutant in table}):
        parser.error(f"no mutant is named {', '.join(unknown)}")
    chosen = [mutant for mutant in table if not options.names or mutant.name in options.names]
    if options.list:
        print(as_markdown(chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run_all(chosen, copy_project(Path(folder)))


def as_markdown(mutants: list[Mutant]) -> str:
    """One row for each mutant: its name, the edit, the tests that kill it."""
    cells = [
        (m.name, f"`{m.file}`: `{m.old.strip()}` becomes `{m.new.strip()}`", ", ".join(m.tests))
        for m in mutants
    ]
    rows = [("mutant", "edit", "killed by"), ("---", "---", "---"), *cells]
    return "\n".join("| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in rows)


def copy_project(folder: Path) -> Path:
    """Copy what the tests need to `folder`, and return it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_all(mutants: list[Mutant], folder: Path) -> int:
    """Run the tests without a mutant, which must pass, and then with each; print a line for each mutant."""
    # Edits can follow each other within a second at one size, which is all that a .pyc file looks at.
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    try:
        for mutant in mutants:
            mutated(mutant, (folder / mutant.file).read_text(encoding="utf-8"))
    except ValueError as error:
        print(error)
        return 1
    status, first = run_tests(folder, sorted({test for mutant in mutants for test in mutant.tests}))
    if status:
        print(f"the tests fail without a mutant (pytest's exit status is {status}): {first}")
        return 1
    counts = Counter(verdict(folder, mutant) for mutant in mutants)
    broken = f", {counts['broken']} broken" if counts["broken"] else ""
    print(f"{len(mutants)} mutants, {counts['killed']} killed, {counts['survived']} survived{broken}")
    return int(counts["killed"] < len(mutants))


def verdict(folder: Path, mutant: Mutant) -> str:
    """Run one mutant and print its line; return killed, survived, or broken where no test could run."""
    status, first = run_mutant(folder, mutant)
    found, said = {0: ("survived", "SURVIVED"), 1: ("killed", first)}.get(
        status, ("broken", f"ERROR, pytest's exit status is {status}: {first}")
    )
    print(f"{mutant.name:40} {mutant.file:20} {said}", flush=True)
    return found


def mutated(mutant: Mutant, source: str) -> str:
    """The source with the mutant's edit; raises `ValueError` unless its old text occurs exactly once."""
    if (count := source.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} holds its old text {count} times: expected once")
    return source.replace(mutant.old, mutant.new)


def run_mutant(folder: Path, mutant: Mutant) -> tuple[int, str]:
    """`run_tests` with the edit made in `folder`, and taken back afterwards."""
    path = folder / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutant, source), encoding="utf-8")
    try:
        return run_tests(folder, mutant.tests)
    finally:
        path.write_text(source, encoding="utf-8")


def run_tests(folder: Path, tests: list[str] | tuple[str, ...]) -> tuple[int, str]:
    """Run tests of the copy in a fork; return pytest's exit status (1: a test failed) and what failed first.

    Where no test failed, the last line that pytest printed stands in for it.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            _be_pytest(folder, tests, output.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        printed = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    return status, failed[1] if failed else "".join(printed.strip().splitlines()[-1:])


def _be_pytest(folder: Path, tests: list[str] | tuple[str, ...], output: int) -> None:
    status = 3  # pytest's own number for an internal error
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        options = ["-x", "-q", "-rfE", "--color=no", "-p", "no:cacheprovider"]
        status = int(pytest.main([*options, *(f"tests/{test}" for test in tests)]))
        sys.stdout.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses an optional kernel
    for library in LIBRARIES:
        importlib.import_module(library)
    sys.exit(main(sys.argv[1:]))
