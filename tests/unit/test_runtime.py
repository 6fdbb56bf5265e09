"""The runtime: refusals that name the plan, kernels kept beside it, FP8 read back.

A stub stands in for TensorRT where only a GPU would give an engine; damaged plans are refused by
TensorRT itself.
"""

import hashlib
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import fixed_scales

from gptneo_trt import runtime
from gptneo_trt.backend import Backend, log_collector
from gptneo_trt.errors import RunError
from gptneo_trt.plans import PlanRequest, build_plan
from gptneo_trt.runtime import Loaded, load, quantized_modules, quantized_modules_of
from gptneo_trt.targets import gpu_at_hand
from gptneo_trt.variants import VARIANTS, every_module

KERNELS = b"compiled for this GPU"
SAID = "[ERROR] said by the stub"


def kept(kernels):
    """Return the content of a file of kernels: their SHA-256, and they."""
    return hashlib.sha256(kernels).digest() + kernels


class Stub:
    """A TensorRT whose engine, context and cache of kernels are objects without a GPU.

    Attributes:
        trt: the module.
        engine, context: what it gives; None refuses, with a line in the log.
        offered: kernels that were offered, each refused unless they are KERNELS.
        contexts: the configs of the contexts that were made, () for none.
    """

    def __init__(self, real):
        self.real, self.engine, self.context = real, self, SimpleNamespace()
        self.offered, self.contexts, self.config = [], [], SimpleNamespace()
        self.compiled = KERNELS
        self.config.create_runtime_cache = lambda: self
        self.config.set_runtime_cache = lambda cache: cache is self
        self.trt = SimpleNamespace(
            ILogger=real.ILogger,
            Runtime=lambda logger: self,
            DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
        )

    def given(self, result):
        """Return a result; complain when it is None."""
        if result is None:
            log_collector(self.real).logger.log(self.real.ILogger.ERROR, "said by the stub")
        return result

    def deserialize_cuda_engine(self, content):
        """Return the engine."""
        return self.given(self.engine)

    def create_runtime_config(self):
        """Return the config."""
        return self.config

    def create_execution_context(self, *config):
        """Return the context."""
        self.contexts.append(config)
        return self.given(self.context)

    def deserialize(self, content):
        """Take kernels into the cache."""
        self.offered.append(content)
        return content == KERNELS

    def serialize(self):
        """Return the kernels of the cache, in a buffer."""
        return memoryview(self.compiled)


@pytest.fixture
def stub(backend):
    """Return a stub of TensorRT."""
    return Stub(backend.trt)


@pytest.fixture
def rtx(stub):
    """Return the stub as a flavour."""
    return Backend("tensorrt_rtx", "1.6.1.120", stub.trt)


@pytest.fixture
def plan(tmp_path):
    """Return a plan, with a side-car, that only the stub loads."""
    path = tmp_path / "some.plan"
    path.write_bytes(b"a plan")
    record = {"flavour": "tensorrt", "version": "11.1.0.106", "gpu": "NVIDIA B300"}
    path.with_suffix(".json").write_text(json.dumps(record))
    return path


# Loading


def test_a_loaded_plan_has_what_must_live_on(stub, rtx, plan):
    """Runtime, engine, context, the log since loading began and the seconds are all there."""
    loaded = load(rtx, plan)
    assert (loaded.runtime, loaded.engine, loaded.context) == (stub, stub, stub.context)
    assert loaded.load_s > 0
    assert loaded.log.lines == []
    loaded.log.logger.log(stub.trt.ILogger.WARNING, "later")
    assert loaded.log.lines == ["[WARNING] later"]


def test_R06_a_missing_plan_is_named(rtx, tmp_path):
    """A plan that is not there, or is a folder, is an error that says what to do."""
    for path in (tmp_path / "absent.plan", tmp_path):
        with pytest.raises(
            RunError, match=rf"^plan {path.name} cannot be read: .*; build it again"
        ):
            load(rtx, path)


