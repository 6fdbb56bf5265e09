"""The report: the tables' lines, the coverage line, and the exact shape of results.json."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from gptneo_trt import report
from gptneo_trt.data import Cell, Provenance
from gptneo_trt.verdicts import UPDATE_IT

PROVENANCE = Provenance("cpu/made-up-1.0", "4446f63", "2026-01-02T03:04:05+00:00", "pytest -m cpu")
FP16 = {
    "prefill/prose/bf16/kl_mean_nats": 2e-4,
    "decode/prose/bf16/kl_mean_nats": 3e-4,
    "prefill/prose/bf16/kl_p99_nats": 0.0012,
    "prefill/prose/bf16/top1_frac": 0.98,
    "prefill/prose/bf16/top1_stderr_frac": 0.00251,
    "prefill/prose/bf16/floor_ratio_lower_x": 1.0,
    "prefill/prose/bf16/floor_ratio_upper_x": 1.0,
    "prefill/prose/bf16/perplexity": 58.4567,
    "prefill/plan_mib": 313.6,
    "decode/plan_mib": 313.62,
    "prefill/build_s": 12.34,
    "decode/build_s": 5.0,
}
FP8 = {"prefill/prose/bf16/kl_mean_nats": 7.4e-3}
FP16_ENGINE = {
    "prefill/speedup_x": 1.0004,
    "prefill/speedup_lower_x": 0.9981,
    "prefill/speedup_upper_x": 1.0011,
    "decode/speedup_x": 0.9998,
    "decode/speedup_lower_x": 0.9996,
    "decode/speedup_upper_x": 1.0016,
    "prefill/latency_us": 412.34,
    "decode/latency_us": 63.06,
    "prefill/fp16_latency_us": 412.5,
    "decode/fp16_latency_us": 63.05,
    "prefill/direct/kl_mean_nats": 1.234e-5,
    "decode/direct/kl_mean_nats": 2e-6,
    "prefill/load_s": 0.31,
    "decode/load_s": 1.26,
}
FP8_ENGINE = {
    "prefill/speedup_x": 1.1,
    "prefill/recipe/bf16/kl_mean_nats": 0.008,
    "decode/recipe/bf16/kl_mean_nats": 0.004,
    "prefill/excess/bf16/kl_mean_nats": 0.0002,
    "prefill/excess/bf16/kl_lower_nats": -0.0004,
    "prefill/excess/bf16/kl_upper_nats": 0.0006,
    "decode/excess/bf16/kl_mean_nats": -0.0001,
    "decode/excess/bf16/kl_lower_nats": -0.0002,
    "decode/excess/bf16/kl_upper_nats": 0.0003,
}
ALTERNATIVES = {
    "decode/alternative/hugging_face_eager_x": 45.26,
    "decode/alternative/hugging_face_eager_us": 2854.1,
    "decode/alternative/static_graph_x": 1.8,
    "decode/alternative/static_graph_us": 113.51,
    "decode/alternative/weights_read_x": 0.412,
    "decode/alternative/weights_read_us": 25.98,
    "decode/step_overhead_x": 1.0123,
    "prefill/alternative/hugging_face_eager_x": 9.9,
}


def cell(variant, verdict, metric="kl_mean_nats", phase="prefill", obtained=0.1):
    """Return a cell of this name and verdict."""
    return Cell(variant, phase, metric, obtained, "at most 1", None, verdict, "made up")


def regression(variant, detectable, baseline, phase="prefill", metric="regression/kl_mean_nats"):
    """Return a passed comparison with the stored run."""
    return Cell(variant, phase, metric, baseline, "", baseline, "passed", "", detectable)


def columns(line):
    """Return heading -> column of a line of the table: two spaces are between columns."""
    return dict(zip(report.HEADINGS, re.split("  +", line), strict=True))


# The table


def test_table_has_a_line_a_row_in_the_given_order():
    """The order is that of the values, which is that of VARIANTS."""
    lines = report.table({"fp8": FP8, "fp16": FP16}, [], FP16, {})

    assert [line.split()[0] for line in lines] == ["variant", "fp8", "fp16"]
    assert columns(lines[0]) == {name: name for name in report.HEADINGS}


def test_table_shows_every_figure_of_a_row():
    """KL, plan and build are given for both phases, the rest for prefill."""
    cells = [cell("fp16", "passed"), cell("fp8", "failed")]

    line = report.table({"fp16": FP16}, cells, FP16, {"fp16": "shipped"})[1]

    assert columns(line) == {
        "variant": "fp16",
        "KL mean": "0.000200 / 0.000300",
        "KL p99": "0.00120",
        "x floor": "1.0+-0.0",
        "top-1": "0.9800+-0.0025",
        "perplexity": "58.46",
        "detects %": "- / - / -",
        "plan MiB": "313.60 / 313.62",
        "build s": "12.3 / 5.0",
        "verdict": "passed (shipped)",
    }


def test_table_shows_a_dash_for_what_was_not_measured():
    """A missing figure is never a 0, and a row without a cell is not passed."""
    line = report.table({"fp8": {}}, [], {}, {})[1]

    expected = dict.fromkeys(report.HEADINGS, "-") | {
        "variant": "fp8", "verdict": "not measured", "KL mean": "- / -", "plan MiB": "- / -",
        "build s": "- / -", "detects %": "- / - / -",
    }  # fmt: skip
    assert columns(line) == expected


@pytest.mark.parametrize(
    ("floor", "ratio"),
    [(FP16, "37.0"), ({}, "-"), ({"prefill/prose/bf16/kl_mean_nats": 0.0}, "-")],
    ids=["measured", "absent", "zero"],
)
def test_ratio_to_the_floor(floor, ratio):
    """The ratio is of prefill KLs, and there is none without a floor to divide by."""
    line = report.table({"fp8": FP8}, [], floor, {})[1]

    assert columns(line)["x floor"] == ratio


def test_ratio_to_the_floor_has_its_interval_where_there_is_one():
    """To the further of the two bounds that the ship decision was judged by."""
    bounds = {"floor_ratio_lower_x": 35.5, "floor_ratio_upper_x": 39.0}
    row = FP8 | {f"prefill/prose/bf16/{name}": value for name, value in bounds.items()}

    assert columns(report.table({"fp8": row}, [], FP16, {})[1])["x floor"] == "37.0+-2.0"


def test_table_shows_what_the_comparison_of_the_kl_would_find():
    """In per cent of the stored KL: prefill, decode, sampled text; of the row's own cells."""
    cells = [
        regression("fp8", 0.00035, 0.007),
        regression("fp8", 0.0007, 0.0066, phase="decode"),
        regression("fp8", 0.0001, 0.004, metric="regression/sampled/kl_mean_nats"),
        regression("fp16", 1.0, 1.0),
        regression("fp8", 0.5, 1.0, metric="regression/nll_mean_nats"),
    ]

    line = report.table({"fp8": FP8}, cells, FP16, {})[1]

    assert columns(line)["detects %"] == "5.0 / 10.6 / 2.5"


