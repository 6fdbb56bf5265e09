"""Add what a query may see to a network: causal, and within the window of a local layer."""

from typing import Any

import numpy as np

from gptneo_trt import layers
from gptneo_trt.data import Architecture
from gptneo_trt.layers import Graph


def _integer(graph: Graph, name: str, values: Any) -> Any:
    return layers.add_constant(graph, name, np.asarray(values, dtype=np.int32)[None, None])


def _add_window(graph: Graph, name: str, distance: Any, first: int, window: int | None) -> Any:
    """Return first <= distance, and distance < window where there is one; bool like distance."""
    before = _integer(graph, f"{name}.before", [[first - 1]])
    visible = layers.add_elementwise(graph, f"{name}.causal", distance, before, "GREATER")
    if window is None:
        return visible
    bound = _integer(graph, f"{name}.window", [[window]])
    near = layers.add_elementwise(graph, f"{name}.near", distance, bound, "LESS")
    return layers.add_elementwise(graph, name, visible, near, "AND")


def _windows(architecture: Architecture) -> dict[str, int | None]:
    present = set(architecture.attention_layers)
    windows = {"global": None, "local": architecture.window_size}
    return {kind: window for kind, window in windows.items() if kind in present}


def add_prefill_masks(graph: Graph, architecture: Architecture, positions: Any) -> dict[str, Any]:
    """Return bool [B, 1, T, T]: a query at i sees j when 0 <= i - j (< window)."""
    batch = positions.shape[0]
    rows = layers.add_reshape(graph, "mask.query_positions", positions, (batch, 1, -1, 1))
    columns = layers.add_reshape(graph, "mask.key_positions", positions, (batch, 1, 1, -1))
    distance = layers.add_elementwise(graph, "mask.distance", rows, columns, "SUB")
    return {
        kind: _add_window(graph, f"mask.{kind}", distance, 0, window)
        for kind, window in _windows(architecture).items()
    }


def add_decode_masks(
    graph: Graph, architecture: Architecture, positions: Any, context: int
) -> dict[str, Any]:
    """Return bool [B, 1, 1, context + 1]: cache rows 1 <= position - j (< window), and itself."""
    each = (positions.shape[0], 1, 1, 1)
    rows = layers.add_reshape(graph, "mask.query_positions", positions, each)
    columns = _integer(graph, "mask.key_positions", np.arange(context)[None])
    distance = layers.add_elementwise(graph, "mask.distance", rows, columns, "SUB")
    itself = layers.add_constant(graph, "mask.itself", np.ones(each, dtype=np.bool_))
    masks = {}
    for kind, window in _windows(architecture).items():
        cached = _add_window(graph, f"mask.{kind}.cached", distance, 1, window)
        masks[kind] = layers.add_concatenation(graph, f"mask.{kind}", (cached, itself), axis=3)
    return masks
