"""Calibration: ModelOpt's ranges are the true ones, of the right projections, and of a copy."""

import copy
import json
import sys
from dataclasses import replace
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import changed, kl_nats

from gptneo_trt import decoder, reference
from gptneo_trt.calibrate import calibrate, quantized_model, quantizer_config
from gptneo_trt.calibrators import modelopt_version
from gptneo_trt.data import TextSet
from gptneo_trt.errors import BuildError, CalibrationError, RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import build_network
from gptneo_trt.scales import read_scales, write_scales
from gptneo_trt.texts import text_set
from gptneo_trt.variants import VARIANTS

# ModelOpt 0.46 scripts functions when it is imported and used; torch 2.13 deprecates that.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning"),
    pytest.mark.usefixtures("one_thread"),
]

ALL = VARIANTS["fp8-all"].quantized_modules(2)
RECIPE = VARIANTS["fp8"].quantized_modules(2)
IDS = tuple(
    np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)
    for seed, length in enumerate((20, 7, 64, 1))
)
CALIBRATION_TEXTS = 24  # of the bundled 192: enough for a comparison at equal ranges
WINDOWS = 8


def text_of(*token_ids):
    """Return a calibration text of these token ids."""
    return TextSet("calibration", "here", token_ids, "every", "a" * 64, "\n", "b" * 64, 64)


TEXT = text_of(*IDS)


def quantizers(model):
    """Return the names of the quantizers that are on."""
    return {
        name
        for name, module in model.named_modules()
        if "Quantizer" in type(module).__name__ and getattr(module, "is_enabled", False)
    }


@pytest.fixture(scope="module")
def quantization():
    """Return ``modelopt.torch.quantization``, imported late: it takes seconds."""
    return import_module("modelopt.torch.quantization")


@pytest.fixture(scope="module")
def calibrated(t0, quantization):
    """Return T0's bf16 model, its logits before, and what calibrating it twice gave."""
    default = copy.deepcopy(quantization.FP8_DEFAULT_CFG)
    model = reference.torch_model(t0, torch.bfloat16)
    before = reference.logits(model, IDS[0][None])
    scales = calibrate(model, t0, TEXT, ALL)
    quantized = quantized_model(model, RECIPE, IDS)
    return SimpleNamespace(
        default=default, model=model, before=before, scales=scales, quantized=quantized
    )


def test_ranges_are_those_of_the_inputs(t0, calibrated):
    """Each range is exactly the largest |input| of its projection, as hooks see it in bf16."""
    model = reference.torch_model(t0, torch.bfloat16)
    largest = dict.fromkeys(ALL, 0.0)

    def watch(name):
        def hook(module, inputs):
            largest[name] = max(largest[name], float(inputs[0].abs().max()))

        model.get_submodule(name).register_forward_pre_hook(hook)

    for name in ALL:
        watch(name)
    for ids in IDS:
        reference.logits(model, ids[None])
    assert calibrated.scales.activation_amax == largest
    assert min(largest.values()) > 0


def test_scales_say_what_they_are_of(t0, calibrated):
    """The record names checkpoint, text, tokens, method and ModelOpt's version."""
    scales = calibrated.scales
    assert (scales.checkpoint_sha256, scales.text_sha256) == (t0.sha256, TEXT.sha256)
    assert (scales.tokens, scales.method) == (92, "max")
    assert scales.modelopt_version == modelopt_version()


def test_C03_quantizers_are_exactly_those_asked_for(calibrated):
    """Input and weight of each module are quantized in E4M3, one scale a tensor; no others."""
    expected = {f"{module}.{part}_quantizer" for module in RECIPE for part in ("input", "weight")}
    assert quantizers(calibrated.quantized) == expected
    for name in expected:
        quantizer = calibrated.quantized.get_submodule(name)
        assert quantizer.num_bits == (4, 3)
        assert quantizer.amax.numel() == 1


def test_C03_modelopt_s_default_quantizes_others(calibrated, quantization):
    """FP8_DEFAULT_CFG alone would also quantize out_proj: leaving it out is our doing."""

    def forward_loop(model):
        model(torch.from_numpy(IDS[0].astype(np.int64))[None], use_cache=False)

    copied = copy.deepcopy(calibrated.model)
    quantization.quantize(copied, quantization.FP8_DEFAULT_CFG, forward_loop=forward_loop)
    assert [name for name in quantizers(copied) if "out_proj.input" in name]


