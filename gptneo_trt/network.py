"""Build the GPT-Neo graph: Checkpoint, Variant, Scales, phase -> ``INetworkDefinition``.

One source for both flavours and both phases. Precision is in the graph alone (types, casts and
Quantize/Dequantize); no builder flag is set.

    phase     inputs                                      outputs
    prefill   token_ids, position_ids int32 [B, T]        logits float32 [B, T, V]
              1 <= T <= context                           h.<i>.key, h.<i>.value [B, H, T, D]
    decode    token_ids, position_ids int32 [B, 1]        logits float32 [B, 1, V]
              past.h.<i>.key, .value [B, H, context, D]   h.<i>.key, h.<i>.value [B, H, 1, D]

B is fixed when a network is built. Each text of a batch has positions of its own, and so a mask.
In decode the new K and V rows are concatenated after the cache rows; of those, row j is visible
when j < position (and within the window of a local layer). Rows at and beyond the position must
be finite, and for an engine so small that no score overflows: TensorRT adds its mask to the scores.
Clearing the cache and writing the new rows back is the caller's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gptneo_trt import blocks, layers, masks
from gptneo_trt.backend import Backend, create_builder, create_network, log_collector, refuse_none
from gptneo_trt.data import Architecture, Checkpoint, Scales
from gptneo_trt.errors import BuildError, CalibrationError
from gptneo_trt.layers import Graph, LinearWeights
from gptneo_trt.smoothing import smoothed
from gptneo_trt.variant import HEAD, Variant

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Network:
    """Hold a finished network and everything that must live as long as it.

    Attributes:
        backend: the TensorRT flavour.
        builder: the ``Builder``, needed to build a plan.
        definition: the ``INetworkDefinition``.
        log: its lines are TensorRT's warnings and errors so far.
        variant: the row.
        phase: "prefill" or "decode".
        context: cache rows in decode, largest T in prefill.
        arrays: constants that TensorRT refers to without copying.
        batch: texts that go through it together.
        packed: layer name -> the bytes of its FP4 or FP8 constant, see ``Graph``.
    """

    backend: Backend
    builder: Any
    definition: Any
    log: Any
    variant: Variant
    phase: str
    context: int
    arrays: tuple[np.ndarray, ...]
    batch: int = 1
    packed: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class _Inputs:
    token_ids: Any
    positions: Any
    past: tuple[tuple[Any, Any], ...]  # (K, V) a layer; empty in prefill
    masks: Mapping[str, Any]  # "global" and "local" -> bool [B, 1, T, S]


def activation_scales(variant: Variant, scales: Scales | None, num_layers: int) -> dict[str, float]:
    """Return module path -> float32 scale of its input, amax x factor / LARGEST, for this row.

    Empty for a row that quantizes no activation.

    Raises:
        CalibrationError: modules that the row quantizes have no range by its calibration.
    """
    if not variant.quantized_activations:
        return {}
    modules = variant.quantized_modules(num_layers)
    method = variant.calibration_method
    known = scales.ranges(method) if scales else {}
    missing = [module for module in modules if module not in known]
    if missing:
        raise CalibrationError(
            f"variant {variant.name!r}: no calibrated range for {len(missing)} of {len(modules)} "
            f"projections: {', '.join(missing)}; calibrate this checkpoint ({method})"
        )
    largest = np.float32(layers.LARGEST[variant.quantized_format])
    factor = np.float32(variant.activation_scale_factor) / largest
    return {module: float(np.float32(known[module]) * factor) for module in modules}


def smoothing_factors(variant: Variant, scales: Scales | None) -> Mapping[str, tuple[float, ...]]:
    """Return path of a LayerNorm -> factors of its channels; none of a row that smooths nothing."""
    return scales.smoothing.get(variant.smoothing, {}) if scales else {}


def build_network(
    backend: Backend, checkpoint: Checkpoint, variant: Variant, scales: Scales | None, phase: str,
    context: int, batch: int = 1,
) -> Network:  # fmt: skip
    """Build the graph of one phase.

    Args:
        backend: the TensorRT flavour.
        checkpoint: weights and shapes.
        variant: what is quantized.
        scales: calibrated ranges; None is enough for a row that quantizes nothing.
        phase: "prefill" or "decode".
        context: cache rows in decode, largest T in prefill.
        batch: texts that go through it together.

    Raises:
        BuildError: unknown phase, no text, a context beyond the position table, or TensorRT's
            refusal.
        CalibrationError: a range is missing.
    """
    architecture = checkpoint.architecture
    if phase not in PHASES:
        raise BuildError(f"phase {phase!r}: expected one of {list(PHASES)}")
    if not 1 <= context <= architecture.max_positions:
        raise BuildError(
            f"context {context}: {checkpoint.name} has {architecture.max_positions} positions; "
            f"choose 1 to {architecture.max_positions}"
        )
    if batch < 1:
        raise BuildError(f"batch {batch}: expected 1 or more")
    log = log_collector(backend.trt)
    if variant.smoothing:
        checkpoint = smoothed(checkpoint, smoothing_factors(variant, scales))
    linears = _linear_weights(checkpoint, variant, scales)
    try:
        builder = create_builder(backend, log)
        definition = create_network(backend, builder)
        graph = Graph(backend, definition, variant.compute_type)
        inputs = _add_inputs(graph, architecture, phase, (batch, context))
        _add_gpt_neo(graph, checkpoint, linears, inputs)
    except BuildError as error:
        what = f"variant {variant.name}, {phase}: {error.message}"
        raise BuildError(what, tuple(log.lines)) from error
    arrays = tuple(graph.arrays)
    return Network(
        backend, builder, definition, log, variant, phase, context, arrays, batch, graph.packed
    )


def head_weight(architecture: Architecture) -> str:
    """Return the name of the weight that the head multiplies with."""
    return "transformer.wte.weight" if architecture.tied_head else f"{HEAD}.weight"


def _linear_weights(
    checkpoint: Checkpoint, variant: Variant, scales: Scales | None
) -> dict[str, LinearWeights]:
    """Return module path -> what its product needs: every projection, and a quantized head."""
    weights, found = checkpoint.weights, {}
    layer_count = checkpoint.architecture.num_layers
    quantized = variant.quantized_modules(layer_count)
    ranges = activation_scales(variant, scales, layer_count)
    products = {
        module: weights[name]
        for name in weights
        if name.startswith("transformer.h.")
        and weights[name].ndim == 2
        and (module := name.removesuffix(".weight")) != name
    }
    if HEAD in quantized:
        products[HEAD] = weights[head_weight(checkpoint.architecture)]
    for module, weight in products.items():
        linear = LinearWeights(weight, weights.get(f"{module}.bias"))
        if module in quantized:
            linear = replace(
                linear,
                activation_scale=ranges.get(module),
                dequantize_type=variant.dequantize_type,
                quantized_format=variant.quantized_format,
                weight_scales=variant.weight_scales,
                weight_only=not variant.quantized_activations,
            )
        found[module] = linear
    return found


def _add_inputs(
    graph: Graph, architecture: Architecture, phase: str, sizes: tuple[int, int]
) -> _Inputs:
    """Add the inputs and masks of a phase; ``sizes`` are batch and context."""
    batch, context = sizes
    types = graph.backend.trt.DataType
    length = -1 if phase == "prefill" else 1
    token_ids = _add_input(graph, "token_ids", types.INT32, (batch, length))
    positions = _add_input(graph, "position_ids", types.INT32, (batch, length))
    if phase == "prefill":
        return _Inputs(
            token_ids, positions, (), masks.add_prefill_masks(graph, architecture, positions)
        )
    shape = (batch, architecture.num_heads, context, architecture.head_width)
    cache_type = graph.data_type(graph.compute_type)
    past = tuple(
        tuple(
            _add_input(graph, f"past.h.{i}.{part}", cache_type, shape) for part in ("key", "value")
        )
        for i in range(architecture.num_layers)
    )
    visible = masks.add_decode_masks(graph, architecture, positions, context)
    return _Inputs(token_ids, positions, past, visible)


def _add_input(graph: Graph, name: str, data_type: Any, shape: tuple[int, ...]) -> Any:
    tensor = graph.network.add_input(name, data_type, shape)
    refuse_none(graph.backend, f"add_input {name}", tensor)
    return tensor


def _mark_output(graph: Graph, name: str, tensor: Any) -> None:
    tensor.name = name
    graph.network.mark_output(tensor)


def _add_gpt_neo(
    graph: Graph, checkpoint: Checkpoint, linears: Mapping[str, LinearWeights], inputs: _Inputs
) -> None:
    """Add everything between the inputs and the marked outputs, top to bottom."""
    weights, architecture = checkpoint.weights, checkpoint.architecture
    wte, wpe = (
        layers.add_weight(graph, name, weights[name], graph.compute_type)
        for name in ("transformer.wte.weight", "transformer.wpe.weight")
    )
    tokens = layers.add_embedding(graph, "transformer.wte", inputs.token_ids, wte)
    places = layers.add_embedding(graph, "transformer.wpe", inputs.positions, wpe)
    hidden = layers.add_elementwise(graph, "transformer.embedding", tokens, places, "SUM")
    for layer in range(architecture.num_layers):
        hidden = _add_block(graph, checkpoint, linears, inputs, layer, hidden)
    hidden = _add_norm(graph, checkpoint, "transformer.ln_f", hidden)
    if HEAD in linears:
        product = _add_linear(graph, HEAD, hidden, linears)
        logits = layers.add_cast(graph, f"{HEAD}.logits", product, "fp32")
    else:
        product = _add_head(graph, checkpoint, hidden, wte)
        logits = layers.add_cast(graph, f"{HEAD}.cast", product, "fp32")
    _mark_output(graph, "logits", logits)


def _add_head(graph: Graph, checkpoint: Checkpoint, hidden: Any, wte: Any) -> Any:
    """Add the product with the head as it is stored, [V, C]: a tied one is not stored again."""
    head, name = wte, head_weight(checkpoint.architecture)
    if not checkpoint.architecture.tied_head:
        head = layers.add_weight(graph, name, checkpoint.weights[name], graph.compute_type)
    head = layers.add_reshape(
        graph, "lm_head.weight.3d", head, (1, checkpoint.architecture.vocab_size, -1)
    )
    operation = graph.backend.trt.MatrixOperation
    product = graph.network.add_matrix_multiply(hidden, operation.NONE, head, operation.TRANSPOSE)
    return graph.named(product, HEAD)


def _add_linear(
    graph: Graph, module: str, tensor: Any, linears: Mapping[str, LinearWeights]
) -> Any:
    """Add a module's product, rounded as its weights say."""
    weights = linears[module]
    add = blocks.add_linear if weights.weight_scales == "block" else layers.add_linear
    return add(graph, module, tensor, weights)


