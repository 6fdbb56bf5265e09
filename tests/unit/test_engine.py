"""The engine: what it hands to TensorRT, in which order, and what it refuses.

The stub of an engine reads and writes at the addresses that it was given and computes with the
interpreter, so what comes out is right only when addresses, shapes and types are.
"""

import ctypes
import math
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptneo_trt import decoder
from gptneo_trt.backend import log_collector
from gptneo_trt.data import Plan
from gptneo_trt.engine import TYPES, Engine
from gptneo_trt.errors import RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import PHASES, build_network
from gptneo_trt.plans import PlanRequest
from gptneo_trt.runtime import Loaded
from gptneo_trt.variants import VARIANTS

CONTEXT = 8
TOKENS = np.random.default_rng(5).integers(0, 61, (2, CONTEXT)).astype(np.int32)


class Gpu:
    """What the engine uses of ``torch.cuda``; work is done when it is launched.

    Attributes:
        log: what happened, in order.
        current: the current stream.
        capturing: whether a graph is being captured.
        broken: whether captures end badly.
    """

    def __init__(self):
        self.log, self.capturing, self.broken = [], False, False
        self.current = self.new_stream("current")

    def new_stream(self, name="engine"):
        """Return a stream that logs who waits for whom."""
        return SimpleNamespace(
            name=name,
            cuda_stream=name,
            device=None,
            wait_stream=lambda other: self.log.append(f"{name} waits for {other.name}"),
            synchronize=lambda: self.log.append(f"host waits for {name}"),
        )

    def new_graph(self):
        """Return a graph whose replay is logged."""
        return SimpleNamespace(replay=lambda: self.log.append("replay"))

    @contextmanager
    def stream(self, stream):
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, stream):
        """Capture on a stream; as with PyTorch, it stays current when the capture fails."""
        self.log.append(f"capture on {stream.name}")
        before, self.current, self.capturing = self.current, stream, True
        try:
            yield
        finally:
            self.capturing = False
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


class StubEngine:
    """An ``ICudaEngine`` with the tensors of a network, and its ``IExecutionContext``.

    Attributes:
        set: (method, tensor name) of every setting that was accepted, in order.
        refused: names of methods that return False, after a line in the log.
        addresses: tensor name -> what was set.
    """

    def __init__(self, network, gpu):
        definition = network.definition
        self.trt, self.gpu, self.interpreter = network.backend.trt, gpu, Interpreter(network)
        self.inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
        outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
        self.tensors = {tensor.name: tensor for tensor in (*self.inputs, *outputs)}
        self.types = {name: tensor.dtype for name, tensor in self.tensors.items()}
        self.set, self.refused, self.addresses, self.length = [], set(), {}, 1

    @property
    def num_io_tensors(self):
        """Return the number of tensors."""
        return len(self.tensors)

    def get_tensor_name(self, index):
        """Return the name of a tensor."""
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name):
        """Return the declared type."""
        return self.types[name]

    def get_tensor_shape(self, name):
        """Return the declared shape, -1 where the length goes."""
        return self.tensors[name].shape

    def get_tensor_mode(self, name):
        """Return whether a tensor is an input."""
        is_input = name in [tensor.name for tensor in self.inputs]
        return self.trt.TensorIOMode.INPUT if is_input else self.trt.TensorIOMode.OUTPUT

    def accepts(self, method):
        """Return what TensorRT returns, and complain as it does."""
        if method in self.refused:
            log_collector(self.trt).logger.log(self.trt.ILogger.ERROR, f"no {method}")
        return method not in self.refused

    def set_input_shape(self, name, shape):
        """Take the length of the text from the shape of an input."""
        if not self.accepts("set_input_shape"):
            return False
        self.set.append(("set_input_shape", name))
        self.length = shape[-1]
        return True

    def set_tensor_address(self, name, address):
        """Remember where a tensor is."""
        if not self.accepts("set_tensor_address"):
            return False
        self.set.append(("set_tensor_address", name))
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        """Compute, from the memory of the inputs into the memory of the outputs."""
        if not self.accepts("execute_async_v3"):
            return False
        self.gpu.log.append(f"run on {stream}")
        memory = {name: self.memory(name) for name in self.tensors}
        feeds = {tensor.name: memory[tensor.name] for tensor in self.inputs}
        feeds |= {name: each.float() for name, each in feeds.items() if each.is_floating_point()}
        for name, value in self.interpreter.run(feeds).items():
            memory[name].copy_(value)
        return True

    def memory(self, name):
        """Return the tensor [1, *shape] at the address that was set."""
        dtype = TYPES[self.types[name].name]
        shape = [self.length if axis == -1 else axis for axis in self.tensors[name].shape]
        size = math.prod(shape) * dtype.itemsize
        buffer = (ctypes.c_char * size).from_address(self.addresses[name])
        return torch.frombuffer(buffer, dtype=dtype).view(1, *shape)


