"""Variants: what can be built, as rows. To add a variant, add a row to VARIANTS.

The recipe and its names are those of the study (README, "Where it comes from"): FP8 E4M3
Quantize/Dequantize around the matrix products of q, k, v, c_fc and c_proj, one scale a
tensor, weights amax / 448, activations calibrated.

A row that is not in the table can be described: ``fp8:quantized=c_fc+v_proj`` is the row fp8 with
another set of projections. What is described so is explored: nothing is stored of it.
"""

from dataclasses import fields, replace
from functools import cache
from typing import Any

from gptneo_trt.errors import VariantError
from gptneo_trt.variant import HEAD, KINDS, Variant

RECIPE = ("q_proj", "k_proj", "v_proj", "c_fc", "c_proj")
SETTING, VALUE, MEMBER = ":", "=", "+"  # of a row that is described


def _without(kind: str) -> tuple[str, ...]:
    return tuple(name for name in RECIPE if name != kind)


_ROWS = (
    Variant("fp32", "float32 everywhere: checks the graph itself", compute_type="fp32"),
    Variant("fp16", "float16, logits cast to float32: the floor"),
    Variant("fp8", "the study's recipe: q, k, v, c_fc, c_proj in FP8", RECIPE),
    Variant("fp8-q_proj", "q_proj alone", ("q_proj",)),
    Variant("fp8-k_proj", "k_proj alone", ("k_proj",)),
    Variant("fp8-v_proj", "v_proj alone", ("v_proj",)),
    Variant("fp8-qkv", "q, k and v", ("q_proj", "k_proj", "v_proj")),
    Variant("fp8-c_fc", "c_fc alone", ("c_fc",)),
    Variant("fp8-c_proj", "c_proj alone", ("c_proj",)),
    Variant("fp8-out_proj", "out_proj alone", ("out_proj",)),
    Variant("fp8-mlp", "c_fc and c_proj", ("c_fc", "c_proj")),
    Variant("fp8-attention", "q, k, v and out_proj", ("q_proj", "k_proj", "v_proj", "out_proj")),
    Variant("fp8-no-q_proj", "the recipe without q_proj", _without("q_proj")),
    Variant("fp8-no-k_proj", "the recipe without k_proj", _without("k_proj")),
    Variant("fp8-no-v_proj", "the recipe without v_proj", _without("v_proj")),
    Variant("fp8-no-c_fc", "the recipe without c_fc", _without("c_fc")),
    Variant("fp8-no-c_proj", "the recipe without c_proj", _without("c_proj")),
    Variant(
        "fp8-edges-fp16", "the recipe, first and last layers in fp16", RECIPE, float_edge_layers=1
    ),
    Variant(
        "fp8-edges2-fp16", "the recipe, 2 layers at each end in fp16", RECIPE, float_edge_layers=2
    ),
    Variant(
        "fp8-edges3-fp16", "the recipe, 3 layers at each end in fp16", RECIPE, float_edge_layers=3
    ),
    Variant(
        "fp8-scales-x0.5",
        "the recipe, activation scales x 0.5",
        RECIPE,
        activation_scale_factor=0.5,
    ),
    Variant(
        "fp8-scales-x0.75",
        "the recipe, activation scales x 0.75",
        RECIPE,
        activation_scale_factor=0.75,
    ),
    Variant(
        "fp8-scales-x1.5",
        "the recipe, activation scales x 1.5",
        RECIPE,
        activation_scale_factor=1.5,
    ),
    Variant(
        "fp8-scales-x2", "the recipe, activation scales x 2", RECIPE, activation_scale_factor=2.0
    ),
    Variant(
        "fp8-dequantize-fp32", "the recipe, Dequantize to float32", RECIPE, dequantize_type="fp32"
    ),
    Variant("fp8-all", "the recipe and out_proj", (*RECIPE, "out_proj")),
    Variant("fp8-lm_head", "the head alone", (HEAD,)),
    Variant("fp8-channel", "the recipe, a weight scale a channel", RECIPE, weight_scales="channel"),
    Variant("fp8-percentile", "the recipe, 99.99 % quantiles", RECIPE, calibration="percentile"),
    Variant("fp8-mse", "the recipe, ranges of least squared error", RECIPE, calibration="mse"),
    Variant("fp8-smoothquant", "the recipe after SmoothQuant", RECIPE, smoothing="smoothquant"),
    Variant(
        "fp8-weights",
        "the recipe's weights alone, a scale a channel",
        RECIPE,
        weight_scales="channel",
        quantized_activations=False,
    ),
    Variant("int8", "the recipe in INT8", RECIPE, quantized_format="int8"),
    Variant(
        "int8-channel",
        "the recipe in INT8, a weight scale a channel",
        RECIPE,
        quantized_format="int8",
        weight_scales="channel",
    ),
    Variant(
        "int8-smoothquant",
        "the recipe in INT8 after SmoothQuant, a weight scale a channel",
        RECIPE,
        quantized_format="int8",
        weight_scales="channel",
        smoothing="smoothquant",
    ),
    Variant(
        "int8-weights",
        "the recipe's weights alone in INT8, a scale a channel",
        RECIPE,
        quantized_format="int8",
        weight_scales="channel",
        quantized_activations=False,
    ),
    Variant(
        "int4-awq",
        "the recipe's weights alone in INT4 after AWQ, a scale a block",
        RECIPE,
        quantized_format="int4",
        weight_scales="block",
        quantized_activations=False,
        smoothing="awq",
    ),
    Variant(
        "nvfp4-weights",
        "the recipe's weights alone in NVFP4",
        RECIPE,
        quantized_format="nvfp4",
        weight_scales="block",
        quantized_activations=False,
    ),
    Variant(
        "nvfp4", "the recipe in NVFP4", RECIPE, quantized_format="nvfp4", weight_scales="block"
    ),
)
VARIANTS = {row.name: row for row in _ROWS}
FLOOR = "fp16"


