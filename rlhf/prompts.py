"""Where a row's prompt ends: token ids are cut, decoded text never is."""

from collections.abc import Callable


def prompt_of(row: dict, tokens: int | None) -> list[int]:
    """The first `tokens` token ids of a row; for None as many as the row's own `prompt_tokens`."""
    return row["token_ids"][: _length(row, tokens)]


def response_of(row: dict, tokens: int | None, eos_id: int) -> list[int]:
    """All token ids after the prompt, and EOS."""
    return [*row["token_ids"][_length(row, tokens) :], eos_id]


def _length(row: dict, tokens: int | None) -> int:
    return row["prompt_tokens"] if tokens is None else tokens


def question_ids(encode: Callable[[str], list[int]], template: str, question: str) -> list[int]:
    """Token ids of the template with the question in it."""
    return encode(template.replace("{question}", question))


def answer_ids(encode: Callable[[str], list[int]], answer: str) -> list[int]:
    """Token ids of an answer as they follow a prompt that ends without a space."""
    return encode(f" {answer}")
