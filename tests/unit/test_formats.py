"""Other formats and calibrations lose what ModelOpt's own simulation of them loses."""

import copy
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import kl_nats

from gptneo_trt import decoder, reference
from gptneo_trt.calibrate import calibrate, quantized_model
from gptneo_trt.calibrators import HISTOGRAM_METHODS, histogram_ranges, least_error_amax
from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.errors import CalibrationError, VariantError
from gptneo_trt.inspection import quantization_of
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.layers import LARGEST
from gptneo_trt.network import build_network
from gptneo_trt.operators import to_fp8, to_int8
from gptneo_trt.smoothing import AWQ, SMOOTHQUANT, smoothed
from gptneo_trt.texts import text_set
from gptneo_trt.variant import Variant
from gptneo_trt.variants import RECIPE, VARIANTS, every_module

# ModelOpt 0.46 scripts functions when it is imported and used; torch 2.13 deprecates that.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")

CALIBRATION_TEXTS, WINDOWS = 12, 4
RECIPE_ROW = VARIANTS["fp8"]
ROWS = {
    "fp8, per channel": replace(RECIPE_ROW, weight_scales="channel"),
    "fp8, percentile": replace(RECIPE_ROW, calibration="percentile"),
    "fp8, mse": replace(RECIPE_ROW, calibration="mse"),
    "int8": replace(RECIPE_ROW, quantized_format="int8"),
    "int8, per channel": replace(RECIPE_ROW, quantized_format="int8", weight_scales="channel"),
    "int8, mse": replace(RECIPE_ROW, quantized_format="int8", calibration="mse"),
    "int8, smoothquant": VARIANTS["int8-smoothquant"],
    "fp8, head": VARIANTS["fp8-lm_head"],
}
BLOCK_ROWS = {
    "int4": Variant(
        "int4",
        "",
        RECIPE,
        quantized_format="int4",
        weight_scales="block",
        quantized_activations=False,
    ),
    "nvfp4": replace(RECIPE_ROW, quantized_format="nvfp4", weight_scales="block"),
    "nvfp4, weights": Variant(
        "nvfp4-weights",
        "",
        RECIPE,
        quantized_format="nvfp4",
        weight_scales="block",
        quantized_activations=False,
    ),
}
WEIGHT_ONLY = {
    "fp8": Variant("fp8-weights", "", RECIPE, quantized_activations=False),
    "int8": Variant(
        "int8-weights",
        "",
        RECIPE,
        quantized_format="int8",
        weight_scales="channel",
        quantized_activations=False,
    ),
}


@pytest.fixture(scope="module")
def bundled():
    """Return the bundled checkpoint, what it is calibrated and judged on, and its ranges."""
    checkpoint = checkpoint_from_source("bundled")
    sizes = (checkpoint.tokenizer_file, 256, checkpoint.architecture.vocab_size)
    text = text_set("calibration", "bundled", *sizes)
    text = replace(text, token_ids=text.token_ids[:CALIBRATION_TEXTS])
    tokens = np.stack(text_set("prose", "bundled", *sizes).token_ids[:WINDOWS])
    model = reference.torch_model(checkpoint, torch.float32)
    layers = checkpoint.architecture.num_layers
    modules = every_module(layers)
    return SimpleNamespace(
        checkpoint=checkpoint,
        text=text,
        tokens=tokens,
        model=model,
        modules=RECIPE_ROW.quantized_modules(layers),
        expected=reference.logits(model, tokens),
        scales=calibrate(model, checkpoint, text, modules, (*HISTOGRAM_METHODS, SMOOTHQUANT, AWQ)),
    )


