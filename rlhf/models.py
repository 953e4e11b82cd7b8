"""One frozen base model and named LoRA adapters on it: load, switch, measure, save.

Only this module knows peft, and only it and `rlhf.optim` know bitsandbytes. Who computes in which dtype:

    the base's weights and hidden states    `dtype`
    the same with nf4                       4-bit matrices multiply in `dtype`; all the rest is float32
    adapters and their gradients            float32; what they add is rounded with the layer's sum
    logits                                  a product in the hidden states' dtype, then float32
    heads, log-probabilities, KL, losses    float32

There is no autocast: every conversion is written where it happens, the adapters' in peft.
"""

import functools
import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from rlhf.errors import UserError
from rlhf.randomness import stream
from rlhf.record import read_json
from rlhf.sections import Model

ALL_LINEAR = "all-linear"


class Lora(NamedTuple):
    """A low-rank adapter's shape: W + (alpha / rank) B A on every target. Source: Hu et al. 2021.

    Targets are names of linear layers, or all-linear alone: every one in the model's blocks.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


def set_determinism(device: str, threads: int) -> torch.device:
    """Fix what makes two runs differ: the number of threads, and on CUDA the algorithms and TF32."""
    torch.set_num_threads(threads)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("runtime.device is 'cuda': expected a machine with a CUDA device, or 'cpu'")
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts, later than this
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    return torch.device(device)


def torch_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What a name means; `half` is bfloat16 where the device computes in it, else float16, said in a line."""
    if dtype != "half":
        return getattr(torch, dtype)
    native = device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False)
    chosen = torch.bfloat16 if native else torch.float16
    print(f"model.dtype half: {str(chosen).removeprefix('torch.')} on {device.type}", flush=True)
    return chosen


def load_base(
    folder: Path, dtype: str, quantization: str, device: torch.device, gradient_checkpointing: bool = False
) -> nn.Module:
    """Load a causal language model with every weight frozen; `quantization` is none or nf4.

    With nf4, embeddings, norms and output head are float32, and so are the hidden states: float16's range is
    too small for those of a deep model. Follows peft's `prepare_model_for_kbit_training`.
    `gradient_checkpointing` keeps no activations inside the blocks and computes them again in the backward
    pass: the same gradients for less memory and a third more time.
    """
    weights_dtype = torch_dtype(dtype, device)
    arguments = {"dtype": weights_dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    if quantization == "nf4":
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=weights_dtype,
        )
        arguments["device_map"] = {"": device}
    try:
        base, found = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **arguments
        )
    except Exception as error:  # transformers tells of a damaged folder by any of a dozen kinds
        raise UserError(f"{folder.name}: the model cannot be loaded: {str(error).strip()}") from None
    if found["missing_keys"]:
        raise UserError(f"{folder.name}: weights are missing, such as {min(found['missing_keys'])}")
    for module in base.modules():
        # bitsandbytes repacks 4-bit weights in place on such CPUs and then loses every LoRA gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    base.requires_grad_(False)
    if quantization == "nf4":
        widen(base)
    if gradient_checkpointing:
        recompute_blocks(base)
    return base.to(device).eval() if quantization == "none" else base.eval()


def widen(base: nn.Module) -> None:
    """Make float32 of every parameter that is not in 4 bits."""
    for parameter in base.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which the base's matrices multiply, whatever its other parameters have."""
    return model.config.dtype


