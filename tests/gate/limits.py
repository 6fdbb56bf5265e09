"""What is acceptable, and why: limits of quality, size and speed; the ship decisions.

A row a variant and checkpoint; each has its reason and its source. `baselines/` holds what was
measured, this table what may be, `tolerances.py` how much may change.

To change a number of either, change it here or there and run ``python -m tests.write_limits``,
which keeps a snapshot of all of them in `limits.json`; commit both. Tightening needs nothing but a
green run. Loosening (more where it says at most, less where it says at least, shipped to studied)
needs a new reason in the same row and the same commit. What is no longer judged at all is named
in REMOVED with its reason. A unit test holds the tables, the snapshot and its history to that.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import BaselineError
from gptneo_trt.targets import TARGETS, Target
from gptneo_trt.variant import HEAD, Variant
from gptneo_trt.variants import VARIANTS, is_explored
from gptneo_trt.verdicts import AT_LEAST, AT_MOST, EXPLORED, SHIPPED, STUDIED, Bound
from tests.gate.tolerances import Tolerance


@dataclass(frozen=True)
class Limits:
    """Bound what one row may lose, in prefill and in decode.

    Attributes:
        kl_mean_nats: largest mean KL(bf16 reference || obtained).
        float32_kl_mean_nats: the same to the float32 reference, which has no error of its own.
        top1_frac: smallest top-1 agreement with the bf16 reference.
        perplexity_ratio: largest ratio to the bf16 reference's perplexity.
        next_token_kl_mean_nats: largest mean KL after questions and prompts.
        next_token_top1_frac: smallest top-1 agreement there.
        reason: why these.
    """

    kl_mean_nats: float
    float32_kl_mean_nats: float
    top1_frac: float
    perplexity_ratio: float
    next_token_kl_mean_nats: float
    next_token_top1_frac: float
    reason: str

    def bounds(self) -> dict[str, Bound]:
        """Return metric name -> bound, of the metrics measured in both phases."""
        return {
            "kl_mean_nats": Bound(AT_MOST, self.kl_mean_nats),
            "float32/kl_mean_nats": Bound(AT_MOST, self.float32_kl_mean_nats),
            "top1_frac": Bound(AT_LEAST, self.top1_frac),
            "perplexity_ratio": Bound(AT_MOST, self.perplexity_ratio),
            "next_token/kl_mean_nats": Bound(AT_MOST, self.next_token_kl_mean_nats),
            "next_token/top1_frac": Bound(AT_LEAST, self.next_token_top1_frac),
        }


_EXACT = "float32 differs from Hugging Face by summation order only; to bf16 it shows bf16's error"
_FLOOR = "fp16 rounds a hundredth of what bf16 rounds; the rest of its KL is the reference's own"
_ALONE = "a kind alone costs several times the floor (study: 8 to 22 times); a third of headroom"
_SEVERAL = "losses of kinds roughly add up; a third of headroom over the first measurement"
_RECIPE = "about 35 times the floor here as in the study (37); a third of headroom"
_NARROW = "ranges below the largest value saturate: that loss is the row's finding; a third more"
_FP8_STEP = "FP8's error is its 3-bit mantissa, not the range: as the recipe, a third of headroom"
_WEIGHTS = "weights alone lose what their own rounding loses; a third over the first measurement"
_INT8 = "one step a tensor or channel, 256 of them: between FP8 and weights alone; a third more"
_FOUR_BITS = "eight magnitudes a block of 16: many times the recipe's loss; a third of headroom"

BUNDLED = {
    "fp32": Limits(4e-4, 1e-9, 0.97, 1.002, 4e-4, 0.85, _EXACT),
    "fp16": Limits(4e-4, 1e-5, 0.97, 1.002, 4e-4, 0.85, _FLOOR),
    "fp8": Limits(1.0e-2, 1.0e-2, 0.92, 1.02, 2.0e-2, 0.70, _RECIPE),
    "fp8-q_proj": Limits(1.1e-3, 8e-4, 0.96, 1.005, 2.0e-3, 0.82, _ALONE),
    "fp8-k_proj": Limits(1.5e-3, 1.2e-3, 0.96, 1.005, 2.0e-3, 0.82, _ALONE),
    "fp8-v_proj": Limits(9.5e-4, 7e-4, 0.96, 1.005, 2.0e-3, 0.82, _ALONE),
    "fp8-qkv": Limits(2.8e-3, 2.5e-3, 0.95, 1.01, 4.0e-3, 0.80, _SEVERAL),
    "fp8-c_fc": Limits(4.8e-3, 4.5e-3, 0.94, 1.01, 9.0e-3, 0.74, _ALONE),
    "fp8-c_proj": Limits(3.5e-3, 3.3e-3, 0.94, 1.01, 6.0e-3, 0.78, _ALONE),
    "fp8-out_proj": Limits(9.5e-4, 7e-4, 0.96, 1.005, 2.2e-3, 0.82, _ALONE),
    "fp8-mlp": Limits(7.8e-3, 7.6e-3, 0.93, 1.015, 1.8e-2, 0.70, _SEVERAL),
    "fp8-attention": Limits(3.6e-3, 3.3e-3, 0.945, 1.01, 7.0e-3, 0.78, _SEVERAL),
    "fp8-no-q_proj": Limits(9.4e-3, 9.2e-3, 0.925, 1.02, 2.5e-2, 0.65, _SEVERAL),
    "fp8-no-k_proj": Limits(9.2e-3, 9.0e-3, 0.925, 1.02, 2.0e-2, 0.70, _SEVERAL),
    "fp8-no-v_proj": Limits(9.6e-3, 9.4e-3, 0.925, 1.02, 2.0e-2, 0.70, _SEVERAL),
    "fp8-no-c_fc": Limits(6.0e-3, 5.8e-3, 0.93, 1.015, 1.0e-2, 0.78, _SEVERAL),
    "fp8-no-c_proj": Limits(7.3e-3, 7.1e-3, 0.93, 1.015, 1.3e-2, 0.70, _SEVERAL),
    "fp8-edges-fp16": Limits(7.5e-3, 7.3e-3, 0.93, 1.015, 1.7e-2, 0.70, _SEVERAL),
    "fp8-scales-x1.5": Limits(1.0e-2, 1.0e-2, 0.92, 1.02, 2.0e-2, 0.70, _RECIPE),
    "fp8-scales-x2": Limits(1.0e-2, 1.0e-2, 0.92, 1.02, 2.0e-2, 0.70, _RECIPE),
    "fp8-dequantize-fp32": Limits(1.0e-2, 1.0e-2, 0.92, 1.02, 2.0e-2, 0.68, _RECIPE),
    "fp8-all": Limits(1.1e-2, 1.1e-2, 0.92, 1.02, 2.1e-2, 0.70, _RECIPE),
    "fp8-edges2-fp16": Limits(3.5e-3, 3.2e-3, 0.95, 1.01, 6.0e-3, 0.84, _SEVERAL),
    "fp8-scales-x0.5": Limits(0.34, 0.34, 0.67, 1.40, 1.4, 0.24, _NARROW),
    "fp8-scales-x0.75": Limits(2.5e-2, 2.5e-2, 0.885, 1.03, 0.16, 0.33, _NARROW),
    "fp8-lm_head": Limits(4.0e-3, 3.7e-3, 0.95, 1.01, 4.2e-3, 0.80, _ALONE),
    "fp8-channel": Limits(1.0e-2, 1.0e-2, 0.92, 1.02, 2.9e-2, 0.60, _FP8_STEP),
    "fp8-percentile": Limits(2.2e-2, 2.2e-2, 0.90, 1.03, 4.8e-2, 0.53, _NARROW),
    "fp8-mse": Limits(1.1e-2, 1.1e-2, 0.92, 1.02, 2.0e-2, 0.65, _FP8_STEP),
    "fp8-smoothquant": Limits(1.2e-2, 1.1e-2, 0.92, 1.02, 3.2e-2, 0.57, _FP8_STEP),
    "fp8-weights": Limits(4.4e-3, 4.2e-3, 0.945, 1.01, 8.0e-3, 0.76, _WEIGHTS),
    "int8": Limits(1.2e-2, 1.2e-2, 0.92, 1.02, 1.9e-2, 0.69, _INT8),
    "int8-channel": Limits(8.0e-3, 7.7e-3, 0.93, 1.015, 1.3e-2, 0.73, _INT8),
    "int8-smoothquant": Limits(7.1e-3, 6.8e-3, 0.935, 1.02, 9.5e-3, 0.79, _INT8),
    "int8-weights": Limits(7.5e-4, 4.6e-4, 0.97, 1.005, 9.0e-4, 0.90, _WEIGHTS),
    "int4-awq": Limits(0.1, 0.1, 0.78, 1.16, 0.15, 0.33, _WEIGHTS),
    "nvfp4-weights": Limits(6.7e-2, 6.7e-2, 0.83, 1.08, 7.5e-2, 0.55, _WEIGHTS),
    "nvfp4": Limits(0.14, 0.14, 0.77, 1.14, 0.18, 0.31, _FOUR_BITS),
}

# Of engines, where these differ from the network: (checkpoint name, variant) -> limits. fp32
# products of an engine may be in TF32, whose 10 bits of mantissa are fp16's (measured 5e-7 nats).
_TF32 = (
    "TensorRT may multiply float32 in TF32, a tenth of what fp16 rounds (measured); no flag here"
)
ENGINES = {("bundled", "fp32"): Limits(4e-4, 2e-6, 0.97, 1.002, 4e-4, 0.85, _TF32)}

_STUDY = "the study's table (B200 and B300, TensorRT 11.1 and 11.4) with a quarter of headroom"
STUDY = {
    "fp16": Limits(3.0e-3, 1e-3, 0.95, 1.01, 3.0e-3, 0.90, _STUDY),
    "fp8": Limits(0.107, 0.107, 0.75, 1.12, 0.2, 0.65, _STUDY),
}
# Checkpoint name -> variant -> limits. A checkpoint without rows has no quality verdict.
LIMITS: Mapping[str, Mapping[str, Limits]] = {
    "bundled": BUNDLED,
    "EleutherAI/gpt-neo-125m": STUDY,
}

# Rows of the matrix: what the study lists as not measured. They are run where they are asked for,
# ``--variants all``; of the bundled checkpoint those of LIMITS alone, which has too few layers for
# three in fp16 at each end.
MATRIX = (
    "fp8-edges2-fp16",
    "fp8-edges3-fp16",
    "fp8-scales-x0.5",
    "fp8-scales-x0.75",
    "fp8-lm_head",
    "fp8-channel",
    "fp8-percentile",
    "fp8-mse",
    "fp8-smoothquant",
    "fp8-weights",
    "int8",
    "int8-channel",
    "int8-smoothquant",
    "int8-weights",
    "int4-awq",
    "nvfp4-weights",
    "nvfp4",
)
# Of these, what differs from the recipe in the ranges of activations alone: random weights, which
# are judged by size and speed, say nothing of them.
OTHER_RANGES = ("fp8-scales-x0.5", "fp8-scales-x0.75", "fp8-percentile", "fp8-mse")
# Rows that the study built, for models that have no limits of their own: size and speed.
STUDY_ROWS = (
    "fp16",
    "fp8",
    "fp8-qkv",
    "fp8-c_fc",
    "fp8-c_proj",
    "fp8-out_proj",
    "fp8-no-c_proj",
    "fp8-edges-fp16",
    "fp8-scales-x1.5",
    "fp8-dequantize-fp32",
)
# Checkpoint name -> rows of which only the build is judged. The study could not build FP8 out_proj
# on TensorRT 11.4 and lists it as not measured: no limit of its quality has a source.
BUILD_ONLY: Mapping[str, tuple[str, ...]] = {"EleutherAI/gpt-neo-125m": ("fp8-out_proj",)}

_STEP = "a decode step does all there is to do for a token; the engine is nearly all of it"
_SHORT_STEP = "a small model has as many other kernels around a shorter engine"
STEP_OVERHEAD: Mapping[str, Tolerance] = {
    "bundled": Tolerance(1.15, _SHORT_STEP),
    "random:gpt-neo-125m": Tolerance(1.03, _STEP),
    "EleutherAI/gpt-neo-125m": Tolerance(1.03, _STEP),
}

CLOCK_FRAC = Tolerance(
    0.5,
    "of the time from the first launch until the device is idle a clock counts all but the launch "
    "of each stretch, microseconds in a millisecond; one of the launch alone counts a twentieth",
    AT_LEAST,
)

# What else a user could run, its time over that of the fp16 engine: (checkpoint name or "",
# metric) -> bound.
_FASTEST = Tolerance(1.0, "an engine that is slower than PyTorch has no use", AT_LEAST)
_READ = Tolerance(
    1.0,
    "nothing can be faster than reading all weights once, an engine neither: a ratio on the other "
    "side of 1 only says that a clock stopped too early",
)
ALTERNATIVES: Mapping[tuple[str, str], Bound] = {
    ("", "alternative/hugging_face_eager_x"): Bound(AT_LEAST, _FASTEST),
    ("", "alternative/hugging_face_compiled_x"): Bound(AT_LEAST, _FASTEST),
    ("", "alternative/static_graph_x"): Bound(AT_LEAST, _FASTEST),
    ("", "alternative/static_compiled_graph_x"): Bound(AT_LEAST, _FASTEST),
    ("", "alternative/weights_read_x"): Bound(AT_MOST, _READ),
}


def _slower(least: float, measured: str) -> Tolerance:
    return Tolerance(least, f"{measured}; ratios vary by up to 5 %", AT_LEAST)


# Where fp16 misses a bound of ALTERNATIVES, a strict expected failure, and the least that it may
# be: (target, checkpoint name, batch, context, metric) -> least.
SLOWER: Mapping[tuple[str, str, int, int, str], Tolerance] = {
    ("h200", "random:gpt-neo-1.3B", 1, 256, "alternative/static_compiled_graph_x"): _slower(
        0.908, "compiled PyTorch takes 1,710 us where the engine takes 1,790"
    ),
    ("h200", "random:gpt-neo-125m", 1, 1024, "alternative/static_compiled_graph_x"): _slower(
        0.887, "compiled PyTorch takes 585 us where the engine takes 625"
    ),
    ("h200", "random:gpt-neo-125m", 1, 2048, "alternative/static_compiled_graph_x"): _slower(
        0.716, "compiled PyTorch takes 602 us where the engine takes 797"
    ),
}

# What an engine must keep to be shipped, next to the fp16 engine of the same run: figure of
# ``gptneo_trt.ratios`` -> bound.
SHIP_LIMITS: Mapping[str, Bound] = {
    "floor_ratio_x": Bound(
        AT_MOST,
        Tolerance(
            2.0, "of mean KL: half of the loss may be the recipe's; the study shipped none at 8"
        ),
    ),
    "top1_drop_frac": Bound(AT_MOST, Tolerance(0.02, "the study refused a drop of 0.15")),
    "perplexity_ratio": Bound(AT_MOST, Tolerance(1.01, "the study refused 1.09 to 1.10")),
}

_DECIDED = dict.fromkeys(BUNDLED, STUDIED) | {"fp32": SHIPPED, "fp16": SHIPPED}
# Checkpoint name -> variant -> decision. One marked shipped must be within the ship limits, one
# marked studied is expected to miss one, both with evidence: a sample that shows neither is
# inconclusive. An unexpected pass asks to revisit the decision.
DECISIONS: Mapping[str, Mapping[str, str]] = {
    "bundled": _DECIDED,
    "EleutherAI/gpt-neo-125m": {"fp16": SHIPPED, "fp8": STUDIED},
}

MIB = 1 << 20
PLAN_KERNELS_MIB = Tolerance(
    5.0,
    "kernels beside the weights: of fp16 about 1.5 MiB in decode and 3.3 in prefill, of other "
    "formats up to 4.4 (measured)",
)
PLAN_LAYER_MIB = Tolerance(
    0.12,
    "biases and tables of one layer: fp16 plans of 12, 24 and 32 layers hold 2.8, 4.0 and 4.7 MiB "
    "beside their weights in decode, 4.5, 5.8 and 6.6 in prefill, about 0.1 more a layer",
)
PLAN_KERNEL_SOURCE_MIB = Tolerance(
    0.35,
    "in prefill with c_proj in FP8, whose shapes are dynamic, TensorRT-RTX 1.6 keeps one kernel "
    "source a layer: 4 MiB for 12 layers, a static shape spares them (measured)",
)


# Format -> bytes of a weight, with the scales of its blocks: INT4 has one in fp16 for 128 at most,
# NVFP4 one in FP8 for 16. Those of a tensor or channel are fewer than a MiB.
QUANTIZED_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16}


def _plan_mib(smallest: float, largest: float) -> tuple[Tolerance, Tolerance]:
    reason = (
        "the study's plans of 313.6 and 239.5 MiB; prefill in FP8 may be larger, see "
        "PLAN_KERNEL_SOURCE_MIB (a static shape gives 242.1 MiB)"
    )
    return Tolerance(smallest, reason, AT_LEAST), Tolerance(largest, reason)


# (checkpoint name, variant, phase) -> smallest and largest plan in MiB, where there is nothing else
# to judge.
PLAN_MIB = {
    ("random:gpt-neo-125m", "fp16", "prefill"): _plan_mib(313.0, 317.0),
    ("random:gpt-neo-125m", "fp16", "decode"): _plan_mib(313.0, 317.0),
    ("random:gpt-neo-125m", "fp8", "prefill"): _plan_mib(238.0, 246.5),
    ("random:gpt-neo-125m", "fp8", "decode"): _plan_mib(238.0, 243.0),
}

# Name in limits.json -> why nobody judges it any more. One that was renamed is named here too.
REMOVED: Mapping[str, str] = {}


def rows_of(model: str) -> tuple[str, ...]:
    """Return the rows that are run by default for what ``--model`` says."""
    return tuple(name for name in all_rows_of(model) if name not in MATRIX)


def all_rows_of(model: str) -> tuple[str, ...]:
    """Return the rows that there are for what ``--model`` says."""
    name = model.partition("@")[0]
    if name in LIMITS:
        return (*LIMITS[name], *BUILD_ONLY.get(name, ()))
    if name.startswith("random:"):
        return (*STUDY_ROWS, *(row for row in MATRIX if row not in OTHER_RANGES))
    return tuple(VARIANTS)


def limits_of(checkpoint: Checkpoint, variant: Variant, target: Target) -> Limits:
    """Return the limits of a row.

    Raises:
        BaselineError: this checkpoint or row has none, so nothing says what is acceptable.
    """
    rows = LIMITS.get(checkpoint.name, {})
    if variant.name not in rows:
        raise BaselineError(
            f"{checkpoint.name}: no limits for variant {variant.name}, obtained rows "
            f"{sorted(rows)}; add one with its reason to tests/gate/limits.py, or select rows "
            "with --variants"
        )
    own = ENGINES.get((checkpoint.name, variant.name)) if target.needs_gpu else None
    return own or rows[variant.name]


def decision_of(checkpoint: Checkpoint, variant: Variant) -> str:
    """Return "shipped" or "studied"; a row nobody decided on is an error (see limits_of).

    One that is described and not in the table is explored.
    """
    if is_explored(variant.name):
        return EXPLORED
    limits_of(checkpoint, variant, TARGETS["cpu"])
    return DECISIONS[checkpoint.name][variant.name]


def step_overhead(checkpoint: Checkpoint, *, is_stored_shape: bool = True) -> float:
    """Return how much longer than its engine a decode step may take.

    The limit of a shallow engine is that of another model, and of a batch or context of which
    nothing is stored.
    """
    loosest = max(STEP_OVERHEAD.values())
    return STEP_OVERHEAD.get(checkpoint.name, loosest) if is_stored_shape else loosest


def alternative(checkpoint: Checkpoint, metric: str) -> Bound:
    """Return the bound of another's time over fp16's."""
    return ALTERNATIVES.get((checkpoint.name, metric), ALTERNATIVES["", metric])


def slower(target: Target, model: str, shape: tuple[int, int], metric: str) -> Tolerance | None:
    """Return the least that fp16 may be next to PyTorch where it is known to be slower, or None.

    ``shape``: batch and context.
    """
    return SLOWER.get((target.name, model, *shape, metric))


def plan_mib(
    checkpoint: Checkpoint, variant: Variant, phase: str, *, is_stored_shape: bool = True
) -> tuple[float, float]:
    """Return the smallest and largest plan of a row, in MiB.

    Weights take 2 bytes in fp16, 4 in fp32, those of QUANTIZED_BYTES quantized; a tied table is
    stored twice, once to gather and once to multiply. Beyond that a plan holds kernels and tables:
    PLAN_KERNELS_MIB, PLAN_LAYER_MIB. FP8 weights whose activations are not quantized may stay in
    fp16: TensorRT-RTX 1.6 stores them so. The rows of PLAN_MIB are for the batch and context of
    which plans are stored.
    """
    fixed = PLAN_MIB.get((checkpoint.name, variant.name, phase))
    if fixed and is_stored_shape:
        return fixed
    width = 4 if variant.compute_type == "fp32" else 2
    sizes = {name: array.size for name, array in checkpoint.weights.items()}
    if checkpoint.architecture.tied_head:
        sizes[f"{HEAD}.weight"] = sizes["transformer.wte.weight"]
    layers = checkpoint.architecture.num_layers
    modules = variant.quantized_modules(layers)
    quantized = sum(sizes[f"{module}.weight"] for module in modules)
    narrow = QUANTIZED_BYTES[variant.quantized_format]
    smallest = (width * (sum(sizes.values()) - quantized) + narrow * quantized) / MIB
    of_weights = not variant.quantized_activations
    # NVFP4 weights alone keep their sources at a static shape, too: 8.1 MiB over the weights in
    # decode at 125m size, measured.
    has_sources = phase == "prefill" or (variant.quantized_format == "nvfp4" and of_weights)
    sources = sum(has_sources and module.endswith("c_proj") for module in modules)
    largest = smallest + PLAN_KERNELS_MIB + PLAN_LAYER_MIB * layers
    largest += PLAN_KERNEL_SOURCE_MIB * sources
    if variant.quantized_format == "fp8" and of_weights:
        largest += (width - narrow) * quantized / MIB
    return smallest, largest