REFUSALS = {"engine": "deserialize_cuda_engine", "context": "create_execution_context"}


@pytest.mark.parametrize("refused", REFUSALS)
def test_N06_a_refusal_says_what_was_built_by_what_and_runs_on_what(stub, rtx, plan, refused):
    """None becomes an error with the plan, its TensorRT, the one at hand and TensorRT's lines."""
    setattr(stub, refused, None)
    with pytest.raises(RunError) as caught:
        load(rtx, plan)
    assert str(caught.value) == (
        f"plan some.plan, built by tensorrt-11.1.0.106 for NVIDIA B300: {REFUSALS[refused]} of "
        "tensorrt_rtx-1.6.1.120 returned None; build it again with the TensorRT and for the GPU "
        f"that run it\n  TensorRT: {SAID}"
    )


SIDE_CARS = {
    "none": None,
    "empty": "",
    "no version": '{"flavour": "tensorrt"}',
    "a list": '["tensorrt", "11.1"]',
    "not text": b"\xff\xfe",
}


@pytest.mark.parametrize("content", SIDE_CARS.values(), ids=SIDE_CARS)
def test_R06_a_plan_without_a_readable_side_car_is_of_an_unknown_tensorrt(stub, rtx, plan, content):
    """A side-car that is absent or damaged does not hide the refusal."""
    side_car = plan.with_suffix(".json")
    side_car.unlink()
    if content is not None:
        side_car.write_bytes(content if isinstance(content, bytes) else content.encode())
    stub.engine = None
    with pytest.raises(RunError, match=r"built by an unknown TensorRT \(no readable side-car\): d"):
        load(rtx, plan)


# Kernels


def test_kernels_are_written_once_and_read_the_next_time(stub, rtx, plan, tmp_path):
    """The first load keeps what was compiled, the second offers it and leaves the file alone."""
    kernels = tmp_path / "kept" / "some.kernels"
    load(rtx, plan, kernels)
    assert stub.offered == []
    assert kernels.read_bytes() == kept(KERNELS)
    written = kernels.stat().st_ino
    assert load(rtx, plan, kernels).log.lines == []
    assert stub.offered == [KERNELS]
    assert kernels.stat().st_ino == written
    assert [path.name for path in kernels.parent.iterdir()] == ["some.kernels"]


def test_kernels_of_a_new_length_are_kept_with_the_others(stub, rtx, plan, tmp_path):
    """What runs compiled is written when asked, once, and found by the next process."""
    kernels = tmp_path / "some.kernels"
    loaded = load(rtx, plan, kernels)
    stub.compiled = KERNELS + b" and another length"
    loaded.keep_kernels()
    assert kernels.read_bytes() == kept(stub.compiled)
    written = kernels.stat().st_ino
    loaded.keep_kernels()
    assert kernels.stat().st_ino == written


# What is in a file of kernels -> what TensorRT is offered of it, and what is said.
BAD_KERNELS = {
    "of another TensorRT": (kept(b"foreign"), [b"foreign"], "TensorRT refused these kernels; "),
    "none in it": (kept(b""), [b""], "TensorRT refused these kernels; "),
    "random bytes": (bytes(range(200)), [], "not kernels as they were written; "),
    "0 bytes": (b"", [], "not kernels as they were written; "),
    "cut": (kept(KERNELS)[:-1], [], "not kernels as they were written; "),
}


@pytest.mark.parametrize(
    ("content", "offered", "message"), BAD_KERNELS.values(), ids=list(BAD_KERNELS)
)
def test_R06_kernels_that_cannot_be_used_are_replaced(
    stub, rtx, plan, tmp_path, content, offered, message
):
    """Foreign or damaged kernels cost a warning and a compilation, and are replaced as a whole.

    Who reads them meanwhile has them whole; native code sees none that were not written here.
    """
    kernels, reader = tmp_path / "some.kernels", tmp_path / "the same file"
    kernels.write_bytes(content)
    reader.hardlink_to(kernels)
    lines = load(rtx, plan, kernels).log.lines
    assert stub.offered == offered
    assert [line.startswith(f"[WARNING] some.kernels: {message}") for line in lines] == [True]
    assert kernels.read_bytes() == kept(KERNELS)
    assert reader.read_bytes() == content


