"""The model card of an exported policy: front matter, use, sources, method, metrics, limits, parameters."""

import re
from pathlib import Path

from rlhf.config import Params, QuestionParams
from rlhf.record import read_json
from rlhf.report import markdown as md
from tools.card_words import Words, answer_words, metrics_file, review_words

AnyParams = Params | QuestionParams


def card(policy: str, merged: bool, params: AnyParams) -> str:
    """Return the card of a policy of the run in the working directory."""
    words = review_words(params) if isinstance(params, Params) else answer_words(params)
    what = f"The {'model' if merged else 'LoRA adapter'} `{policy}` of an experiment in RLHF on"
    opening = f"{what} {md.escape(params.fetch.policy.name)}: {trained_by(policy, params)}."
    settings = Path("params.yaml").read_text(encoding="utf-8")
    sections = [
        front_matter(merged, params),
        f"# {md.escape(params.report.title)}: {policy}",
        "\n".join(filter(None, [opening, words.aim])),
        f"## Use\n\n{usage(merged, params, words)}",
        "\n\n".join(filter(None, ["## Sources", sources(params), words.data])),
        f"## Method\n\n{words.method}",
        f"## Metrics\n\n{metrics(params, words)}",
        f"## Limits\n\n{words.limits}",
        f"## Parameters\n\n```yaml\n{settings}```",
    ]
    return "\n\n".join(sections) + "\n"


def metric_files(policy: str, params: AnyParams) -> list[str]:
    """Return where the metrics lie that the card of a policy tells of."""
    names = ["report", "reward", "judge_model" if isinstance(params, Params) else "preferences"]
    return [*map(metrics_file, names), *([] if policy == "sft" else [training_metrics(policy)])]


def training_metrics(policy: str) -> str:
    """Return where PPO wrote what it says of its training."""
    return metrics_file(f"ppo/{policy.removeprefix('ppo-')}")


def front_matter(merged: bool, params: AnyParams) -> str:
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


def trained_by(policy: str, params: AnyParams) -> str:
    """Return in words which policy of the run this is."""
    if policy == "sft":
        return "the supervised policy, which PPO started from"
    step = read_json(training_metrics(policy))["selected_step"]
    seed = policy.removeprefix("ppo-")
    return f"trained by PPO with seed {seed}, as it was after step {step} of {params.ppo.steps}"


def usage(merged: bool, params: AnyParams, words: Words) -> str:
    """Return code that loads the folder, and how to sample as in the evaluation."""
    generation = params.generation
    options = ["do_sample=True", f"temperature={generation.temperature}", "top_k=0", "top_p=1.0"]
    quoted = ", ".join(f"`{option}`" for option in options)
    code = loading(merged, params)
    if isinstance(params, QuestionParams):
        code += asking(params, options)
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
    source = params.fetch.policy
    if source.kind == "wheel" and not merged:
        text += f"""

The base is no folder on a hub: the project's fetch stage makes it of
`{source.path or source.name}`, a file of a Python package. The export `--merged` needs no base."""
    return f"""{text}

It was trained and evaluated with the full distribution: {quoted}, with at most
{generation.response_tokens} new tokens after {words.prompt}."""


def loading(merged: bool, params: AnyParams) -> list[str]:
    """Return the lines of code that load the folder's model."""
    source, call = params.fetch.policy, "AutoModelForCausalLM.from_pretrained"
    classes = "AutoModelForCausalLM" + (", AutoTokenizer" if isinstance(params, QuestionParams) else "")
    if merged:
        return [f"from transformers import {classes}", "", f'model = {call}("this folder")']
    base = (
        f'{call}("{source.name}", revision="{source.revision}")'
        if source.kind == "hub" and source.path is None
        else f'{call}("a folder with the policy below")'
    )
    return [
        "from peft import PeftModel",
        f"from transformers import {classes}",
        "",
        f"base = {base}",
        'model = PeftModel.from_pretrained(base, "this folder")',
    ]


def asking(params: QuestionParams, options: list[str]) -> list[str]:
    """Return the lines of code that ask that model a question."""
    arguments = ", ".join([f"max_new_tokens={params.generation.response_tokens}", *options])
    return [
        'tokenizer = AutoTokenizer.from_pretrained("this folder")',
        f"template = {params.split.template!r}",
        'prompt = template.replace("{question}", "Why does ice float on water?")',
        'tokens = tokenizer.encode(prompt, add_special_tokens=False, return_tensors="pt")',
        f"output = model.generate(tokens, {arguments})",
        "print(tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True).strip())",
    ]


def sources(params: AnyParams) -> str:
    """Return a table of models and data with revisions and licences."""
    pins = vars(params.fetch)
    keys = ("kind", "name", "revision", "path", "license")
    rows = [[what, *(md.escape(getattr(pin, key) or "–") for key in keys)] for what, pin in pins.items()]
    return md.table(["What", "Kind", "Name", "Revision", "Path", "Licence"], rows, len(keys) + 1)


def metrics(params: AnyParams, words: Words) -> str:
    """Return the run's levels, differences with intervals, and the accuracy of what was learnt."""
    found = read_json(metrics_file("report"))
    seeds = ", ".join(map(str, params.ppo.seeds))
    names = [name.removesuffix("_ppo") for name in found if name.endswith("_ppo")]
    levels = [
        [in_words(n), *(md.number(found.get(f"{n}_{p}")) for p in ("base", "sft", "ppo"))] for n in names
    ]
    end = "_ppo_minus_sft"
    differences = [
        [in_words(n.removesuffix(end)), md.signed(v), md.interval(found[f"{n}_low"], found[f"{n}_high"])]
        for n, v in found.items()
        if n.endswith(end)
    ]
    return f"""{md.table(["", "base", "SFT", "PPO"], levels)}

{md.table(["PPO − SFT, paired", "Mean", "95% interval"], differences)}

{words.accuracies}

PPO is the mean over the seeds {seeds}. {words.scales} The intervals of the
differences are those of the report; those of the accuracies are Clopper and Pearson's{words.trials}."""


def in_words(name: str) -> str:
    """Return a metric's name in words."""
    return name.replace("_", " ")
