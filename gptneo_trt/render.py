"""``results.json`` -> ``report.md`` and ``report.html``: ``python -m gptneo_trt.render FILE DIR``.

Both are made from the same page and say the same; the HTML has the plots and the worst tokens,
needs no network, and follows the reader's light or dark mode. Templates: ``gptneo_trt/templates``.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from gptneo_trt import claims, decisions, report
from gptneo_trt.data import Cell
from gptneo_trt.results import read_results
from gptneo_trt.variants import FLOOR
from gptneo_trt.verdicts import problems
from gptneo_trt.whole_file import whole_file

Results = Mapping[str, Any]  # content of results.json
NEEDS_MATPLOTLIB = "needs matplotlib: pip install 'gptneo-trt[report]'"
LINES_SHOWN = 40  # of problems, known failures and improvements each
LINE_SHOWN = 350  # characters of one in Markdown
SEPARATOR = " / "  # between the parts of a text in a table
PARTS = ("prefill", "decode", "sampled")
UNITS = {"mhz": "MHz", "c": "C", "w": "W"}  # by how the names of what a GPU reports end
NUMBER = re.compile(r"-?[\d.]+([eE+-].*)?|-")


@dataclass(frozen=True)
class Table:
    """Hold one table: headings, rows of texts, and how to read them."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str

    @property
    def columns(self) -> list[tuple[str, Sequence[str], bool]]:
        """Return (heading, names of its parts, whether all are numbers); one part at least."""
        found: list[tuple[str, Sequence[str], bool]] = []
        for heading, column in zip(self.headings, zip(*self.rows, strict=True), strict=True):
            texts = [text.split(SEPARATOR) for text in column]
            numeric = all(NUMBER.fullmatch(part) for parts in texts for part in parts)
            found.append((heading, PARTS[: len(texts[0])], numeric))
        return found

    @property
    def cells(self) -> list[list[tuple[str, bool]]]:
        """Return the parts of each row, each with whether its column is of numbers."""
        numeric = [numeric for _, _, numeric in self.columns]
        return [
            [
                (part, of_numbers)
                for text, of_numbers in zip(row, numeric, strict=True)
                for part in text.split(SEPARATOR)
            ]
            for row in self.rows
        ]


def page_of(results: Results) -> dict[str, Any]:
    """Return what both templates show."""
    cells = [_cell(each) for each in results["cells"]]
    expected = {(cell.variant, cell.phase, cell.metric) for cell in cells}
    expected |= {_key(name) for name in results["coverage"]["missing"]}
    wrong = problems(expected, cells)
    return {
        "results": {"shape": {}, "rows": {}} | dict(results),
        "green": not wrong,
        "problems": _shown(wrong),
        "known_failures": _shown(results.get("known_failures", [])),
        "improvements": _shown(report.improvements(cells)),
        "opening": claims.opening(results),
        "ship_limits": decisions.ship_limits(results),
        "decisions": decisions.decisions(results),
        "summary": claims.summary(results),
        "quality": claims.quality_claims(results),
        "speed": claims.speed_claims(results),
        "not_measured": claims.not_measured(results),
        "revisit": claims.revisit(results),
        "tables": _tables(results, cells),
        "worst": _worst(results),
        "regions": _regions(results),
        "environment": _measured_with(results),
    }


def _shown(lines: Sequence[str]) -> list[str]:
    """Return the first LINES_SHOWN lines, and one that counts the rest."""
    more = len(lines) - LINES_SHOWN
    return [*lines[:LINES_SHOWN], *([f"and {more} more: results.json"] if more > 0 else [])]


def _cell(stored: Mapping[str, Any]) -> Cell:
    known = {field.name for field in fields(Cell)}
    return Cell(**{name: value for name, value in stored.items() if name in known})


def _key(name: str) -> tuple[str, str, str]:
    """Return (variant, phase, metric) of "variant/phase/metric"; a metric may have slashes."""
    variant, phase, metric = name.split("/", 2)
    return variant, phase, metric


def _tables(results: Results, cells: Sequence[Cell]) -> list[Table]:
    rows = {name: results["values"].get(name, {}) for name in claims.measured_rows(results)}
    floor = results["values"].get(FLOOR, {})
    decisions = {name: row["decision"] for name, row in results.get("rows", {}).items()}
    shown = {name: decision for name, decision in decisions.items() if decision}
    found = [
        Table(
            "Quality and size",
            report.HEADINGS,
            report.quality_rows(rows, cells, floor, shown),
            report.LEGEND,
        ),
        Table("Engines", report.ENGINE_HEADINGS, report.engine_rows(rows), report.ENGINE_LEGEND),
        Table(
            "Instead of the engine",
            report.ALTERNATIVE_HEADINGS,
            report.alternative_rows(floor),
            report.ALTERNATIVES_LEGEND,
        ),
    ]
    return [table for table in found if table.rows]


