"""The policy's tokenizer, loaded from a verified folder, and what its end of sequence is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.errors import UserError
from rlhf.record import read_json


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `folder`; raises `UserError` without one that names a usable end of sequence.

    The tokenizer's end of sequence is the one that is trained, sampled and scored with; where config.json or
    generation_config.json name another, one printed line says so. Texts are encoded without special tokens:
    no beginning of sequence is ever added, and the one end of sequence is put there by id. Padding is masked
    by length, so no padding token is needed.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers tells of a damaged folder by any of a dozen kinds
        raise UserError(f"{folder.name}: no tokenizer: {str(error).strip()}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder.name}: the tokenizer names no end-of-sequence token")
    _check_end(folder, tokenizer.eos_token, tokenizer.eos_token_id)
    return tokenizer


def encoder(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return the function from a text to its token ids, without special tokens.

    It raises `UserError` for a text with an id beyond the vocabulary of the model in `folder`.
    """
    vocabulary = _configs(folder).get("config.json", {}).get("vocab_size")

    def encode(text: str) -> list[int]:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        _check_id(folder, vocabulary, f"id for {text[:60]!r}", max(token_ids, default=0))
        return token_ids

    return encode


def _check_end(folder: Path, token: str, token_id: int) -> None:
    configs = _configs(folder)
    vocabulary = configs.get("config.json", {}).get("vocab_size")
    _check_id(folder, vocabulary, f"end of sequence {token!r}", token_id)
    found = {name: config.get("eos_token_id") for name, config in configs.items()}
    others = [f"{name} names {end}" for name, end in found.items() if end not in (None, token_id, [token_id])]
    if others:
        chosen = f"{folder.name}: the end of sequence is the tokenizer's {token!r} ({token_id})"
        print(f"{chosen}; {', '.join(others)}", flush=True)


def _check_id(folder: Path, vocabulary: Any, what: str, token_id: int) -> None:
    if isinstance(vocabulary, int) and token_id >= vocabulary:
        raise UserError(
            f"{folder.name}: the tokenizer's {what} is {token_id}: "
            f"expected an id below the model's vocab_size {vocabulary}"
        )


def _configs(folder: Path) -> dict[str, dict]:
    names = ("config.json", "generation_config.json")
    return {name: _read_object(folder / name) for name in names if (folder / name).is_file()}


def _read_object(path: Path) -> dict:
    values = read_json(path)
    if not isinstance(values, dict):
        raise UserError(f"{path.parent.name}/{path.name}: expected a JSON object")
    return values
