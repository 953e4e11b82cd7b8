"""Write a trained policy as a folder that plain peft or transformers loads, with a model card of its run:
`python -m tools.export sft|ppo-<seed> FOLDER [--merged]`.

The folder holds the LoRA adapter, or with `--merged` the whole model in float32 with the adapter merged into
it; the tokenizer; and README.md. The same run gives the same bytes. It works in the folder of either pipeline
(for question answering `cd qa`, with PYTHONPATH=..).
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from safetensors import SafetensorError
from transformers import GenerationConfig

from rlhf.config import load
from rlhf.errors import UserError, run
from rlhf.generate import adapter_folder
from rlhf.models import Lora, add_adapters, load_adapter, load_base, set_determinism
from rlhf.record import read_json, replacing, write_json, write_text
from rlhf.sources import locate
from rlhf.tokenizer import load_tokenizer
from tools.bundle import locked_outputs, output_files
from tools.card import AnyParams, card, metric_files
from tools.verify import read_stages

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
    adapter = adapter_folder(policy, params)
    if adapter is None:
        raise UserError(f"policy is {policy!r}: expected sft or ppo-<seed>; nothing was trained in the base")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{arguments.folder} is there: expected a new folder, or an empty one")
    check_run([adapter.as_posix(), *metric_files(policy, params)])
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


def check_run(needed: list[str]) -> None:
    """Raise `UserError` unless these outputs and the parameters are those of one run, by its dvc.lock."""
    outs, lock = locked_outputs(Path("dvc.lock")), read_stages(Path("dvc.lock"))
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


def write_adapter(folder: Path, adapter: Path, params: AnyParams) -> None:
    """Copy the PEFT adapter; a base model on a hub is named with its commit."""
    source = params.fetch.policy
    shutil.copyfile(adapter / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = read_json(adapter / "adapter_config.json")
    config["revision"] = source.revision if source.kind == "hub" else None
    write_json(folder / "adapter_config.json", config)


def write_merged(folder: Path, base: Path, adapter: Path, params: AnyParams) -> None:
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


if __name__ == "__main__":
    run(main)
