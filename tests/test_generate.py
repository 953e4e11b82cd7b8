"""`python -m rlhf.generate` on a tiny trained run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architecture import ROOT
from peft import PeftModel
from small_run import write_run
from toy import environment
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rlhf import errors, generate
from rlhf.config import load
from rlhf.randomness import stream
from rlhf.sampling import gumbel_noise

BOTH = ("--policy", "base", "--policy", "ppo-1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder)
    return folder


@pytest.fixture
def here(trained, monkeypatch) -> Path:
    """That run as the working directory; the program's own process would have no progress bars either."""
    disable_progress_bar()
    monkeypatch.chdir(trained)
    return trained


def generated(monkeypatch, capsys, *arguments: str) -> list[str]:
    """Run the program here and return what it printed, cut at blank lines."""
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    generate.main()
    return capsys.readouterr().out.removesuffix("\n\n").split("\n\n")


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """Run the program here and return the one line of its error."""
    monkeypatch.setattr(sys, "argv", ["generate", *arguments])
    with pytest.raises(SystemExit) as end:
        errors.run(generate.main)
    out, err = capsys.readouterr()
    assert (end.value.code, out, err.count("\n")) == (1, "", 1), err
    return err


@torch.no_grad()
def by_peft_alone(adapter: str | None, prompt: str, number: int, sample: int, seed: int) -> str:
    """The same text by plain transformers and peft: one row, no cache, argmax of logits / 0.7 + noise."""
    model = AutoModelForCausalLM.from_pretrained("policy")
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    tokenizer = AutoTokenizer.from_pretrained("policy")
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start, noise = len(tokens), stream(seed, "generate", "sample", number, sample)
    while len(tokens) < start + 12 and tokens[-1] != tokenizer.eos_token_id:
        logits = model.eval()(torch.tensor([tokens]), use_cache=False).logits[:, -1] / 0.7
        tokens.append((logits + gumbel_noise([noise], logits.shape[1])).argmax().item())
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text if tokens[-1] == tokenizer.eos_token_id else f"{text} … (cut at 12 tokens)"


def test_every_policy_continues_every_prompt_by_its_adapter_and_the_same_noise(here, monkeypatch, capsys):
    """The second route has no batch, no padding and no cache; four texts in batches of three."""
    prompts = ["the film is", "a warm , funny and moving"]
    policies = ["--policy", "base", "--policy", "sft", "--policy", "ppo-1"]
    blocks = generated(monkeypatch, capsys, *policies, "--samples", "2", *prompts)
    adapters = {"base": None, "sft": "artifacts/sft", "ppo-1": "artifacts/ppo/1"}
    seed = load().seed
    for block, (number, sample) in zip(blocks, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        assert block.split("\n") == [
            f"{policy + ':':6} {by_peft_alone(adapter, prompts[number], number, sample, seed)}"
            for policy, adapter in adapters.items()
        ]
    assert len({line.split(":", 1)[1] for block in blocks for line in block.split("\n")}) > 9
    assert any("(cut at 12 tokens)" in block for block in blocks)


def test_a_text_depends_on_seed_number_and_sample_and_on_nothing_beside_it(here, monkeypatch, capsys):
    several = generated(monkeypatch, capsys, *BOTH, "--samples", "3", "the film", "it is", "too long")
    alone = generated(monkeypatch, capsys, "--policy", "ppo-1", "the film", "it is")
    lines = [several[0].split("\n")[1], several[3].split("\n")[1]]
    assert alone == lines
    assert generated(monkeypatch, capsys, "--policy", "ppo-1", "--policy", "ppo-1", "the film") == lines[:1]
    seed = ("--seed", str(load().seed))
    assert generated(monkeypatch, capsys, "--policy", "ppo-1", *seed, "the film") == lines[:1]
    assert generated(monkeypatch, capsys, "--policy", "ppo-1", "--seed", "7", "the film") != lines[:1]


def test_prompts_come_from_a_file_or_the_standard_input(here, tmp_path, monkeypatch, capsys):
    expected = generated(monkeypatch, capsys, *BOTH, "the film", "it is")
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfthe film\r\nit is\r\n")
    assert generated(monkeypatch, capsys, *BOTH, "--file", str(tmp_path / "prompts")) == expected
    (tmp_path / "prompts").write_bytes(b"it is")
    assert generated(monkeypatch, capsys, *BOTH, "the film", "--file", str(tmp_path / "prompts")) == expected
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.generate", *BOTH, "--file", "-"],
        env=environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        input="the film\nit is\n",
        capture_output=True,
        text=True,
    )
    assert (done.stdout.removesuffix("\n\n").split("\n\n"), done.stderr) == (expected, "")