def test_C04_the_model_is_not_touched(calibrated):
    """Reference logits are bitwise the same before and after, and no quantizer is in the model."""
    assert np.array_equal(reference.logits(calibrated.model, IDS[0][None]), calibrated.before)
    assert not [m for m in calibrated.model.modules() if "Quantizer" in type(m).__name__]


def test_C04_the_copy_is_quantized(calibrated):
    """The copy gives other logits: were it the reference, that would be seen."""
    ids = torch.from_numpy(IDS[0].astype(np.int64))[None]
    with torch.inference_mode():
        obtained = calibrated.quantized(ids, use_cache=False).logits.float().numpy()
    assert kl_nats(calibrated.before, obtained).mean() > 1e-3


def test_C04_a_reference_made_afterwards_is_unquantized(t0, calibrated):
    """ModelOpt's registrations do not reach a model that is made later."""
    later = reference.torch_model(t0, torch.bfloat16)
    assert np.array_equal(reference.logits(later, IDS[0][None]), calibrated.before)


def test_C04_rows_give_the_same_in_either_order(t0, backend, calibrated):
    """FP8 first and fp16 second, or the other way round: logits and reference are bitwise alike."""

    def logits(row):
        network = build_network(backend, t0, VARIANTS[row], calibrated.scales, "prefill", 64)
        return decoder.prefill(Interpreter(network), t0.architecture, IDS[0][None]).logits

    forward = {row: logits(row) for row in ("fp8", "fp16")}
    backward = {row: logits(row) for row in ("fp16", "fp8")}
    assert all(np.array_equal(forward[row], backward[row]) for row in forward)
    assert not np.array_equal(forward["fp8"], forward["fp16"])
    assert np.array_equal(reference.logits(calibrated.model, IDS[0][None]), calibrated.before)


def test_C04_a_quantized_reference_is_refused(calibrated):
    """The guard: a model that holds quantizers is no reference."""
    with pytest.raises(RunError, match=r"the reference is quantized: obtained \d+ quantizers such"):
        reference.logits(calibrated.quantized, IDS[0][None])


def test_C07_the_default_configuration_is_unchanged(calibrated, quantization):
    """FP8_DEFAULT_CFG equals itself before and after calibrating."""
    assert calibrated.default == quantization.FP8_DEFAULT_CFG


def test_C07_configurations_do_not_inherit():
    """Two module sets give the same configurations in either order."""
    one, other = ("transformer.h.0.mlp.c_fc",), ("transformer.h.1.mlp.c_proj",)
    forward = [quantizer_config(one), quantizer_config(other)]
    backward = [quantizer_config(other), quantizer_config(one)]
    assert forward == backward[::-1]
    assert "c_fc" not in json.dumps(forward[1]["quant_cfg"], default=str)


def test_C07_another_configuration_format_is_refused(monkeypatch, quantization):
    """A dict-style quant_cfg is refused with the version found and the one that is supported."""
    found = rf"nvidia-modelopt {modelopt_version()}: quant_cfg is a dict"
    monkeypatch.setattr(quantization, "FP8_DEFAULT_CFG", {"quant_cfg": {"*": {"enable": False}}})
    with pytest.raises(CalibrationError, match=rf"{found}, expected a list of rules"):
        quantizer_config(ALL)


