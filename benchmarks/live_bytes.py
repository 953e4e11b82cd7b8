"""Counting the bytes of tensors that are alive, real ones or ones on the meta device, and models there."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes import functional as bnb_functional
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig
from transformers.integrations import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from rlhf.models import recompute_blocks, widen


class LiveBytes(TorchDispatchMode):
    """While it is active, `now` is the bytes of all storages alive among `held` and what operators gave,
    `peak` the largest `now` so far. What a kernel allocates and frees inside itself is not seen.

    On the meta device, where no tensor has a value, the question that transformers asks of a mask, whether no
    token is padding, is answered by `padded`.
    """

    def __init__(self, held: Iterable[Tensor] = (), padded: bool = True) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.padded = padded
        self._bytes: dict[int, int] = {}
        for tensor in held:
            self._see(tensor)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return not self.padded
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._bytes:
            self._bytes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._bytes.pop(key)


@contextmanager
def fused_attention() -> Iterator[None]:
    """On the meta device torch would take attention apart and keep its [T, T] weights; the CPU and every CUDA
    card have a fused kernel that keeps none, and the CPU's is taken inside. Not a function mode: torch
    switches those off in the backward pass, where blocks are recomputed."""
    kept = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _fused_attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = kept


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    **_: Any,
) -> Tensor:
    mask = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )[0]


def meta_base(
    config: PretrainedConfig, dtype: torch.dtype, quantization: str, gradient_checkpointing: bool
) -> nn.Module:
    """What `rlhf.models.load_base` gives, on the meta device: every shape and dtype, and no memory."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if quantization == "nf4":
        _quantise(base, dtype)
        widen(base)
    base.requires_grad_(False)
    if gradient_checkpointing:
        recompute_blocks(base)
    return base.eval()


def _quantise(base: nn.Module, dtype: torch.dtype) -> None:
    kept = get_keys_to_not_convert(base)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    replace_with_bnb_linear(base, kept, nf4)
    # bitsandbytes keeps one table of codes for all; one made here on the meta device must not stay.
    tables, bnb_functional.name2qmap = bnb_functional.name2qmap, {}
    try:
        for module in base.modules():
            if isinstance(module, Linear4bit):
                weight = torch.empty(module.weight.shape, dtype=dtype, device="meta")
                module.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")._quantize("meta")
                if module.bias is not None:
                    module.bias.data = module.bias.data.to(dtype)
    finally:
        bnb_functional.name2qmap = tables


def tensors_of(*modules: nn.Module) -> Iterator[Tensor]:
    """Every parameter and buffer, and the scales and code tables of those in 4 bits."""
    for module in modules:
        yield from module.buffers()
        for parameter in module.parameters():
            yield parameter
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())
