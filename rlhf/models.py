"""One frozen base model, named LoRA adapters on it, linear heads beside it: load, switch, measure, save.

The only module that knows peft and bitsandbytes.
"""

import hashlib
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rlhf.errors import UserError
from rlhf.randomness import stream
from rlhf.record import read_json


class Lora(NamedTuple):
    """A low-rank adapter's shape: W + (alpha / rank) B A on every target. Source: Hu et al. 2021."""

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


def load_base(folder: Path, dtype: str, quantization: str, device: torch.device) -> nn.Module:
    """Load a causal language model with every weight frozen; `quantization` is none or nf4."""
    torch_dtype = getattr(torch, dtype)
    arguments = {"dtype": torch_dtype, "attn_implementation": "sdpa", "use_safetensors": True}
    if quantization == "nf4":
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch_dtype,
        )
        arguments["device_map"] = {"": device}
    base, found = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **arguments
    )
    if found["missing_keys"]:
        raise UserError(f"{folder.name}: weights are missing, such as {min(found['missing_keys'])}")
    for module in base.modules():
        # bitsandbytes repacks 4-bit weights in place on such CPUs and then loses every LoRA gradient.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    base.requires_grad_(False)
    return base.to(device).eval() if quantization == "none" else base.eval()


def add_adapters(base: nn.Module, lora: Lora, names: list[str], seed: int) -> PeftModel:
    """Put fresh adapters on `base`: A from U(-1/sqrt(in), 1/sqrt(in)), B zero, each name its own stream."""
    _check_targets(base, lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config, adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, config)
    for name in names:
        _initialise(model, name, seed)
    select(model, names[0])
    return model.eval()


def _check_targets(base: nn.Module, targets: tuple[str, ...]) -> None:
    layers = [name for name, module in base.named_modules() if _is_matrix(module)]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            candidates = ", ".join(sorted({name.split(".")[-1] for name in layers}))
            raise UserError(f"model.lora.targets names {target!r}: expected layers among {candidates}")


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


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
    tensors = _load_tensors(Path(folder) / "adapter_model.safetensors")
    expected = {key: tuple(value.shape) for key, value in adapter_state(model, name).items()}
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    alpha = read_json(Path(folder) / "adapter_config.json").get("lora_alpha")
    if found != expected or alpha != model.peft_config[name].lora_alpha:
        raise UserError(f"{folder}: the saved adapter does not fit this model and its model.lora parameters")
    set_adapter_state(model, name, tensors)


def new_head(hidden_size: int, seed: int | None, device: torch.device) -> nn.Linear:
    """A float32 linear head [H] -> [1]: zero for `seed` None (value head), else U(-1/sqrt(H), 1/sqrt(H))."""
    head = nn.Linear(hidden_size, 1, dtype=torch.float32)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if seed is not None:
        bound = hidden_size**-0.5
        values = stream(seed, "models", "head").uniform(-bound, bound, (1, hidden_size))
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(values))
    return head.to(device)


def save_head(head: nn.Linear, path: Path) -> None:
    """Write a head's weight and bias as safetensors."""
    path.write_bytes(save({k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}))


def load_head(path: str | Path, device: torch.device) -> nn.Linear:
    """Load a head that `save_head` wrote, frozen."""
    tensors = _load_tensors(path)
    if {key: value.ndim for key, value in tensors.items()} != {"weight": 2, "bias": 1}:
        raise UserError(f"{path}: expected a head's weight and bias, found {sorted(tensors)}")
    head = nn.Linear(tensors["weight"].shape[1], 1, dtype=torch.float32)
    head.load_state_dict(tensors)
    return head.to(device).requires_grad_(False)


def _load_tensors(path: str | Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from None


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
