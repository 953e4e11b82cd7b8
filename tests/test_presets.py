"""Presets: each loads strictly and is in DVC's own form; the first reference's has each of its figures."""

import dataclasses
import io

import pytest
from architecture import ROOT
from ruamel.yaml import YAML

from rlhf.config import Params, QuestionParams, load
from rlhf.sections import Fetch, PolicyFetch

PRESETS = sorted((ROOT / "presets").glob("*.yaml"), key=lambda path: path.stem)
NAMES = ["qwen3-0.6b-sst2", "qwen3-4b-sst2", "qwen3-4b-sst2-strong"]
TRAIN, VALIDATION = "train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"

# As many public projects pin them, and the hashes of their files where those are known.
COMMITS = {
    "Qwen/Qwen3-4B-Base": "906bfd4b4dc7f14ee4320094d8b41684abff8539",
    "Qwen/Qwen3-0.6B-Base": "da87bfb608c14b7cf20ba1ce41287e8de496c0cd",
    "Qwen/Qwen2.5-0.5B": "060db6499f32faf8b98477b0a26969ef7d8b9987",
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "714eb0fa89d2f80546fda750413ed43d93601a13",
    "stanfordnlp/sst2": "8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb",
}
KNOWN = {
    "Qwen/Qwen3-4B-Base": {
        "4c807e2503d68ae373d508689d00a41f4b33f33c2536da97ab81a20caddc1241",
        "f4707585548b2fc75a6b1d732e8465c62040a8699903c32850781beeb9b27826",
        "c7b1aa8fb672de2e00423c99876926022e50b18d4f0d140670788510a27f9965",
    },
    "Qwen/Qwen2.5-0.5B": {"88c142557820ccad55bb59756bfcfcf891de9cc6202816bd346445188a0ed342"},
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": {
        "7c3919835e442510166d267fe7cbe847e0c51cd26d9ba07b89a57b952b49b8aa"
    },
    "stanfordnlp/sst2": {
        "c7921283b75a42e685f50edecb96798607ea0fcbfd0739ee8975f22c12d55f09",
        "fb00fe008f6828f86ba2beda8415a4cf5da0c884f21c5f238c87131b5aa19529",
        "20d27a86c0c59acb746a41a481ebb1fc71edb72d94b5ccee7f23b9041b17adcf",
    },
}