@pytest.mark.parametrize("name", ["modelopt", "modelopt.torch.quantization"])
def test_C07_absent_modelopt_says_how_to_install_it(monkeypatch, name):
    """Without ModelOpt, or with one that fails on import, the error has the install command."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CalibrationError, match=r"cannot be imported: .* pip install 'gptneo-trt\["):
        quantizer_config(ALL)


class Broken(MetaPathFinder):
    """Let the import of a module raise."""

    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        """Raise where the module is looked for."""
        if name == self.name:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("wrong torch"), AttributeError("no such op"), OSError("libfoo.so")],
    ids=str,
)
def test_C07_a_modelopt_that_fails_on_import_is_named(monkeypatch, error):
    """Whatever its import raises becomes our error, with the install command."""
    name = "modelopt.torch.quantization"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr("modelopt.torch.quantization", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(name, error), *sys.meta_path])
    with pytest.raises(
        CalibrationError, match=f"imported: {type(error).__name__}: {error}; do: pip"
    ):
        quantizer_config(ALL)


STYLES = {
    "list": ([{"quantizer_name": "*", "enable": False}], None),
    "dict": ({"*": {"enable": False}}, "quant_cfg is a dict, expected a list of rules"),
    "none": (None, "quant_cfg is a NoneType, expected a list of rules"),
}


@pytest.mark.parametrize(("rules", "refusal"), STYLES.values(), ids=STYLES)
def test_C07_a_stub_of_either_style(monkeypatch, rules, refusal):
    """A list-style default gives the modules' quantizers and stays as it is; others are refused."""
    default = {"quant_cfg": rules, "algorithm": "max"}
    before = copy.deepcopy(default)
    stub = SimpleNamespace(FP8_DEFAULT_CFG=default)
    root = SimpleNamespace(__version__="0.1", torch=SimpleNamespace(quantization=stub))
    monkeypatch.setitem(sys.modules, "modelopt", root)
    monkeypatch.setitem(sys.modules, "modelopt.torch", root.torch)
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", stub)
    if refusal:
        with pytest.raises(CalibrationError, match=f"nvidia-modelopt 0.1: {refusal}"):
            quantizer_config(RECIPE)
    else:
        enabled = [rule["quantizer_name"] for rule in quantizer_config(RECIPE)["quant_cfg"][2:]]
        parts = ("input", "weight")
        assert enabled == [f"{name}.{part}_quantizer" for name in RECIPE for part in parts]
    assert default == before


@pytest.mark.parametrize(
    "text", [text_of(), text_of(IDS[0][:0], IDS[0][:0])], ids=["no text", "empty texts"]
)
def test_C02_nothing_to_calibrate_on(t0, calibrated, text):
    """(c, d) No prompt, or only empty ones, is an error that states 0 tokens."""
    with pytest.raises(CalibrationError, match="here: 0 calibration tokens; nothing is written"):
        calibrate(calibrated.model, t0, text, ALL)


def test_C02_an_input_of_zeros_is_named(t0):
    """(b) Where ln_2 gives zeros, c_fc has no range: layer and projection are named, alone."""
    norm = "transformer.h.0.ln_2"
    dead = changed(t0, {f"{norm}.weight": np.zeros_like, f"{norm}.bias": np.zeros_like})
    model = reference.torch_model(dead, torch.bfloat16)
    with pytest.raises(CalibrationError, match=r"obtained transformer.h.0.mlp.c_fc: 0.0; leave"):
        calibrate(model, dead, TEXT, ALL)


def test_C02_a_weight_of_zeros_is_named(t0, backend):
    """(a) Its input has a range, which is stored; the weight has none, and building says which."""
    name = "transformer.h.1.mlp.c_fc"
    dead = changed(t0, {f"{name}.weight": np.zeros_like})
    scales = calibrate(reference.torch_model(dead, torch.bfloat16), dead, TEXT, ALL)
    assert len(scales.activation_amax) == len(ALL)
    assert all(0 < amax < np.inf for amax in scales.activation_amax.values())
    with pytest.raises(BuildError, match=rf"fp8, decode: {name}.weight: largest .* value 0.0"):
        build_network(backend, dead, VARIANTS["fp8"], scales, "decode", 8)
    build_network(backend, dead, VARIANTS["fp8-c_proj"], scales, "decode", 8)


def test_C02_a_nan_weight_is_named(t0):
    """(e) One NaN in a weight is an error that names the weight, not ModelOpt's assertion."""
    name = "transformer.h.1.mlp.c_fc.weight"
    model = reference.torch_model(t0, torch.bfloat16)
    model.get_parameter(name).data[3, 4] = float("nan")
    with pytest.raises(CalibrationError, match=rf"weights \['{name}'\] hold NaN"):
        calibrate(model, t0, TEXT, ALL)


def test_C03_modules_that_do_not_exist_are_named(t0, calibrated):
    """Modules of another family are all named, sorted; nothing is calibrated."""
    modules = ("transformer.h.0.mlp.fc1", "transformer.h.0.mlp.c_fc", "transformer.h.2.mlp.c_fc")
    with pytest.raises(CalibrationError, match=r"\['transformer.h.0.mlp.fc1', 'transformer.h.2.ml"):
        calibrate(calibrated.model, t0, TEXT, modules)


def test_C03_a_module_without_quantizers_is_refused(t0, calibrated):
    """A module that ModelOpt places no quantizer on is not silently left out."""
    with pytest.raises(CalibrationError, match=r"missing \['transformer.h.0.mlp.input_quantizer'"):
        calibrate(calibrated.model, t0, TEXT, ("transformer.h.0.mlp",))