@pytest.mark.parametrize(("detectable", "baseline"), [(None, 0.007), (0.001, None), (0.001, 0.0)])
def test_there_is_no_detectable_share_without_both_figures(detectable, baseline):
    """Nothing is divided by a stored KL that is missing or 0."""
    cells = [regression("fp8", detectable, baseline)]

    assert columns(report.table({"fp8": FP8}, cells, FP16, {})[1])["detects %"] == "- / - / -"


@pytest.mark.parametrize("direction", ["better", "faster"])
def test_what_became_better_is_listed(direction):
    """A passed cell whose verdict asks to update its baseline, by name and with its reason."""
    told = f"{direction} {UPDATE_IT}: changed by much"
    better = Cell("fp8", "decode", "regression/kl", 0.00512345, "", 0.007, "passed", told)
    cells = [cell("fp16", "passed"), better, replace(better, verdict="inconclusive")]

    assert report.improvements(cells) == [
        f"fp8/decode/regression/kl: {direction} than the baseline: update it: changed by much"
    ]


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (["passed", "passed"], "passed"),
        (["passed", "not measured"], "not measured"),
        (["not measured", "inconclusive", "passed"], "inconclusive"),
        (["inconclusive", "failed", "not measured"], "failed"),
        ([], "not measured"),
    ],
)
def test_a_row_has_the_worst_verdict_of_its_cells(verdicts, worst):
    """Only a row whose cells all passed is passed; no cell at all is not measured."""
    assert report.worst_verdict([cell("fp8", verdict) for verdict in verdicts]) == worst


def test_table_counts_only_the_row_s_own_cells():
    """Another row's failure does not colour this one."""
    cells = [cell("fp16", "passed"), cell("fp8", "failed")]

    lines = report.table({"fp16": FP16, "fp8": FP8}, cells, FP16, {})

    assert [columns(line)["verdict"] for line in lines[1:]] == ["passed", "failed"]


