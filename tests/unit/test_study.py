"""The table beside the study's: every figure is read from a run, or said to be not measured."""

import copy
import re
from pathlib import Path

import pytest

from gptneo_trt import baselines, study
from gptneo_trt.results import read_results
from gptneo_trt.study import FINDINGS, NOT_MEASURED, table
from gptneo_trt.variants import VARIANTS
from gptneo_trt.verdicts import WITHIN
from tests.unit.stored_results import FILE, measured_only, stored_results, with_cell


@pytest.fixture(scope="module")
def run():
    """Return a real run on an H200."""
    return stored_results()


def cells(line):
    """Return the cells of a table's line."""
    return [each.strip() for each in line.strip("|").split("|")]


def figure(run, what):
    """Return what a run on the bundled checkpoint says of a finding."""
    (found,) = [each for each in FINDINGS if each.what.startswith(what)]
    return found.figure(run)


def test_every_line_has_every_cell(run):
    """Five a line, and none of them empty."""
    heading, rule, *lines, _, legend = table(run, run)
    assert cells(rule) == ["---"] * 5
    assert len(lines) == len(FINDINGS)
    for line in lines:
        assert len(cells(line)) == len(cells(heading))
        assert all(cells(line))
        assert f"{cells(line)[-1]}: " in legend


def test_nothing_is_said_of_what_was_not_measured(run):
    """A run of no row, or of fp16 alone, has no figure of FP8."""
    nothing = measured_only(run, [])
    assert {each.figure(nothing) for each in FINDINGS} == {NOT_MEASURED}
    floor = measured_only(run, ["fp16"])
    said = {each.what for each in FINDINGS if each.figure(floor) != NOT_MEASURED}
    assert {each.partition(",")[0] for each in said} == {
        "decode plan",
        "KL of fp16 to bf16",
        "non-finite logits",
    }


def test_one_figure_of_two_is_told_beside_what_is_missing(run):
    """A row whose decode alone was timed has one."""
    part = copy.deepcopy(run)
    part["values"]["fp8"].pop("prefill/speedup_x")
    decode = part["values"]["fp8"]["decode/speedup_x"]
    assert figure(part, "fp16's time over the FP8") == f"{decode:.2f} / {NOT_MEASURED}"


def test_figures_are_those_of_the_run(run):
    """Read from other members of it, or computed from them here."""
    values = run["values"]
    prefill = {name: row["prefill/prose/bf16/kl_mean_nats"] for name, row in values.items()}
    assert figure(run, "one kind alone") == (
        f"{prefill['fp8-v_proj'] / prefill['fp16']:.1f} (v_proj) to "
        f"{prefill['fp8-c_fc'] / prefill['fp16']:.1f} x (c_fc)"
    )
    ratio = prefill["fp8-scales-x1.5"] / prefill["fp8"]
    assert figure(run, "KL at activation scales") == f"{ratio:.2f} x the recipe's"
    top1 = [
        cell["obtained"]
        for name in ("fp16", "fp8")
        for cell in run["cells"]
        if (cell["variant"], cell["metric"]) == (name, "next_token/top1_frac")
    ]
    assert figure(run, "next-token top-1") == f"{100 * (top1[0] - top1[1]):.0f} points"
    plans = [f"{values[name]['decode/plan_mib']:.1f}" for name in ("fp16", "fp8")]
    assert figure(run, "decode plan") == " -> ".join(plans)


def test_a_row_that_does_not_build_is_said_to(run):
    """As out_proj on TensorRT 11.4: with no loss beside it."""
    failed = with_cell(run, "fp8-out_proj", "decode", "build", verdict="failed as known")
    failed["values"] = {name: row for name, row in run["values"].items() if name != "fp8-out_proj"}
    assert figure(failed, "FP8 out_proj") == "does not build"
    assert figure(run, "FP8 out_proj").startswith("builds, ")


def test_non_finite_values_are_counted(run):
    """A row with one in a phase is not clean."""
    bad = with_cell(run, "fp8", "decode", "non_finite", verdict="failed")
    assert (
        figure(bad, "non-finite")
        == f"none in {len(run['values']) - 1} of {len(run['values'])} rows"
    )


def test_a_row_with_both_is_named(run):
    """Within the ship limits, and faster."""
    good = with_cell(run, "fp8-k_proj", "both", "ship", obtained=WITHIN)
    assert figure(good, "within the ship limits").startswith("fp8-k_proj of 21 in prefill; none of")
    assert figure(run, "within the ship limits").startswith("none of 21 in prefill")


def test_every_row_that_is_asked_for_exists():
    """A name that no row has would be not measured for ever."""
    source = Path(study.__file__).read_text(encoding="utf-8")
    asked = re.findall(r'"((?:fp8|nvfp4)[-\w.]*)"', source)
    assert len(asked) > 8
    assert set(asked) <= set(VARIANTS)


def test_command_prints_the_table(run, capsys):
    """From two files."""
    assert study.main([str(FILE), str(FILE)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FINDINGS) + 4


def test_the_study_s_figures_are_the_published_ones():
    """Of the three machines, in the order of the docstring, as the stored baselines have them."""
    stored = Path(__file__).parents[2] / "baselines"
    machines = ("b200/tensorrt-11.4.0.106", "b300/tensorrt-11.4.0.106", "b300/tensorrt-11.1.0.106")
    values = {
        row: [
            baselines.read(stored / machine / "EleutherAI--gpt-neo-125m", row).values
            for machine in machines
        ]
        for row in ("fp16", "fp8")
    }
    speeds = [(each["decode/speedup_x"], each["prefill/speedup_x"]) for each in values["fp8"]]
    losses = {
        row: [each["decode/prose/bf16/kl_mean_nats"] for each in found]
        for row, found in values.items()
    }
    plans = {row: {each["decode/plan_mib"] for each in found} for row, found in values.items()}
    ratios = [own / floor for own, floor in zip(losses["fp8"], losses["fp16"], strict=True)]

    told = {each.what.partition(",")[0]: each.study for each in FINDINGS}
    assert told["fp16's time over the FP8 recipe's"] == ", ".join(
        f"{decode:.2f} / {prefill:.2f}" for decode, prefill in speeds
    )
    assert told["KL of fp16 to bf16"] == ", ".join(f"{each:.4f}" for each in losses["fp16"])
    assert told["KL of the FP8 recipe"] == ", ".join(f"{each:.4f}" for each in losses["fp8"])
    assert told["decode plan"] == f"{plans['fp16'].pop()} -> {plans['fp8'].pop()}"
    assert round(sum(ratios) / 3) == 37
    assert told["the same over fp16's"] == "about 37 x"


def test_readme_has_the_table_of_the_stored_runs():
    """It is what the command prints of the files that it names."""
    root = Path(__file__).parents[2]
    files = [
        root / "docs" / "h200" / f"{name}.results.json"
        for name in ("bundled", "random-gpt-neo-125m")
    ]
    made = "\n".join(table(*map(read_results, files)))
    assert made in (root / "README.md").read_text(encoding="utf-8")