def _add_norm(graph: Graph, checkpoint: Checkpoint, name: str, hidden: Any) -> Any:
    weights = checkpoint.weights
    epsilon = checkpoint.architecture.layer_norm_epsilon
    parameters = (weights[f"{name}.weight"], weights[f"{name}.bias"], epsilon)
    return layers.add_layer_norm(graph, name, hidden, parameters)


def _add_block(
    graph: Graph, checkpoint: Checkpoint, linears: Mapping[str, LinearWeights], inputs: _Inputs,
    layer: int, hidden: Any,
) -> Any:  # fmt: skip
    """Add one transformer block on ``hidden`` [B, T, C] and mark its new K and V rows."""
    block = f"transformer.h.{layer}"
    architecture = checkpoint.architecture

    def linear(path: str, tensor: Any) -> Any:
        return _add_linear(graph, f"{block}.{path}", tensor, linears)

    normal = _add_norm(graph, checkpoint, f"{block}.ln_1", hidden)
    query, key, value = (
        layers.add_split_heads(
            graph,
            f"{block}.attn.attention.{part}_heads",
            linear(f"attn.attention.{part}_proj", normal),
            architecture.num_heads,
        )
        for part in "qkv"
    )
    _mark_output(graph, f"h.{layer}.key", key)
    _mark_output(graph, f"h.{layer}.value", value)
    if inputs.past:
        past_key, past_value = inputs.past[layer]
        key = layers.add_concatenation(
            graph, f"{block}.attn.attention.keys", (past_key, key), axis=2
        )
        value = layers.add_concatenation(
            graph, f"{block}.attn.attention.values", (past_value, value), axis=2
        )
    mask = inputs.masks[architecture.attention_layers[layer]]
    attended = layers.add_attention(graph, f"{block}.attn.attention", (query, key, value), mask)
    merged = layers.add_merge_heads(graph, f"{block}.attn.attention.merged", attended)
    attention = linear("attn.attention.out_proj", merged)
    hidden = layers.add_elementwise(graph, f"{block}.attn.residual", hidden, attention, "SUM")

    normal = _add_norm(graph, checkpoint, f"{block}.ln_2", hidden)
    wide = linear("mlp.c_fc", normal)
    active = layers.add_activation(graph, f"{block}.mlp.act", wide, architecture.activation)
    output = linear("mlp.c_proj", active)
    return layers.add_elementwise(graph, f"{block}.mlp.residual", hidden, output, "SUM")
