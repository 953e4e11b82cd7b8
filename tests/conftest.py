"""Fixtures for tests that run a model."""

import os

# One thread: on models this small a second one only waits, and other work shares the machine. Read when
# torch starts, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


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
