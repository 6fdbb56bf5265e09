"""Faults to seed, as rows, each with the gate cell that must turn red for it.

A seed changes what the gate's networks are built from or run by, never a reference, a limit or a
judge. test_faults.py seeds them in its own process. As a plugin (``-p tests.selftest.faults``)
this module seeds the row that the environment variable GATE_FAULT names in a whole run.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gptneo_trt import decoder, layers, network
from gptneo_trt.interpreter import Interpreter
from tests.gate import measure, test_build
from tests.gate.measurer import DECODE_TOKENS

VARIABLE = "GATE_FAULT"
BOTH = ("prefill", "decode")
WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
Q_PROJ = "transformer.h.2.attn.attention.q_proj.weight"
C_FC = "transformer.h.2.mlp.c_fc"
LAST_STEP = DECODE_TOKENS - 1

Seed = Callable[[pytest.MonkeyPatch], None]
Weights = Mapping[str, np.ndarray]
Ranges = dict[str, float]


@dataclass(frozen=True)
class Fault:
    """Describe one fault.

    Attributes:
        name: test id.
        breaks: what is wrong then.
        seed: puts it in.
        cell: metric that must turn red in every phase of ``phases``.
        reason: regular expression that this cell's reason matches from its beginning.
        variant: row that is measured.
        phases: measured with the fault; the other phase is the control's.
        verdict: of the cell.
    """

    name: str
    breaks: str
    seed: Seed
    cell: str
    reason: str
    variant: str = "fp16"
    phases: tuple[str, ...] = ("prefill",)
    verdict: str = "failed"


def network_from(
    architecture: Mapping[str, Any] | None = None,
    weights: Mapping[str, Callable[[Weights], np.ndarray]] | None = None,
    amax: Callable[[Ranges], Ranges] | None = None,
) -> Seed:
    """Return a seed: networks see another configuration, weights or ranges than the reference."""

    def build(backend, checkpoint, variant, scales, phase, context):
        changed = {name: change(checkpoint.weights) for name, change in (weights or {}).items()}
        shapes = replace(checkpoint.architecture, **(architecture or {}))
        seen = replace(checkpoint, architecture=shapes, weights={**checkpoint.weights, **changed})
        if amax:
            scales = replace(scales, activation_amax=amax(dict(scales.activation_amax)))
        return network.build_network(backend, seen, variant, scales, phase, context)

    def seed(patch: pytest.MonkeyPatch) -> None:
        for module in (measure, test_build):
            patch.setattr(module, "build_network", build)

    return seed


def linear(module: str, **changes: Any) -> Seed:
    """Return a seed: one projection is added with other LinearWeights."""
    add_linear = layers.add_linear

    def add(graph, name, tensor, weights):
        weights = replace(weights, **changes) if name == module else weights
        return add_linear(graph, name, tensor, weights)

    return lambda patch: patch.setattr(layers, "add_linear", add)


def _scaled_scores(patch: pytest.MonkeyPatch) -> None:
    add_attention = layers.add_attention

    def add(graph, name, tensors, mask):
        query, key, value = tensors
        width = np.full((1, 1, 1, 1), query.shape[-1] ** -0.5, dtype=np.float16)
        factor = layers.add_constant(graph, f"{name}.factor", width)
        query = layers.add_elementwise(graph, f"{name}.scaled", query, factor, "PROD")
        return add_attention(graph, name, (query, key, value), mask)

    patch.setattr(layers, "add_attention", add)


def _cache_written_by(change: Callable[[int, dict, dict], dict]) -> Seed:
    """Return a seed: in decode, ``change(step, outputs, those of the step before)`` comes out."""

    class Faulty(Interpreter):
        before: Mapping[str, Any] = {}

        def run(self, feeds, into=None):
            if self.phase == "prefill":
                return super().run(feeds, into)
            outputs = super().run(feeds)
            step = int(feeds["position_ids"].flatten()[0])
            changed = outputs | change(step, outputs, self.before)
            self.before = outputs
            for name, tensor in (into or {}).items():
                tensor.copy_(changed[name])
            return changed

    return lambda patch: patch.setattr(measure, "Interpreter", Faulty)


def _swapped(step: int, outputs: dict, before: dict) -> dict:
    other = {"key": "value", "value": "key"}
    rows = [name.rpartition(".") for name in outputs if name != "logits"]
    return {f"{block}.{part}": outputs[f"{block}.{other[part]}"] for block, _, part in rows}


def _stale(step: int, outputs: dict, before: dict) -> dict:
    return {name: row for name, row in before.items() if name != "logits" and step == 40}


def _infinite(step: int, outputs: dict, before: dict) -> dict:
    row = outputs["h.3.key"].clone()
    if step == LAST_STEP:
        row[0, 0, 2, 0, 5] = float("inf")
    return {"h.3.key": row}


def _shifted_text(patch: pytest.MonkeyPatch) -> None:
    prefill = decoder.prefill

    def shifted(executor, architecture, token_ids):
        return prefill(executor, architecture, np.roll(token_ids, 1, axis=1))

    patch.setattr(decoder, "prefill", shifted)


def _with_nan(weights: Weights) -> np.ndarray:
    array = weights[f"{C_FC}.weight"].copy()
    array.flat[array.size // 2] = np.nan
    return array


def _swapped_ranges(path: str, one: int, other: int) -> Seed:
    first, second = f"transformer.h.{one}.{path}", f"transformer.h.{other}.{path}"
    return network_from(amax=lambda amax: amax | {first: amax[second], second: amax[first]})


def _scaled_ranges(factor: float, only: str = "") -> Seed:
    """Return a seed: the range of one module, or of all, is multiplied."""
    return network_from(
        amax=lambda amax: {
            name: value * factor if only in ("", name) else value for name, value in amax.items()
        }
    )


OVER_EXACT = r"obtained \S+, expected at most 1e-05$"
OVER_RECIPE = r"obtained \S+, expected at most 0\.01$"
WORSE = "worse than the baseline: changed by"
# Shared with whole runs.
SCALED_SCORES, NAN_WEIGHT = "scores-scaled", "nan-in-a-weight"

FAULTS = (
    Fault(
        "local-mask-missing",
        "local layers see everything",
        network_from({"attention_layers": ("global",) * 6}),
        "float32/kl_mean_nats",
        OVER_EXACT,
        phases=BOTH,
    ),
    Fault(
        "window-one-wider",
        "a local layer sees one token too many",
        network_from({"window_size": 65}),
        "float32/kl_mean_nats",
        OVER_EXACT,
        phases=BOTH,
    ),
    Fault(
        "window-one-narrower",
        "a local layer sees one token too few",
        network_from({"window_size": 63}),
        "regression/kl_mean_nats",
        WORSE,
    ),
    Fault(
        SCALED_SCORES,
        "scores are multiplied by 1 / sqrt(head width), which GPT-Neo does not do",
        _scaled_scores,
        "kl_mean_nats",
        r"obtained \S+, expected at most 0\.0004$",
    ),
    Fault(
        "positions-off-by-one",
        "position i reads row i + 1 of the position table",
        network_from(weights={WPE: lambda weights: np.roll(weights[WPE], -1, axis=0)}),
        "top1_frac",
        r"obtained \S+, expected at least 0\.97$",
    ),
    Fault(
        "cache-k-and-v-swapped",
        "K rows go to the V cache and V rows to the K cache",
        _cache_written_by(_swapped),
        "agreement/kl_mean_nats",
        r"obtained \S+, expected at most \S+$",
        phases=("decode",),
    ),
    Fault(
        "cache-row-stale",
        "at step 40 the cache gets the rows of step 39 again",
        _cache_written_by(_stale),
        "agreement/kl_mean_nats",
        r"obtained \S+, expected at most \S+$",
        phases=("decode",),
    ),
    Fault(
        "infinity-in-a-k-row",
        "one value of the last K row of layer 3 is infinite, the logits are not",
        _cache_written_by(_infinite),
        "non_finite",
        rf"keys\[0, 3, 2, {LAST_STEP}, 5\] = inf$",
        phases=("decode",),
    ),
    Fault(
        "bias-dropped",
        "one c_fc has no bias",
        linear(C_FC, bias=None),
        "float32/kl_mean_nats",
        OVER_EXACT,
    ),
    Fault(
        "bias-dropped-fp8",
        "one out_proj, which this row does not quantize, has no bias",
        linear("transformer.h.3.attn.attention.out_proj", bias=None),
        "regression/kl_mean_nats",
        WORSE,
        "fp8",
    ),
    Fault(
        "activation-relu",
        "relu instead of gelu_new",
        network_from({"activation": "relu"}),
        "perplexity_ratio",
        r"obtained \S+, expected at most 1\.002$",
    ),
    Fault(
        "activation-gelu",
        "the erf form of gelu instead of the tanh form",
        network_from({"activation": "gelu"}),
        "regression/kl_mean_nats",
        WORSE,
    ),
    Fault(
        "layer-norm-epsilon",
        "1e-6 is added to the variance instead of 1e-5: only the fp32 row is exact enough",
        network_from({"layer_norm_epsilon": 1e-6}),
        "float32/kl_mean_nats",
        r"obtained \S+, expected at most 1e-09$",
        "fp32",
    ),
    Fault(
        "weight-transposed",
        "one q_proj, which is square, is transposed",
        network_from(weights={Q_PROJ: lambda weights: weights[Q_PROJ].T}),
        "float32/kl_mean_nats",
        OVER_RECIPE,
        "fp8",
    ),
    Fault(
        "head-untied",
        "the head is 5 % larger than the embedding that it is tied to",
        network_from({"tied_head": False}, {HEAD: lambda weights: weights[WTE] * np.float32(1.05)}),
        "regression/nll_mean_nats",
        WORSE,
    ),
    Fault(
        NAN_WEIGHT,
        "one value of one c_fc is NaN",
        network_from(weights={f"{C_FC}.weight": _with_nan}),
        "non_finite",
        r"logits\[0, 0, 0\] = nan$",
    ),
    Fault(
        "text-shifted",
        "the network reads the text one token late",
        _shifted_text,
        "next_token/kl_mean_nats",
        r"obtained \S+, expected at most 0\.0004$",
    ),
    Fault(
        "scales-swapped",
        "the input scales of k_proj in layers 0 and 4 are swapped",
        _swapped_ranges("attn.attention.k_proj", 0, 4),
        "kl_mean_nats",
        OVER_RECIPE,
        "fp8",
    ),
    Fault(
        "scale-0.6-times-the-right-one",
        "the input of one c_fc saturates so little that the loss grows by about the tolerance",
        _scaled_ranges(0.6, "transformer.h.3.mlp.c_fc"),
        "regression/kl_mean_nats",
        "too few tokens to decide: changed by",
        "fp8",
        verdict="inconclusive",
    ),
    Fault(
        "scale-8-times-too-small",
        "the input of one c_fc saturates at an eighth of its range",
        _scaled_ranges(1 / 8, C_FC),
        "float32/kl_mean_nats",
        OVER_RECIPE,
        "fp8",
    ),
    Fault(
        "scales-4096-times-too-large",
        "every input falls among FP8's subnormals",
        _scaled_ranges(4096),
        "regression/kl_mean_nats",
        WORSE,
        "fp8",
    ),
)

# What no cell of the row shows today. A row that is caught after all belongs in FAULTS.
UNSEEN = (
    Fault(
        "scales-16-times-too-large",
        "FP8 has an exponent: 16 x leaves nearly all inputs above the subnormals",
        _scaled_ranges(16),
        "regression/kl_mean_nats",
        WORSE,
        "fp8",
    ),
    Fault(
        "window-one-narrower-fp8",
        "a fortieth of what FP8 loses itself; the fp16 row shows it",
        network_from({"window_size": 63}),
        "regression/kl_mean_nats",
        WORSE,
        "fp8",
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    """Seed the fault that GATE_FAULT names, for the whole run."""
    patch = pytest.MonkeyPatch()
    {fault.name: fault for fault in FAULTS}[os.environ[VARIABLE]].seed(patch)
    config.add_cleanup(patch.undo)
