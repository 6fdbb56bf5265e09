"""Batch and context of a run: what asks for them, what is refused, where a run names them."""

import json
import re

import pytest
from gate_stubs import Options, line_of, run_gate, run_pytest

from tests.gate.shape import LEAST_CONTEXT, STORED_SHAPE, Shape, refuse_shape, shape_of

RANDOM = "random:gpt-neo-125m"


# What asks for it


@pytest.mark.parametrize(
    ("shape", "options", "title"),
    [
        (STORED_SHAPE, [], ""),
        (Shape(4, 256), ["--batch=4"], ", batch 4, context 256"),
        (Shape(1, 1024), ["--context=1024"], ", batch 1, context 1024"),
        (Shape(8, 2048), ["--batch=8", "--context=2048"], ", batch 8, context 2048"),
    ],
)
def test_a_shape_says_what_asks_for_it(shape, options, title):
    """Options that are not the default, for the command; both numbers, for a heading."""
    given = Options("h200", batch=shape.batch, context=shape.context)

    assert shape_of(given) == shape
    assert (shape.options(), shape.title()) == (options, title)
    assert shape.is_stored is (shape == Shape(1, 256))


REFUSED = {
    "no text": ({"batch": 0}, "--batch: obtained 0, expected 1 or more"),
    "fewer": ({"batch": -1}, "--batch: obtained -1, expected 1 or more"),
    "no token": ({"context": 0}, "--context: obtained 0, expected 64 to 2048, the positions of "),
    "too short": ({"context": LEAST_CONTEXT - 1}, "--context: obtained 63, expected 64 to 2048"),
    "too long": ({"context": 2049}, "--context: obtained 2049, expected 64 to 2048, the positio"),
    "trained weights": (
        {"batch": 4, "model": "bundled"},
        "--model: obtained bundled with --batch=4, expected random weights: a loss depends on neit",
    ),
    "of the hub": (
        {"context": 512, "model": "EleutherAI/gpt-neo-125m@21def0"},
        "--model: obtained EleutherAI/gpt-neo-125m@21def0 with --context=512, expected random wei",
    ),
    "stored": (
        {"batch": 2, "context": 512, "update_baselines": True},
        "--update-baselines: obtained --batch=2 --context=512, expected neither: what is stored is "
        "of batch 1 and context 256; leave one of the options out",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_shape_that_a_run_cannot_have_is_refused(options, message):
    """Obtained, expected, and what to do."""
    given = Options("h200", **{"model": RANDOM} | options)
    with pytest.raises(pytest.UsageError, match=f"^{re.escape(message)}"):
        refuse_shape(given)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "bundled"},
        {"model": "bundled", "update_baselines": True},
        {"model": RANDOM, "batch": 8, "context": 2048},
        {"model": RANDOM, "context": LEAST_CONTEXT},
    ],
)
def test_other_shapes_are_not_refused(options):
    """The default is any model's; of random weights every position is used."""
    refuse_shape(Options("h200", **options))


def test_a_refusal_ends_the_run_before_it_collects():
    """A usage error, as of the other options."""
    found = run_pytest("--batch=4", "--collect-only", "tests/gate")

    assert found.status == pytest.ExitCode.USAGE_ERROR
    assert "--model: obtained bundled with --batch=4, expected random weights" in found.text


# What a run says


def test_a_run_at_another_shape_says_so(tmp_path):
    """In its last lines, its command, its results and its report."""
    options = ("--model", RANDOM, "--variants=fp16", "--batch=4", "--context=1024")
    test = "tests/gate/test_build.py::test_plan_builds"

    found = run_gate(tmp_path, *options, f"--gate-report={tmp_path / 'report'}", test)

    assert found.status == 0, found.text
    assert f" gate: {RANDOM}, batch 4, context 1024 on cpu/" in found.text
    assert line_of(found.text, "measured ") == "measured 2 of 2 cells"
    results = json.loads((tmp_path / "report" / "results.json").read_text())
    assert results["shape"] == {"batch": 4, "context": 1024}
    assert results["provenance"]["command"].endswith("--variants=fp16 --batch=4 --context=1024")
    report = (tmp_path / "report" / "report.md").read_text()
    assert report.startswith(f"# {RANDOM}, batch 4, context 1024 on cpu/")
