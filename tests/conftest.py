"""Fixtures for tests that run a model."""

import os
import subprocess
import sys
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
def project(tmp_path_factory, sources) -> Path:
    """The toy project after `make repro`, committed; its environment is the one that runs the tests."""
    from toy import run, write_project

    folder = write_project(tmp_path_factory.mktemp("project"), sources)
    run(folder, "git", "init", "--quiet")
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "--quiet", "-m", "before")
    (folder / ".venv").mkdir()
    (folder / ".venv/installed.txt").write_text("")
    assert run(folder, "make", "repro").endswith("The report is reports/report.md\n")
    run(folder, "git", "add", ".")
    run(folder, "git", "commit", "--quiet", "-m", "after")
    return folder