def _worst(results: Results) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return row -> its worst tokens in prefill, of the rows that have some, in their order."""
    profiles = results.get("token_profiles", {})
    rows = [row for row in claims.measured_rows(results) if row in profiles]
    found = {row: profiles[row].get("prefill", {}).get("worst") for row in rows}
    return {row: worst for row, worst in found.items() if worst}


def _regions(results: Results) -> dict[str, Mapping[str, Any]]:
    """Return phase -> what was timed in it, prefill first."""
    regions = results.get("timing", {}).get("regions", {})
    return {phase: regions[phase] for phase in report.PHASES if phase in regions}


def _measured_with(results: Results) -> list[tuple[str, str]]:
    """Return (what, in words) of the references, the machine, the versions and the checkpoint."""
    provenance, model, timing = (
        results.get(each, {}) for each in ("provenance", "model", "timing")
    )
    lines = [(f"reference {kind}", _told(each)) for kind, each in _references(results).items()]
    lines.append(("machine", provenance["machine"]))
    lines += [("GPU", _told(gpu))] if (gpu := provenance.get("gpu")) else []
    lines += [("GPU while it was timed", _told(watch))] if (watch := timing.get("watch")) else []
    lines.append(("versions", _told(provenance["versions"])))
    revision = f", revision `{model['revision']}`" if model["revision"] else ""
    return [*lines, ("checkpoint", f"SHA-256 `{model['sha256']}`{revision}")]


def _references(results: Results) -> dict[str, Mapping[str, Any]]:
    """Return the references in a fixed order, and what each was computed with in one too."""
    found = results.get("references", {})
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found)}


def _told(members: Mapping[str, Any]) -> str:
    """Return members as one line; a list of two numbers is a range, an empty one "none"."""
    told = []
    for name, value in members.items():
        words, _, unit = name.rpartition("_")
        unit, words = (f" {UNITS[unit]}", words) if unit in UNITS else ("", name)
        told.append(f"{words.replace('_', ' ')} {_value(value)}{unit}")
    return ", ".join(told)


def _value(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    if len(value) == 2 and all(isinstance(each, int | float) for each in value):
        return " to ".join(map(str, dict.fromkeys(value)))
    return "; ".join(map(str, value)) or "none"


def markdown(results: Results) -> str:
    """Return ``report.md``: fits a pull request or the summary of a CI job."""
    return _environment().get_template("report.md.j2").render(**page_of(results))


def html(results: Results) -> str:
    """Return ``report.html``: one file, with the plots.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # Only here: a GPU host without matplotlib still writes results.json and report.md.
    from gptneo_trt.plots import plots

    page = page_of(results) | {"plots": plots(results)}
    return _environment().get_template("report.html.j2").render(**page)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("gptneo_trt"),
        autoescape=select_autoescape(["html.j2"], default_for_string=False),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": lambda text: _one_line(text).replace("|", "\\|"),
        "code": _code,
        "line": _one_line,
        "short": lambda text: text[:LINE_SHOWN] + "..." * (len(text) > LINE_SHOWN),
        "quoted": lambda text: json.dumps(text, ensure_ascii=False),
    }
    return environment


def _one_line(text: object) -> str:
    """Return a text that Markdown shows as it is, tags too."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")


def _code(text: object) -> Markup:
    """Return HTML of a text in which code stands between backquotes, as in Markdown."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def write_reports(folder: Path, results: Results) -> list[str]:
    """Write ``report.md`` and ``report.html`` into a folder; return a line a file.

    Where matplotlib is not installed the line of the HTML says so and what to do.
    """
    contents = {"report.md": markdown(results)}
    lines = []
    if find_spec("matplotlib"):
        contents["report.html"] = html(results)
    else:
        lines.append(f"{folder / 'report.html'}: not written: {NEEDS_MATPLOTLIB}")
    for name, content in contents.items():
        with whole_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
    return [*(str(folder / name) for name in contents), *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the reports of a results file; return 1 where one could not be written."""
    parser = argparse.ArgumentParser(prog="python -m gptneo_trt.render", description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of a run")
    parser.add_argument("folder", type=Path, help="where report.md and report.html go")
    options = parser.parse_args(arguments)
    lines = write_reports(options.folder, read_results(options.results))
    print("\n".join(lines))
    return int(any("not written" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
