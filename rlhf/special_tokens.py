"""The special tokens that a model's files name and nothing here uses: beginning of sequence and padding."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf.record import read_json

UNUSED = {
    "bos": "no beginning of sequence is ever added",
    "pad": "padding is masked by length, whatever token it has",
}


def say_unused(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a line for each of them on which tokenizer, config.json and generation_config.json disagree.

    The end of sequence is used, and `rlhf.tokenizer.load_tokenizer` chooses it. `folder` is the one that it
    loaded `tokenizer` from.
    """
    names = ("config.json", "generation_config.json")
    configs = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    for kind, choice in UNUSED.items():
        key = f"{kind}_token_id"
        found = {"tokenizer": getattr(tokenizer, key)}
        found |= {name: config.get(key) for name, config in configs.items()}
        if len(set(map(str, found.values()))) > 1:
            listed = ", ".join(f"{name} {'none' if i is None else i}" for name, i in found.items())
            print(f"{folder.name}: {key}: {listed}: {choice}", flush=True)
