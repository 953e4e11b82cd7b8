"""Fixtures for tests that run a model."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# One thread: on models this small a second one only waits, and other work shares the machine. Read when
# torch starts, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# PEFT alone reads the adapter; then rlhf builds and saves the same adapter again.
ELSEWHERE = """
import sys
from pathlib import Path
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "adapter").eval()
with torch.no_grad():
    out = model(input_ids=torch.tensor([[5, 3, 9, 1]]), output_hidden_states=True)
torch.save([out.logits[0], out.hidden_states[-1][0]], "views.pt")
assert "rlhf" not in sys.modules

sys.path[:0] = {paths!r}
from tiny import save_tiny_adapter
save_tiny_adapter(Path("."), "again")
"""


@pytest.fixture(params=["llama", "qwen3", "gpt2"])
def architecture(request) -> str:
    """Rotary positions, rotary with normalised queries, and learned positions."""
    return request.param


@pytest.fixture
def model(architecture):
    """A tiny model under the perturbed adapters sft, reward and ppo."""
    from tiny import tiny_model

    return tiny_model(architecture)


@pytest.fixture
def llama():
    """A tiny Llama under the perturbed adapters sft, reward and ppo, for what no architecture changes."""
    from tiny import tiny_model

    return tiny_model("llama")


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory) -> Path:
    """A folder with base/, adapter/, what PEFT alone saw of them in another process (views.pt), and again/.

    again/ is adapter/ made and saved there once more, under another hash seed.
    """
    from tiny import save_tiny_adapter, write_policy_folder

    folder, tests = tmp_path_factory.mktemp("elsewhere"), Path(__file__).parent
    write_policy_folder(folder / "base")
    save_tiny_adapter(folder, "adapter")
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONHASHSEED": other}
    program = ELSEWHERE.format(paths=[str(tests), str(tests.parent)])
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True)
    return folder


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """What the toy project fetches: tiny models and made-up reviews."""
    from toy import write_sources

    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder)
    return folder


@pytest.fixture(scope="session")
def project_and_clone(tmp_path_factory, sources) -> tuple[Path, Path]:
    """The toy project after both pipelines, committed; and a clone in which they ran in other surroundings.

    At the same time, since both are waited for. The environment is the one that runs the tests.
    """
    from toy import run, write_project

    root = tmp_path_factory.mktemp("projects")
    (root / "project").mkdir()
    folder, clone = write_project(root / "project", sources), root / "a clone"
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "--quiet", "-m", "before")
    run(root, "git", "clone", "--quiet", str(folder), str(clone))
    (folder / ".venv").mkdir()
    (folder / ".venv/installed.txt").write_text("")
    with elsewhere_too(clone, "dvc repro && dvc repro qa/dvc.yaml"):
        assert run(folder, "make", "repro").endswith("The report is reports/report.md\n")
        assert run(folder, "make", "repro-qa").endswith("The report is qa/reports/report.md\n")
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "--quiet", "-m", "after")
    return folder, clone


@pytest.fixture(scope="session")
def project(project_and_clone) -> Path:
    """The toy project after both pipelines."""
    return project_and_clone[0]


@contextmanager
def elsewhere_too(clone: Path, command: str) -> Iterator[None]:
    """Run a command in the clone meanwhile, in surroundings of which none may change a byte."""
    from toy import environment

    surroundings = {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "3"}
    shell = ["sh", "-c", f"umask 077 && {command}"]
    with subprocess.Popen(shell, cwd=clone, env=environment(**surroundings)) as process:
        yield
    assert process.returncode == 0
