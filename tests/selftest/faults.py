"""Faults to seed: a row each, with the gate cell that must turn red for it.

A seed patches what the gate's networks are made of or run by, never a reference, a limit or a
judge. The rows are seeded in this process by test_faults.py; as a pytest plugin
(``-p tests.selftest.faults``) this module seeds the row that GATE_FAULT names in a whole run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from gptneo_trt import decoder, layers, network
from gptneo_trt.interpreter import Interpreter
from tests.gate import measure, test_build

VARIABLE = "GATE_FAULT"
BLOCK = "transformer.h"
BOTH = ("prefill", "decode")

Array = np.ndarray
Seed = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """Describe one fault.

    Attributes:
        name: test id.
        breaks: what is wrong then.
        seed: puts it in.
        cell: metric of the gate cell that must turn red, in every phase of ``phases``.
        reason: regular expression of that cell's reason.
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


def _network_from(
    architecture: Mapping[str, Any] | None = None,
    weights: Mapping[str, Callable[[Array], Array]] | None = None,
    amax: Callable[[dict[str, float]], dict[str, float]] | None = None,
) -> Seed:
    """Return a seed: networks are built from another configuration, weights or ranges."""

    def build(backend, checkpoint, variant, scales, phase, context):
        changed = dict(checkpoint.weights)
        for name, change in (weights or {}).items():
            changed[name] = change(changed[name].astype(np.float32))
        shapes = replace(checkpoint.architecture, **(architecture or {}))
        if scales and amax:
            scales = replace(scales, activation_amax=amax(dict(scales.activation_amax)))
        checkpoint = replace(checkpoint, architecture=shapes, weights=changed)
        return network.build_network(backend, checkpoint, variant, scales, phase, context)

    def seed(patch: pytest.MonkeyPatch) -> None:
        for module in (measure, test_build):
            patch.setattr(module, "build_network", build)

    return seed


def _linear(name: str, **changes: Any) -> Seed:
    """Return a seed: one projection is built with other LinearWeights."""
    add_linear = layers.add_linear

    def add(graph, path, tensor, weights):
        weights = replace(weights, **changes) if path == name else weights
        return add_linear(graph, path, tensor, weights)

    return lambda patch: patch.setattr(layers, "add_linear", add)


def _scaled_scores(patch: pytest.MonkeyPatch) -> None:
    add_attention = layers.add_attention

    def add(graph, name, tensors, mask):
        query, *others = tensors
        width = np.full((1, 1, 1, 1), query.shape[-1] ** -0.5, dtype=np.float16)
        factor = layers.add_constant(graph, f"{name}.factor", width)
        query = layers.add_elementwise(graph, f"{name}.scaled", query, factor, "PROD")
        return add_attention(graph, name, (query, *others), mask)

    patch.setattr(layers, "add_attention", add)


def _outputs(change: Callable[[int, dict[str, Any], dict[str, Any]], None]) -> Seed:
    """Return a seed: ``change(step, outputs, previous outputs)`` after every decode step."""

    class Faulty(Interpreter):
        def run(self, feeds):
            outputs = super().run(feeds)
            if self.network.phase == "decode":
                step = int(feeds["position_ids"].flatten()[0])
                change(step, outputs, getattr(self, "previous", outputs))
                self.previous = dict(outputs)
            return outputs

    return lambda patch: patch.setattr(measure, "Interpreter", Faulty)


def _swap_cache(step, outputs, previous):
    for layer in range(6):
        key, value = outputs[f"h.{layer}.key"], outputs[f"h.{layer}.value"]
        outputs |= {f"h.{layer}.key": value, f"h.{layer}.value": key}


def _keep_row(step, outputs, previous):
    if step == 40:
        outputs |= {name: previous[name] for name in outputs if name != "logits"}


def _infinite_key(step, outputs, previous):
    if step == measure.DECODE_TOKENS - 1:
        outputs["h.3.key"] = outputs["h.3.key"].clone()
        outputs["h.3.key"][0, 0, 2, 0, 5] = float("inf")


def _shifted_text(patch: pytest.MonkeyPatch) -> None:
    prefill = decoder.prefill

    def shifted(executor, architecture, token_ids):
        return prefill(executor, architecture, np.roll(token_ids, 1, axis=1))

    patch.setattr(decoder, "prefill", shifted)