@pytest.fixture
def gpu(monkeypatch):
    """Return what stands in for ``torch.cuda``."""
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.new_stream())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made.new_graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    return made


@pytest.fixture(scope="module")
def network_of(backend, t0):
    """Return a function (phase, row, batch) -> Network of T0."""
    return cache(
        lambda phase, row, batch: build_network(
            backend, t0, VARIANTS[row], None, phase, CONTEXT, batch
        )
    )


@pytest.fixture
def stub(network_of, gpu):
    """Return a function (phase, row, batch) -> StubEngine."""
    return lambda phase="prefill", row="fp16", batch=1: StubEngine(
        network_of(phase, row, batch), gpu
    )


@pytest.fixture
def engine_of(monkeypatch, backend, t0):
    """Return a function that loads a stub as an Engine."""

    def load(stub):
        network = stub.interpreter.network
        loaded = Loaded(None, stub, stub, log_collector(backend.trt), 0.0)
        monkeypatch.setattr("gptneo_trt.engine.load", lambda backend, plan, kernels: loaded)
        request = PlanRequest(
            backend, t0, network.variant, None, network.phase, network.context, batch=network.batch
        )
        return Engine(request, Plan(Path("some.plan"), 1.0, 1.0, False, ()), device="cpu")

    return load


def test_R06_a_plan_that_is_refused_names_what_was_to_run_it(monkeypatch, backend, t0):
    """Row, phase, and the TensorRT and GPU at hand stand before what the runtime says."""

    def refuse(backend, plan, kernels):
        raise RunError("plan some.plan, built by tensorrt-11.1.0.106 for NVIDIA B300: refused")

    monkeypatch.setattr("gptneo_trt.engine.load", refuse)
    gpu = "NVIDIA H200, driver 580.159.04"
    request = PlanRequest(backend, t0, VARIANTS["fp16"], None, "decode", CONTEXT, gpu=gpu)
    expected = f"^variant fp16, decode, {backend.target}, fp16, {gpu}: plan some.plan, built"
    with pytest.raises(RunError, match=expected):
        Engine(request, Plan(Path("some.plan"), 1.0, 1.0, False, ()), device="cpu")


def text(length=CONTEXT, row=0):
    """Return the feeds of a prefill."""
    tokens = torch.from_numpy(TOKENS[row : row + 1, None, :length].copy())
    return {
        "token_ids": tokens,
        "position_ids": torch.arange(length, dtype=torch.int32)[None, None],
    }


def copies(outputs):
    """Return copies of outputs, which last beyond the next run."""
    return {name: tensor.clone() for name, tensor in outputs.items()}


def same(obtained, expected):
    """Return whether outputs are bitwise the same."""
    return obtained.keys() == expected.keys() and all(
        torch.equal(obtained[name], expected[name]) for name in expected
    )


# What comes out


