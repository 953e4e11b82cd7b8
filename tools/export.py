"""Write a trained policy as a folder that plain peft or transformers loads, with a model card of its run:
`python -m tools.export sft|ppo-<seed> FOLDER [--merged]`.

The folder holds the LoRA adapter, or with `--merged` the whole model in float32 with the adapter merged into
it; the tokenizer; and README.md. The same run gives the same bytes.
"""

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from safetensors import SafetensorError
from transformers import GenerationConfig

from rlhf.config import Params, load
from rlhf.errors import UserError, run
from rlhf.generate import adapter_folder
from rlhf.models import Lora, add_adapters, load_adapter, load_base, set_determinism
from rlhf.record import read_json, replacing, write_json, write_text
from rlhf.report import markdown as md
from rlhf.report.appendix import JUDGE_LIMITS, LIMITS
from rlhf.sources import locate
from rlhf.stats import clopper_pearson
from rlhf.tokenizer import load_tokenizer
from tools.bundle import locked_outputs, output_files
from tools.verify import read_stages

METRICS = {name: f"reports/metrics/{name}.json" for name in ("report", "reward", "judge_model")}
AGAIN = "run `dvc repro` first"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.export", description="Write a trained policy as a folder, with a model card."
    )
    parser.add_argument("policy", metavar="POLICY", help="sft or ppo-<seed>")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder, or an empty one")
    parser.add_argument("--merged", action="store_true", help="the whole model, not the adapter alone")
    arguments = parser.parse_args()
    params, policy, target = load(), arguments.policy, arguments.folder.resolve()
    if not isinstance(params, Params):
        raise UserError(
            "the model card is written for the movie-review pipeline; artifacts/sft and artifacts/ppo/<seed> "
            "of the question answering one are PEFT folders as they are"
        )
    adapter = adapter_folder(policy, params)
    if adapter is None:
        raise UserError(f"policy is {policy!r}: expected sft or ppo-<seed>; nothing was trained in the base")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{arguments.folder} is there: expected a new folder, or an empty one")
    check_run(policy, adapter)
    base = locate(read_json("data/manifests/policy.json"))
    with replacing(target) as folder:
        folder.mkdir()
        write_tokenizer(folder, base)
        if arguments.merged:
            write_merged(folder, base, adapter, params)
        else:
            write_adapter(folder, adapter, params)
        write_text(folder / "README.md", card(policy, arguments.merged, params))
    print(f"wrote {policy} to {arguments.folder}")


def check_run(policy: str, adapter: Path) -> None:
    """Raise `UserError` unless adapter, metrics and parameters are those of one run, by its dvc.lock."""
    outs, lock = locked_outputs(Path("dvc.lock")), read_stages(Path("dvc.lock"))
    needed = [adapter.as_posix(), *METRICS.values()]
    if policy != "sft":
        needed.append(training_metrics(policy))
    if missing := [path for path in needed if path not in outs]:
        raise UserError(f"dvc.lock does not name {missing[0]}: {AGAIN}")
    output_files(Path(), {path: outs[path] for path in needed})
    deps = [dep for stage in lock.values() for dep in stage.get("deps", [])]
    if stale := [dep["path"] for dep in deps if outs.get(dep["path"], dep["md5"]) != dep["md5"]]:
        raise UserError(f"{stale[0]} has changed since it was used: {AGAIN}")
    now = YAML(typ="safe", pure=True).load(Path("params.yaml").read_text(encoding="utf-8"))
    for key, value in lock["report"]["params"]["params.yaml"].items():
        if value_at(now, key) != value:
            raise UserError(f"params.yaml has another {key} than the report was made with: {AGAIN}")


def value_at(values: Any, key: str) -> Any:
    """Return the value at a dotted key; None where there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def write_tokenizer(folder: Path, base: Path) -> None:
    """Write the tokenizer's files, without how it happened to be loaded here."""
    load_tokenizer(base).save_pretrained(folder)
    config = read_json(folder / "tokenizer_config.json")
    write_json(
        folder / "tokenizer_config.json",
        {name: value for name, value in config.items() if name not in ("is_local", "local_files_only")},
    )