def check_length(model: nn.Module, tokens: int) -> None:
    """Raise `UserError` where the model has fewer positions than `tokens`, the longest text with its EOS."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise UserError(
            f"the model has {positions} positions: expected {tokens}, for the longest text, response and EOS"
        )


def recompute_blocks(base: nn.Module) -> None:
    """Make every block recompute its activations; `UserError` for a model without such blocks.

    transformers' own switch acts in training mode alone, and that would turn dropout on.
    """
    blocks = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise UserError(
            f"model.gradient_checkpointing is true: expected a model whose blocks can be recomputed, "
            f"not {type(base).__name__}"
        )
    for block in blocks:
        block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward, *inputs, **options):
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    # The reentrant kind gives no gradient where a block's input needs none, as below the first adapter.
    return checkpoint(forward, *inputs, use_reentrant=False, **options)


def load_model(
    folder: Path, settings: Model, device: torch.device, names: list[str], seed: int, dropout: float = 0.0
) -> PeftModel:
    """The base of `load_base` under the adapters of `add_adapters`, as the section `model` has them."""
    base = load_base(folder, settings.dtype, settings.quantization, device, settings.gradient_checkpointing)
    return add_adapters(base, Lora(**vars(settings.lora)), names, seed, dropout)


def add_adapters(base: nn.Module, lora: Lora, names: list[str], seed: int, dropout: float = 0.0) -> PeftModel:
    """Put fresh adapters on `base`: A from U(-1/sqrt(in), 1/sqrt(in)), B zero, each name its own stream.

    `dropout` on the adapters' inputs acts only inside `lora_dropout`.
    """
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_resolve_targets(base, lora.targets),
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    for name in names:
        _initialise(model, name, seed)
    select(model, names[0])
    return model.eval()


def _resolve_targets(base: nn.Module, targets: tuple[str, ...]) -> list[str]:
    layers = [name for name, module in base.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    if tuple(targets) == (ALL_LINEAR,):
        # Blocks are the numbered members of a list; the output head is outside of them.
        inside = {name.split(".")[-1] for name in layers if any(map(str.isdecimal, name.split(".")[:-1]))}
        targets = sorted(inside) or targets
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            candidates = ", ".join(sorted({name.split(".")[-1] for name in layers}))
            raise UserError(
                f"model.lora.targets names {target!r}: expected layers among {candidates}, "
                f"or {ALL_LINEAR} alone"
            )
    return list(targets)


@contextmanager
def lora_dropout(model: PeftModel, seed: int) -> Iterator[None]:
    """Dropout on for the active adapter's inputs and nothing else, its draws named by `seed`.

    The forward and, where blocks are recomputed, the backward pass belong inside. Torch's generators are left
    as they were; without dropout in the adapter nothing happens at all.
    """
    modules = [
        module.lora_dropout[name]
        for module in model.modules()
        if hasattr(module, "lora_dropout")
        for name in model.active_adapters
        if isinstance(module.lora_dropout[name], nn.Dropout)
    ]
    if not modules:
        yield
        return
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            for module in modules:
                module.train()
            yield
        finally:
            for module in modules:
                module.eval()


@torch.no_grad()
def _initialise(model: PeftModel, name: str, seed: int) -> None:
    for key, parameter in _adapter_parameters(model, name):
        if "lora_A" in key:
            bound = parameter.shape[1] ** -0.5
            values = stream(seed, "models", "lora", name, key).uniform(-bound, bound, parameter.shape)
            parameter.copy_(torch.from_numpy(values))
        else:
            parameter.zero_()


def _adapter_parameters(model: PeftModel, name: str) -> list[tuple[str, nn.Parameter]]:
    found = [(k, p) for k, p in model.named_parameters() if "lora_" in k and f".{name}." in k]
    if not found:
        raise ValueError(f"no adapter named {name!r}")
    return found


def select(model: PeftModel, name: str | None, train: bool = False) -> list[nn.Parameter]:
    """Make adapter `name` the active one, or none at all for None; return its parameters.

    peft's own switches thaw what they touch, so the trainable set is made here and checked: exactly the
    adapter's parameters when `train`, nothing otherwise. The model stays in evaluation mode, so dropout is
    off everywhere: PPO's likelihood ratios need it off.
    """
    if name is None:
        model.base_model.disable_adapter_layers()
        parameters = []
    else:
        model.base_model.enable_adapter_layers()
        model.set_adapter(name)
        parameters = [parameter for _, parameter in _adapter_parameters(model, name)]
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(train)
    return parameters


def fingerprint(model: PeftModel, name: str) -> str:
    """sha256 over an adapter's names and float32 bytes: equal before and after means it did not change."""
    digest = hashlib.sha256()
    for key, parameter in sorted(_adapter_parameters(model, name)):
        digest.update(key.encode())
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def adapter_state(model: PeftModel, name: str) -> dict[str, Tensor]:
    """A copy of an adapter's tensors, in PEFT's own names."""
    state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return {key: value.detach().clone() for key, value in sorted(state.items())}


def set_adapter_state(model: PeftModel, name: str, state: dict[str, Tensor]) -> None:
    """Copy tensors that `adapter_state` gave, perhaps of another adapter, into adapter `name`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that the other adapters' tensors are not in it
        set_peft_model_state_dict(model, state, adapter_name=name)


def save_adapter(model: PeftModel, name: str, folder: Path, base_name: str) -> None:
    """Write a plain PEFT folder that PEFT alone can load; `base_name` names the base model inside it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config[name]
    config.base_model_name_or_path, config.inference_mode = base_name, True
    # A set would be written in an order that changes from process to process.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    tensors = {key: value.cpu().contiguous() for key, value in adapter_state(model, name).items()}
    # Written by Python, so that a full disk is an OSError like any other.
    (folder / "adapter_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))


def load_adapter(model: PeftModel, name: str, folder: str | Path) -> None:
    """Load a saved adapter's weights into the existing adapter `name`; strength and every tensor must fit."""
    tensors = load_tensors(Path(folder) / "adapter_model.safetensors")
    expected = {key: tuple(value.shape) for key, value in adapter_state(model, name).items()}
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    config = read_json(Path(folder) / "adapter_config.json")
    alpha = config.get("lora_alpha") if isinstance(config, dict) else None
    if found != expected or alpha != model.peft_config[name].lora_alpha:
        raise UserError(f"{folder}: the saved adapter does not fit this model and its model.lora parameters")
    set_adapter_state(model, name, tensors)


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """The weights of a safetensors file; raises `UserError` when it is not one or a number is not finite."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not tensor.isfinite().all():
            raise UserError(f"{path}: {name!r} is {tensor.dtype}: expected finite floating-point numbers")
    return tensors


def hidden_states(model: PeftModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The backbone's last hidden states [B, T, H] under the active adapter.

    Positions count real tokens only, so padding on either side shifts nothing.
    """
    positions = (attention_mask.long().cumsum(1) - 1).clamp_min(0)
    backbone = model.get_base_model().base_model
    return backbone(
        input_ids=input_ids, attention_mask=attention_mask.long(), position_ids=positions, use_cache=False
    ).last_hidden_state


def language_head(model: PeftModel) -> nn.Linear:
    """The frozen layer from hidden states to vocabulary logits."""
    return model.get_base_model().get_output_embeddings()