@pytest.fixture
def stored(tmp_path, calibrated):
    """Return a file with the scales of T0."""
    path = tmp_path / "made" / "scales.json"
    write_scales(path, calibrated.scales)
    return path


def test_scales_survive_the_file(stored, t0, calibrated):
    """What is read is bit by bit what was written; no temporary file is left."""
    assert read_scales(stored, t0, TEXT, ALL) == calibrated.scales
    assert [path.name for path in stored.parent.iterdir()] == ["scales.json"]


def test_C07_stored_scales_need_no_modelopt(monkeypatch, stored, t0, calibrated):
    """Stored scales are read where ModelOpt is absent."""
    monkeypatch.setitem(sys.modules, "modelopt", None)
    assert read_scales(stored, t0, TEXT, ALL) == calibrated.scales


@pytest.fixture(scope="module")
def simulated(bundled):
    """Return ModelOpt's own FP8 simulation of the bundled float32 model, with its ranges.

    "fp8-all" is calibrated; for "fp8" its out_proj quantizers are off, which leaves the other
    ranges as they are, since calibration sees an unquantized model.
    """
    sizes = (bundled.tokenizer_file, 256, bundled.architecture.vocab_size)
    text = text_set("calibration", "bundled", *sizes)
    text = replace(text, token_ids=text.token_ids[:CALIBRATION_TEXTS])
    tokens = np.stack(text_set("prose", "bundled", *sizes).token_ids[:WINDOWS])
    model = reference.torch_model(bundled, torch.float32)
    modules = VARIANTS["fp8-all"].quantized_modules(bundled.architecture.num_layers)
    quantized = quantized_model(model, modules, text.token_ids)

    def logits():
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64))
            return quantized(ids, use_cache=False).logits.numpy()

    found = {"fp8-all": logits()}
    for module in modules:
        if module.endswith("out_proj"):
            quantized.get_submodule(module).input_quantizer.disable()
            quantized.get_submodule(module).weight_quantizer.disable()
    found["fp8"] = logits()
    return SimpleNamespace(
        tokens=tokens,
        expected=reference.logits(model, tokens),
        logits=found,
        scales=calibrate(model, bundled, text, modules),
    )


@pytest.fixture(scope="module")
def interpreted(backend, bundled, simulated):
    """Return a function row -> logits of the prefill network at the simulation's ranges."""

    def run(row):
        network = build_network(backend, bundled, row, simulated.scales, "prefill", 256)
        executor = Interpreter(network)
        return decoder.prefill(executor, bundled.architecture, simulated.tokens).logits

    return run


@pytest.mark.parametrize("name", ["fp8", "fp8-all"])
def test_recipe_loses_what_modelopt_s_simulation_loses(simulated, interpreted, name):
    """The interpreted row is as far from float32 as ModelOpt's own simulation, within 10 %."""
    simulation = kl_nats(simulated.expected, simulated.logits[name]).mean()
    obtained = kl_nats(simulated.expected, interpreted(VARIANTS[name])).mean()
    assert obtained == pytest.approx(simulation, rel=0.1)


@pytest.mark.parametrize("name", ["fp8-no-c_fc", "fp8-no-c_proj"])
def test_another_recipe_loses_something_else(simulated, interpreted, name):
    """Leaving c_fc or c_proj out moves the loss by more than 10 %: the check above can fail."""
    simulation = kl_nats(simulated.expected, simulated.logits["fp8"]).mean()
    obtained = kl_nats(simulated.expected, interpreted(VARIANTS[name])).mean()
    assert obtained != pytest.approx(simulation, rel=0.1)


def test_float32_recipe_is_near_the_simulation_itself(simulated, interpreted):
    """With float32 around FP8 the two distributions are nearer each other than the reference.

    At activation scales x 1.2 they are not: only equal scales give that.
    """
    wide = replace(VARIANTS["fp8"], compute_type="fp32", dequantize_type="fp32")
    loss = kl_nats(simulated.expected, simulated.logits["fp8"]).mean()
    direct = {
        factor: kl_nats(
            simulated.logits["fp8"], interpreted(replace(wide, activation_scale_factor=factor))
        ).mean()
        for factor in (1.0, 1.2)
    }
    assert direct[1.0] < 0.6 * loss
    assert direct[1.2] > 0.8 * loss
