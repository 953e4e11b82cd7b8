"""The policy's tokenizer, loaded from a verified folder."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.errors import UserError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `folder`; raises `UserError` without one, or without an end-of-sequence token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder.name}: no tokenizer: {str(error).splitlines()[0]}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"{folder.name}: the tokenizer names no end-of-sequence token")
    return tokenizer
