"""Small pieces of GitHub-flavoured markdown: escaped text, whole tables, numbers as they are read."""

import math
import unicodedata
from collections.abc import Iterable, Sequence

ENTITIES = {ord(c): f"&#{ord(c)};" for c in "&<>|`"}
BACKSLASHES = {ord(c): f"\\{c}" for c in "\\*_[]#~$"}
LINE_ENDS = "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def escape(text: str, limit: int | None = None) -> str:
    """Return `text` as one line that shows literally, in a table cell or out of it.

    Line ends become a return sign, control and direction characters a space; longer than `limit` is cut.
    """
    text = text.replace("\r\n", "\n").strip()
    text = "".join(" ⏎ " if c in LINE_ENDS else _visible(c) for c in text)
    text = " ".join(text.split())
    if limit is not None and len(text) > limit:
        text = text[:limit].rstrip() + " …"
    return text.translate(ENTITIES | BACKSLASHES)


def _visible(character: str) -> str:
    return " " if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn") else character


def table(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """Return a table of cells that are already markdown; `text_columns` first ones align left."""
    marks = [":--" if i < text_columns else "--:" for i in range(len(header))]
    lines = [header, marks, *rows]
    if any(len(line) != len(header) for line in lines):
        raise ValueError(f"a row differs from the {len(header)} columns of {list(header)}")
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(number: int, name: str, caption: str) -> str:
    """Return an image by relative path, and its caption in italics; its first sentence is the alt text."""
    return f"![{caption.split('. ')[0]}](figures/{name}.png)\n\n*Figure {number}. {caption}.*"


def folded(summary: str, body: str) -> str:
    """Return a block that a code host shows closed."""
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def count(n: int, what: str) -> str:
    """Return "1 seed", "2 seeds"."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def number(value: float | None, digits: int = 3) -> str:
    """Return a fixed-point number without a negative zero; a dash where it is not defined."""
    if value is None or not math.isfinite(value):
        return "–"
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def signed(value: float, digits: int = 3) -> str:
    """Return `number` with a plus sign where the value, as shown, is above zero."""
    text = number(value, digits)
    return "+" + text if text != "–" and float(text) > 0 else text


def interval(low: float, high: float, digits: int = 3) -> str:
    """Return `[low, high]`."""
    return f"[{number(low, digits)}, {number(high, digits)}]"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage."""
    text = number(100 * share, digits)
    return text if text == "–" else text + "%"


def p_value(p: float | None) -> str:
    """Return a p-value, never as zero; a dash where there is none."""
    return "< 0.001" if p is not None and p < 0.001 else number(p, 3)
