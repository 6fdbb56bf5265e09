"""``results.json`` -> ``report.md`` and ``report.html``: ``python -m gptneo_trt.render FILE DIR``.

Both are made from the same page and say the same; the HTML has the plots, needs no network, and
follows the reader's light or dark mode. Templates: ``gptneo_trt/templates``.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from gptneo_trt import claims, report
from gptneo_trt.data import Cell
from gptneo_trt.results import read_results
from gptneo_trt.variants import FLOOR
from gptneo_trt.verdicts import problems
from gptneo_trt.whole_file import whole_file

Results = Mapping[str, Any]  # content of results.json
NEEDS_MATPLOTLIB = "needs matplotlib: pip install 'gptneo-trt[report]'"
PROBLEMS_SHOWN = 40


@dataclass(frozen=True)
class Table:
    """Hold one table: headings, rows of texts, and how to read them."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: str


def page_of(results: Results) -> dict[str, Any]:
    """Return what both templates show."""
    cells = [_cell(each) for each in results["cells"]]
    expected = {(cell.variant, cell.phase, cell.metric) for cell in cells}
    expected |= {_key(name) for name in results["coverage"]["missing"]}
    wrong = problems(expected, cells)
    return {
        "results": {"known_failures": [], "references": {}, "shape": {}, "timing": {}}
        | dict(results),
        "green": not wrong,
        "problems": wrong[:PROBLEMS_SHOWN],
        "problems_left_out": max(0, len(wrong) - PROBLEMS_SHOWN),
        "improvements": report.improvements(cells),
        "decisions": claims.decisions(results),
        "summary": claims.summary(results),
        "quality": claims.quality_claims(results),
        "speed": claims.speed_claims(results),
        "not_measured": claims.not_measured(results),
        "revisit": claims.revisit(results),
        "tables": _tables(results, cells),
        "worst": _worst(results),
    }


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
    """Return row -> its worst tokens in prefill, of the rows that have some."""
    profiles = results.get("token_profiles", {})
    found = {row: profiles[row].get("prefill", {}).get("worst") for row in profiles}
    return {row: worst for row, worst in found.items() if worst}


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
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment


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
