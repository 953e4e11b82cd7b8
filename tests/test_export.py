"""`python -m tools.export` on a tiny trained run: what plain peft and transformers make of the folders."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architecture import ROOT
from safetensors.torch import load_file
from small_run import write_lock, write_run
from tiny import CPU, TARGETS, TEXT, lora, perturb, plain_forward, write_policy_folder
from toy import environment
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlhf import errors
from rlhf.config import load
from rlhf.models import add_adapters, load_adapter, load_base, save_adapter, select
from rlhf.record import read_json, write_json
from tools import export

COMMIT = "906bfd4b4dc7f14ee4320094d8b41684abff8539"

# Plain peft and transformers read both folders; this package cannot be imported.
ELSEWHERE = """
import sys
sys.modules["rlhf"] = sys.modules["tools"] = sys.modules["stages"] = None
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, merged = sys.argv[1:4]
models = {
    "adapter": PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval(),
    "merged": AutoModelForCausalLM.from_pretrained(merged).eval(),
}
tokens = [AutoTokenizer.from_pretrained(folder)("the film")["input_ids"] for folder in sys.argv[1:4]]
assert tokens[0] == tokens[1] == tokens[2] != []
with torch.no_grad():
    views = {name: model(torch.tensor([[5, 3, 9, 1]])).logits[0] for name, model in models.items()}
