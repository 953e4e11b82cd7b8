"""`python -m tools.export` on tiny trained runs: what plain peft and transformers make of the folders."""

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
from small_run import PEOPLE_S_METRICS, write_lock, write_metrics, write_question_run, write_run
from tiny import CPU, TARGETS, TEXT, lora, perturb, plain_forward, write_policy_folder
from toy import environment, run, set_params
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rlhf import errors
from rlhf.config import load
from rlhf.models import add_adapters, load_adapter, load_base, save_adapter, select
from rlhf.prompts import question_ids
from rlhf.record import read_json, write_json
from tools import card, export

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


RUNS = {"reviews": write_run, "questions": write_question_run}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with one run of each pipeline."""
    folder = tmp_path_factory.mktemp("trained")
    for name, write in RUNS.items():
        (folder / name).mkdir()
        write(folder / name)
    disable_progress_bar()
    return folder


def enter_copy(run: Path, tmp_path: Path, monkeypatch) -> Path:
    """Copy a run and make the copy the working directory."""
    shutil.copytree(run, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the run on movie reviews as the working directory."""
    return enter_copy(trained / "reviews", tmp_path, monkeypatch)


@pytest.fixture
def asked(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the run on questions as the working directory."""
    return enter_copy(trained / "questions", tmp_path, monkeypatch)


@pytest.fixture(params=RUNS)
def either(request, trained, tmp_path, monkeypatch) -> Path:
    """One and then the other."""
    return enter_copy(trained / request.param, tmp_path, monkeypatch)


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


def read_card(folder: str = "out") -> str:
    return Path(folder, "README.md").read_text(encoding="utf-8")


def part(text: str, heading: str) -> str:
    """Return a section of a card."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_both_folders_load_without_this_package_and_give_the_policy_s_logits(either, tmp_path, monkeypatch):
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
    text = read_card()
    assert text.startswith("---\nlibrary_name: peft\nlicense: mine\npipeline_tag: text-generation\n---\n\n# ")
    steps = load().ppo.steps
    assert f"trained by PPO with seed 1, as it was after step 6 of {steps}." in text
    assert "| policy | file | policy | – | – | mine |" in text
    for line in (
        "| positive rate | 0.250 | 0.500 | 0.625 |",
        "| kl nats per sequence | – | – | 1.750 |",
        "| judge probability | +0.125 | [-0.062, 0.375] |",
        "| Reward model | 10 | 100.0% | [0.692, 1.000] |",
        "| Judge | 2 | 0.0% | [0.000, 0.842] |",
    ):
        assert f"\n{line}\n" in text
    assert "a classifier trained on 77 other labelled texts" in text
    assert "No person compared these texts." in text and "{" not in text.split("## Parameters")[0]
    assert (here / "params.yaml").read_text(encoding="utf-8") in text
    assert len(re.findall(r"\.(?=\s)", part(text, "Method"))) == 4


def test_the_card_of_answers_tells_of_the_run(asked, monkeypatch):
    """Clopper and Pearson, 10 questions as trials: none right gives 0 to 1 - 0.025 ** (1 / 10) = 0.3085."""
    assert call(monkeypatch, "ppo-1", "out") == 0
    text = read_card()
    assert text.startswith("---\nlibrary_name: peft\nlicense: mine\npipeline_tag: text-generation\n---\n\n# ")
    assert "trained by PPO with seed 1, as it was after step 3 of 6." in text
    assert part(text, "Sources").count("| policy | file | policy | – | – | mine |") == 1
    for line in (
        "| heuristic score | -0.500 | 2.250 | 4.125 |",
        "| chrf | 12.000 | 25.500 | 21.750 |",
        "| kl nats per sequence | – | – | 1.750 |",
        "| heuristic score | +1.875 | [1.000, 2.500] |",
        "| chrf | -3.750 | [-7.250, -0.125] |",
        "| Reward model, as judged | 30 | 10 | 0.0% | [0.000, 0.308] |",
        "| Reward model, before noise | 30 | 10 | 100.0% | [0.692, 1.000] |",
    ):
        assert f"\n{line}\n" in text
    limits = part(text, "Limits")
    for said in ("as a source of facts", "No person compared", "reward hacking", "66 test questions"):
        assert said in limits
    assert "{" not in limits + part(text, "Method") + part(text, "Metrics")
    assert (asked / "params.yaml").read_text(encoding="utf-8") in text
    assert len(re.findall(r"\.(?=\s)", part(text, "Method"))) == 5


def test_the_card_of_answers_tells_people_s_preferences_from_simulated_ones(asked, monkeypatch):
    assert call(monkeypatch, "ppo-1", "simulated") == 0
    simulated = read_card("simulated")
    write_metrics(asked, PEOPLE_S_METRICS)
    write_lock(asked)
    assert call(monkeypatch, "ppo-1", "people") == 0
    people = read_card("people")
    for said in (
        "the preferences of a simulated annotator",
        "learns 77 preferences between two answers,\nthose of a simulated annotator between 3 samples of SFT",
        "turned round with probability 0.05",
        "No person's preferences were used",
        "The annotator is simulated by the same rule",
        "in standard deviations of SFT's samples",
        "Reward model, before noise",
    ):
        assert said in simulated and said not in people, said
    for said in (
        "people's preferences",
        "learns 55 preferences between two answers,\npeople's own, from a file;",
        "People's preferences are `data/preferences.jsonl`.",
        "The preferences are people's, from the user's file.",
        "in standard deviations of the preferred and rejected answers",
        "| Reward model, as judged | 30 | 2 | 50.0% | [0.013, 0.987] |",
    ):
        assert said in people and said not in simulated, said


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        (
            "reward",
            {"adapter": True, "head": "linear"},
            "another adapter of the same base with a linear head,",
        ),
        ("reward", {"adapter": False, "head": "mlp"}, "the frozen base itself with a head of two layers,"),
        ("ppo", {"advantage": "gae"}, "advantages are GAE's, with a value head,"),
        ("ppo", {"advantage": "returns"}, "advantages are the rewards to go, without a value head,"),
        ("ppo", {"kl_beta": 0.0}, "steps of 32, without a KL penalty."),
        ("ppo", {"kl_controller": "fixed", "kl_beta": 0.3}, "token (fixed, 0.3)."),
        ("ppo", {"kl_controller": "ziegler", "kl_beta": 0.3}, "token (ziegler, 0.3 at first)."),
        ("ppo", {"validation_prefixes": 5}, "highest reward on\n5 fixed validation questions is kept."),
    ],
)
def test_the_method_of_answers_follows_the_parameters(asked, section, values, said):
    params = load()
    changed = dataclasses.replace(
        params, **{section: dataclasses.replace(getattr(params, section), **values)}
    )
    assert said in part(card.card("sft", False, changed), "Method")


