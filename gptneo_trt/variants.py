"""Variants: what can be built, as rows. To add a variant, add a row to VARIANTS.

The recipe and its names are those of the study (README, "Where it comes from"): FP8 E4M3
Quantize/Dequantize around the matrix products of q, k, v, c_fc and c_proj, one scale a
tensor, weights amax / 448, activations calibrated.

A row that is not in the table can be described: ``fp8:quantized=c_fc+v_proj`` is the row fp8 with
another set of projections. What is described so is explored: nothing is stored of it.
"""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from gptneo_trt.errors import VariantError

# Projection kind -> its place inside a block, in Hugging Face's names.
PROJECTIONS = {
    "q_proj": "attn.attention.q_proj",
    "k_proj": "attn.attention.k_proj",
    "v_proj": "attn.attention.v_proj",
    "out_proj": "attn.attention.out_proj",
    "c_fc": "mlp.c_fc",
    "c_proj": "mlp.c_proj",
}
HEAD = "lm_head"  # outside the blocks; a tied one is the embedding
KINDS = (*PROJECTIONS, HEAD)
RECIPE = ("q_proj", "k_proj", "v_proj", "c_fc", "c_proj")
TYPES = ("fp32", "fp16")
FORMATS = ("fp8", "int8", "int4", "nvfp4")
# Formats with a scale for every block of a weight's input axis, and no other.
BLOCK_FORMATS = ("int4", "nvfp4")
WEIGHT_SCALES = ("tensor", "channel", "block")
CALIBRATIONS = ("max", "percentile", "mse")
SMOOTHINGS = ("", "smoothquant", "awq")
# Field -> what it may be.
CHOICES = {
    "compute_type": TYPES,
    "dequantize_type": TYPES,
    "quantized_format": FORMATS,
    "weight_scales": WEIGHT_SCALES,
    "calibration": CALIBRATIONS,
    "smoothing": SMOOTHINGS,
}
SETTING, VALUE, MEMBER = ":", "=", "+"  # of a row that is described