def test_how_a_text_ended_is_said_and_its_lines_stay_together(here):
    tokenizer = AutoTokenizer.from_pretrained("policy")
    prompt, more = (tokenizer.encode(text, add_special_tokens=False) for text in ("the film", " is dull"))
    eos = tokenizer.eos_token_id

    def text_of(response: list[int]) -> str:
        return generate.text_of(
            prompt, response, eos, lambda t: tokenizer.decode(t, skip_special_tokens=True)
        )

    assert text_of([*more, eos]) == "the film is dull"
    assert text_of([eos]) == "the film (ended at once)"
    assert text_of(more) == f"the film is dull … (cut at {len(more)} tokens)"
    assert generate.block("sft", 6, "one\ntwo") == "sft:    one\n        two"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "ppo-7", "it"], "policy 'ppo-7' is unknown: expected one of base, sft, ppo-1, ppo-2"),
        (["--policy", "ppo-01", "it"], "policy 'ppo-01' is unknown: "),
        (["--policy", "../sft", "it"], "policy '../sft' is unknown: "),
        (
            ["--policy", "ppo-2", "it"],
            "policy ppo-2: artifacts/ppo/2 is not there yet: run `dvc repro ppo@2` ",
        ),
        (["--policy", "sft"], "no prompt: expected some, as in "),
        (["--policy", "sft", "--file", "empty"], "no prompt: expected some, as in "),
        (["--policy", "sft", "the film", ""], "prompt 2 is empty: expected some words to continue"),
        (["--policy", "sft", " \t"], "prompt 1 is empty: expected some words to continue"),
        (["--policy", "sft", "--file", "gap"], "prompt 2 is empty: expected some words to continue"),
        (["--policy", "sft", "it", "日本"], "prompt 2 is empty: the tokenizer gives no token for it"),
        (["--policy", "sft", "it " * 300], "prompt 1 has 600 tokens: expected at most 244"),
        (["--policy", "sft", "it\udcff"], "prompt 1 is 'it\\udcff': expected valid UTF-8"),
        (["--policy", "sft", "--file", "latin"], "--file latin: not valid UTF-8: "),
        (["--policy", "sft", "--file", "none"], "No such file or directory: none"),
        (["--policy", "sft", "--samples", "0", "it"], "--samples is 0: expected an integer of at least 1"),
        (["--policy", "sft", "--seed", "-1", "it"], "--seed is -1: expected an integer of at least 0"),
    ],
)
def test_each_error_is_one_line(here, monkeypatch, capsys, arguments, message):
    for name, content in (("empty", b""), ("gap", b"a\n\nb\n"), ("latin", b"caf\xe9\n")):
        (here / name).write_bytes(content)
    assert refused(monkeypatch, capsys, *arguments).startswith(f"error: {message}")


def test_an_adapter_of_other_parameters_or_no_manifest_is_one_line(here, tmp_path, monkeypatch, capsys):
    shutil.copytree(here, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    text = Path("params.yaml").read_text(encoding="utf-8")
    Path("params.yaml").write_text(text.replace("alpha: 4.0", "alpha: 8.0"), encoding="utf-8")
    expected = (
        "error: artifacts/sft: the saved adapter does not fit this model and its model.lora parameters\n"
    )
    assert refused(monkeypatch, capsys, "--policy", "sft", "it") == expected
    Path("data/manifests/policy.json").unlink()
    assert "data/manifests/policy.json" in refused(monkeypatch, capsys, "--policy", "sft", "it")
