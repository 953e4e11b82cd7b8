"""Malformed heads, adapters, snapshots and model folders, each with words of the line that refuses it."""

import json
import struct

import torch
from safetensors.torch import save

Cases = dict[str, tuple[bytes, str]]

UNREADABLE = "not a readable safetensors file: "
NUMBERS = "expected finite floating-point numbers"


def safetensors(header: object, data: bytes = b"") -> bytes:
    """A file with any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def declared(dtype: str, shape: object, end: int, **more: object) -> bytes:
    """A file whose header says all that, followed by 32 bytes."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]} | more
    return safetensors({"weight": entry}, bytes(32))


def files(good: bytes, unreadable: str) -> Cases:
    """What no reader of safetensors takes: `good` damaged, headers that lie, other formats."""
    length = struct.unpack("<Q", good[:8])[0]
    contents = {
        **{"empty": b"", "text": b"hello, hello, hello", "pickle": b"\x80\x04K\x01.", "one byte": good[:1]},
        **{"header's length alone": good[:8], "header alone": good[: 8 + length], "last byte cut": good[:-1]},
        **{"one byte more": good + b"\0", "first byte cut": good[1:], "ones": b"\xff" * 64},
        **{"zeros": bytes(64)},
        **{"large header": struct.pack("<Q", 2**62) + good[8:]},
        **{"long header": struct.pack("<Q", 2**20) + good[8:]},
        **{"deep": safetensors(b"[" * 5000), "list": safetensors([]), "open": safetensors(b'{"weight":')},
        **{"not UTF-8": safetensors(b'{"\xff": 1}'), "number": safetensors(b"3")},
        **{"zip": b"PK\3\4" + bytes(60)},
        **{"below 0": declared("F32", [-8], 32), "overflow": declared("F32", [2**62, 2**62], 32)},
        **{"unknown type": declared("F31", [8], 32), "other size": declared("F32", [7], 32)},
        **{"beyond the end": declared("F32", [9], 36)},
        **{"from the end": declared("F32", [8], 32, data_offsets=[32, 0])},
        **{"with a gap": declared("F32", [7], 32, data_offsets=[4, 32])},
        **{"no offsets": declared("F32", [8], 32, data_offsets=[])},
        **{"text offsets": declared("F32", [8], 32, data_offsets="x")},
        **{"shape is text": declared("F32", "8", 32)},
    }  # fmt: skip
    return {what: (content, unreadable) for what, content in contents.items()}


HEAD = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
MLP = {
    "0.weight": torch.ones(2, 4),
    "0.bias": torch.zeros(2),
    "2.weight": torch.ones(1, 2),
    "2.bias": torch.zeros(1),
}
NO_HEAD = "expected a head's weights and biases, found "
HEADS: Cases = {
    **files(save(HEAD), UNREADABLE),
    "no tensor": (safetensors({}), NO_HEAD),
    "no bias": (save({"weight": HEAD["weight"]}), NO_HEAD),
    "no weight": (save({"bias": HEAD["bias"]}), NO_HEAD),
    "one more": (save(HEAD | {"more": torch.ones(1)}), NO_HEAD),
    "line end in a name": (save(HEAD | {"a\nb": torch.ones(1)}), NO_HEAD + r".*'a\\nb'"),
    "two outputs": (save({"weight": torch.ones(2, 4), "bias": torch.zeros(2)}), NO_HEAD),
    "no input": (save(HEAD | {"weight": torch.ones(1, 0)}), NO_HEAD),
    "weight is a vector": (save(HEAD | {"weight": torch.ones(4)}), NO_HEAD),
    "weight is a number": (save(HEAD | {"weight": torch.tensor(1.0)}), NO_HEAD),
    "weight has three axes": (save(HEAD | {"weight": torch.ones(1, 4, 1)}), NO_HEAD),
    "half of an mlp": (save({k: v for k, v in MLP.items() if k.startswith("0.")}), NO_HEAD),
    "narrow mlp": (save(MLP | {"0.weight": torch.ones(1, 4), "0.bias": torch.zeros(1)}), NO_HEAD),
    "both kinds": (save(HEAD | MLP), NO_HEAD),
    "NaN": (save(HEAD | {"weight": torch.tensor([[1.0, float("nan"), 1.0, 1.0]])}), NUMBERS),
    "infinity": (save(HEAD | {"bias": torch.tensor([float("inf")])}), NUMBERS),
    "integers": (save(HEAD | {"weight": torch.ones(1, 4, dtype=torch.int64)}), NUMBERS),
    "truth values": (save(HEAD | {"weight": torch.ones(1, 4, dtype=torch.bool)}), NUMBERS),
    "complex numbers": (save(HEAD | {"weight": torch.ones(1, 4, dtype=torch.complex64)}), NUMBERS),
}  # fmt: skip