@pytest.mark.parametrize("options", [[], ["--merged"]])
def test_the_code_on_the_card_of_answers_asks_as_the_evaluation_did(asked, monkeypatch, capsys, options):
    set_params(asked, {"split.template": 'a film\'s "{question}"\n\nso'})
    assert call(monkeypatch, "ppo-1", "out", *options) == 0
    (code,) = re.findall(r"```python\n(.*?)```", read_card(), re.DOTALL)
    names = {}
    exec(code.replace("this folder", "out").replace("a folder with the policy below", "policy"), names)
    tokenizer = AutoTokenizer.from_pretrained("policy")
    question = "Why does ice float on water?"
    expected = question_ids(
        lambda t: tokenizer.encode(t, add_special_tokens=False), load().split.template, question
    )
    assert names["tokens"].tolist() == [expected]
    assert 0 < names["output"].shape[1] - len(expected) <= 12


def test_the_card_of_sft_and_of_a_ready_judge(here):
    params = load()
    params = dataclasses.replace(params, judge=dataclasses.replace(params.judge, epochs=0))
    text = card.card("sft", True, params)
    assert "the supervised policy, which PPO started from." in text and "library_name: transformers" in text
    assert "never sees, a ready classifier," in text and "The judge is a ready classifier." in text
    assert "merged here into the same base in float32" not in text
    quantised = dataclasses.replace(params, model=dataclasses.replace(params.model, quantization="nf4"))
    assert "(quantisation: nf4) and\nis merged here" in card.card("sft", True, quantised)
    assert "(quantisation: nf4) and\nthe base above is loaded" in card.card("sft", False, quantised)


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
    assert said in card.card("sft", False, dataclasses.replace(params, reward=reward))


