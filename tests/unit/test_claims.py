"""What a report says of a run: measured rows alone, all of them, quality apart from speed.

The five points are those that the review of the study raised (README, "Where it comes from").
"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptneo_trt import claims, speeds
from gptneo_trt.variants import VARIANTS
from tests.unit.stored_results import measured_only, stored_results, with_cell

NAMES = sorted(VARIANTS, key=len, reverse=True)
NAME = re.compile("|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w.-]*\w)" for name in NAMES))
MEASURED = sorted(stored_results()["values"])
subsets = st.sets(st.sampled_from(MEASURED), min_size=1).map(lambda rows: rows | {"fp16"})
quick = settings(max_examples=40, deadline=None)


def named(lines):
    """Return the rows that lines name."""
    return {name for line in lines for name in NAME.findall(line)}


def sentences(results):
    """Return everything that is said of rows, but of those that were not measured."""
    told = [claims.opening, claims.quality_claims, claims.speed_claims]
    told += [claims.summary, claims.revisit]
    return [line for tell in told for line in tell(results)]


# 1. Claims cover only what was measured.


@quick
@given(subsets)
def test_review_1_no_sentence_is_about_a_row_that_was_not_measured(rows):
    """Whatever was selected: a row without a cell is named as not measured, and nowhere else."""
    results = measured_only(stored_results(), rows)

    assert named(sentences(results)) <= rows
    assert {each.variant for each in claims.decisions(results)} <= rows
    whole_rows = ("did not select", "which the row leaves in fp16")
    absent = [what for what, why, _ in claims.not_measured(results) if why.endswith(whole_rows)]
    assert named(absent) == set(VARIANTS) - rows


def test_review_1_a_row_with_cells_that_have_no_figure_is_not_measured():
    """Cells that say "not measured" make no row measured: it is not ruled out either."""
    results = stored_results()
    for cell in results["cells"]:
        if cell["variant"] == "fp8-c_fc":
            cell["verdict"] = "not measured"
    results["coverage"]["missing"] = ["fp8-c_fc/prefill/kl_mean_nats"]

    assert "fp8-c_fc" not in named(sentences(results))
    told = claims.not_measured(results)
    assert any("fp8-c_fc/prefill/kl_mean_nats" in what for what, _, _ in told)


# 2. The speed summary names every row with that speed-up; quality and speed are apart.


@quick
@given(subsets)
def test_review_2_every_timed_row_is_named_once_a_phase_in_its_group(rows):
    """Faster, slower or as fast: the interval says which, and nobody is left out."""
    results = measured_only(stored_results(), rows)
    for phase in ("prefill", "decode"):
        lines = [line for line in claims.speed_claims(results) if line.startswith(f"{phase}: ")]
        found = [NAME.findall(line.partition(" fp16: ")[2]) for line in lines]
        assert sorted(row for group in found for row in group) == sorted(rows - {"fp16"})
        for line, group in zip(lines, found, strict=True):
            for row in group:
                _, lower, upper = speeds.speedups(results, phase)[row]
                assert ("faster" in line, "slower" in line) == (lower > 1, upper < 1)


@quick
@given(subsets)
def test_review_2_no_sentence_on_speed_is_about_quality(rows):
    """And none on quality about speed; the summary alone has both."""
    results = measured_only(stored_results(), rows)
    for line in claims.speed_claims(results):
        assert not re.search(r"\bKL\b|top-1|perplexity|limits", line)
    for line in claims.quality_claims(results):
        assert not re.search(r"\b(faster|slower|time|us)\b", line)


def test_review_2_an_interval_around_1_is_neither_faster_nor_slower():
    """A difference that the rounds do not show is none."""
    results = stored_results()
    row = results["values"]["fp8"]
    row |= {
        "decode/speedup_x": 1.001,
        "decode/speedup_lower_x": 0.99,
        "decode/speedup_upper_x": 1.01,
    }
    (line,) = (line for line in claims.speed_claims(results) if "decode: 1 row as fast" in line)
    assert named([line]) == {"fp8", "fp16"}


# 3. A negative result is a figure, not a cause excluded.


def test_review_3_other_scales_are_a_figure_and_exclude_no_cause():
    """The sentence has both KLs and the factor, and says what it does not say."""
    (line,) = (
        line
        for line in claims.quality_claims(stored_results())
        if line.startswith("fp8-scales-x1.5 has")
    )
    assert named([line]) == {"fp8-scales-x1.5", "fp8"}
    assert "the factor 1.5" in line
    assert "other scales were not measured by these rows" in line
    assert "does not say what the loss comes from" in line


def test_review_3_without_the_row_it_is_held_against_nothing_is_said():
    """fp8-scales-x2 alone has no fp8 to compare with."""
    results = measured_only(stored_results(), {"fp16", "fp8-scales-x2"})
    assert not [line for line in claims.quality_claims(results) if "has a KL" in line]


# 4. NVFP4 is unmeasured.


@quick
@given(subsets)
def test_review_4_nvfp4_is_not_measured_and_nothing_follows_for_it(rows):
    """It is among what was not measured, with what it needs, and in no claim."""
    results = measured_only(stored_results(), rows)
    (why,) = (why for what, why, _ in claims.not_measured(results) if what == "NVFP4")
    assert "compute capability 10.0 or newer" in why
    assert "no other row says anything about it" in why
    assert "NVFP4" not in " ".join(sentences(results))


def test_review_4_nvfp4_is_measured_once_an_engine_of_it_was_timed():
    """Where the hardware has it, the report says its figures and no longer that there are none."""
    results = stored_results()
    results["rows"]["fp8-c_fc"]["settings"]["quantized_format"] = "nvfp4"

    assert "NVFP4" not in [what for what, _, _ in claims.not_measured(results)]


# Inconclusive is said as inconclusive.


def test_an_undecided_row_is_inconclusive_and_counted_nowhere_else():
    """Neither within nor outside; more tokens are needed."""
    results = with_cell(
        stored_results(), "fp8-v_proj", "both", "ship", obtained="undecided", verdict="inconclusive"
    )
    (line,) = (line for line in claims.quality_claims(results) if "inconclusive" in line)
    assert named([line]) - {"fp16"} == {"fp8-v_proj"}
    assert "More tokens are needed to decide on fp8-v_proj." in claims.revisit(results)
    assert "Not decided, more tokens are needed: fp8-v_proj." in claims.opening(results)
    others = [line for line in claims.quality_claims(results) if "ship limits (" in line]
    assert "fp8-v_proj" not in named(others)
    assert all("Of 20 rows" in line for line in claims.summary(results))


@pytest.mark.parametrize("metric", speeds.CELLS)
def test_an_inconclusive_speed_is_in_no_group(metric):
    """The machine was too noisy: it is named as that, whether or not a ratio is stored."""
    stored = "fp8-k_proj", "prefill", "regression/speedup_x"
    results = with_cell(stored_results(), *stored, verdict="inconclusive", metric=metric)
    lines = [line for line in claims.speed_claims(results) if line.startswith("prefill")]
    assert [line for line in lines if "fp8-k_proj" in line] == [
        "prefill: inconclusive, not counted above: fp8-k_proj."
    ]


# The opening


def test_a_page_opens_with_what_may_ship_and_what_the_others_miss():
    """Rows that may, by name; of the others how many miss which limit, and the nearest."""
    assert claims.opening(stored_results()) == [
        "May ship, every figure within its ship limit: fp32, fp16.",
        "May not ship: 20 rows. Outside its limit: KL in 20, top-1 in 14. "
        "Nearest: fp8-v_proj, 3.2 x fp16's KL.",
    ]


def test_a_row_with_a_red_cell_is_not_said_to_be_ready():
    """Its quality may be within the limits: what else was judged is not."""
    results = with_cell(stored_results(), "fp32", "decode", "plan_mib", verdict="failed")
    assert claims.opening(results)[:2] == [
        "May ship, every figure within its ship limit: fp16.",
        "Within its ship limits, but not all of its cells passed: fp32.",
    ]


def test_a_row_that_misses_another_limit_alone_is_not_the_nearest():
    """Its KL may be within the limit: no distance to close."""
    reason = (
        "studied: outside the ship limits: prefill: top1_drop_frac 0.05 (0.04 to 0.06, each bound "
        "at 95 %), expected at most 0.02"
    )
    results = with_cell(stored_results(), "fp8-v_proj", "both", "ship", reason=reason)
    assert "Nearest: fp8-out_proj, 3.3 x" in claims.opening(results)[1]
    assert "nearest is fp8-out_proj: 3.3 x" in claims.revisit(results)[0]


def test_nothing_opens_a_page_without_a_decision():
    """A checkpoint whose rows nobody decided on."""
    assert claims.opening(measured_only(stored_results(), set())) == []


def test_rows_are_told_the_best_first():
    """The least loss, and the fastest."""
    *_, outside = (line for line in claims.quality_claims(stored_results()) if "outside" in line)
    assert outside.index("fp8-v_proj (3.2 x)") < outside.index("fp8-out_proj (3.3 x)")
    assert outside.endswith("fp8-all (37.1 x).")
    slower = claims.speed_claims(stored_results())[-2]
    assert slower.startswith("decode: 21 rows slower than fp16: fp8-c_fc (0.953 x), ")


# The summary


def test_a_row_with_both_is_named():
    """Within the limits and faster: nothing of that kind is left unsaid."""
    results = with_cell(
        stored_results(), "fp8-k_proj", "both", "ship", obtained="within the ship limits"
    )
    prefill, decode = claims.summary(results)
    assert "have both: fp8-k_proj" in prefill
    assert "none has both" in decode


def test_nothing_is_said_of_both_where_nothing_was_timed():
    """On the target cpu there is no speed, and that is listed."""
    results = stored_results()
    for row in results["values"].values():
        for name in [name for name in row if "speedup" in name or "alternative" in name]:
            del row[name]
    results["target"] = "cpu/tensorrt_rtx-1.6.1.120"

    assert claims.summary(results) == []
    assert claims.speed_claims(results) == []
    told = {what: why for what, why, _ in claims.not_measured(results)}
    assert told["speed"] == "target cpu timed no engine in this run"
    assert "engine excess" not in told


@pytest.mark.parametrize(
    ("lost", "why"),
    [
        (("excess", "speedup"), "target h200 ran no engine in this run: losses are those of netwo"),
        (("excess",), "engines were timed, and their losses not measured, in this run"),
    ],
)
def test_without_the_losses_of_engines_their_excess_is_not_measured(lost, why):
    """Losses are those of networks then, or there are none; a timed engine was run."""
    results = stored_results()
    for row in results["values"].values():
        for name in [name for name in row if any(each in name for each in lost)]:
            del row[name]

    told = {what: why for what, why, _ in claims.not_measured(results)}
    assert told["engine excess"].startswith(why)


def beside_the_engine(ratio, verdict="passed"):
    """Return what is said of compiled PyTorch in decode, beside the other sentences on speed."""
    results, metric = stored_results(), "alternative/static_compiled_graph_x"
    results["values"]["fp16"][f"decode/{metric}"] = ratio
    results = with_cell(results, "fp16", "decode", metric, obtained=ratio, verdict=verdict)
    return [each for each in claims.speed_claims(results) if each.startswith("decode, without")]


def test_what_a_user_would_otherwise_run_is_told_the_fastest_first():
    """Each with its part of fp16's time, in decode and prefill; a bound is no way to run it."""
    slower = "static_graph (1.89 x its time), hugging_face_eager (21.26 x its time)."

    assert beside_the_engine(0.95) == [
        "decode, without TensorRT: faster than fp16's engine: static_compiled_graph (0.95 x its "
        "time).",
        f"decode, without TensorRT: no faster than fp16's engine: {slower}",
    ]
    assert beside_the_engine(1.0, "failed") == [
        "decode, without TensorRT: no faster than fp16's engine: static_compiled_graph (1.00 x its "
        f"time), {slower}"
    ]


