"""Turn reports/report.md into one self-contained reports/report.html: `python -m tools.report_html`.

Figures become data: URIs, so that the file can be mailed, printed or opened without the folder it came from.
The same report gives the same bytes.
"""

import base64
import html
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from rlhf.errors import UserError, run
from rlhf.record import write_text

REPORT = Path("reports/report.md")
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 64rem;
       margin: 0 auto; padding: 1rem; }
h1, h2, h3 { line-height: 1.25; }
h2 { border-bottom: 1px solid #ccc; padding-bottom: .2rem; margin-top: 2.5rem; }
img { max-width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: .25rem .5rem; vertical-align: top; }
th { background: #f2f2f2; }
code, pre { font-size: .8rem; overflow-wrap: anywhere; }
pre { background: #f6f6f6; padding: .75rem; white-space: pre-wrap; }
summary { cursor: pointer; font-weight: 600; margin: .5rem 0; }
@media print {
  body { max-width: none; font-size: 10pt; padding: 0; }
  h2, h3 { break-after: avoid; }
  img, tr { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow-x: visible; }
  table { font-size: 6.5pt; }
  details::details-content { content-visibility: visible; height: auto; }
}
""".strip()


def main() -> None:
    if not REPORT.exists():
        raise UserError(f"{REPORT}: no such file: run `make repro` first")
    target = REPORT.with_suffix(".html")
    write_text(target, page(REPORT.read_text(encoding="utf-8"), REPORT.parent))
    print(f"wrote {target}")


def page(text: str, folder: Path) -> str:
    """Return a whole HTML page of a report's markdown; image paths are relative to `folder`."""
    parser = MarkdownIt("commonmark", {"html": True, "xhtmlOut": False}).enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for image in [child for child in token.children or () if child.type == "image"]:
            image.attrSet("src", data_uri(folder / str(image.attrGet("src"))))
    body = parser.renderer.render(scrolling(tokens), parser.options, {})
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title(tokens))}</title>\n<style>\n{STYLE}\n</style>\n</head>\n"
        f"<body>\n{body}</body>\n</html>\n"
    )


def title(tokens: Sequence[Token]) -> str:
    """Return the words of the first heading."""
    heading = next((inline for opening, inline in pairwise(tokens) if opening.type == "heading_open"), None)
    return "".join(child.content for child in heading.children or ()) if heading else "Report"


def scrolling(tokens: Sequence[Token]) -> list[Token]:
    """Return the tokens with every table in a box of its own, which scrolls where the screen is narrow."""
    found = []
    for token in tokens:
        if token.type == "table_open":
            found.append(Token("html_block", "", 0, content='<div class="scroll">\n'))
        found.append(token)
        if token.type == "table_close":
            found.append(Token("html_block", "", 0, content="</div>\n"))
    return found


def data_uri(path: Path) -> str:
    """Return a PNG as a data: URI."""
    if not path.is_file():
        raise UserError(f"{path}: no such figure: run `make repro` first")
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


if __name__ == "__main__":
    run(main)