# The reference notebook's figures: the cell where it stands, and the setting that must equal it.
REFERENCE = [
    ("In [2] SEED = 42", "seed", 42),
    ('In [2] DEVICE = torch.device("cuda:0")', "runtime.device", "cuda"),
    ("In [2] MODEL_ID", "fetch.policy.name", "Qwen/Qwen3-4B-Base"),
    ("In [2] JUDGE_ID", "fetch.judge.name", "distilbert/distilbert-base-uncased-finetuned-sst-2-english"),
    ('In [3] load_dataset("stanfordnlp/sst2")', "fetch.reviews.name", "stanfordnlp/sst2"),
    ('In [3] raw["train"]', "split.rows.file", TRAIN),
    ('In [3] raw["validation"]', "split.rows.held_out_file", VALIDATION),
    ('In [3] r["sentence"]', "split.rows.text_column", "sentence"),
    ('In [3] r["label"]', "split.rows.label_column", "label"),
    ('In [3] int(r["label"])', "split.rows.labels", {"0": 0, "1": 1}),
    ("In [3] 12 <= len(ids)", "split.min_tokens", 12),
    ('In [2] max_length=96, In [3] len(ids) < CFG["max_length"]-1', "split.max_tokens", 94),
    ("In [3] train[:2048]", "split.sizes.sft", 2048),
    ("In [3] train[2048:6144]", "split.sizes.rm", 4096),
    ("In [3] train[6144:7168]", "split.sizes.ppo", 1024),
    ("In [2] val_n=128", "split.sizes.val", 128),
    ("In [2] rm_test_n=128", "split.sizes.rm_test", 128),
    ("In [2] eval_n=40", "split.sizes.test", 40),
    ("In [2] DTYPE = bfloat16 if the GPU has it, else float16", "model.dtype", "half"),
    ('In [4] bnb_4bit_quant_type="nf4"', "model.quantization", "nf4"),
    ("In [2] lora_rank=8", "model.lora.rank", 8),
    ('In [4] lora_alpha=2*CFG["lora_rank"]', "model.lora.alpha", 16.0),
    ("In [4] target_modules", "model.lora.targets", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("In [2] max_length=96, one sequence at a time", "model.micro_batch_tokens", 96),
    ("In [4] use_gradient_checkpointing=False", "model.gradient_checkpointing", False),
    ("In [6] torch.optim.AdamW(params,lr)", "adam.state", "float32"),
    ("AdamW's default betas", "adam.beta1", 0.9),
    ("AdamW's default betas", "adam.beta2", 0.999),
    ("AdamW's default eps", "adam.eps", 1e-8),
    ("AdamW's default weight_decay", "adam.weight_decay", 0.01),
    ("In [4] clip_grad_norm_(parameters, 1.0)", "adam.max_grad_norm", 1.0),
    ("In [2] prefix_tokens=6", "generation.prefix_tokens", 6),
    ("In [2] response_tokens=48", "generation.response_tokens", 48),
    ("In [5] temperature=1.0", "generation.temperature", 1.0),
    ("In [4] sampled_logprobs: hidden[:, :-1] predicts ids[:, 1:]", "sft.prompt_tokens", 1),
    ("In [2] sft_steps=128", "sft.steps", 128),
    ("In [2] accum=8", "sft.batch_size", 8),
    ("In [2] sft_lr=1e-4", "sft.lr", 1e-4),
    ("In [4] lora_dropout=0.0", "sft.lora_dropout", 0.0),
    ("In [7] binary_cross_entropy_with_logits", "reward.loss", "label"),
    ("In [4] reward_head = nn.Linear(H, 1)", "reward.head", "linear"),
    ('In [7] select_adapter("reward",train=True)', "reward.adapter", True),
    ("In [2] rm_steps=192", "reward.steps", 192),
    ("In [2] accum=8", "reward.batch_size", 8),
    ("In [2] rm_lr=1e-4", "reward.lr", 1e-4),
    ("In [7] (step+1)%32==0", "reward.validate_every", 32),
    ('In [7] reward_test["accuracy"]<0.7', "reward.weak_accuracy", 0.7),
    ("In [2] SEED, one PPO run", "ppo.seeds", (42,)),
    ("In [2] PPO_STEPS = 96", "ppo.steps", 96),
    ("In [2] PPO_BATCH = 8", "ppo.batch_size", 8),
    ("In [8] one optimizer_step per epoch", "ppo.minibatches", 1),
    ("In [2] PPO_EPOCHS = 2", "ppo.epochs", 2),
    ("In [2] PPO_LEARNING_RATE = 1e-5, over ppo_lr=5e-6", "ppo.lr", 1e-5),
    ("In [2] kl_beta=.05", "ppo.kl_beta", 0.05),
    ('In [8] -CFG["kl_beta"]*(old_lp-ref_lp)', "ppo.kl_controller", "fixed"),
    ("In [2] clip=.2", "ppo.clip", 0.2),
    ("In [2] value_clip=.2", "ppo.value_clip", 0.2),
    ("In [2] value_coef=.5", "ppo.value_coef", 0.5),
    ("In [8] compute_advantage", "ppo.advantage", "gae"),
    ("In [2] gamma=1.", "ppo.gamma", 1.0),
    ("In [2] lam=.95", "ppo.lam", 0.95),
    ("In [2] PPO_VALIDATION_EVERY = 16", "ppo.validate_every", 16),
    ("In [2] PPO_VALIDATION_N = 16", "ppo.validation_prefixes", 16),
    ("In [5] one continuation of each test prefix", "sample.n", 1),
    ("In [9] the judge is taken as it is", "judge.epochs", 0),
    ("In [9] the judge is taken as it is", "split.judge", None),
    ("In [9] range(0,len(rows),16)", "judge.batch_size", 16),
    ("In [9] max_length=256", "judge.max_tokens", 256),
    ("In [9] boot_rng.choice(delta,(2000,len(delta)))", "report.resamples", 2000),
    ("In [9] head(8)", "report.examples", 8),
]
# Settings that the reference has no figure for, and why the preset's decide no result of its kind.
WITHOUT = {
    "runtime.threads": "the GPU computes",
    "runtime.snapshot_seconds": "decides no output",
    "split.rows.encoding": "a parquet file has its own",
    "split.rows.where": "all rows",
    "split.sha256": "frozen after the first run",
    "ppo.kl_target": "the controller is fixed",
    "ppo.kl_horizon": "the controller is fixed",
    "sample.batch_size": "a row's sample does not depend on its batch",
    "judge.lr": "the judge is not trained",
    "report.title": "a title",
}


def flat(value: object, key: str = "") -> dict[str, object]:
    """A configuration's values by dotted key."""
    if not dataclasses.is_dataclass(value):
        return {key: value}
    fields = {
        f"{key}.{field.name}".strip("."): getattr(value, field.name) for field in dataclasses.fields(value)
    }
    return {inner: found for name, part in fields.items() for inner, found in flat(part, name).items()}


def preset(name: str) -> dict[str, object]:
    return flat(load(ROOT / "presets" / f"{name}.yaml"))


def check_sources(fetch: Fetch | PolicyFetch) -> None:
    for name, source in vars(fetch).items():
        assert (source.kind, source.revision) == ("hub", COMMITS[source.name]), name
        assert set(source.sha256.values()) == KNOWN.get(source.name, set()), name


def test_the_presets_are_these():
    assert [path.stem for path in PRESETS] == NAMES


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_complete_strict_and_in_the_form_that_dvc_writes(path):
    assert isinstance(load(path), Params)
    text, written, yaml = path.read_text(encoding="utf-8"), io.StringIO(), YAML()
    yaml.dump(yaml.load(text), written)
    assert written.getvalue() == text
    default = YAML().load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert list(yaml.load(text)) == list(default)
    assert "the README's table" in text and text.startswith("# ")


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_source_of_a_preset_is_a_hub_commit_with_the_hashes_that_are_known(path):
    fetch = load(path).fetch
    check_sources(fetch)
    for file in (TRAIN, VALIDATION):
        assert f"{fetch.reviews.path}/{file}" in fetch.reviews.sha256


@pytest.mark.parametrize(("origin", "key", "expected"), REFERENCE, ids=lambda value: str(value)[:40])
def test_the_first_reference_s_figure_is_the_preset_s(origin, key, expected):
    assert preset("qwen3-4b-sst2")[key] == expected, origin


def test_no_setting_of_the_first_reference_s_preset_is_left_unexamined():
    examined = {key for _, key, _ in REFERENCE} | WITHOUT.keys()
    settings = {key for key in preset("qwen3-4b-sst2") if not key.startswith("fetch.")}
    assert settings <= examined
    assert examined - settings == {f"fetch.{name}.name" for name in ("policy", "reviews", "judge")}


def test_the_strong_preset_is_the_first_reference_s_experiment_with_more_of_it():
    weak, strong = preset("qwen3-4b-sst2"), preset("qwen3-4b-sst2-strong")
    assert strong["split.sizes.test"] >= 256 and len(strong["ppo.seeds"]) >= 5 and strong["sample.n"] > 1
    assert {
        key
        for key in weak
        if key.startswith(("fetch.", "generation.", "judge.")) and weak[key] != strong[key]
    } == set()
    default = flat(load(ROOT / "params.yaml"))
    for key in ("ppo.kl_beta", "ppo.batch_size", "ppo.minibatches", "report.resamples"):
        assert strong[key] == default[key] != weak[key]


def test_a_small_gpu_s_preset_differs_from_the_strong_one_in_size_alone():
    strong, small = preset("qwen3-4b-sst2-strong"), preset("qwen3-0.6b-sst2")
    assert small["fetch.policy.name"] == "Qwen/Qwen3-0.6B-Base" and small["model.quantization"] == "none"
    changed = {key for key in strong if strong[key] != small[key] and not key.startswith("fetch.policy.")}
    assert changed == {
        *("split.sizes.rm", "split.sizes.ppo", "split.sizes.test", "model.quantization"),
        *("model.micro_batch_tokens", "reward.steps", "ppo.seeds", "ppo.steps", "sample.n", "report.title"),
    }


# The question answering guide's figures: its own expression, and the setting that must equal it.
GUIDE = [
    ("r=16", "model.lora.rank", 16),
    ("lora_alpha=32", "model.lora.alpha", 32.0),
    ('target_modules=["q_proj", "v_proj"]', "model.lora.targets", ("q_proj", "v_proj")),
    ("lora_dropout=0.1", "sft.lora_dropout", 0.1),
    ("sft_dataloader: batch_size=2", "sft.batch_size", 2),
    ("AdamW(model.parameters(), lr=1e-4)", "sft.lr", 1e-4),
    ("num_epochs = 3, of 200 answers here", "sft.steps", 3 * 200 // 2),
    ("two layers on the frozen model", "reward.head", "mlp"),
    ("two layers on the frozen model", "reward.adapter", False),
    ("rm_dataloader: batch_size=2", "reward.batch_size", 2),
    ("AdamW(reward_model.reward_head.parameters(), lr=1e-4)", "reward.lr", 1e-4),
    ("clip_range: 0.2", "ppo.clip", 0.2),
    ("ppo_epochs: 4", "ppo.epochs", 4),
    ("kl_coef: 0.1", "ppo.kl_beta", 0.1),
    ("target_kl: 0.02", "ppo.kl_target", 0.02),
    ("kl_coef times or over 1.2", "ppo.kl_controller", "stepwise"),
    ("learning_rate: 1e-5", "ppo.lr", 1e-5),
    ("batch_size: 4", "ppo.batch_size", 4),
    ("one update per response", "ppo.minibatches", 4),
    ("no value head", "ppo.advantage", "returns"),
    ("clip_grad_norm_(..., 1.0)", "adam.max_grad_norm", 1.0),
    ("max_new_tokens: 100", "generation.response_tokens", 100),
    ("temperature: 0.7", "generation.temperature", 0.7),
]


def guide() -> QuestionParams:
    return load(ROOT / "qa/presets/qwen2.5-0.5b.yaml")


@pytest.mark.parametrize(("origin", "key", "expected"), GUIDE, ids=lambda value: str(value)[:40])
def test_the_guide_s_figure_is_its_preset_s(origin, key, expected):
    assert flat(guide())[key] == expected, origin


def test_the_guide_s_preset_is_the_default_s_data_on_the_pinned_model():
    default = load(ROOT / "qa/params.yaml")
    check_sources(guide().fetch)
    assert guide().split.sizes == default.split.sizes and guide().preferences.samples == 4