def _with_nan(array: Array) -> Array:
    array = array.copy()
    array.flat[array.size // 2] = np.nan
    return array


def _swapped_ranges(first: str, second: str) -> Callable[[dict], dict]:
    return lambda amax: amax | {first: amax[second], second: amax[first]}


def _factor(kind: str, factor: float) -> Callable[[dict], dict]:
    return lambda amax: {
        name: value * (factor if name.endswith(kind) else 1) for name, value in amax.items()
    }


def _late_rows(table: Array) -> Array:
    return np.concatenate((table[1:], table[-1:]))


WINDOW = 64
FAULTS = (
    Fault(
        "local-mask-missing",
        "local layers see everything",
        _network_from({"attention_layers": ("global",) * 6}),
        "kl_mean_nats",
        "at most",
        phases=BOTH,
    ),
    Fault(
        "window-one-wider",
        "",
        _network_from({"window_size": WINDOW + 1}),
        "kl_mean_nats",
        "",
        phases=BOTH,
    ),
    Fault(
        "window-one-narrower",
        "",
        _network_from({"window_size": WINDOW - 1}),
        "kl_mean_nats",
        "",
        phases=BOTH,
    ),
    Fault("scaled", "", _scaled_scores, "kl_mean_nats", ""),
    Fault(
        "pos", "", _network_from(weights={"transformer.wpe.weight": _late_rows}), "kl_mean_nats", ""
    ),
    Fault("swapkv", "", _outputs(_swap_cache), "kl_mean_nats", "", phases=("decode",)),
    Fault("stale", "", _outputs(_keep_row), "kl_mean_nats", "", phases=("decode",)),
    Fault("infkey", "", _outputs(_infinite_key), "kl_mean_nats", "", phases=("decode",)),
    Fault("bias", "", _linear("transformer.h.3.mlp.c_fc", bias=None), "kl_mean_nats", ""),
    Fault(
        "bias-out",
        "",
        _linear("transformer.h.3.attn.attention.out_proj", bias=None),
        "kl_mean_nats",
        "",
    ),
    Fault(
        "bias8",
        "",
        _linear("transformer.h.3.attn.attention.out_proj", bias=None),
        "kl_mean_nats",
        "",
        "fp8",
    ),
    Fault("relu", "", _network_from({"activation": "relu"}), "kl_mean_nats", ""),
    Fault("gelu", "", _network_from({"activation": "gelu"}), "kl_mean_nats", ""),
    Fault("gelu8", "", _network_from({"activation": "gelu"}), "kl_mean_nats", "", "fp8"),
    Fault("eps", "", _network_from({"layer_norm_epsilon": 1e-6}), "kl_mean_nats", ""),
    Fault(
        "win8",
        "",
        _network_from({"window_size": WINDOW + 1}),
        "kl_mean_nats",
        "",
        "fp8",
        phases=BOTH,
    ),
    Fault("win8n", "", _network_from({"window_size": WINDOW - 1}), "kl_mean_nats", "", "fp8"),
    Fault(
        "qT",
        "",
        _network_from(weights={"transformer.h.2.attn.attention.q_proj.weight": np.transpose}),
        "kl_mean_nats",
        "",
        "fp8",
    ),
    Fault(
        "nan",
        "",
        _network_from(weights={"transformer.h.2.mlp.c_fc.weight": _with_nan}),
        "kl_mean_nats",
        "",
    ),
    Fault("shift", "", _shifted_text, "kl_mean_nats", ""),
    *(
        Fault(
            f"swap-{k}",
            "",
            _network_from(amax=_swapped_ranges(f"transformer.h.{a}.{k}", f"transformer.h.{b}.{k}")),
            "kl_mean_nats",
            "",
            "fp8",
        )
        for k, a, b in (
            ("attn.attention.k_proj", 0, 4),
            ("attn.attention.q_proj", 0, 4),
            ("mlp.c_proj", 0, 3),
            ("mlp.c_fc", 1, 5),
            ("attn.attention.v_proj", 0, 4),
        )
    ),
    *(
        Fault(f"factor-{k}-{f}", "", _network_from(amax=_factor(k, f)), "kl_mean_nats", "", "fp8")
        for k in (
            "h.2.mlp.c_proj",
            "h.2.mlp.c_fc",
            "h.2.attn.attention.v_proj",
            "c_proj",
            "c_fc",
            "v_proj",
            "proj",
            "",
        )
        for f in (1 / 8, 16)
    ),
)