def simulated(bundled, row):
    """Return the logits of ModelOpt's simulation of a row."""
    axis, model = 0 if row.weight_scales == "channel" else None, bundled.model
    if row.smoothing:  # calibrated anew: its ranges are not those that are computed
        smooth = smoothed(bundled.checkpoint, bundled.scales.smoothing[row.smoothing])
        model = reference.torch_model(smooth, torch.float32)
    modules = row.quantized_modules(bundled.checkpoint.architecture.num_layers)
    quantized = quantized_model(model, modules, bundled.text.token_ids, row.quantized_format, axis)
    if row.calibration != "max":
        ranges = bundled.scales.ranges(row.calibration_method)
        for module in modules:
            amax = torch.tensor(ranges[module])
            quantized.get_submodule(module).input_quantizer.amax = amax
    with torch.inference_mode():
        ids = torch.from_numpy(bundled.tokens.astype(np.int64))
        return quantized(ids, use_cache=False).logits.numpy()


def simulated_in_blocks(bundled, row):
    """Return the logits of ModelOpt's simulation of a row whose weights are in blocks.

    Its NVFP4 rounds on a GPU alone: a backend of ours calls what ModelOpt stores weights with.
    """
    quantization = import_module("modelopt.torch.quantization")  # late: it takes seconds
    base = {"int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
    config = copy.deepcopy(getattr(quantization, base[row.quantized_format]))
    rules = {rule["quantizer_name"]: rule.get("cfg") for rule in config["quant_cfg"]}
    config["quant_cfg"] = [{"quantizer_name": "*", "enable": False}]
    for module in bundled.modules:
        for part in ("input", "weight") if row.quantized_activations else ("weight",):
            cfg = copy.deepcopy(rules[f"*{part}_quantizer"])
            if row.quantized_format == "nvfp4":
                cfg["backend"] = "nvfp4"
            else:
                width = bundled.checkpoint.weights[f"{module}.weight"].shape[1]
                cfg["block_sizes"][-1] = 128 if width % 128 == 0 else 64
            name = f"{module}.{part}_quantizer"
            config["quant_cfg"].append({"quantizer_name": name, "cfg": cfg, "enable": True})
    texts = [torch.from_numpy(ids.astype(np.int64))[None] for ids in bundled.text.token_ids]
    model, ids = copy.deepcopy(bundled.model), torch.from_numpy(bundled.tokens.astype(np.int64))
    quantization.nn.register_quant_backend("nvfp4", nvfp4_of_modelopt)
    try:
        with torch.inference_mode():
            quantization.quantize(model, config, lambda each: [each(text) for text in texts])
            return model(ids, use_cache=False).logits.numpy()
    finally:
        quantization.nn.unregister_quant_backend("nvfp4")


def nvfp4_of_modelopt(tensor, quantizer):
    """Return what ModelOpt stores a tensor as in NVFP4, with the range of its quantizer."""
    stores = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
    scale = stores.get_weights_scaling_factor_2_from_quantizer(quantizer)
    stored, block_scales, _ = stores.quantize(tensor, 16, None, scale)
    options = {"scale": block_scales, "double_scale": scale, "block_sizes": {-1: 16}}
    return stored.dequantize(dtype=tensor.dtype, **options)


def rounded_in_blocks(tensor, amax, row):
    """Return a float64 tensor [..., I] rounded as the row says, by the formats' definitions."""
    if row.quantized_format == "int4":
        blocks = tensor.unflatten(-1, (-1, 128 if tensor.shape[-1] % 128 == 0 else 64))
        steps = blocks.abs().amax(-1, keepdim=True) / 7
        return ((blocks / steps).round().clamp(-8, 7) * steps).flatten(-2)
    blocks, largest = tensor.unflatten(-1, (-1, 16)), amax / 6 / 448
    scales = (blocks.abs().amax(-1, keepdim=True) / 6 / largest).clamp(max=448)
    steps = scales.to(torch.float8_e4m3fn).double() * largest
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat((-table.flip(0)[:-1], table))
    nearest = ((blocks / steps.clamp(min=1e-30)).unsqueeze(-1) - table).abs().argmin(-1)
    return (table[nearest] * steps).flatten(-2)


def simulated_by_definition(bundled, row):
    """Return the logits of Hugging Face's model with the row's rounding put in by hand."""
    model, largest = copy.deepcopy(bundled.model), bundled.scales.ranges("max")

    def rounds(amax):
        return lambda _, inputs: rounded_in_blocks(inputs[0].double(), amax, row).float()

    with torch.inference_mode():
        for module in map(model.get_submodule, bundled.modules):
            weight = module.weight.double()
            module.weight = torch.nn.Parameter(
                rounded_in_blocks(weight, weight.abs().max(), row).float(), requires_grad=False
            )
        if row.quantized_activations:
            for name in bundled.modules:
                model.get_submodule(name).register_forward_pre_hook(rounds(largest[name]))
        ids = torch.from_numpy(bundled.tokens.astype(np.int64))
        return model(ids, use_cache=False).logits.numpy()


def interpreted(backend, bundled, row):
    """Return the logits of the row's prefill network."""
    network = build_network(backend, bundled.checkpoint, row, bundled.scales, "prefill", 256)
    executor = Interpreter(network)
    return decoder.prefill(executor, bundled.checkpoint.architecture, bundled.tokens).logits


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_row_loses_what_modelopt_s_simulation_loses(backend, bundled, row):
    """The interpreted row is as far from float32 as ModelOpt's own simulation, within 10 %."""
    simulation = kl_nats(bundled.expected, simulated(bundled, row)).mean()
    obtained = kl_nats(bundled.expected, interpreted(backend, bundled, row)).mean()
    assert obtained == pytest.approx(simulation, rel=0.1)


@pytest.mark.parametrize("simulate", [simulated_in_blocks, simulated_by_definition])
@pytest.mark.parametrize("name", BLOCK_ROWS)
def test_row_in_blocks_loses_what_its_simulation_loses(backend, bundled, name, simulate):
    """So is one with a scale a block: by ModelOpt's arithmetic, and by the formats' definitions."""
    row = BLOCK_ROWS[name]
    simulation = kl_nats(bundled.expected, simulate(bundled, row)).mean()
    obtained = kl_nats(bundled.expected, interpreted(backend, bundled, row)).mean()
    assert obtained == pytest.approx(simulation, rel=0.1)


def test_rows_differ_by_more_than_that(backend, bundled):
    """INT8 loses less than two thirds of FP8's loss: the check above can fail."""
    losses = {
        name: kl_nats(bundled.expected, interpreted(backend, bundled, row)).mean()
        for name, row in {**ROWS, **WEIGHT_ONLY, "recipe": RECIPE_ROW}.items()
    }
    assert losses["int8"] < 0.67 * losses["recipe"]
    assert losses["fp8"] < 0.67 * losses["recipe"]  # weights alone
    assert losses["int8, per channel"] != pytest.approx(losses["int8"], rel=0.01)
    assert losses["int8, smoothquant"] < 0.95 * losses["int8, per channel"]


def test_awq_is_exact_and_lowers_the_loss_of_int4(backend, bundled):
    """The search changes no function; it spares the weights that matter most."""
    row, factors = VARIANTS["int4-awq"], bundled.scales.smoothing[AWQ]
    smooth = reference.torch_model(smoothed(bundled.checkpoint, factors), torch.float32)
    assert kl_nats(bundled.expected, reference.logits(smooth, bundled.tokens)).mean() < 1e-9
    assert all(max(each) > 1.1 * min(each) for each in factors.values())
    found, plain = (
        kl_nats(bundled.expected, interpreted(backend, bundled, each)).mean()
        for each in (row, replace(row, smoothing=""))
    )
    assert found < 0.97 * plain


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_alone_are_quantized(backend, bundled, name):
    """Read back: each product has a quantized weight, one scale a channel or a tensor, no input."""
    row = WEIGHT_ONLY[name]
    network = build_network(backend, bundled.checkpoint, row, None, "decode", 16)
    found = quantization_of(network)
    assert found.modules == bundled.modules
    assert dict(found.activation_scales) == {}
    shapes = {m: bundled.checkpoint.weights[f"{m}.weight"].shape[0] for m in bundled.modules}
    wanted = shapes if row.weight_scales == "channel" else dict.fromkeys(shapes, 1)
    assert dict(found.weight_scale_counts) == wanted


def test_ranges_are_below_the_largest_input(bundled):
    """A percentile cuts, the smallest error may; neither is larger than what was seen."""
    largest = bundled.scales.ranges("max")
    for method in HISTOGRAM_METHODS:
        found = bundled.scales.ranges(method)
        assert found.keys() == largest.keys()
        # A bin of the histogram is 1 / 2048 of the first text's range.
        assert all(0 < amax <= 1.01 * largest[module] for module, amax in found.items())
    cut = bundled.scales.ranges("percentile")
    assert sum(cut[module] < 0.9 * amax for module, amax in largest.items()) > 5


@pytest.mark.parametrize(("number_format", "round_to"), [("int8", to_int8), ("fp8", to_fp8)])
def test_least_error_is_less_than_that_of_other_ranges(number_format, round_to):
    """A normal distribution with outliers: narrower ranges clip more, wider ones round more."""
    values = torch.randn(20000, generator=torch.Generator().manual_seed(0)).abs()
    values[:20] *= 6
    counts, edges = torch.histogram(values, bins=2048, range=(0.0, float(values.max())))

    def error(amax):
        scale = amax / LARGEST[number_format]
        return float(((round_to(values / scale) * scale - values) ** 2).mean())

    obtained = least_error_amax(counts, edges, number_format)

    # The values are rounded here, the middles of the bins there.
    assert all(error(obtained) <= 1.05 * error(factor * obtained) for factor in (0.5, 0.8, 1.25, 2))


def test_histograms_leave_the_model_alone(bundled):
    """Hooks are gone afterwards, also where a text fails."""
    with pytest.raises(IndexError):
        histogram_ranges(bundled.model, bundled.modules, [np.array([10**6])], ["percentile"])
    assert not any(module._forward_pre_hooks for module in bundled.model.modules())


def test_a_row_without_ranges_of_its_calibration_is_refused(backend, bundled):
    """Ranges by another method are not taken instead."""
    scales = replace(bundled.scales, other_amax={})
    with pytest.raises(CalibrationError, match=r"no calibrated range for 30 of 30 .* \(mse-fp8\)$"):
        build_network(backend, bundled.checkpoint, ROWS["fp8, mse"], scales, "decode", 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantized_format": "fp7"}, "quantized_format 'fp7', expected one of"),
        ({"weight_scales": "row"}, "weight_scales 'row', expected one of"),
        ({"calibration": "entropy"}, "calibration 'entropy', expected one of"),
        ({"quantized_activations": False, "calibration": "mse"}, "activations are not quantized"),
        ({"quantized": (), "weight_scales": "channel"}, "it quantizes nothing"),
        ({"weight_scales": "block"}, "'block' of fp8, expected 'tensor' or 'channel'"),
        ({"quantized_format": "nvfp4"}, "weight_scales 'tensor' of nvfp4, expected 'block'"),
        (
            {"quantized_format": "int4", "weight_scales": "channel"},
            "'channel' of int4, expected 'block'; int4 is of weights alone",
        ),
        (
            {"quantized_format": "nvfp4", "weight_scales": "block", "calibration": "mse"},
            "calibration 'mse' of nvfp4, expected 'max' or 'percentile'",
        ),
        ({"quantized": (), "name": "int8"}, "it quantizes nothing"),
    ],
)
def test_rows_that_make_no_sense_are_refused(changes, message):
    """An unknown choice, or one that changes nothing, is named."""
    with pytest.raises(VariantError, match=message):
        replace(RECIPE_ROW, **changes)
