"""Seeds of faults in what networks are built from and run by: weights, ranges, layers, cache rows.

A seed takes a MonkeyPatch and puts one fault into the pipeline. These reach the process that builds
plans too (``faulty_worker.py``), and engines as well as the interpreter.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gptneo_trt import layers, masks, network
from gptneo_trt.engine import Engine
from gptneo_trt.interpreter import Interpreter
from tests.gate.measurer import DECODE_TOKENS

WTE, WPE, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
Q_PROJ = "transformer.h.2.attn.attention.q_proj.weight"
C_FC = "transformer.h.2.mlp.c_fc"
OUT_PROJ = "transformer.h.1.attn.attention.out_proj"
LAST_STEP = DECODE_TOKENS - 1
STEP = 40  # at which a cache row is written wrongly

Seed = Callable[[pytest.MonkeyPatch], None]
Weights = Mapping[str, np.ndarray]
Ranges = dict[str, float]
Tensors = Mapping[str, torch.Tensor]


def everywhere(
    patch: pytest.MonkeyPatch, function: Callable[..., Any], other: Callable[..., Any]
) -> None:
    """Replace a function in every module that has it, its own and those that imported it."""
    name = function.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is function:
            patch.setattr(module, name, other)


def together(*seeds: Seed) -> Seed:
    """Return a seed that puts in several faults, which are one only together."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        for each in seeds:
            each(patch)

    return seed


def network_from(
    architecture: Mapping[str, Any] | None = None,
    weights: Mapping[str, Callable[[Weights], np.ndarray]] | None = None,
    amax: Callable[[Ranges], Ranges] | None = None,
) -> Seed:
    """Return a seed: networks see another configuration, weights or ranges than the reference."""
    build_network = network.build_network

    def build(backend, checkpoint, variant, scales, phase, *sizes):
        changed = {name: change(checkpoint.weights) for name, change in (weights or {}).items()}
        shapes = replace(checkpoint.architecture, **(architecture or {}))
        seen = replace(checkpoint, architecture=shapes, weights={**checkpoint.weights, **changed})
        if amax and scales:
            scales = replace(scales, activation_amax=amax(dict(scales.activation_amax)))
        return build_network(backend, seen, variant, scales, phase, *sizes)

    return lambda patch: everywhere(patch, build_network, build)


def linear(module: str, **changes: Any) -> Seed:
    """Return a seed: one projection is added with other LinearWeights."""
    add_linear = layers.add_linear

    def add(graph, name, tensor, weights):
        weights = replace(weights, **changes) if name == module else weights
        return add_linear(graph, name, tensor, weights)

    return lambda patch: patch.setattr(layers, "add_linear", add)


def swapped_weights(one: str, other: str) -> Seed:
    """Return a seed: two weights of equal shape are exchanged."""
    return network_from(
        weights={one: lambda weights: weights[other], other: lambda weights: weights[one]}
    )


def scaled_scores(patch: pytest.MonkeyPatch) -> None:
    """Multiply scores by 1 / sqrt(head width)."""
    add_attention = layers.add_attention

    def add(graph, name, tensors, mask):
        query, key, value = tensors
        width = np.full((1, 1, 1, 1), query.shape[-1] ** -0.5, dtype=np.float16)
        factor = layers.add_constant(graph, f"{name}.factor", width)
        query = layers.add_elementwise(graph, f"{name}.scaled", query, factor, "PROD")
        return add_attention(graph, name, (query, key, value), mask)

    patch.setattr(layers, "add_attention", add)


def mask_moved(rows: int) -> Seed:
    """Return a seed: what a query sees last lies so many positions earlier; -1 is the future."""
    add_window = masks._add_window

    def add(graph, name, distance, first, window):
        return add_window(graph, name, distance, first + rows, window)

    return lambda patch: patch.setattr(masks, "_add_window", add)


def weight_scales(factor: float) -> Seed:
    """Return a seed: the scale of every weight is multiplied."""
    weight_scale = layers.weight_scale

    def scaled(module, weight, *options):
        return factor * weight_scale(module, weight, *options)

    return lambda patch: patch.setattr(layers, "weight_scale", scaled)


def with_nan(weights: Weights) -> np.ndarray:
    """Return a c_fc with one NaN."""
    array = weights[f"{C_FC}.weight"].copy()
    array.flat[array.size // 2] = np.nan
    return array


def swapped_ranges(path: str, one: int, other: int) -> Seed:
    """Return a seed: the ranges of one projection in two layers are exchanged."""
    first, second = f"transformer.h.{one}.{path}", f"transformer.h.{other}.{path}"
    return network_from(amax=lambda amax: amax | {first: amax[second], second: amax[first]})


def scaled_ranges(factor: float, only: str = "") -> Seed:
    """Return a seed: the range of one module, or of all, is multiplied."""
    return network_from(
        amax=lambda amax: {
            name: value * factor if only in ("", name) else value for name, value in amax.items()
        }
    )


def rows_written(change: Callable[[Tensors, Tensors], None]) -> Seed:
    """Return a seed: in decode, ``change(feeds, outputs)`` alters what the loop writes.

    It runs wherever the executor does, in its CUDA graph too: tensor operations in place, and no
    look at a value.
    """

    def seed(patch: pytest.MonkeyPatch) -> None:
        for kind in (Interpreter, Engine):
            patch.setattr(kind, "run", _changed(kind.run, change))

    return seed


def _changed(run: Callable[..., Any], change: Callable[[Tensors, Tensors], None]) -> Callable:
    def changed(self, feeds, into=None):
        outputs = run(self, feeds, into)
        if self.phase == "decode":
            change(feeds, outputs)
        return outputs

    return changed


def _rows(outputs: Tensors) -> dict[str, torch.Tensor]:
    return {name: row for name, row in outputs.items() if name != "logits"}


def _place(feeds: Tensors) -> torch.Tensor:
    return feeds["position_ids"].flatten()[:1]


def swapped_rows(feeds: Tensors, outputs: Tensors) -> None:
    """Exchange K and V of every layer."""
    for name, key in _rows(outputs).items():
        if name.endswith(".key"):
            value = outputs[name.removesuffix("key") + "value"]
            kept = key.clone()
            key.copy_(value)
            value.copy_(kept)


def stale_rows(feeds: Tensors, outputs: Tensors) -> None:
    """Give the rows of the step before once more, at one step."""
    place = _place(feeds)
    for name, row in _rows(outputs).items():
        before = feeds[f"past.{name}"].index_select(-2, (place - 1).clamp(min=0))
        row.copy_(torch.where(place == STEP, before, row))


def overwritten_row(feeds: Tensors, outputs: Tensors) -> None:
    """Write the new rows over an earlier one too, at one step."""
    place = _place(feeds)
    for name, row in _rows(outputs).items():
        earlier = feeds[f"past.{name}"][..., STEP // 2 : STEP // 2 + 1, :]
        earlier.copy_(torch.where(place == STEP, row, earlier))


def infinite_row(feeds: Tensors, outputs: Tensors) -> None:
    """Put an infinity into the last K row of one layer."""
    value = outputs["h.3.key"][:1, 0, 2, 0, 5]
    value.copy_(torch.where(_place(feeds) == LAST_STEP, torch.inf, value))