@dataclass(frozen=True)
class Variant:
    """Describe one row: what is quantized, and how.

    Attributes:
        name: row name, test id, file name and report row.
        summary: one line for people.
        quantized: kinds that are quantized, of KINDS; empty for a floating-point row.
        compute_type: type of weights and activations, "fp16" or "fp32".
        dequantize_type: output type of Dequantize, and so of the quantized products.
        activation_scale_factor: multiplies every calibrated activation scale.
        float_edge_layers: blocks left unquantized at each end.
        quantized_format: "fp8" (E4M3), "int8" or "nvfp4", of weights and of the activations they
            multiply; "int4", of weights alone.
        weight_scales: one a "tensor", one an output "channel", or, of "int4" and "nvfp4" and of
            nothing else, one a "block" of the input axis.
        quantized_activations: False quantizes weights alone; they are multiplied in compute_type.
        calibration: how the range of an activation is found: its largest value ("max"), the
            99.99 % quantile ("percentile"), or the smallest mean squared error ("mse").
        smoothing: how range is moved from activations into weights, see ``smoothing.py``; "" for
            not at all.

    Raises:
        VariantError: an unknown or empty set of projections, an unknown type, a factor that is
            not positive, settings or a format that exclude each other; all of them in one
            message.
    """

    name: str
    summary: str
    quantized: tuple[str, ...] = ()
    compute_type: str = "fp16"
    dequantize_type: str = "fp16"
    activation_scale_factor: float = 1.0
    float_edge_layers: int = 0
    quantized_format: str = "fp8"
    weight_scales: str = "tensor"
    quantized_activations: bool = True
    calibration: str = "max"
    smoothing: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "quantized", tuple(dict.fromkeys(self.quantized)))
        wrong = []
        unknown = sorted(set(self.quantized) - set(KINDS))
        if unknown:
            wrong.append(f"unknown projections {unknown}, expected some of {list(KINDS)}")
        for field_name, choices in CHOICES.items():
            obtained = getattr(self, field_name)
            if obtained not in choices:
                wrong.append(f"{field_name} {obtained!r}, expected one of {list(choices)}")
        if not 0 < self.activation_scale_factor < float("inf"):
            factor = self.activation_scale_factor
            wrong.append(f"activation_scale_factor {factor}, expected a positive number")
        if self.float_edge_layers < 0:
            wrong.append(f"float_edge_layers {self.float_edge_layers}, expected 0 or more")
        plain = all(
            getattr(self, field.name) == field.default
            for field in fields(self)
            if field.name not in ("name", "summary", "quantized", "compute_type")
        )
        if not self.quantized and not (plain and not _named_after_a_format(self.name)):
            wrong.append(f"it quantizes nothing; name some of {list(KINDS)} in `quantized`")
        scaled = self.activation_scale_factor != 1.0 or self.calibration != "max"
        if not self.quantized_activations and scaled:
            wrong.append("its activations are not quantized, so nothing of them is calibrated")
        wrong += self._smoothing_mismatches()
        wrong += self._format_mismatches()
        if wrong:
            raise VariantError(f"variant {self.name!r}: " + "; ".join(wrong))

    def _format_mismatches(self) -> list[str]:
        """Return what a format does not allow."""
        wrong, name = [], self.quantized_format
        if name in BLOCK_FORMATS and self.weight_scales != "block":
            wrong.append(f"weight_scales {self.weight_scales!r} of {name}, expected 'block'")
        if name not in BLOCK_FORMATS and self.weight_scales == "block":
            wrong.append(f"weight_scales 'block' of {name}, expected 'tensor' or 'channel'")
        if name == "int4" and self.quantized_activations:
            wrong.append("int4 is of weights alone; set quantized_activations to False")
        if name == "nvfp4" and self.calibration == "mse":
            wrong.append("calibration 'mse' of nvfp4, expected 'max' or 'percentile'")
        return wrong

    def _smoothing_mismatches(self) -> list[str]:
        """Return what a smoothing does not allow."""
        wrong = []
        if self.smoothing and self.calibration != "max":
            wrong.append(f"{self.smoothing} has the largest values alone, not {self.calibration}")
        if self.smoothing == "smoothquant" and not self.quantized_activations:
            wrong.append("smoothquant is for quantized activations, which it has not")
        if self.smoothing == "awq" and self.quantized_format != "int4":
            wrong.append(f"awq is for weights in int4, not {self.quantized_format}")
        return wrong

    @property
    def is_calibrated(self) -> bool:
        """Return whether it has ranges of activations."""
        return bool(self.quantized) and self.quantized_activations

    @property
    def reads_scales(self) -> bool:
        """Return whether it is built from what is calibrated: ranges, or factors of channels."""
        return self.is_calibrated or bool(self.smoothing)

    @property
    def calibration_method(self) -> str:
        """Return the name that the ranges of its calibration have in ``Scales``."""
        if self.smoothing:
            return self.smoothing
        if self.calibration == "mse":  # the error is that of a format
            return f"mse-{self.quantized_format}"
        return self.calibration

    @property
    def number_format(self) -> str:
        """Return the narrowest format in its plan: a quantized one, or its compute type.

        TensorRT-RTX refuses a GPU that does not multiply a format even where weights alone have it.
        """
        return self.quantized_format if self.quantized else self.compute_type

    def quantized_modules(self, num_layers: int) -> tuple[str, ...]:
        """Return the quantized module paths, ``transformer.h.0.mlp.c_fc`` or ``lm_head``, in order.

        Raises:
            VariantError: the row quantizes something, but nothing of this many layers.
        """
        layers = range(self.float_edge_layers, num_layers - self.float_edge_layers)
        modules = tuple(
            f"transformer.h.{layer}.{path}"
            for layer in layers
            for kind, path in PROJECTIONS.items()
            if kind in self.quantized
        )
        if HEAD in self.quantized:
            modules += (HEAD,)
        if self.quantized and not modules:
            raise VariantError(
                f"variant {self.name!r}: nothing is left to quantize in {num_layers} layers with "
                f"{self.float_edge_layers} at each end in {self.compute_type}; lower "
                "float_edge_layers or use a deeper checkpoint"
            )
        return modules


def _named_after_a_format(name: str) -> bool:
    return any(each in name for each in FORMATS)


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