@pytest.mark.parametrize("row", ["fp16", "fp32"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("batch", [1, 2])
def test_engine_gives_what_its_network_gives(monkeypatch, stub, engine_of, t0, phase, row, batch):
    """Through addresses, lengths and half-precision caches: bitwise the interpreter's results."""
    made = stub(phase, row, batch)
    made.interpreter.batches_at_once = 1
    engine = engine_of(made)
    monkeypatch.setattr(Engine, "repeat", Interpreter.repeat)
    run = {"prefill": decoder.prefill, "decode": decoder.decode}[phase]
    for tokens in (TOKENS[:batch], TOKENS[-batch:, :5], TOKENS):
        obtained = run(engine, t0.architecture, tokens)
        expected = run(made.interpreter, t0.architecture, tokens)
        assert all(
            np.array_equal(vars(obtained)[name], each) for name, each in vars(expected).items()
        )
    assert engine.cache_type == {"fp16": torch.float16, "fp32": torch.float32}[row]


def test_engine_says_what_it_runs(stub, engine_of):
    """Row, phase, context, batch and device are the request's; batches go one by one."""
    engine = engine_of(stub("decode", batch=2))
    assert (engine.variant, engine.phase, engine.context) == (VARIANTS["fp16"], "decode", CONTEXT)
    assert (engine.batch, engine.batches_at_once) == (2, 1)
    assert engine.device == torch.device("cpu")


def test_a_tensor_of_another_type_is_refused(backend, stub, engine_of):
    """A plan with a type that no tensor here has is refused, with the types that there are."""
    made = stub()
    made.types["h.1.key"] = backend.trt.DataType.BF16
    with pytest.raises(
        RunError, match=r"fp16, prefill, .*: tensor h\.1\.key of type BF16, .*'HALF', 'INT32'\]"
    ):
        engine_of(made)


def test_outputs_are_views_of_buffers_that_are_made_once(stub, engine_of):
    """Each run puts its outputs where the last one did, in the shape of its own text."""
    engine = engine_of(stub())
    long = engine.run(text())
    kept = copies(long)
    short = engine.run(text(3, row=1))
    assert [tuple(short[name].shape) for name in ("logits", "h.1.value")] == [
        (1, 1, 3, 64),
        (1, 1, 2, 3, 16),
    ]
    assert all(short[name].data_ptr() == long[name].data_ptr() for name in long)
    assert same(engine.run(text()), kept)


def test_outputs_go_where_they_are_asked_for(stub, engine_of):
    """An output named in ``into`` is that tensor; the others stay in the engine's buffers."""
    engine = engine_of(stub())
    expected = copies(engine.run(text()))
    rows = torch.full((1, 1, 2, CONTEXT, 16), torch.nan, dtype=torch.float16)
    outputs = engine.run(text(), {"h.0.key": rows})
    assert outputs["h.0.key"] is rows
    assert same(outputs, expected)
    assert engine.run(text())["h.0.key"] is not rows


class Operations(TorchDispatchMode):
    """Collect the names of PyTorch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        """Note the name and go on."""
        self.names.add(operation.overloadpacket.__name__)
        return operation(*arguments, **(options or {}))


def test_a_run_allocates_nothing(monkeypatch, stub, engine_of):
    """After the engine is made, a run takes views of its buffers and calls nothing else."""
    made = stub()
    engine, feeds = engine_of(made), text()
    monkeypatch.setattr(made, "execute_async_v3", lambda stream: True)
    with Operations() as operations:
        engine.run(feeds)
    assert operations.names <= {"slice", "view"}


# What TensorRT is told


def test_shapes_and_addresses_are_set_when_they_change(stub, engine_of):
    """The same feeds again set nothing, a moved tensor sets its address, a length the shapes."""
    made = stub()
    engine, feeds = engine_of(made), text()
    engine.run(feeds)
    everything = [("set_tensor_address", name) for name in made.tensors]
    shapes = [("set_input_shape", name) for name in feeds]
    assert sorted(made.set) == sorted(everything + shapes)
    made.set.clear()
    engine.run(feeds)
    assert made.set == []
    engine.run(feeds | {"token_ids": feeds["token_ids"].clone()})
    assert made.set == [("set_tensor_address", "token_ids")]
    made.set.clear()
    short = text(3)
    engine.run(short)
    assert sorted(made.set) == sorted(shapes + [("set_tensor_address", name) for name in short])


def test_a_fixed_shape_is_not_set(stub, engine_of, t0):
    """A decode engine has no input shape to set."""
    made = stub("decode")
    loop = decoder.DecodeLoop(engine_of(made), t0.architecture, 1, 2)
    loop.step()
    assert "set_input_shape" not in {method for method, _ in made.set}


@pytest.mark.parametrize("method", ["set_input_shape", "set_tensor_address", "execute_async_v3"])
def test_R03_false_from_tensorrt_is_an_error_and_the_next_run_is_right(
    stub, engine_of, gpu, method
):
    """TensorRT's own lines are in the message, nothing runs, and the next run sets all again."""
    made = stub()
    engine, before = engine_of(made), text(3, row=1)  # alive, so that no address comes again
    expected = copies(engine.run(text(4)))
    engine.run(before)
    gpu.log.clear()
    made.refused = {method}
    with pytest.raises(
        RunError,
        match=rf"^variant fp16, prefill, tensorrt_rtx-.*: {method}.* returned False"
        rf"\n  TensorRT: \[ERROR\] no {method}$",
    ):
        engine.run(text(4))
    assert "run on engine" not in gpu.log
    made.refused = set()
    made.set.clear()
    assert same(engine.run(text(4)), expected)
    assert {name for method, name in made.set if method == "set_tensor_address"} == set(
        made.tensors
    )
    assert ("set_input_shape", "token_ids") in made.set


def test_R05_a_run_is_ordered_between_what_came_before_and_what_comes_after(stub, engine_of, gpu):
    """The engine's stream waits for the current one, which then waits for it; the host for none."""
    engine = engine_of(stub())
    engine.run(text())
    assert gpu.log == ["engine waits for current", "run on engine", "current waits for engine"]


def test_R05_the_current_stream_is_that_of_the_call(stub, engine_of, gpu):
    """Work of another stream that is current during the call is waited for, not the default's."""
    engine = engine_of(stub())
    with gpu.stream(gpu.new_stream("other")):
        engine.run(text())
    assert gpu.log == ["engine waits for other", "run on engine", "other waits for engine"]


# What is refused before anything runs

WRONG_FEEDS = {
    "missing": (lambda f: f.pop("position_ids"), "position_ids: missing"),
    "unknown": (lambda f: f.update(tokens=f["token_ids"]), "tokens: no such input"),
    "an output": (lambda f: f.update(logits=f["token_ids"]), "logits: no such input"),
    "no batch axis": (
        lambda f: f.update(token_ids=f["token_ids"][0]),
        r"token_ids: obtained \(\(1, 8\), torch.int32, 'cpu'\), expected \(\(1, 1, 8\), torch.i",
    ),
    "two texts": (
        lambda f: f.update(token_ids=f["token_ids"].repeat(2, 1, 1)),
        r"token_ids: obtained \(\(2, 1, 8\), .* expected \(\(1, 1, 8\)",
    ),
    "another length": (
        lambda f: f.update(position_ids=f["position_ids"][..., :7]),
        r"position_ids: obtained \(\(1, 1, 7\), .* expected \(\(1, 1, 8\)",
    ),
    "another type": (
        lambda f: f.update(token_ids=f["token_ids"].long()),
        "token_ids: obtained .*torch.int64, .* expected .*torch.int32",
    ),
    "another device": (
        lambda f: f.update(token_ids=f["token_ids"].to("meta")),
        "token_ids: obtained .*'meta'.* expected .*'cpu'",
    ),
    "not contiguous": (
        lambda f: f.update(token_ids=torch.zeros(1, 1, 16, dtype=torch.int32)[..., ::2]),
        "token_ids: not contiguous",
    ),
    "R-03 empty": (lambda f: f.update(text(0)), "token_ids: 0 tokens, expected 1 to 8"),
    "R-03 too long": (
        lambda f: f.update({name: each.repeat(1, 1, 2) for name, each in f.items()}),
        "token_ids: 16 tokens, expected 1 to 8",
    ),
    "several at once": (
        lambda f: f.update(
            token_ids=f["token_ids"].long(), position_ids=f["position_ids"][0], x=f["token_ids"]
        ),
        r"position_ids: obtained .*; token_ids: obtained .*int64.*; x: no such input",
    ),
}


@pytest.mark.parametrize(("change", "message"), WRONG_FEEDS.values(), ids=WRONG_FEEDS)
def test_R03_feeds_that_do_not_fit_are_refused_before_anything_runs(
    stub, engine_of, gpu, change, message
):
    """All that is wrong is said at once, TensorRT is told nothing, and the next run is right."""
    made = stub()
    engine = engine_of(made)
    expected = copies(engine.run(text()))
    gpu.log.clear()
    made.set.clear()
    wrong = text()
    change(wrong)
    with pytest.raises(RunError, match=rf"^variant fp16, prefill, tensorrt_rtx-.*GPU: {message}"):
        engine.run(wrong)
    assert (made.set, gpu.log) == ([], [])
    assert same(engine.run(text()), expected)


WRONG_INTO = {
    "unknown": ("h.2.key", torch.zeros(1), r"h\.2\.key: no such output"),
    "an input": ("token_ids", torch.zeros(1), "token_ids: no such output"),
    "another type": ("h.0.key", torch.zeros(1, 1, 2, 8, 16), "torch.float32, .* torch.float16"),
    "another shape": ("logits", torch.zeros(1, 1, 1, 64), r"logits: obtained \(\(1, 1, 1, 64\)"),
    "not contiguous": ("logits", torch.zeros(1, 1, 64, 8).mT, "logits: not contiguous"),
}


@pytest.mark.parametrize(("name", "tensor", "message"), WRONG_INTO.values(), ids=WRONG_INTO)
def test_outputs_that_do_not_fit_are_refused_before_anything_runs(
    stub, engine_of, gpu, name, tensor, message
):
    """A tensor that an output cannot be written to is refused like an input."""
    made = stub()
    engine = engine_of(made)
    with pytest.raises(RunError, match=message):
        engine.run(text(), {name: tensor})
    assert (made.set, gpu.log) == ([], [])


def test_a_decode_engine_takes_one_token_at_a_time(stub, engine_of, gpu):
    """Whatever the cache has room for, a step of two tokens is refused."""
    made = stub("decode")
    with pytest.raises(RunError, match=r"token_ids: obtained \(\(1, 1, 2\), .*\(\(1, 1, 1\)"):
        engine_of(made).run(text(2))
    assert gpu.log == []


# Graphs


def test_R05_what_is_repeated_runs_once_before_it_is_captured(stub, engine_of, gpu):
    """Lazy set-up happens in a run on the engine's stream, which is over before the capture."""
    engine, feeds = engine_of(stub()), text()
    replay = engine.repeat(lambda: engine.run(feeds))
    assert gpu.log == [
        "engine waits for current",
        "run on engine",
        "host waits for engine",
        "capture on engine",
        "run on engine",
    ]
    gpu.log.clear()
    replay()
    assert gpu.log == ["replay"]


def test_R05_a_function_that_cannot_be_captured_is_an_error(stub, engine_of, gpu):
    """A capture that PyTorch refuses gives no plain function instead, and the engine still runs."""
    engine = engine_of(stub())
    expected = copies(engine.run(text()))
    feeds = text()

    def waits_for_the_host():
        engine.run(feeds)
        if gpu.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(
        RunError,
        match=r"fp16, prefill, .*: CUDA graph: .*capture failed: operation not permit",
    ):
        engine.repeat(waits_for_the_host)
    assert gpu.current.name == "current"
    assert same(engine.run(text()), expected)


def test_R05_a_capture_that_ends_badly_is_an_error(stub, engine_of, gpu):
    """A failure that shows only when the capture ends is one too."""
    engine, feeds = engine_of(stub()), text()
    gpu.broken = True
    with pytest.raises(RunError, match="capture failed: operation failed due to a previous error"):
        engine.repeat(lambda: engine.run(feeds))
    assert gpu.current.name == "current"
    gpu.broken = False
    assert engine.repeat(lambda: engine.run(feeds))


def test_R05_a_run_that_tensorrt_refuses_while_captured_is_an_error(stub, engine_of, gpu):
    """False from TensorRT inside a capture is not taken for a captured run."""
    made = stub()
    engine, feeds = engine_of(made), text()

    def refused_while_captured():
        made.refused = {"execute_async_v3"} if gpu.capturing else set()
        engine.run(feeds)

    with pytest.raises(RunError, match="execute_async_v3 returned False"):
        engine.repeat(refused_while_captured)
    assert gpu.current.name == "current"
