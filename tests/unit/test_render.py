"""report.md and report.html: the same content, in one file each, whatever a run holds."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gptneo_trt import render
from gptneo_trt.results import read_results
from tests.unit.stored_results import measured_only, stored_results

pytest.importorskip("matplotlib")

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Checker(HTMLParser):
    """Collect what a page refers to, and hold its tags against each other."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags, self.ids = [], [], [], []

    def handle_starttag(self, tag, attributes):
        """Remember an element and what it refers to."""
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        self.ids += [value for name, value in attributes if name == "id"]
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
    assert {link[:1] for link in checker.links} == {"#"}
    assert len(checker.ids) == len(set(checker.ids))
    assert {link[1:] for link in checker.links} <= set(checker.ids)
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
    described = re.findall(r'role="img" aria-labelledby="(\S+) (\S+)"', page)
    assert len(described) == 4
    assert all(f'id="{each}"' in page for pair in described for each in pair)


def test_both_say_the_same(page):
    """Every claim, decision and thing that was not measured is in both files."""
    results = stored_results()
    text = render.markdown(results)
    content = render.page_of(results)
    lines = [
        *content["opening"],
        *content["summary"],
        *content["quality"],
        *content["speed"],
        *content["revisit"],
    ]
    lines += [why for _, why, _ in content["not_measured"]]
    escaped = unescape(page)
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
            assert region[name].replace("`", "") in re.sub("</?code>", "", unescape(page))
    assert results["provenance"]["machine"] in text


def test_both_open_with_what_may_ship_and_why_not(page):
    """Before any table, and what the limits are."""
    for content, first in ((render.markdown(stored_results()), "| row |"), (page, "<table")):
        told = content[: content.index(first)]
        assert "May ship, every figure within its ship limit: fp32, fp16." in told
        assert "May not ship: 20 rows. Outside its limit: KL in 20, top-1 in 14." in told
        assert "KL at most 2 x fp16" in told


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


# Tables


def test_parts_of_a_figure_have_columns_and_numbers_are_aligned():
    """ "a / b" is two columns under one heading; a column with one word is no column of numbers."""
    rows = [("fp8", "1e-05 / -", "1.0+-0.2", "passed"), ("fp16", "-0.25 / 3", "-", "-")]
    table = render.Table("title", ("variant", "KL", "x", "verdict"), rows, "legend")
    assert table.columns == [
        ("variant", ("prefill",), False),
        ("KL", ("prefill", "decode"), True),
        ("x", ("prefill",), True),
        ("verdict", ("prefill",), False),
    ]
    assert table.cells[1] == [
        ("fp16", False), ("-0.25", True), ("3", True), ("-", True), ("-", False)
    ]  # fmt: skip


def test_html_tables_have_as_many_columns_in_every_row(page):
    """Headings over parts span them."""
    tables = re.findall(r'<table class="figures">.*?</table>', page, re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        head, *rows = re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
        spans = sum(int(span or 1) for span in re.findall(r'<th(?: colspan="(\d)")?', head))
        assert {row.count("<td") for row in rows[1:]} == {spans}
        assert "+-" not in table


# Worst tokens


def worst_token(likely, target="ic"):
    """Return a worst token whose most likely is this one."""
    side = [{"token": likely, "probability": 0.5}]
    return {
        "text": 6, "position": 169, "kl_nats": 0.00665, "before": "\n\nWh", "target": target,
        "expected": side, "obtained": side,
    }  # fmt: skip


def with_worst(*tokens):
    """Return the stored results with these tokens of fp8 and fp16."""
    profile = {"prefill": {"worst": list(tokens)}}
    return stored_results() | {"token_profiles": {"fp8": profile, "fp16": profile}}


def test_worst_tokens_are_shown_as_they_are():
    """Quotes and angle brackets are themselves; a line break is visible; tables' order."""
    found = render.html(with_worst(worst_token("'s <b>\n")))
    assert '50.0 % "\'s <b>\\n"' in unescape(found)
    assert "<b>\\n" not in found
    assert ">↵↵Wh</span><b>ic</b>" in found
    rows = re.findall(r"<summary>(\S+) <span class=\"soft\">largest 0.00665 nats", found)
    assert rows == ["fp16", "fp8"]


def test_the_token_that_follows_is_marked_among_the_most_likely():
    """On both sides, and nothing where it is not among them."""
    assert render.html(with_worst(worst_token("ic"))).count('class="next"') == 4
    assert 'class="next"' not in render.html(with_worst(worst_token("at")))


# What runs leave behind


def test_markdown_keeps_tags_and_stays_short():
    """A reason with tags, line breaks and 5,000 characters, in every cell of a run."""
    results = stored_results()
    for cell in results["cells"]:
        cell |= {"verdict": "failed", "reason": "<class 'E'>\nsecond " + "word " * 1000}
    results["known_failures"] = ["known " * 1000] * 50
    text = render.markdown(results)
    assert "&lt;class 'E'> second word" in text
    assert "<class" not in text
    assert "word..." in text
    assert "- and 10 more: results.json" in text
    assert "word " * 900 in render.html(results)
    assert len(text) < 60_000


def test_what_a_gpu_reported_while_it_was_timed_is_in_both(page):
    """With units; a clock that did not move is one figure, and nothing is "none"."""
    told = (
        "GPU while it was timed: measurements 53, measured again 0, disturbances none, sm clock "
        "1980 MHz, memory clock 3201 MHz, temperature 39 to 41 C, slowdowns none, processes of "
        "this run alone"
    )
    assert told in page
    assert told in render.markdown(stored_results())
    assert "power limit 700.0 W" in page


def test_phases_are_in_the_order_of_the_tables(page):
    """Prefill first, however the file has them."""
    results = stored_results()
    assert list(results["timing"]["regions"]) == ["decode", "prefill"]
    assert "<th>prefill</th><th>decode</th>" in page
    text = render.markdown(results)
    assert text.index("- prefill: timed") < text.index("- decode: timed")


def test_the_example_is_what_is_made_of_its_results():
    """docs/h200 keeps a run and its report; a report that today's code would not make is stale."""
    folder = Path(render.__file__).parents[1] / "docs" / "h200"
    made = render.markdown(read_results(folder / "bundled.results.json"))
    assert (folder / "bundled.report.md").read_text(encoding="utf-8") == made