def test_a_base_on_a_hub_is_named_with_its_commit(here, tmp_path):
    params = load()
    policy = dataclasses.replace(
        params.fetch.policy, kind="hub", name="Qwen/Qwen3-4B-Base", revision=COMMIT, license="Apache-2.0"
    )
    params = dataclasses.replace(params, fetch=dataclasses.replace(params.fetch, policy=policy))
    (tmp_path / "out").mkdir()
    export.write_adapter(tmp_path / "out", Path("artifacts/sft"), params)
    assert read_json(tmp_path / "out/adapter_config.json")["revision"] == COMMIT
    text = card.card("sft", False, params)
    assert text.startswith("---\nbase_model: Qwen/Qwen3-4B-Base\nlibrary_name: peft\nlicense: apache-2.0\n")
    assert f'from_pretrained("Qwen/Qwen3-4B-Base", revision="{COMMIT}")' in text


def test_a_base_out_of_a_package_is_said_to_be_no_folder_on_a_hub(here):
    params = load()
    policy = dataclasses.replace(params.fetch.policy, kind="wheel", name="llm", path="llm_x/x.gguf")
    params = dataclasses.replace(params, fetch=dataclasses.replace(params.fetch, policy=policy))
    said = "makes it of\n`llm_x/x.gguf`, a file of a Python package. The export `--merged` needs no base."
    assert said in card.card("sft", False, params) and said not in card.card("sft", True, params)


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
def test_each_error_is_one_line_and_nothing_is_written(either, monkeypatch, capsys, what):
    change, arguments, message = REFUSED[what]
    if change:
        change()
    assert_refused(either, monkeypatch, capsys, arguments.split(), message)


@pytest.mark.parametrize(
    ("name", "change", "state"),
    [
        ("preferences", lambda path: path.unlink(), "is missing"),
        (
            "preferences",
            lambda path: write_json(path, PEOPLE_S_METRICS["preferences"]),
            "is not what dvc.lock says",
        ),
        ("report", lambda path: path.unlink(), "is missing"),
    ],
)
def test_a_card_of_answers_needs_the_metrics_of_their_run(asked, monkeypatch, capsys, name, change, state):
    """It needs no judge's model: that run has none."""
    assert not Path("reports/metrics/judge_model.json").exists()
    change(Path(f"reports/metrics/{name}.json"))
    message = f"output reports/metrics/{name}.json {state}: run `dvc repro` or `dvc pull` first"
    assert_refused(asked, monkeypatch, capsys, ["sft", "new"], message)


def assert_refused(folder: Path, monkeypatch, capsys, arguments: list[str], message: str) -> None:
    """Hold that the program ends with one line that begins with `message`, and that it writes nothing."""
    before = tree(folder)
    assert call(monkeypatch, *arguments, "--merged") == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1
    assert tree(folder) == before and not (folder / "new").exists()


@pytest.mark.parametrize("options", [[], ["--merged"]])
def test_a_failure_on_the_way_leaves_nothing(either, monkeypatch, capsys, options):
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device", "README.md")

    monkeypatch.setattr(export, "card", fail)
    before = tree(either)
    (either / "new").mkdir()
    assert call(monkeypatch, "sft", "new", *options) == 1
    assert capsys.readouterr().err == "error: No space left on device: README.md\n"
    assert tree(either) == before
    assert [path.name for path in either.iterdir() if "new" in path.name] == ["new"]


@pytest.mark.parametrize(
    ("options", "absolute", "title"),
    [
        ([], False, "Movie-review"),
        (["PIPELINE=qa"], False, "Question"),
        (["PIPELINE=qa", "MERGED=1"], True, "Question"),
    ],
)
def test_make_exports_from_either_pipeline(trained, tmp_path, options, absolute, title):
    """As in a clone: the first pipeline in the root, the second in qa/; TO is relative to the root."""
    root = tmp_path / "the root"
    shutil.copytree(trained / "reviews", root)
    shutil.copytree(trained / "questions", root / "qa")
    for name in ("Makefile", "constraints.txt", "rlhf", "stages", "tools"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").mkdir()
    (root / ".venv/installed.txt").touch()
    target = tmp_path / "my policy" if absolute else root / "my policy"
    run(root, "make", "export", "POLICY=sft", f"TO={target if absolute else 'my policy'}", *options)
    assert f"\n# {title}" in read_card(str(target))
    assert (target / "model.safetensors").exists() == ("MERGED=1" in options)