def test_legend_explains_every_heading_that_is_not_a_word():
    """A reader finds the unit and the phase of each figure below the table."""
    for heading in ("KL", "p99", "x floor", "top-1", "perplexity", "plan MiB", "build s", "nats"):
        assert heading in report.LEGEND
    assert "detects: minimum detectable effect" in report.LEGEND


# Engines on a GPU


def test_engine_table_has_these_lines():
    """A line a row, both phases a column, with "-" for all that a row does not have."""
    rows = {"fp16": FP16_ENGINE, "fp8": FP8_ENGINE, "fp8-c_fc": {}}

    lines = report.engine_table(rows)

    middle = len(
        "variant   x fp16                       us            fp16 us       recipe KL          "
    )
    assert [line[:middle].rstrip() for line in lines] == [
        "variant   x fp16                       us            fp16 us       recipe KL",
        "fp16      1.000+-0.002 / 1.000+-0.002  412.3 / 63.1  412.5 / 63.0  - / -",
        "fp8       1.100 / -                    - / -         - / -         0.00800 / 0.00400",
        "fp8-c_fc  - / -                        - / -         - / -         - / -",
    ]
    assert [line[middle:] for line in lines] == [
        "engine excess %        KL to interpreter  load s",
        "- / -                  1.2e-05 / 2.0e-06  0.3 / 1.3",
        "2.5+-7.5 / -2.5+-10.0  - / -              - / -",
        "- / -                  - / -              - / -",
    ]


@pytest.mark.parametrize("rows", [{}, {"fp16": {}}, {"fp16": FP16, "fp8": FP8}])
def test_engine_table_is_empty_without_an_engine(rows):
    """What the interpreter measures on any machine is no row of it."""
    assert report.engine_table(rows) == []


@pytest.mark.parametrize(
    "name",
    [
        "prefill/speedup_x",
        "decode/latency_us",
        "prefill/recipe/bf16/kl_mean_nats",
        "decode/direct/kl_mean_nats",
        "prefill/load_s",
    ],
)
def test_engine_table_shows_whatever_there_is(name):
    """One figure of one phase is enough: a run that broke off shows what it had."""
    assert len(report.engine_table({"fp16": {name: 0.0}, "fp8": {}})) == 3


@pytest.mark.parametrize(
    ("recipe", "shown"),
    [({}, "- / -     "), ({"prefill/recipe/bf16/kl_mean_nats": 0.0}, "0.00 / -  ")],
    ids=["missing", "zero"],
)
def test_there_is_no_excess_of_a_recipe_without_loss(recipe, shown):
    """Nothing is divided by a recipe loss that is missing or 0."""
    row = {"prefill/load_s": 1.0, "prefill/excess/bf16/kl_mean_nats": 1e-4}

    line = report.engine_table({"fp8": row | recipe})[1]

    assert line == (
        f"fp8      - / -   - / -  - / -    {shown} - / -            - / -              1.0 / -"
    )


def test_an_excess_that_rounds_to_nothing_has_no_sign():
    """ "-0.0" reads as a loss that went the other way."""
    row = {"decode/recipe/bf16/kl_mean_nats": 0.01, "decode/excess/bf16/kl_mean_nats": -1e-6}

    assert "- / 0.0 " in report.engine_table({"fp8": row})[1]


def test_an_interval_reaches_to_its_further_end():
    """A skewed interval that contains zero is not shown as one that does not."""
    row = {
        "decode/recipe/bf16/kl_mean_nats": 0.01,
        "decode/excess/bf16/kl_mean_nats": 0.0004,
        "decode/excess/bf16/kl_lower_nats": -0.0001,
        "decode/excess/bf16/kl_upper_nats": 0.0006,
    }

    assert "- / 4.0+-5.0 " in report.engine_table({"fp8": row})[1]


def test_alternatives_table_has_these_lines():
    """fp16 first, then the fastest first, a phase at a time; the step's overhead last."""
    assert report.alternatives_table(FP16_ENGINE | ALTERNATIVES) == [
        "phase    instead of the engine  x fp16's time  us",
        "prefill  fp16 engine            1.00           412.3",
        "prefill  hugging_face_eager     9.90           -",
        "decode   fp16 engine            1.00           63.1",
        "decode   weights_read           0.41           26.0",
        "decode   static_graph           1.80           113.5",
        "decode   hugging_face_eager     45.26          2854.1",
        "decode   step over bare engine  1.012          -",
    ]


