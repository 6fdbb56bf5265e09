"""Why a row may ship or not, in words: what verdicts.judge_decision wrote, without its names."""

import pytest

from gptneo_trt.data import Interval
from gptneo_trt.decisions import FIGURES, decisions, in_words, ship_limits
from gptneo_trt.verdicts import judge_decision
from tests.gate import limits
from tests.unit.stored_results import measured_only, stored_results


def test_every_ship_limit_has_words():
    """And the text that a gate writes today is understood."""
    assert set(FIGURES) == set(limits.SHIP_LIMITS)
    interval = Interval(0.01, 0.005, 0.015, 0.95)
    judged = {f"decode: {name}": (interval, each) for name, each in limits.SHIP_LIMITS.items()}
    cell = judge_decision("fp8", "both", "ship", "shipped", judged)
    assert in_words(cell.reason) == (
        "shipped: within the ship limits: decode: KL 0.01000 x fp16's (0.005000 to 0.01500), "
        "top-1 1.00 points below fp16's (0.500 to 1.50), perplexity 0.01000 x the reference's "
        "(0.005000 to 0.01500)"
    )


def test_a_reason_is_in_words_with_its_bounds():
    """No name of a metric, points instead of fractions, and each phase once."""
    found = {each.variant: each for each in decisions(stored_results())}
    assert found["fp8"].reason == (
        "prefill: KL 35.58 x fp16's (33.41 to 37.75), top-1 5.21 points below fp16's (4.20 to "
        "6.22); decode: KL 34.38 x fp16's (32.46 to 36.31), top-1 5.34 points below fp16's (4.77 "
        "to 5.91)"
    )
    assert found["fp8"].figures == {"floor_ratio_x", "top1_drop_frac"}
    assert "perplexity 0.9994 x the reference's (0.9986 to 1.000)" in found["fp32"].reason


@pytest.mark.parametrize(
    "reason",
    ["", "made up", "prefill: new_x 1 (0.5 to 2, each bound at 95 %), expected at most 3; so"],
)
def test_a_reason_of_another_form_is_told_as_it_is(reason):
    """A limit that has no words yet, or a text that was never a figure."""
    assert in_words(reason) == reason


def test_what_follows_the_figures_of_a_reason_is_kept():
    """That a studied row is now within the limits."""
    figure = (
        "decode: perplexity_ratio 1.001 (1 to 1.002, each bound at 95 %), expected at most 1.01"
    )
    assert in_words(f"{figure}; now within the limits: revisit the decision") == (
        "decode: perplexity 1.001 x the reference's (1.000 to 1.002); now within the limits: "
        "revisit the decision"
    )


def test_a_large_figure_has_no_digit_that_was_not_stored():
    """1035, of a reason with four digits, is not 1035.00."""
    figure = "decode: floor_ratio_x 1035 (956.6 to 1114, each bound at 95 %), expected at most 2"
    assert in_words(figure) == "decode: KL 1035 x fp16's (956.6 to 1114)"


def test_ship_limits_are_in_the_words_of_the_reasons():
    """With the unit of the figures that they bound; one without words by its name."""
    limits = {
        "floor_ratio_x": {"direction": "at most", "value": 2.0},
        "top1_drop_frac": {"direction": "at most", "value": 0.02},
        "new_x": {"direction": "at least", "value": 0.5},
    }
    assert ship_limits({"ship_limits": limits}) == (
        "KL at most 2 x fp16's, top-1 at most 2 points below fp16's, new_x at least 0.5"
    )
    assert ship_limits({}) == ""


def test_a_row_without_a_cell_of_its_decision_is_not_measured():
    """Somebody decided on it, and this run said nothing of that."""
    results = measured_only(stored_results(), {"fp8"})
    results["cells"] = [cell for cell in results["cells"] if cell["metric"] != "ship"]
    (found,) = decisions(results)
    assert (found.decision, found.outcome, found.reason) == ("studied", "not measured", "")
    assert found.figures == frozenset()
