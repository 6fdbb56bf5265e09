"""docs/cases.md: every case from public reports, with tests that exist and carry its id."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = (
    "B-01", "N-01", "P-01", "B-02", "P-02", "N-02", "C-01", "C-02", "L-01", "P-03", "L-02", "B-04",
    "R-02", "M-01", "D-01", "C-03", "R-03", "C-04", "M-03", "D-03", "L-04", "R-05", "N-04", "N-05",
    "N-06", "R-06", "C-06", "L-06", "L-07", "L-08", "C-07", "L-09", "N-08", "C-09",
)  # fmt: skip
ID = re.compile(r"(?<=_)[A-Z]\d\d(?=_)")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@cache
def functions():
    """Return file -> names of its test functions, of every file of tests."""
    found = {}
    for path in sorted(ROOT.glob("tests/**/test_*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
        found[str(path.relative_to(ROOT))] = {each for each in names if each.startswith("test_")}
    return found


@cache
def rows():
    """Return case -> its line in the table."""
    text = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.match(r"\| [A-Z]-\d\d ", line)]
    return {line[2:6]: line for line in lines}


def test_every_case_has_a_row():
    """All 34, in the order of their numbers, each once."""
    assert len(CASES) == 34
    assert tuple(rows()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_row_names_tests_that_carry_the_id(case):
    """What the table says can be run: at least one test, and each is there."""
    named = NAMED.findall(rows()[case])
    assert named, rows()[case]
    for file, test in named:
        assert test in functions()[file], f"{file}::{test}"
        assert case.replace("-", "") in ID.findall(test), test


@pytest.mark.parametrize("case", CASES)
def test_row_says_what_happened_and_what_happens(case):
    """Case, before, now, tests."""
    columns = [column.strip() for column in rows()[case].strip("|").split(" | ")]
    assert len(columns) == 4
    assert all(columns)


def test_every_id_in_a_test_name_is_a_case():
    """A mistyped id is found."""
    known = {case.replace("-", "") for case in CASES}
    assert {
        found for names in functions().values() for name in names for found in ID.findall(name)
    } <= known