torch.save(views, "views.pt")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_run(folder)
    disable_progress_bar()
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    """A copy of that run as the working directory."""
    shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def call(monkeypatch, *arguments: str) -> int:
    """Run the program here and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["export", *arguments])
    try:
        errors.run(export.main)
    except SystemExit as end:
        return end.code
    return 0


def tree(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_both_folders_load_without_this_package_and_give_the_policy_s_logits(here, tmp_path, monkeypatch):
    """The adapter to the bit; W + (alpha / rank) B A within what float32 gives in another order of sums."""
    assert call(monkeypatch, "ppo-1", "../adapter") == 0
    (tmp_path / "merged").mkdir()
    assert call(monkeypatch, "ppo-1", "../merged", "--merged") == 0
    plain = {k: v for k, v in environment(OMP_NUM_THREADS="1").items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", ELSEWHERE, "here/policy", "adapter", "merged"]
    subprocess.run(command, cwd=tmp_path, env=plain, check=True)
    views = torch.load(tmp_path / "views.pt", weights_only=True)

    params = load()
    model = add_adapters(
        load_base(Path("policy"), "float32", "none", CPU), lora("llama"), ["ppo"], params.seed
    )
    load_adapter(model, "ppo", "artifacts/ppo/1")
    expected = plain_forward(model, TEXT)[0]
    torch.testing.assert_close(views["adapter"], expected, rtol=0, atol=0)
    scale = expected.abs().max()
    assert (views["merged"] - expected).abs().max() < 1e-6 * scale
    select(model, None)
    assert (plain_forward(model, TEXT)[0] - expected).abs().max() > 0.1 * scale


def test_the_same_run_gives_the_same_bytes_in_another_process(here, tmp_path, monkeypatch):
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    variables = environment(PYTHONPATH=str(ROOT), PYTHONHASHSEED=other, OMP_NUM_THREADS="1")
    assert call(monkeypatch, "sft", "../adapter") == 0
    assert call(monkeypatch, "sft", "../merged", "--merged") == 0
    for name, options in (("adapter", []), ("merged", ["--merged"])):
        command = [sys.executable, "-m", "tools.export", "sft", f"../again/{name}", *options]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (f"wrote sft to ../again/{name}\n", "")
        assert tree(tmp_path / name) == tree(tmp_path / "again" / name)
        assert str(tmp_path).encode() not in b"".join(tree(tmp_path / name).values())
    shared = {"README.md", "tokenizer.json", "tokenizer_config.json"}
    assert set(tree(tmp_path / "adapter")) == shared | {"adapter_config.json", "adapter_model.safetensors"}
    assert set(tree(tmp_path / "merged")) == shared | {
        *("config.json", "generation_config.json", "model.safetensors")
    }


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_architecture_is_merged(tmp_path, here, architecture):
    """Tied and untied heads, and GPT-2, whose matrices are transposed."""
    base = write_policy_folder(tmp_path / "base", architecture)
    model = add_adapters(load_base(base, "float32", "none", CPU), lora(architecture), ["sft"], seed=1)
    perturb(model, "sft")
    save_adapter(model, "sft", tmp_path / "adapter", "base")
    params = load()
    targets = dataclasses.replace(params.model.lora, targets=TARGETS[architecture])
    params = dataclasses.replace(params, model=dataclasses.replace(params.model, lora=targets))
    (tmp_path / "merged").mkdir()
    export.write_merged(tmp_path / "merged", base, tmp_path / "adapter", params)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    expected = plain_forward(model, TEXT)[0]
    assert (plain_forward(merged, TEXT)[0] - expected).abs().max() < 1e-6 * expected.abs().max()
    assert {t.dtype for t in load_file(tmp_path / "merged/model.safetensors").values()} == {torch.float32}


def test_the_merged_model_samples_as_it_was_evaluated_and_not_as_its_base_s_files_say(here, monkeypatch):
    assert read_json("policy/generation_config.json")["repetition_penalty"] == 5.0
    assert call(monkeypatch, "sft", "out", "--merged") == 0
    found = read_json("out/generation_config.json")
    del found["transformers_version"]
    expected = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0, "max_new_tokens": 12}
    assert found == expected | {"eos_token_id": 0, "pad_token_id": 0}


def test_the_card_tells_of_the_run(here, monkeypatch):
    """Clopper and Pearson: all 10 of 10 right gives 0.025 ** (1 / 10) = 0.6915 to 1; none of 2 gives 0 to
    1 - 0.025 ** (1 / 2) = 0.8419."""
    assert call(monkeypatch, "ppo-1", "out") == 0
    card = (here / "out/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: peft\nlicense: mine\npipeline_tag: text-generation\n---\n\n# ")
    steps = load().ppo.steps
    assert f"trained by PPO with seed 1, as it was after step 6 of {steps}." in card
    assert "| policy | file | policy | – | – | mine |" in card
    for line in (
        "| positive rate | 0.250 | 0.500 | 0.625 |",
        "| kl nats per sequence | – | – | 1.750 |",
        "| judge probability | +0.125 | [-0.062, 0.375] |",
        "| Reward model | 10 | 100.0% | [0.692, 1.000] |",
        "| Judge | 2 | 0.0% | [0.000, 0.842] |",
    ):
        assert f"\n{line}\n" in card
    assert "a classifier trained on 77 other labelled texts" in card
    assert "No person compared these texts." in card and "{" not in card.split("## Parameters")[0]
    assert (here / "params.yaml").read_text(encoding="utf-8") in card
    assert len(re.findall(r"\.(?=\s)", card.split("## Method")[1].split("## Metrics")[0])) == 4


def test_the_card_of_sft_and_of_a_ready_judge(here):
    params = load()
    params = dataclasses.replace(params, judge=dataclasses.replace(params.judge, epochs=0))
    card = export.card("sft", True, params)
    assert "the supervised policy, which PPO started from." in card and "library_name: transformers" in card
    assert "never sees, a ready classifier," in card and "The judge is a ready classifier." in card
    assert "merged here into the same base in float32" not in card
    quantised = dataclasses.replace(params, model=dataclasses.replace(params.model, quantization="nf4"))
    assert "(quantisation: nf4) and\nis merged here" in export.card("sft", True, quantised)
    assert "(quantisation: nf4) and\nthe base above is loaded" in export.card("sft", False, quantised)


@pytest.mark.parametrize(
    ("adapter", "head", "said"),
    [
        (True, "linear", "A reward model, another adapter of the same base with a linear head,\n"),
        (False, "mlp", "A reward model, the frozen base itself with a head of two layers,\n"),
    ],
)
def test_the_card_describes_the_reward_model_that_was_trained(here, adapter, head, said):
    params = load()
    reward = dataclasses.replace(params.reward, adapter=adapter, head=head)
    assert said in export.card("sft", False, dataclasses.replace(params, reward=reward))


def test_a_base_on_a_hub_is_named_with_its_commit(here, tmp_path):
    params = load()
    policy = dataclasses.replace(
        params.fetch.policy, kind="hub", name="Qwen/Qwen3-4B-Base", revision=COMMIT, license="Apache-2.0"
    )
    params = dataclasses.replace(params, fetch=dataclasses.replace(params.fetch, policy=policy))
    (tmp_path / "out").mkdir()
    export.write_adapter(tmp_path / "out", Path("artifacts/sft"), params)
    assert read_json(tmp_path / "out/adapter_config.json")["revision"] == COMMIT
    card = export.card("sft", False, params)
    assert card.startswith("---\nbase_model: Qwen/Qwen3-4B-Base\nlibrary_name: peft\nlicense: apache-2.0\n")
    assert f'from_pretrained("Qwen/Qwen3-4B-Base", revision="{COMMIT}")' in card


# What -> how the run is changed, the arguments, and how the one line begins.
REFUSED = {
    "base": (
        None,
        "base new",
        "policy is 'base': expected sft or ppo-<seed>; nothing was trained in",
    ),
    "unknown": (None, "ppo-9 new", "policy 'ppo-9' is unknown: expected one of base, sft, ppo-1, ppo-2"),
    "not there yet": (None, "ppo-2 new", "policy ppo-2: artifacts/ppo/2 is not there yet: run `dvc repro"),
    "a full folder": (None, "sft artifacts", "artifacts is there: expected a new folder, or an empty one"),
    "the project": (None, "sft .", ". is there: expected a new folder, or an empty one"),
    "a file": (None, "sft params.yaml", "params.yaml is there: expected a new folder, or an empty one"),
    "no lock": (lambda: Path("dvc.lock").unlink(), "sft new", "HEAD has no dvc.lock: "),
    "lock of nothing": (
        lambda: Path("dvc.lock").write_text("stages: {}"),
        "sft new",
        "dvc.lock does not name artifacts/sft: run `dvc repro` first",
    ),
    "other weights": (
        lambda: Path("artifacts/ppo/1/adapter_model.safetensors").write_bytes(b"short"),
        "ppo-1 new",
        "output artifacts/ppo/1 is not what dvc.lock says: run `dvc repro` or `dvc pull` first",
    ),
    "other metrics": (
        lambda: write_json("reports/metrics/reward.json", {}),
        "ppo-1 new",
        "output reports/metrics/reward.json is not what dvc.lock says: ",
    ),
    "no metrics": (
        lambda: Path("reports/metrics/ppo/1.json").unlink(),
        "ppo-1 new",
        "output reports/metrics/ppo/1.json is missing: run ",
    ),
    "trained again": (
        lambda: write_lock(Path(), deps={"artifacts/sft": "0" * 32 + ".dir"}),
        "ppo-1 new",
        "artifacts/sft has changed since it was used: run `dvc repro` first",
    ),
    "other parameter": (
        lambda: write_lock(Path(), params={"runtime.threads": 9}),
        "ppo-1 new",
        "params.yaml has another runtime.threads than the report was made with: run `dvc repro` first",
    ),
    "a parameter that is gone": (
        lambda: write_lock(Path(), params={"ppo.gone.long": 9}),
        "ppo-1 new",
        "params.yaml has another ppo.gone.long than the report was made with",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_each_error_is_one_line_and_nothing_is_written(here, monkeypatch, capsys, what):
    change, arguments, message = REFUSED[what]
    if change:
        change()
    before = tree(here)
    assert call(monkeypatch, *arguments.split(), "--merged") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert tree(here) == before and not (here / "new").exists()


@pytest.mark.parametrize("options", [[], ["--merged"]])
def test_a_failure_on_the_way_leaves_nothing(here, monkeypatch, capsys, options):
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device", "README.md")

    monkeypatch.setattr(export, "card", fail)
    before = tree(here)
    (here / "new").mkdir()
    assert call(monkeypatch, "sft", "new", *options) == 1
    assert capsys.readouterr().err == "error: No space left on device: README.md\n"
    assert tree(here) == before and sorted(path.name for path in here.iterdir() if "new" in path.name) == [
        "new"
    ]