def test_alternatives_table_has_a_line_for_what_was_measured_alone():
    """An overhead needs no alternative, and fp16's latency may be missing."""
    assert report.alternatives_table({"decode/step_overhead_x": 1.5})[1:] == [
        "decode  step over bare engine  1.500          -"
    ]
    assert report.alternatives_table({"decode/alternative/static_graph_x": 2.0})[1:] == [
        "decode  fp16 engine            1.00           -",
        "decode  static_graph           2.00           -",
    ]


@pytest.mark.parametrize("floor", [{}, FP16, FP16_ENGINE])
def test_alternatives_table_is_empty_without_one(floor):
    """fp16's own latency is in the table of engines."""
    assert report.alternatives_table(floor) == []


def test_tables_of_a_run_without_a_gpu_are_the_one_and_its_legend():
    """Nothing is added to what such a run prints."""
    rows, cells, decisions = (
        {"fp16": FP16, "fp8": FP8},
        [cell("fp16", "passed")],
        {"fp8": "studied"},
    )

    assert report.tables(rows, cells, FP16, decisions) == [
        *report.table(rows, cells, FP16, decisions),
        report.LEGEND,
    ]


def test_tables_of_engines_follow_with_their_legends():
    """An empty line, the headings, the rows and what the headings mean."""
    row = FP16 | FP16_ENGINE | ALTERNATIVES
    rows = {"fp16": row, "fp8": FP8 | FP8_ENGINE}

    assert report.tables(rows, [], row, {}) == [
        *report.table(rows, [], row, {}),
        report.LEGEND,
        "",
        *report.engine_table(rows),
        report.ENGINE_LEGEND,
        "",
        *report.alternatives_table(row),
        report.ALTERNATIVES_LEGEND,
    ]


def test_tables_leave_out_alternatives_that_were_not_timed():
    """A run without fp16 has engines and nothing to compare them with."""
    lines = report.tables({"fp8": FP8_ENGINE}, [], {}, {})

    assert lines[-1] == report.ENGINE_LEGEND
    assert lines.count("") == 1


def test_legends_explain_every_heading_of_engines():
    """A reader finds the unit and the phase of each figure below its table."""
    named = (
        "prefill / decode",
        "x fp16",
        "us",
        "fp16 us",
        "recipe KL",
        "engine excess",
        "KL to interpreter",
    )
    for heading in (*named, "per cent", "nats", "+-"):
        assert heading in report.ENGINE_LEGEND
    for heading in ("x fp16's time", "weights_read", "step over bare engine"):
        assert heading in report.ALTERNATIVES_LEGEND


def test_report_does_without_torch():
    """The summary of a run that could measure nothing does not wait for it."""
    script = "import sys; sys.modules['torch'] = None; import gptneo_trt.report"

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Coverage


EXPECTED = [("fp8", "prefill", "kl_mean_nats"), ("fp16", "prefill", "kl_mean_nats")]


def test_coverage_line_counts_what_was_judged():
    """Failed and inconclusive cells were measured."""
    cells = [cell("fp16", "failed"), cell("fp8", "inconclusive")]

    assert report.coverage_line(EXPECTED, cells) == "measured 2 of 2 cells"


def test_coverage_line_names_what_is_missing():
    """A cell without a value and a cell that nobody gave are both missing, sorted."""
    assert report.coverage_line(EXPECTED, [cell("fp8", "not measured")]) == (
        "measured 0 of 2 cells; not measured: fp16/prefill/kl_mean_nats, fp8/prefill/kl_mean_nats"
    )


@pytest.mark.parametrize(("missing", "more"), [(8, ""), (9, " and 1 more"), (30, " and 22 more")])
def test_coverage_line_names_eight_and_counts_the_rest(missing, more):
    """A run in which everything is missing has a line that can still be read."""
    expected = [("fp8", "prefill", f"metric{index:02d}") for index in range(missing)]

    line = report.coverage_line(expected, [])

    assert line.startswith(f"measured 0 of {missing} cells; not measured: fp8/prefill/metric00, ")
    assert line.endswith(f"fp8/prefill/metric07{more}")


def test_coverage_ignores_cells_that_nobody_expected():
    """A renamed cell does not make up for the one that vanished."""
    line = report.coverage_line(EXPECTED[:1], [cell("fp8_v2", "passed")])

    assert line == "measured 0 of 1 cells; not measured: fp8/prefill/kl_mean_nats"