def test_a_disturbed_alternative_is_not_told():
    """No sentence without a figure that was judged."""
    assert not any("compiled" in each for each in beside_the_engine(0.95, "inconclusive"))


def test_a_row_that_the_checkpoint_is_too_shallow_for_says_so():
    """To select it would not help."""
    told = {what: (why, when) for what, why, when in claims.not_measured(stored_results())}
    why, when = told["fp8-edges3-fp16"]
    assert why == "all 6 layers of this checkpoint are at an end, which the row leaves in fp16"
    assert when == "a deeper checkpoint is at hand"


def test_the_nearest_row_outside_is_named_with_its_distance():
    """When to revisit follows from the figures of the run."""
    assert claims.revisit(stored_results())[0].startswith(
        "The row outside the limits that is nearest is fp8-v_proj: 3.2 x the fp16 row's KL"
    )


@pytest.mark.parametrize("missing", [1, 12, 13])
def test_missing_cells_are_named_and_the_rest_counted(missing):
    """A dozen by name."""
    results = stored_results()
    results["coverage"]["missing"] = [f"fp8/prefill/metric{index}" for index in range(missing)]
    (what,) = (what for what, why, _ in claims.not_measured(results) if "without a figure" in why)
    assert what.count("metric") == min(missing, 12)
    assert ("and 1 more" in what) == (missing == 13)