def write_adapter(folder: Path, adapter: Path, params: Params) -> None:
    """Copy the PEFT adapter; a base model on a hub is named with its commit."""
    source = params.fetch.policy
    shutil.copyfile(adapter / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = read_json(adapter / "adapter_config.json")
    config["revision"] = source.revision if source.kind == "hub" else None
    write_json(folder / "adapter_config.json", config)


def write_merged(folder: Path, base: Path, adapter: Path, params: Params) -> None:
    """Write W + (alpha / rank) B A in float32; unless told otherwise it then samples as it was evaluated."""
    tokenizer = load_tokenizer(base)
    device = set_determinism("cpu", params.runtime.threads)
    lora = Lora(**vars(params.model.lora))
    model = add_adapters(load_base(base, "float32", "none", device), lora, ["policy"], params.seed)
    load_adapter(model, "policy", adapter)
    merged = model.merge_and_unload()
    merged.generation_config = GenerationConfig(
        do_sample=True,
        temperature=params.generation.temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=params.generation.response_tokens,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )
    try:
        merged.save_pretrained(folder)
    except SafetensorError as error:
        raise UserError(f"{folder.name}: the weights cannot be written: {error}") from None


def card(policy: str, merged: bool, params: Params) -> str:
    """Return the model card: what it is, its use, sources, method, metrics, limits and parameters."""
    source = params.fetch.policy
    what = f"The {'model' if merged else 'LoRA adapter'} `{policy}` of an experiment in RLHF on"
    limits = LIMITS.format(judge=JUDGE_LIMITS[params.judge.epochs > 0])
    settings = Path("params.yaml").read_text(encoding="utf-8")
    sections = [
        front_matter(merged, params),
        f"# {md.escape(params.report.title)}: {policy}",
        f"{what} {md.escape(source.name)}: {trained_by(policy, params)}.",
        f"## Use\n\n{usage(merged, params)}",
        f"## Sources\n\n{sources(params)}",
        f"## Method\n\n{method(params)}",
        f"## Metrics\n\n{metrics(params)}",
        f"## Limits\n\n{limits}",
        f"## Parameters\n\n```yaml\n{settings}```",
    ]
    return "\n\n".join(sections) + "\n"


def front_matter(merged: bool, params: Params) -> str:
    """Return the lines that model hubs read; a licence that is no plain identifier is `other`."""
    source = params.fetch.policy
    licence = source.license.lower()
    lines = [
        *([f"base_model: {source.name}"] if source.kind == "hub" else []),
        f"library_name: {'transformers' if merged else 'peft'}",
        f"license: {licence if re.fullmatch('[a-z][a-z0-9.-]*', licence) else 'other'}",
        "pipeline_tag: text-generation",
    ]
    return "\n".join(["---", *lines, "---"])


def trained_by(policy: str, params: Params) -> str:
    """Return in words which policy of the run this is."""
    if policy == "sft":
        return "the supervised policy, which PPO started from"
    step = read_json(training_metrics(policy))["selected_step"]
    seed = policy.removeprefix("ppo-")
    return f"trained by PPO with seed {seed}, as it was after step {step} of {params.ppo.steps}"


def training_metrics(policy: str) -> str:
    """Return where PPO wrote what it says of its training."""
    return f"reports/metrics/ppo/{policy.removeprefix('ppo-')}.json"


def usage(merged: bool, params: Params) -> str:
    """Return code that loads the folder, and how to sample as in the evaluation."""
    source, generation = params.fetch.policy, params.generation
    call = "AutoModelForCausalLM.from_pretrained"
    if merged:
        code = ["from transformers import AutoModelForCausalLM", "", f'model = {call}("this folder")']
    else:
        code = ["from peft import PeftModel", "from transformers import AutoModelForCausalLM", ""]
        code += [
            f'base = {call}("{source.name}", revision="{source.revision}")'
            if source.kind == "hub" and source.path is None
            else f'base = {call}("a folder with the policy below")',
            'model = PeftModel.from_pretrained(base, "this folder")',
        ]
    text = "\n".join(["```python", *code, "```"])
    if (params.model.quantization, params.model.dtype) != ("none", "float32"):
        now = (
            "is merged here into the same base in float32"
            if merged
            else "the base above is loaded as its files have it"
        )
        text += f"""

The adapter was trained on a base in {params.model.dtype} (quantisation: {params.model.quantization}) and
{now}: the metrics below are those on the base of training."""
    sampling = f"`do_sample=True`, `temperature={generation.temperature}`, `top_k=0`, `top_p=1.0`"
    return f"""{text}

It was trained and evaluated with the full distribution: {sampling}, with at most
{generation.response_tokens} new tokens after the first {generation.prefix_tokens} tokens of a text."""


def sources(params: Params) -> str:
    """Return a table of models and data with revisions and licences."""
    pins = vars(params.fetch)
    keys = ("kind", "name", "revision", "path", "license")
    rows = [[what, *(md.escape(getattr(pin, key) or "–") for key in keys)] for what, pin in pins.items()]
    return md.table(["What", "Kind", "Name", "Revision", "Path", "Licence"], rows, len(keys) + 1)


def method(params: Params) -> str:
    """Return the whole run in four sentences."""
    sizes, sft, ppo = params.split.sizes, params.sft, params.ppo
    judge = "a ready classifier"
    if params.judge.epochs > 0:
        rows = read_json(METRICS["judge_model"])["train_rows"]
        judge = f"a classifier trained on {rows} other labelled texts"
    reward = "another adapter of the same base" if params.reward.adapter else "the frozen base itself"
    head = {"linear": "a linear head", "mlp": "a head of two layers"}[params.reward.head]
    rank, penalty = params.model.lora.rank, f"{ppo.kl_controller}, {ppo.kl_beta}"
    return f"""SFT fits a LoRA adapter of rank {rank} to {sizes.sft} texts by next-token loss, in
{sft.steps} steps of {sft.batch_size}. A reward model, {reward} with {head},
learns the human labels of {sizes.rm} texts. PPO starts from SFT and raises the reward 2σ(logit) − 1 of its
continuations in {ppo.steps} steps of {ppo.batch_size}, with a KL penalty to the frozen SFT policy on every
token ({penalty}), and the step of the highest reward on fixed validation prefixes is kept. A judge
that PPO never sees, {judge}, scores what each policy writes after
{sizes.test} held-out prefixes, under the same random numbers."""


def metrics(params: Params) -> str:
    """Return the run's levels, differences with intervals, and the accuracy of what measured them."""
    found = read_json(METRICS["report"])
    seeds = ", ".join(map(str, params.ppo.seeds))
    names = [name.removesuffix("_ppo") for name in found if name.endswith("_ppo")]
    levels = [[words(n), *(md.number(found.get(f"{n}_{p}")) for p in ("base", "sft", "ppo"))] for n in names]
    end = "_ppo_minus_sft"
    differences = [
        [words(n.removesuffix(end)), md.signed(v), md.interval(found[f"{n}_low"], found[f"{n}_high"])]
        for n, v in found.items()
        if n.endswith(end)
    ]
    reward, judge = read_json(METRICS["reward"]), read_json(METRICS["judge_model"])
    accuracies = [
        accuracy("Reward model", reward["accuracy"], reward["n"]),
        accuracy("Judge", judge["accuracy"], judge["n"]),
        accuracy("VADER", judge["vader_accuracy"], judge["n"]),
    ]
    return f"""{md.table(["", "base", "SFT", "PPO"], levels)}

{md.table(["PPO − SFT, paired", "Mean", "95% interval"], differences)}

{md.table(["Accuracy on held-out labels", "n", "Accuracy", "95% interval"], accuracies)}

PPO is the mean over the seeds {seeds}. NLL and KL are in nats, lengths in tokens. The intervals of the
differences are those of the report; those of the accuracies are Clopper and Pearson's."""


def words(name: str) -> str:
    """Return a metric's name in words."""
    return name.replace("_", " ")


def accuracy(name: str, share: float, n: int) -> list[str]:
    """Return a table row with an accuracy and its interval."""
    return [name, str(n), md.percent(share), md.interval(*clopper_pearson(round(share * n), n))]


if __name__ == "__main__":
    run(main)
