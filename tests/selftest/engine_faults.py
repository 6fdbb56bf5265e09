"""Faults that are seeded into engines, as rows: those of the CPU that a plan can have, and what
only loading, running and timing an engine can get wrong."""

from dataclasses import replace

from tests.selftest.engine_seeds import (
    copied_logits,
    damaged_plan,
    host_clock,
    kept_cache,
    network_of_row,
)
from tests.selftest.fault import BOTH, Fault
from tests.selftest.faults import FAULTS
from tests.selftest.gate_faults import OTHER_GPU
from tests.selftest.model_faults import OVER
from tests.selftest.seeds import C_FC, OUT_PROJ, linear, scaled_ranges

# Rows of the CPU whose fault is in the network: here in the network that the plan is built from.
IN_PLANS = (
    "weight-transposed", "weights-q-and-k-swapped", "bias-dropped", "head-untied",
    "nan-in-a-weight", "scales-swapped", "scale-8-times-too-small", "weight-scales-halved",
    "local-mask-missing", "window-one-narrower", "mask-sees-the-next-token",
    "mask-hides-the-last-row", "scores-scaled", "positions-off-by-one", "activation-relu",
    "logits-truncated",
)  # fmt: skip
# Rows of the CPU whose fault is in what runs a network: here it runs an engine.
IN_RUNS = (
    "cache-k-and-v-swapped", "cache-row-stale", "cache-row-overwritten", "infinity-in-a-k-row",
    "text-shifted", "last-token-left-out", "kl-in-bits",
)  # fmt: skip


def _of_cpu(names: tuple[str, ...], through: str) -> tuple[Fault, ...]:
    """Return rows of the CPU, in one phase each, for another part of the gate."""
    rows = {fault.name: fault for fault in FAULTS}
    return tuple(
        replace(rows[name], phases=rows[name].phases[:1], through=through) for name in names
    )


PLANS = (
    Fault(
        "plan-of-another-row", "plan",
        "the plan of fp16 has the name of the fp8 row's",
        network_of_row("fp16"),
        "engine/quantized_projections", "0 projections multiply in FP8; missing: ",
        "fp8", through="engine plans",
    ),
    Fault(
        "plan-with-one-projection-left-out", "plan",
        "the plan multiplies one c_fc in fp16",
        linear(C_FC, activation_scale=None),
        "engine/quantized_projections",
        rf"29 projections multiply in FP8; missing: \['{C_FC}'\]; not intended: \[\]$",
        "fp8", through="engine plans",
    ),
    Fault(
        "plan-with-one-projection-too-many", "plan",
        "the plan multiplies one out_proj in FP8",
        linear(OUT_PROJ, activation_scale=0.01),
        "engine/quantized_projections",
        rf"31 projections multiply in FP8; missing: \[\]; not intended: \['{OUT_PROJ}'\]$",
        "fp8", through="engine plans",
    ),
    Fault(
        "plan-stale", "plan",
        "the plan was built from the checkpoint before its last change, of one bias",
        linear("transformer.h.4.mlp.c_fc", bias=None),
        "direct/kl_mean_nats", r"obtained \S+, expected at most 5e-05(;|$)", through="engine plans",
    ),
    Fault(
        "plan-stale-fp8", "plan",
        "the plan was built with ranges of an earlier calibration",
        scaled_ranges(1 / 8, "transformer.h.3.mlp.c_fc"),
        "excess/float32/kl_mean_nats", "the engine loses more than its recipe: ",
        "fp8", through="engine plans",
    ),
    Fault(
        "plan-damaged", "plan",
        "half of the plan is lost",
        damaged_plan,
        "engine/loads", r"(?s)RunError: .*deserialize_cuda_engine of \S+ returned None",
        through="engine runs",
    ),
)  # fmt: skip

RUNTIME = (
    Fault(
        "cache-not-cleared", "runtime",
        "a text starts with the cache rows of the one before",
        kept_cache,
        "engine/forgets", "logits differ after a long text and nan in the cache: ",
        phases=("decode",), through="engine runs",
    ),
    replace(
        next(fault for fault in FAULTS if fault.name == OTHER_GPU),
        breaks="the stored run is the CPU's",
        reason='BaselineError: .*gpu: stored "cpu", current "NVIDIA H200"', through="engine runs",
    ),
)  # fmt: skip

TIMING = (
    Fault(
        "clock-of-the-launch", "timing",
        "the clock stops when the work is launched, not when it is done",
        host_clock,
        "clock_frac", r"obtained \S+, expected at least 0\.5$", phases=BOTH, through="engine runs",
    ),
    Fault(
        "copy-in-the-step", "timing",
        "every step copies the logits of all steps to the host",
        copied_logits(),
        "step_overhead_x", OVER, phases=("decode",), through="engine runs",
    ),
    Fault(
        "copy-in-the-steps-of-one-row", "timing",
        "the same, in the steps of the fp8 row alone",
        copied_logits("fp8"),
        "regression/speedup_x", "slower than the baseline: ", "fp8",
        phases=("decode",), through="engine runs",
    ),
)  # fmt: skip

ENGINE_FAULTS: tuple[Fault, ...] = (
    *_of_cpu(IN_PLANS, "engine plans"), *_of_cpu(IN_RUNS, "engine runs"), *PLANS, *RUNTIME, *TIMING
)  # fmt: skip