def test_N06_kernels_that_tensorrt_does_not_tell_are_not_kept(stub, rtx, plan, tmp_path):
    """``serialize`` may give None: the engine runs, and its kernels are compiled again."""
    stub.serialize = lambda: None
    loaded = load(rtx, plan, tmp_path / "some.kernels")
    loaded.keep_kernels()
    assert not (tmp_path / "some.kernels").exists()


@pytest.mark.parametrize("call", ["create_runtime_config", "create_runtime_cache"])
def test_N06_what_a_context_needs_may_be_none(stub, rtx, plan, call):
    """None of a call before the context is an error that names it."""
    holder = stub if call == "create_runtime_config" else stub.config
    setattr(holder, call, lambda: None)
    with pytest.raises(RunError, match=f"tensorrt_rtx-1.6.1.120: {call} returned None"):
        load(rtx, plan)


def test_N06_a_runtime_that_is_not_created_is_named(rtx, plan, stub):
    """What pybind11 says of a null pointer gets flavour, version and TensorRT's lines."""

    def refuse(logger):
        stub.given(None)
        raise TypeError("pybind11::init(): factory function returned nullptr")

    stub.trt.Runtime = refuse
    with pytest.raises(RunError, match=r"1\.6\.1\.120: no Runtime: .*\n  TensorRT: \[ERROR\] said"):
        load(rtx, plan)


def test_no_kernels_are_kept_where_none_are_asked_for(rtx, plan, tmp_path):
    """Without a place for them nothing is written."""
    before = sorted(tmp_path.iterdir())
    load(rtx, plan).keep_kernels()
    assert sorted(tmp_path.iterdir()) == before


def test_no_kernels_are_kept_of_a_refused_context(stub, rtx, plan, tmp_path):
    """What was compiled for a context that did not come about is not kept."""
    stub.context = None
    with pytest.raises(RunError, match="create_execution_context"):
        load(rtx, plan, tmp_path / "some.kernels")
    assert not (tmp_path / "some.kernels").exists()


def test_tensorrt_keeps_no_kernels(stub, rtx, plan, tmp_path):
    """TensorRT compiled its kernels into the plan: no file is written, none is read."""
    full = replace(rtx, flavour="tensorrt", version="11.4.0.106")
    kernels = tmp_path / "some.kernels"
    assert load(full, plan, kernels).context is stub.context
    assert not kernels.exists()
    kernels.write_bytes(b"of another time")
    load(full, plan, kernels).keep_kernels()
    assert stub.offered == []
    assert stub.contexts == [(), ()]
    assert kernels.read_bytes() == b"of another time"


# TensorRT itself


@pytest.fixture(scope="module")
def built(backend, t0, tmp_path_factory):
    """Return a real plan of T0."""
    request = PlanRequest(backend, t0, VARIANTS["fp8"], fixed_scales(t0), "decode", 8)
    return build_plan(request, tmp_path_factory.mktemp("cache"))


