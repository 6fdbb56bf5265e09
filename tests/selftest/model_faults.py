"""Faults in what runs, as rows: weights, ranges and scales, the network, the rows of the cache."""

import numpy as np

from tests.selftest.fault import BOTH, Fault
from tests.selftest.gate_seeds import cached_ranges
from tests.selftest.seeds import (
    C_FC,
    HEAD,
    LAST_STEP,
    OUT_PROJ,
    Q_PROJ,
    WPE,
    WTE,
    infinite_row,
    linear,
    mask_moved,
    network_from,
    overwritten_row,
    rows_written,
    scaled_ranges,
    scaled_scores,
    stale_rows,
    swapped_ranges,
    swapped_rows,
    swapped_weights,
    weight_scales,
    with_nan,
)

OVER_FLOOR = r"obtained \S+, expected at most 0\.0004(;|$)"
OVER_EXACT = r"obtained \S+, expected at most 1e-05(;|$)"
OVER_RECIPE = r"obtained \S+, expected at most 0\.01(;|$)"
OVER = r"obtained \S+, expected at most \S+"
WORSE = "worse than the baseline: changed by"
# Shared with whole runs.
SCALED_SCORES, NAN_WEIGHT, NARROW = "scores-scaled", "nan-in-a-weight", "window-one-narrower"
V_PROJ = "transformer.h.{}.attn.attention.v_proj.weight"

WEIGHTS = (
    Fault(
        "weight-transposed", "weights",
        "one q_proj, which is square, is transposed",
        network_from(weights={Q_PROJ: lambda weights: weights[Q_PROJ].T}),
        "float32/kl_mean_nats", OVER_RECIPE, "fp8",
    ),
    Fault(
        "weights-of-two-layers-swapped", "weights",
        "v_proj of layers 1 and 2 are exchanged",
        swapped_weights(V_PROJ.format(1), V_PROJ.format(2)),
        "float32/kl_mean_nats", OVER_EXACT,
    ),
    Fault(
        "weights-q-and-k-swapped", "weights",
        "q_proj and k_proj of one layer are exchanged",
        swapped_weights(Q_PROJ, Q_PROJ.replace("q_proj", "k_proj")),
        "float32/kl_mean_nats", OVER_EXACT,
    ),
    Fault(
        "layer-norm-without-bias", "weights",
        "the last LayerNorm adds no bias",
        network_from(
            weights={
                "transformer.ln_f.bias": lambda weights: 0 * weights["transformer.ln_f.bias"]
            }
        ),
        "float32/kl_mean_nats", OVER_EXACT,
    ),
    Fault(
        "bias-dropped", "weights",
        "one c_fc has no bias",
        linear(C_FC, bias=None),
        "float32/kl_mean_nats", OVER_EXACT,
    ),
    Fault(
        "bias-dropped-fp8", "weights",
        "one out_proj, which this row does not quantize, has no bias",
        linear("transformer.h.3.attn.attention.out_proj", bias=None),
        "regression/kl_mean_nats", WORSE, "fp8",
    ),
    Fault(
        "head-untied", "weights",
        "the head is 5 % larger than the embedding that it is tied to",
        network_from({"tied_head": False}, {HEAD: lambda weights: weights[WTE] * np.float32(1.05)}),
        "regression/nll_mean_nats", WORSE,
    ),
    Fault(
        NAN_WEIGHT, "weights",
        "one value of one c_fc is NaN",
        network_from(weights={f"{C_FC}.weight": with_nan}),
        "non_finite", r"logits\[0, 0, 0\] = nan$",
    ),
)  # fmt: skip

SCALES = (
    Fault(
        "scales-swapped", "scales",
        "the input scales of k_proj in layers 0 and 4 are swapped",
        swapped_ranges("attn.attention.k_proj", 0, 4),
        "kl_mean_nats", OVER_RECIPE, "fp8",
    ),
    Fault(
        "scale-0.6-times-the-right-one", "scales",
        "the input of one c_fc saturates so little that only twice the prose's text shows it",
        scaled_ranges(0.6, "transformer.h.3.mlp.c_fc"),
        "regression/sampled/kl_mean_nats", WORSE, "fp8", through="sampled losses",
    ),
    Fault(
        "scales-16-times-too-large-in-calibration", "scales",
        "every calibrated range is 16 times too large: FP8 has an exponent, no loss shows it",
        cached_ranges(16),
        "regression/activation_amax", r"obtained 15, expected at most \S+; .*: obtained range ",
        "fp8", ("both",), through="networks",
    ),
    Fault(
        "scale-8-times-too-small", "scales",
        "the input of one c_fc saturates at an eighth of its range",
        scaled_ranges(1 / 8, C_FC),
        "float32/kl_mean_nats", OVER_RECIPE, "fp8",
    ),
    Fault(
        "scales-4096-times-too-large", "scales",
        "every input falls among FP8's subnormals",
        scaled_ranges(4096),
        "regression/kl_mean_nats", WORSE, "fp8",
    ),
    Fault(
        "weight-scales-halved", "scales",
        "the upper half of every weight's range saturates",
        weight_scales(0.5),
        "float32/kl_mean_nats", OVER_RECIPE, "fp8",
    ),
    Fault(
        "scale-of-another-projection", "scales",
        "one c_fc is quantized with a scale that is not its own",
        linear(C_FC, activation_scale=0.01),
        "quantized_projections",
        rf"30 of 37 products read FP8; .*; other scales: {C_FC}: 0\.0099.*, expected [0-9.]+$",
        "fp8", BOTH, through="networks",
    ),
)  # fmt: skip

