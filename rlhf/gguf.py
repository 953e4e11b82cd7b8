"""A GGUF model, dequantised to a plain transformers folder in float32."""

import contextlib
import importlib.metadata
import io
import json
from pathlib import Path

from rlhf.errors import UserError
from rlhf.record import write_json


def version() -> str:
    """Name what decides the bytes that `convert` writes: the rules of this module and the library."""
    return f"1, transformers {importlib.metadata.version('transformers')}"


def convert(path: Path, folder: Path) -> None:
    """Write configs, tokenizer and `model.safetensors` to `folder`, the same bytes each time.

    Raises `UserError` when `path` is not a model that transformers can convert.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _convert(path, folder)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path.name}: cannot be converted: {' '.join(str(error).split())}") from None
    _drop_library_version(folder)


def _convert(path: Path, folder: Path) -> None:
    # Imported here: they take seconds, and only this function needs them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # local_files_only is written into the tokenizer's config, and offline mode would set it.
    where = {"gguf_file": path.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    model, loading = AutoModelForCausalLM.from_pretrained(
        path.parent, **where, dtype=torch.float32, output_loading_info=True
    )
    if loading["missing_keys"]:
        raise UserError(f"it lacks {', '.join(sorted(loading['missing_keys']))}")
    _forget_quantisation(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantisation(model) -> None:
    """Undo the flags of a GGUF load, which outlive the dequantisation and forbid saving."""
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if name in vars(owner):
            delattr(owner, name)


def _drop_library_version(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text(encoding="utf-8"))
        config.pop("transformers_version", None)
        write_json(folder / name, config)