def every_module(num_layers: int) -> tuple[str, ...]:
    """Return the path of every module that a row can quantize."""
    return Variant("every", "everything that there is", KINDS).quantized_modules(num_layers)


def is_explored(name: str) -> bool:
    """Return whether a name describes a row that is not in the table."""
    return SETTING in name


def base_of(name: str) -> str:
    """Return the row of the table that a name begins with."""
    return name.partition(SETTING)[0]


@cache
def variant_named(name: str) -> Variant:
    """Return the row of VARIANTS called ``name``, or the one that it describes.

    Args:
        name: of a row, and settings: ``fp8:quantized=c_fc+v_proj:dequantize_type=fp32``.

    Raises:
        VariantError: there is none; the message lists the rows. Or a setting is none of Variant's,
            or cannot have that value.
    """
    base, *settings = name.split(SETTING)
    if base not in VARIANTS:
        raise VariantError(f"no variant {base!r}; the rows are: {', '.join(VARIANTS)}")
    row = VARIANTS[base]
    if not settings:
        return row
    changes = dict(_setting(name, text) for text in settings)
    return replace(row, name=name, summary=f"{base} with {', '.join(settings)}", **changes)


def _setting(name: str, text: str) -> tuple[str, Any]:
    """Return field and value of ``field=value``."""
    field_name, _, value = text.partition(VALUE)
    kinds = {field.name: type(field.default) for field in fields(Variant)[2:]}
    if field_name not in kinds:
        raise VariantError(f"variant {name!r}: setting {text!r}, expected one of {list(kinds)}")
    kind: Any = kinds[field_name]
    try:
        if kind is bool:
            return field_name, {"True": True, "False": False}[value]
        return field_name, tuple(value.split(MEMBER)) if kind is tuple else kind(value)
    except (KeyError, ValueError) as error:
        raise VariantError(
            f"variant {name!r}: setting {text!r}, expected a {kind.__name__}"
        ) from error
