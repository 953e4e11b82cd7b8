"""The HTML page: self-contained and well-formed, with every table, figure and folded block of the report."""

import base64
import re
from html.parser import HTMLParser

import pytest
from architecture import ROOT

from rlhf import errors
from rlhf.report import markdown as md
from tools import report_html

PNG = b"\x89PNG a figure"
HOSTILE = "</title><script>alert(1)</script> | `code` & [x](javascript:alert(1)) _em_"
REPORT = "\n\n".join(
    [
        f"# A *report* of {md.escape(HOSTILE)}",
        md.table(["Text", "n"], [[md.escape(HOSTILE), "1"], ["plain", "2"]]),
        md.folded("More", md.table(["a"], [["inside"]])),
        md.figure(1, "one", "What to see. n = 3"),
    ]
)
VOID = {"meta", "img", "br", "hr"}


class Page(HTMLParser):
    """Collects tags and words, and fails on a tag that is closed out of order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/one.png").write_bytes(PNG)
    return tmp_path


def test_a_page_holds_its_figures_and_asks_for_nothing_else(folder):
    text = report_html.page(REPORT, folder)
    page = Page(text)
    (image,) = page.all("img")
    assert image["alt"] == "What to see"
    assert base64.b64decode(image["src"].removeprefix("data:image/png;base64,")) == PNG
    assert not re.search(r'(src|href)="(?!data:)', text) and "url(" not in text and "@import" not in text
    assert page.all("link") == page.all("script") == page.all("iframe") == []
    assert 'lang="en"' in text and 'charset="utf-8"' in text and "viewport" in text


def test_texts_of_models_stay_texts(folder):
    text = report_html.page(REPORT, folder)
    words = " ".join("".join(Page(text).words).split())
    assert words.count("<script>alert(1)</script>") == 3  # title, heading, cell
    assert "<script" not in text and "<em>em" not in text


def test_tables_scroll_and_folded_blocks_hold_theirs(folder):
    page = Page(report_html.page(REPORT, folder))
    assert len(page.all("table")) == len([a for a in page.all("div") if a.get("class") == "scroll"]) == 2
    assert len(page.all("details")) == len(page.all("summary")) == 1
    opened = [tag for tag, _ in page.tags]
    assert opened.index("table", opened.index("details")) > opened.index("details")
    assert {a["style"] for a in page.all("td") if "style" in a} == {"text-align:left", "text-align:right"}


def test_the_same_report_gives_the_same_bytes(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(report_html, "REPORT", folder / "report.md")
    (folder / "report.md").write_text(REPORT, encoding="utf-8")
    written = []
    for _ in range(2):
        report_html.main()
        written.append((folder / "report.html").read_bytes())
    assert written[0] == written[1] and b"\r" not in written[0]


@pytest.mark.parametrize(
    ("missing", "message"), [("figures/one.png", "no such figure"), ("report.md", "no such file")]
)
def test_what_is_missing_is_named_in_one_line(folder, monkeypatch, missing, message):
    (folder / "report.md").write_text(REPORT, encoding="utf-8")
    (folder / missing).unlink()
    monkeypatch.setattr(report_html, "REPORT", folder / "report.md")
    with pytest.raises(errors.UserError, match=message) as found:
        report_html.main()
    assert missing.rpartition("/")[2] in str(found.value) and "\n" not in str(found.value)


def test_the_committed_report_is_whole():
    source = (ROOT / "reports/report.md").read_text(encoding="utf-8")
    page = Page(report_html.page(source, ROOT / "reports"))
    assert len(page.all("img")) == source.count("](figures/") > 5
    assert len(page.all("table")) == len(re.findall(r"^\|( (:--|--:) \|)+$", source, re.MULTILINE)) > 20
    assert len(page.all("details")) == source.count("<details>")
    assert len(page.all("h2")) == len(re.findall("^## ", source, re.MULTILINE))
