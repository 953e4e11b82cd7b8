"""Exact resume: snapshots of a running stage, each whole or absent, used only under the same inputs.

No generator state is kept: every draw is named by (seed, stage, purpose, step, row), see `rlhf.randomness`.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlhf.record import replacing, sha256_file

KEPT = 2  # the newest may turn out to be damaged


class Snapshot(NamedTuple):
    """A stage after `step` steps: named tensors, and a record of whatever JSON holds exactly."""

    step: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]


class Best(NamedTuple):
    """The trained parameters at the step with the best validation so far, and that validation's value."""

    step: int
    value: float
    parameters: list[Tensor]


def inputs_key(values: Any, files: Iterable[str | Path]) -> str:
    """Hash all that decides a stage's bytes: a key that differs means that a snapshot must not be used.

    `values` (dataclasses and JSON values, the environment among them), the bytes of `files` and of folders
    among them, the pinned packages, and the files of the project's code that is loaded. To be called before
    anything slow, while those files still are what was loaded.
    """
    digest = hashlib.sha256(json.dumps(values, default=dataclasses.asdict).encode())
    for path in [*_loaded_code(), *map(Path, files)]:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if not file.is_dir():
                digest.update(f"{file.name} {sha256_file(file)}\n".encode())
    return digest.hexdigest()


def _loaded_code() -> list[Path]:
    root = Path(__file__).resolve().parent.parent
    files = {Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
    code = sorted(f for f in files if f.is_relative_to(root / "rlhf") or f.is_relative_to(root / "stages"))
    return [root / "constraints.txt", *code]


class Snapshots:
    """The snapshots of one stage under one set of inputs: `folder/key/<step>-<sha256>.safetensors`."""

    def __init__(self, folder: str | Path, key: str, seconds: float) -> None:
        self.stage, self.folder, self.seconds = Path(folder), Path(folder) / key, seconds
        self.saved = time.monotonic()

    def latest(self) -> Snapshot | None:
        """The newest snapshot that is whole, if there is one; a damaged one is named and removed."""
        for partial in self.folder.glob(".*.partial"):
            partial.unlink()
        for path in sorted(self.folder.glob("*.safetensors"), reverse=True):
            try:
                snapshot = _read(path)
            except (ValueError, LookupError, TypeError, RecursionError, SafetensorError):
                print(f"{self.stage.name}: snapshot {path.name} is damaged and not used", flush=True)
                path.unlink()
                continue
            print(f"{self.stage.name}: resuming after step {snapshot.step}", flush=True)
            return snapshot
        return None

    def due(self) -> bool:
        """Whether `seconds` have passed since the last snapshot."""
        return time.monotonic() - self.saved >= self.seconds

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot, then forget all but the newest two."""
        record = json.dumps({"step": snapshot.step, "record": snapshot.record}).encode()
        content = save(snapshot.tensors | {"record": torch.frombuffer(bytearray(record), dtype=torch.uint8)})
        digest = hashlib.sha256(content).hexdigest()
        with replacing(self.folder / f"{snapshot.step:08d}-{digest}.safetensors") as temporary:
            temporary.write_bytes(content)
        for old in sorted(self.folder.glob("*.safetensors"))[:-KEPT]:
            old.unlink()
        self.saved = time.monotonic()

    def remove(self) -> None:
        """Remove all snapshots of the stage, those of other inputs too: its outputs are there now."""
        if self.stage.exists():
            shutil.rmtree(self.stage)


def _read(path: Path) -> Snapshot:
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != path.stem.partition("-")[2]:
        raise ValueError("the content is not what the name says")
    tensors = load(content)
    record = json.loads(tensors.pop("record").numpy().tobytes())
    return Snapshot(record["step"], tensors, record["record"])


def training_snapshot(
    step: int,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    best: Best | None = None,
    **record: Any,
) -> Snapshot:
    """A training run after `step` steps: every trained parameter, the optimiser's state, the loss scale, the
    best so far; `record` adds logs and numbers."""
    tensors = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        values = {"parameter": parameter.detach(), **optimizer.state[parameter]}
        # bitsandbytes counts its steps in an int, and its parameters share tables, which safetensors refuses.
        copies = {name: torch.as_tensor(value).cpu().contiguous().clone() for name, value in values.items()}
        tensors |= {f"{index}.{name}": value for name, value in copies.items()}
    if best:
        tensors |= {f"best.{index}": value.cpu() for index, value in enumerate(best.parameters)}
        record |= {"best_step": best.step, "best_value": best.value}
    return Snapshot(step, tensors, {"scaler": scaler.state_dict() if scaler else {}, **record})


@torch.no_grad()
def restore_training(
    snapshot: Snapshot, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> Best | None:
    """Put a `training_snapshot` back into the live parameters, optimiser and scaler; return its best."""
    parameters = _parameters(optimizer)
    for index, parameter in enumerate(parameters):
        prefix = f"{index}."
        state = {k.removeprefix(prefix): v for k, v in snapshot.tensors.items() if k.startswith(prefix)}
        parameter.copy_(state.pop("parameter"))
        optimizer.state[parameter] = {k: _state_value(v, parameter.device) for k, v in state.items()}
    if snapshot.record["scaler"]:
        scaler.load_state_dict(snapshot.record["scaler"])
    if "best_step" not in snapshot.record:
        return None
    values = [snapshot.tensors[f"best.{index}"].to(p.device) for index, p in enumerate(parameters)]
    return Best(snapshot.record["best_step"], snapshot.record["best_value"], values)


def _state_value(value: Tensor, device: torch.device) -> Tensor | int:
    """torch's AdamW counts its steps in a float tensor on the CPU, bitsandbytes' in an int."""
    if value.ndim:
        return value.to(device)
    return value if value.is_floating_point() else value.item()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
