"""Both networks build, their plans have the stored size, they quantize what the row says, with
the ranges that calibration gave before.
"""

import pytest

from gptneo_trt.data import Cell
from gptneo_trt.inspection import quantization_of
from gptneo_trt.network import PHASES, activation_scales
from gptneo_trt.scale_verdicts import judge_ranges
from gptneo_trt.scales import ranges_from_values
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, Bound, judge_limit, judge_stored
from tests.gate import limits, tolerances


@pytest.mark.cells(phases=PHASES, metrics=("build",), stage="build")
def test_plan_builds(variant, phase, metric, planned, judge):
    """TensorRT builds a plan of this row."""
    built = planned(variant, phase)
    reason = "; ".join(("built", *built.log))
    judge(Cell(variant.name, phase, metric, "built", None, None, "passed", reason))


@pytest.mark.cells(phases=PHASES, metrics=("plan_mib",), plan=True)
def test_plan_size_is_within_its_limits(variant, phase, metric, planned, judge, checkpoint, shape):
    """A plan is no larger than the weights of its row explain, and no smaller."""
    built = planned(variant, phase)
    smallest, largest = limits.plan_mib(checkpoint, variant, phase, is_stored_shape=shape.is_stored)
    low = judge_limit(variant.name, phase, metric, built.plan_mib, Bound(AT_LEAST, smallest))
    high = judge_limit(variant.name, phase, metric, built.plan_mib, Bound(AT_MOST, largest))
    judge(low if low.verdict != "passed" else high)


@pytest.mark.cells(phases=PHASES, metrics=("regression/plan_mib",), plan=True)
def test_plan_size_is_the_stored_one(variant, phase, metric, planned, judge, stored, comparing):
    """A plan has the size of the stored run's."""
    built = planned(variant, phase)
    if not comparing:
        pytest.skip("baselines are being written")
    found, name = stored(variant), f"{phase}/plan_mib"
    expected, rounding = found.values.get(name), found.rounding.get(name, 0.0)
    tolerance = tolerances.PLAN_SIZE_FRAC
    judge(
        judge_stored(
            variant.name, phase, metric, built.plan_mib, expected, tolerance, tolerance_abs=rounding
        )
    )


@pytest.mark.cells(phases=PHASES, metrics=("quantized_projections",))
def test_exactly_the_intended_projections_are_quantized(
    variant, phase, metric, built_network, checkpoint, scales, judge
):
    """Read back from TensorRT, what the row says is quantized, with the calibrated scales."""
    found = quantization_of(built_network(variant, phase))
    expected = variant.quantized_modules(checkpoint.architecture.num_layers)
    missing = sorted(set(expected) - set(found.modules))
    extra = sorted(set(found.modules) - set(expected))
    wanted_scales = activation_scales(variant, scales, checkpoint.architecture.num_layers)
    rescaled = sorted(
        f"{module}: {scale}, expected {wanted_scales[module]}"
        for module, scale in found.activation_scales.items()
        if scale != wanted_scales.get(module, scale)
    )
    verdict = "failed" if missing or extra or rescaled else "passed"
    number_format = variant.quantized_format.upper()
    reason = f"{len(found.modules)} of {len(found.products)} products read {number_format}"
    if verdict == "failed":
        reason += f"; missing: {missing}; not intended: {extra}"
    if rescaled:
        reason += f"; other scales: {'; '.join(rescaled)}"
    count, wanted = len(found.modules), len(expected)
    judge(Cell(variant.name, phase, metric, count, wanted, None, verdict, reason))


@pytest.mark.cells(
    phases=("both",), metrics=("regression/activation_amax",), rows="calibrated", quality=True
)
def test_calibrated_ranges_are_the_stored_ones(
    variant, phase, metric, calibrated, judge, stored, comparing
):
    """Calibration gives each projection of a row the range that it gave for the stored run."""
    obtained = calibrated(variant)
    if not comparing:
        pytest.skip("baselines are being written")
    expected = ranges_from_values(stored(variant).values)
    tolerance = tolerances.ACTIVATION_AMAX_FRAC
    judge(judge_ranges(variant.name, phase, metric, obtained, expected, tolerance))
