"""report.md and report.html: the same content, in one file each, whatever a run holds."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from stored_results import measured_only, stored_results

from gptneo_trt import render

pytest.importorskip("matplotlib")

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Checker(HTMLParser):
    """Collect what a page refers to, and hold its tags against each other."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags = [], [], []

    def handle_starttag(self, tag, attributes):
        """Remember an element and what it refers to."""
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        """Close the innermost element."""
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page():
    """Return the HTML of the stored run."""
    return render.html(stored_results())


def test_html_is_well_formed_and_needs_nothing_else(page):
    """One file: no script, no style sheet, no image, no font from elsewhere."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert not {"script", "link", "iframe", "object"} & set(checker.tags)
    assert all(link.startswith("#") for link in checker.links)
    assert not re.search(r"@import|url\((?!#)", page)


def test_plots_are_svg_in_the_page_s_colours(page):
    """Each is XML by itself; text is text, in the colour of the page."""
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 4  # the stored run is older than its values over tokens
    for plot in plots:
        ET.fromstring(plot)
        assert "currentColor" in plot
        assert "<text" in plot
    assert "#010203" not in page


def test_both_say_the_same(page):
    """Every claim, decision and thing that was not measured is in both files."""
    results = stored_results()
    text = render.markdown(results)
    content = render.page_of(results)
    lines = [*content["summary"], *content["quality"], *content["speed"], *content["revisit"]]
    lines += [why for _, why, _ in content["not_measured"]]
    escaped = page.replace("&#39;", "'").replace("&#34;", '"').replace("&amp;", "&")
    for line in lines:
        assert line in text
        assert line in escaped
    assert "953 of 953 cells" in text


def test_review_5_timed_region_of_both_engines_is_stated(page):
    """What is timed, synchronisation, transfers, tokens and checked outputs, of both phases."""
    results = stored_results()
    text = render.markdown(results)
    for phase, region in results["timing"]["regions"].items():
        assert f"- {phase}: timed: " in text
        for name in ("timed", "synchronisation", "transfers", "tokens", "outputs", "graph"):
            assert region[name] in text
            assert region[name] in page.replace("&#39;", "'")
    assert results["provenance"]["machine"] in text


def test_a_run_that_is_not_green_says_why_first(page):
    """A failed cell and a missing one are listed, and the heading is not "passed"."""
    results = stored_results()
    results["cells"][0] |= {"verdict": "failed", "reason": "made up <b>"}
    results["coverage"]["missing"] = ["fp8/prefill/vanished"]
    text, red = render.markdown(results), render.html(results)
    for content in (text, red):
        assert "What keeps it from passing" in content
        assert "fp8/prefill/vanished: not measured: no cell" in content
    assert text.startswith("# bundled on h200/tensorrt_rtx-1.6.1.120: NOT passed\n")
    assert "made up &lt;b&gt;" in red
    assert "What keeps it from passing" not in page


@pytest.mark.parametrize(
    "rows", [{"fp16"}, {"fp16", "fp8-c_fc"}, set()], ids=["one", "two", "none"]
)
def test_reports_of_parts_of_a_run_are_written(rows, tmp_path):
    """Of one row, two, or none at all: what there is, and no error."""
    lines = render.write_reports(tmp_path, measured_only(stored_results(), rows))
    assert lines == [str(tmp_path / "report.md"), str(tmp_path / "report.html")]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_without_matplotlib_the_html_is_missing_and_says_why(tmp_path, monkeypatch, capsys):
    """The Markdown is written all the same; the command fails."""
    source = tmp_path / "results.json"
    source.write_text(json.dumps(stored_results()))
    monkeypatch.setattr(render, "find_spec", lambda name: None)

    status = render.main([str(source), str(tmp_path / "out")])

    assert status == 1
    assert "report.html: not written: needs matplotlib: pip install" in capsys.readouterr().out
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["report.md"]


def test_the_same_results_give_the_same_files(page):
    """Reports can be committed and compared."""
    assert render.html(stored_results()) == page


def test_import_does_without_matplotlib(monkeypatch):
    """A GPU host may lack it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert render.markdown(measured_only(stored_results(), {"fp16"}))


def test_headings_name_a_batch_or_context_of_which_nothing_is_stored(page):
    """In both reports; a run at the batch and context of the baselines names neither."""
    results = stored_results() | {"shape": {"batch": 4, "context": 1024}}
    named = "bundled, batch 4, context 1024 on h200/"
    assert f"<title>{named}" in render.html(results)
    assert render.markdown(results).startswith(f"# {named}")
    assert "<title>bundled on h200/" in page
