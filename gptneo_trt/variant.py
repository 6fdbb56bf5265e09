"""A variant: what is quantized, and how. The rows that there are: ``variants.py``."""

from dataclasses import dataclass, fields

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