# An adapter for `tiny.tiny_model("llama")`, whose own tensors a test adds to.
NO_FIT = "the saved adapter does not fit this model and its model.lora parameters"
ADAPTERS: Cases = {
    **files(save({"x": torch.ones(2)}), UNREADABLE),
    "no tensor": (safetensors({}), NO_FIT),
    "a head": (save(HEAD), NO_FIT),
    "NaN": (save({"x": torch.tensor([float("nan")])}), NUMBERS),
}
ADAPTER_CONFIGS: Cases = {
    "empty": (b"", "adapter_config.json: not valid JSON"),
    "text": (b"hello", "adapter_config.json: not valid JSON"),
    "open": (b'{"lora_alpha": 4.0', "adapter_config.json: not valid JSON"),
    "UTF-16": ('{"lora_alpha": 4.0}'.encode("utf-16"), "adapter_config.json: not valid UTF-8"),
    "NaN": (b'{"lora_alpha": NaN}', "NaN is not a JSON number"),
    "too large": (b'{"lora_alpha": 1e999}', "adapter_config.json: not valid JSON"),
    "deep": (b"[" * 10**5, "adapter_config.json: not valid JSON"),
    **{
        f"{content!r}": (content, NO_FIT)
        for content in (b"[]", b"null", b"4.0", b"{}", b'{"lora_alpha": 5.0}', b'{"lora_alpha": "4.0"}')
    },
}  # fmt: skip


def recorded(content: bytes, **tensors: torch.Tensor) -> bytes:
    return save({"record": torch.frombuffer(bytearray(content), dtype=torch.uint8), **tensors})


WHOLE = recorded(b'{"step": 9, "record": {}}')
SNAPSHOTS: Cases = {
    what: (content, "snapshot .* is damaged and not used")
    for what, content in {
        **{what: content for what, (content, _) in files(WHOLE, "").items()},
        **{"no record": save(HEAD), "no tensor": safetensors({}), "record is text": recorded(b"hello")},
        **{"record is a list": recorded(b"[]"), "record is null": recorded(b"null")},
        **{"record is 3": recorded(b"3")},
        **{"empty record": recorded(b"{}"), "no step": recorded(b'{"record": {}}')},
        **{"deep": recorded(b"[" * 10**5)},
        **{"not UTF-8": recorded(b"\xff"), "no bytes": save({"record": torch.ones(3, dtype=torch.bfloat16)})},
        **{"digits": recorded(b'{"step": %b}' % (b"9" * 5000))},
        **{"pickled record": recorded(b"\x80\x04K\x01.")},
    }.items()
}  # fmt: skip

# One file of a tiny model's folder, by its name.
MODEL = "the model cannot be loaded: "
TOKENIZER = "no tokenizer: "
LLAMA = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 2}
MODELS: dict[str, Cases] = {
    "model.safetensors": files(save(HEAD), MODEL) | {"no tensor": (safetensors({}), "weights are missing")},
    "config.json": {
        **{f"{content!r}": (content, MODEL) for content in (b"", b"hello", b"[]", b"{}", b"null", b"\xff")},
        **{
            what: (json.dumps(LLAMA | changes).encode(), MODEL)
            for what, changes in {
                **{"unknown type": {"model_type": "nosuch"}, "no language model": {"model_type": "vit"}},
                **{"remote code": {"model_type": "nosuch", "auto_map": {"AutoConfig": "evil.Config"}}},
                **{"size is text": {"hidden_size": "x"}, "vocabulary below 0": {"vocab_size": -1}},
                **{"other size": {"hidden_size": 64}, "heads do not divide": {"num_attention_heads": 3}},
            }.items()
        },
    },
    "tokenizer.json": {
        f"{content!r}": (content, TOKENIZER) for content in (b"", b"hello", b"[]", b"{}", b"null", b"\xff")
    },
    "tokenizer_config.json": {
        **{f"{content!r}": (content, TOKENIZER) for content in (b"", b"[]", b"null", b"\xff")},
        "class is a number": (b'{"tokenizer_class": 3}', TOKENIZER),
        "no end": (b"{}", "the tokenizer names no end-of-sequence token"),
        "end is a number": (b'{"eos_token": 3}', TOKENIZER),
        "remote code": (b'{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}', TOKENIZER),
    },
}  # fmt: skip