DAMAGES = {
    "cut in half": lambda content: content[: len(content) // 2],
    "0 bytes": lambda content: b"",
    "first 16 bytes changed": lambda content: bytes(16) + content[16:],
    "not a plan": lambda content: b"<html>404</html>",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_R06_tensorrt_refuses_a_damaged_plan(backend, built, tmp_path, damage):
    """TensorRT returns None for it, and its own reason is in the message beside the file's name."""
    path = tmp_path / "damaged.plan"
    path.write_bytes(damage(built.path.read_bytes()))
    path.with_suffix(".json").write_bytes(built.path.with_suffix(".json").read_bytes())
    with pytest.raises(
        RunError,
        match=rf"^plan damaged\.plan, built by {backend.target}: deserialize_cuda_engine of "
        rf"{backend.target} returned None; .*\n  TensorRT: \[ERROR\] ",
    ):
        load(backend, path)


def test_a_whole_plan_without_a_gpu_is_refused(backend, built):
    """Without a GPU TensorRT-RTX builds plans and loads none: that is an error, not a crash."""
    if gpu_at_hand():
        pytest.skip("a GPU is here: tests/runtime loads plans")
    with pytest.raises(RunError, match=r"returned None; .*\n  TensorRT: \[ERROR\] .*Cuda Runtime"):
        load(backend, built.path)


def test_a_plan_that_does_not_load_where_it_is_built_is_a_plan_all_the_same(backend, t0, tmp_path):
    """Kernels are compiled while building where that works; whether it loads is said later."""
    if gpu_at_hand():
        pytest.skip("a GPU is here: the plan loads")
    request = PlanRequest(backend, t0, VARIANTS["fp16"], None, "decode", 8, gpu="NVIDIA H200, 1")
    plan = build_plan(request, tmp_path)
    assert plan.path.exists()
    assert not plan.kernels.exists()


# FP8 in an engine


def layer(name, inputs=("FP8",), constants=(("weight", "FP8"), ("beta", "Float")), **fields):
    """Return a layer as the inspector describes it."""
    return {
        "Name": name,
        "LayerType": "gemm",
        "Inputs": [{"Name": "x", "Dimensions": [1, -1, 192], "Datatype": each} for each in inputs],
        "Constants": [
            {"Name": f"__mye7_{name}_myl0", "Datatype": each} for name, each in constants
        ],
        "Outputs": [{"Name": "y", "Dimensions": [1, -1, 192], "Datatype": "Half"}],
    } | fields


H0 = "transformer.h.0.attn.attention"
FOUND = {
    "a product": ([layer(f"{H0}.v_proj_myl0_12")], [f"{H0}.v_proj"]),
    "a fused product": (
        [layer(f"{H0}.v_proj+{H0}.k_proj+{H0}.q_proj_myl0_1")],
        [f"{H0}.k_proj", f"{H0}.q_proj", f"{H0}.v_proj"],
    ),
    "both products of an MLP": (
        [layer("transformer.h.11.mlp.c_proj_myl0_4"), layer("transformer.h.11.mlp.c_fc_myl0_3")],
        ["transformer.h.11.mlp.c_fc", "transformer.h.11.mlp.c_proj"],
    ),
    "a product named by its constants alone": (
        [
            layer(
                "__myl_FcAddAdd_myl0_8",
                constants=(
                    (f"{H0}.out_proj.bias_constantHalf", "Half"),
                    ("12316dconst", "FP8"),
                ),
            )
        ],
        [f"{H0}.out_proj"],
    ),
    "the same product in two layers": (
        [layer(f"{H0}.q_proj_myl0_1"), layer(f"{H0}.q_proj_myl0_2")],
        [f"{H0}.q_proj"],
    ),
    "half constants": ([layer(f"{H0}.q_proj_myl0_1", constants=(("weight", "Half"),))], []),
    "half inputs": ([layer(f"{H0}.q_proj_myl0_1", inputs=("Half", "Float"))], []),
    "no constants": ([layer(f"{H0}.q_proj_myl0_1", constants=())], []),
    "attention that puts out FP8": (
        [layer(f"{H0}_myl0_9", ("Half",), (), Outputs=[{"Name": "y", "Datatype": "FP8"}])],
        [],
    ),
    "layers without tensors": ([{"Name": "nop", "LayerType": "NoOp"}], []),
}


@pytest.mark.parametrize(("layers", "expected"), FOUND.values(), ids=FOUND)
def test_projections_in_fp8_are_found(layers, expected):
    """A product counts when it reads an FP8 tensor and an FP8 constant; names come out sorted."""
    other = layer("transformer.h.0.mlp.c_fc_myl0_7", ("Half",), (("weight", "Half"),))
    assert quantized_modules_of({"Layers": [other, *layers], "Bindings": []}, "fp8") == tuple(
        expected
    )


def test_a_format_is_not_taken_for_another():
    """INT8 products are those of a row in INT8, and none of one in FP8."""
    tensor = {"Name": "x", "Datatype": "Int8"}
    product = layer(f"{H0}.k_proj", Inputs=[tensor], Constants=[tensor])
    assert quantized_modules_of({"Layers": [product]}, "int8") == (f"{H0}.k_proj",)
    assert quantized_modules_of({"Layers": [product]}, "fp8") == ()


def test_the_older_key_of_a_type_is_read():
    """Other versions write type and format into one text, under another key."""
    tensor = {"Name": "x", "Format/Datatype": "Row major linear FP8 format"}
    product = layer(f"{H0}.k_proj", Inputs=[tensor], Constants=[tensor])
    half = {"Name": "x", "Format/Datatype": "Row major linear FP16 format"}
    assert quantized_modules_of({"Layers": [product]}, "fp8") == (f"{H0}.k_proj",)
    assert quantized_modules_of({"Layers": [product | {"Inputs": [half]}]}, "fp8") == ()


def test_C03_layers_without_types_are_not_taken_for_fp16():
    """An engine built without detailed verbosity tells names alone: that is no "no FP8"."""
    for layers in (["__myl_Fc_myl0_1", "__myl_Add_myl0_2"], [layer("a"), "b"]):
        with pytest.raises(RunError, match="obtained 2 layers without types, expected layers with"):
            quantized_modules_of({"Layers": layers}, "fp8")
    for nothing in ({}, {"Layers": []}):
        with pytest.raises(RunError, match=r"0 layers without types.*detailed profiling verbo"):
            quantized_modules_of(nothing, "fp8")


def test_C03_fp8_layers_that_name_no_projection_are_listed():
    """A product in FP8 that cannot be told from others is an error, not one projection fewer."""
    layers = [layer("__myl_Fc_myl0_2"), layer(f"{H0}.q_proj_myl0_1"), layer("__myl_Fc_myl0_1")]
    with pytest.raises(RunError, match=r"no projection: \['__myl_Fc_myl0_1', '__myl_Fc_myl0_2'\]"):
        quantized_modules_of({"Layers": layers}, "fp8")


def test_the_inspector_is_asked_for_json(backend):
    """What is read is the engine's own information, as JSON."""
    information = {"Layers": [layer(f"{H0}.q_proj_myl0_1")]}
    asked = []
    inspector = SimpleNamespace(
        get_engine_information=lambda form: asked.append(form) or json.dumps(information)
    )
    engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
    loaded = Loaded(None, engine, None, log_collector(backend.trt), 0.0)
    assert quantized_modules(backend, loaded, "fp8") == (f"{H0}.q_proj",)
    assert asked == [backend.trt.LayerInformationFormat.JSON]


@pytest.mark.parametrize("call", ["create_engine_inspector", "get_engine_information"])
def test_N06_an_inspector_that_tells_nothing_is_named(backend, call):
    """None of an engine's inspector is an error that names the call."""
    inspector = SimpleNamespace(get_engine_information=lambda form: None)
    given = None if call == "create_engine_inspector" else inspector
    engine = SimpleNamespace(create_engine_inspector=lambda: given)
    loaded = Loaded(None, engine, None, log_collector(backend.trt), 0.0)
    with pytest.raises(RunError, match=f"{backend.target}: {call} returned None"):
        quantized_modules(backend, loaded, "fp8")


def test_every_projection_has_a_name_that_is_found(t0):
    """The expression that reads names knows every projection that a row can quantize."""
    modules = every_module(t0.architecture.num_layers)
    assert [runtime.MODULE.fullmatch(module).group() for module in modules] == list(modules)
    assert runtime.MODULE.findall("transformer.h.1.ln_1 transformer.h.1.attn.residual") == []