NETWORK = (
    Fault(
        "local-mask-missing", "network",
        "local layers see everything",
        network_from({"attention_layers": ("global",) * 6}),
        "float32/kl_mean_nats", OVER_EXACT, phases=BOTH,
    ),
    Fault(
        "local-and-global-exchanged", "network",
        "layers that should see a window see everything, and the other way round",
        network_from({"attention_layers": ("local", "global") * 3}),
        "float32/kl_mean_nats", OVER_EXACT,
    ),
    Fault(
        "window-one-wider", "network",
        "a local layer sees one token too many",
        network_from({"window_size": 65}),
        "float32/kl_mean_nats", OVER_EXACT,
    ),
    Fault(
        NARROW, "network",
        "a local layer sees one token too few; no FP8 row shows it, so fp16 is judged beside them",
        network_from({"window_size": 63}),
        "regression/kl_mean_nats", WORSE,
    ),
    Fault(
        "mask-sees-the-next-token", "network",
        "every query sees the key that follows it",
        mask_moved(-1),
        "kl_mean_nats", OVER_FLOOR,
    ),
    Fault(
        "mask-hides-the-last-row", "network",
        "in decode no query sees the cache row before its own",
        mask_moved(1),
        "kl_mean_nats", OVER_FLOOR, phases=("decode",),
    ),
    Fault(
        SCALED_SCORES, "network",
        "scores are multiplied by 1 / sqrt(head width), which GPT-Neo does not do",
        scaled_scores,
        "kl_mean_nats", OVER_FLOOR,
    ),
    Fault(
        "positions-off-by-one", "network",
        "position i reads row i + 1 of the position table",
        network_from(weights={WPE: lambda weights: np.roll(weights[WPE], -1, axis=0)}),
        "top1_frac", r"obtained \S+, expected at least 0\.97(;|$)",
    ),
    Fault(
        "activation-relu", "network",
        "relu instead of gelu_new",
        network_from({"activation": "relu"}),
        "perplexity_ratio", r"obtained \S+, expected at most 1\.002(;|$)",
    ),
    Fault(
        "activation-gelu", "network",
        "the erf form of gelu instead of the tanh form",
        network_from({"activation": "gelu"}),
        "regression/kl_mean_nats", WORSE,
    ),
    Fault(
        "layer-norm-epsilon", "network",
        "1e-6 is added to the variance instead of 1e-5: only the fp32 row is exact enough",
        network_from({"layer_norm_epsilon": 1e-6}),
        "float32/kl_mean_nats", r"obtained \S+, expected at most 1e-09(;|$)", "fp32",
    ),
    Fault(
        "one-projection-left-unquantized", "network",
        "one c_fc multiplies in fp16",
        linear(C_FC, activation_scale=None),
        "quantized_projections",
        rf"29 of 37 products read FP8; missing: \['{C_FC}'\]; not intended: \[\]$",
        "fp8", BOTH, through="networks",
    ),
    Fault(
        "one-projection-too-many", "network",
        "one out_proj multiplies in FP8",
        linear(OUT_PROJ, activation_scale=0.01),
        "quantized_projections",
        rf"31 of 37 products read FP8; missing: \[\]; not intended: \['{OUT_PROJ}'\]$",
        "fp8", BOTH, through="networks",
    ),
)  # fmt: skip

CACHE = (
    Fault(
        "cache-k-and-v-swapped", "cache",
        "K rows go to the V cache and V rows to the K cache",
        rows_written(swapped_rows),
        "agreement/kl_mean_nats", OVER, phases=("decode",),
    ),
    Fault(
        "cache-row-stale", "cache",
        "at step 40 the cache gets the rows of step 39 again",
        rows_written(stale_rows),
        "agreement/kl_mean_nats", OVER, phases=("decode",),
    ),
    Fault(
        "cache-row-overwritten", "cache",
        "step 40 writes over the row of step 20 too",
        rows_written(overwritten_row),
        "agreement/kl_mean_nats", OVER, phases=("decode",),
    ),
    Fault(
        "infinity-in-a-k-row", "cache",
        "one value of the last K row of layer 3 is infinite, the logits are not",
        rows_written(infinite_row),
        "non_finite", rf"keys\[0, 3, 2, {LAST_STEP}, 5\] = inf$", phases=("decode",),
    ),
)  # fmt: skip

MODEL_FAULTS = (*WEIGHTS, *SCALES, *NETWORK, *CACHE)
