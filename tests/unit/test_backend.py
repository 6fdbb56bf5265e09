"""The backend: which flavour is here, what it is asked for, and its log lines."""

import io
import sys
from types import SimpleNamespace

import pytest

from gptneo_trt.backend import (
    FLAVOURS,
    Backend,
    add_attention,
    backend_named,
    create_config,
    create_context,
    create_network,
    log_collector,
)
from gptneo_trt.errors import BuildError, RunError

KERNELS = b"compiled for this GPU"


@pytest.fixture(scope="module")
def builder(backend):
    """Return a Builder, with its logger kept alive."""
    log = log_collector(backend.trt)
    return SimpleNamespace(log=log, builder=backend.trt.Builder(log.logger))


def test_target_names_flavour_and_version(backend):
    """The target is the import name and the module's own version."""
    assert backend.target == f"tensorrt_rtx-{backend.trt.__version__}"
    assert backend.version == backend.trt.__version__


def test_unknown_flavour_lists_the_known_ones():
    """A flavour that does not exist is refused with the list of those that do."""
    with pytest.raises(BuildError, match=r"'openvino': expected one of \['tensorrt', 'tensorrt_"):
        backend_named("openvino")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_absent_flavour_says_how_to_install_it(monkeypatch, flavour):
    """A flavour that cannot be imported is refused with the command that installs it."""
    monkeypatch.setitem(sys.modules, flavour, None)
    with pytest.raises(BuildError, match="cannot be imported") as caught:
        backend_named(flavour)
    assert FLAVOURS[flavour] in str(caught.value)


def test_log_collector_keeps_warnings_and_errors(backend):
    """Errors and warnings are kept in order with their severity; information is dropped."""
    log = log_collector(backend.trt)
    severity = backend.trt.ILogger
    for level in ("ERROR", "INFO", "WARNING", "VERBOSE", "INTERNAL_ERROR"):
        log.logger.log(getattr(severity, level), level.lower())
    assert log.lines == [
        "[ERROR] error",
        "[WARNING] warning",
        "[INTERNAL_ERROR] internal_error",
    ]


def test_every_log_of_a_process_hears_tensorrt(backend):
    """TensorRT keeps the first logger of a process: a later Log gets its lines all the same."""
    first, second = log_collector(backend.trt), log_collector(backend.trt)
    builder = backend.trt.Builder(second.logger)
    assert first.logger is second.logger
    network = create_network(backend, builder)
    tensor = network.add_input("x", backend.trt.DataType.FLOAT, (2, 2))
    network.add_gather(tensor, tensor, 7)
    assert builder.build_serialized_network(network, create_config(backend, builder, ())) is None
    assert second.lines
    assert first.lines == second.lines


def test_log_collector_hears_tensorrt(backend, builder):
    """TensorRT's own complaint about a wrong call ends up in the lines."""
    network = create_network(backend, builder.builder)
    before = len(builder.log.lines)
    tensor = network.add_input("x", backend.trt.DataType.FLOAT, (2, 2))
    network.add_gather(tensor, tensor, 7)
    config = create_config(backend, builder.builder, ())
    assert builder.builder.build_serialized_network(network, config) is None
    assert any(line.startswith("[ERROR]") for line in builder.log.lines[before:])


def test_network_is_strongly_typed(backend, builder):
    """Precision is the network's: it is created strongly typed."""
    network = create_network(backend, builder.builder)
    assert network.get_flag(backend.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def test_N06_no_network_is_named(backend):
    """A builder that returns no network is a BuildError with flavour and version."""
    broken = SimpleNamespace(create_network=lambda flag: None)
    with pytest.raises(BuildError, match=f"{backend.target}: create_network returned None"):
        create_network(backend, broken)


def test_capabilities_are_set_as_asked(backend, builder):
    """ "8.9" and "12.0" are asked for as SM89 and SM120, in that order."""
    config = create_config(backend, builder.builder, ("8.9", "12.0"))
    obtained = [config.get_compute_capability(i).name for i in range(2)]
    assert config.num_compute_capabilities == 2
    assert obtained == ["SM89", "SM120"]


@pytest.mark.parametrize("capability", ["9.0", "", "sm89", "12", "CURRENT"])
def test_other_capabilities_are_refused_with_the_declared_ones(backend, builder, capability):
    """A capability that TensorRT-RTX does not declare is refused; the declared ones are listed."""
    with pytest.raises(BuildError, match=f"compute capability '{capability}' is refused") as caught:
        create_config(backend, builder.builder, ("8.9", capability))
    declared = backend.trt.ComputeCapability.__members__
    names = [f"{name[2:-1]}.{name[-1]}" for name in declared if name.startswith("SM")]
    assert names
    assert all(name in str(caught.value) for name in names)


def test_tensorrt_takes_no_capabilities(backend, builder):
    """TensorRT builds for the GPU at hand: naming a capability is refused, naming none is not."""
    full = Backend("tensorrt", "11.4.0", backend.trt)
    with pytest.raises(BuildError, match=r"tensorrt-11.4.0: builds for the GPU at hand only"):
        create_config(full, builder.builder, ("8.9",))
    assert create_config(full, builder.builder, ()) is not None


def test_log_lines_are_echoed_as_they_come(backend):
    """With ``echo`` set, a warning is on the stream at once; informational lines never are."""
    collector = log_collector(backend.trt)
    collector.logger.log(backend.trt.ILogger.WARNING, "before")
    collector.echo = io.StringIO()
    collector.logger.log(backend.trt.ILogger.ERROR, "last words")
    collector.logger.log(backend.trt.ILogger.INFO, "chatter")
    assert collector.echo.getvalue() == "[ERROR] last words\n"
    assert collector.lines == ["[WARNING] before", "[ERROR] last words"]


class RuntimeCache:
    """An ``IRuntimeCache`` that takes the kernels of this GPU and no others."""

    def deserialize(self, content):
        """Return whether the kernels are this GPU's."""
        return content == KERNELS


def rtx_engine(context="a context", accepts=True):
    """Return an ``ICudaEngine`` of TensorRT-RTX that keeps its runtime config and its calls."""
    calls = []
    config = SimpleNamespace(
        create_runtime_cache=RuntimeCache,
        set_runtime_cache=lambda cache: calls.append(cache) or accepts,
    )

    def create_execution_context(config):
        calls.append(config)
        return context

    return SimpleNamespace(
        calls=calls,
        config=config,
        create_runtime_config=lambda: config,
        create_execution_context=create_execution_context,
    )


def test_tensorrt_rtx_compiles_every_kernel_before_it_runs(backend):
    """A context is made from a config that asks for eager kernels and holds a runtime cache."""
    engine = rtx_engine()
    context, kept, taken = create_context(backend, engine)
    strategies = backend.trt.DynamicShapesKernelSpecializationStrategy
    assert engine.config.dynamic_shapes_kernel_specialization_strategy == strategies.EAGER
    cache, config = engine.calls
    assert isinstance(cache, RuntimeCache)
    assert config is engine.config
    assert (context, kept, taken) == ("a context", cache, False)


@pytest.mark.parametrize(("known", "taken"), [(KERNELS, True), (b"garbage", False), (b"", False)])
def test_R06_kernels_that_tensorrt_takes_are_told_from_foreign_ones(backend, known, taken):
    """Whether the offered kernels were taken is said; a context is there either way."""
    context, _, obtained = create_context(backend, rtx_engine(), known)
    assert (context, obtained) == ("a context", taken)


def test_N06_a_context_that_is_refused_is_none(backend):
    """TensorRT's refusal is handed on."""
    assert create_context(backend, rtx_engine(context=None))[0] is None


def test_a_runtime_cache_that_is_refused_is_an_error(backend):
    """False from ``set_runtime_cache`` is not passed over, and no context is made after it."""
    engine = rtx_engine(accepts=False)
    with pytest.raises(RunError, match=f"{backend.target}: set_runtime_cache returned False"):
        create_context(backend, engine)
    assert len(engine.calls) == 1


def test_tensorrt_creates_a_context_and_nothing_else():
    """TensorRT has no runtime cache: a context is asked for plainly, and kernels are ignored."""
    full = Backend("tensorrt", "11.4.0.106", SimpleNamespace())
    engine = SimpleNamespace(create_execution_context=lambda: "a context")
    assert create_context(full, engine) == ("a context", None, False)
    assert create_context(full, engine, KERNELS) == ("a context", None, False)


def test_attention_is_added_without_the_causal_flag(backend):
    """The newer method gets the kind "none": GPT-Neo's mask and the flag exclude each other."""
    network = SimpleNamespace(add_attention_v2=lambda *arguments: arguments)
    softmax, none = backend.trt.AttentionNormalizationOp.SOFTMAX, backend.trt.CausalMaskKind.NONE
    assert add_attention(backend, network, "q", "k", "v") == ("q", "k", "v", softmax, none)


def test_attention_falls_back_to_the_older_method(backend):
    """Where ``add_attention_v2`` is absent, as in TensorRT-RTX 1.4, the older method gets False."""
    softmax = backend.trt.AttentionNormalizationOp.SOFTMAX
    trt = SimpleNamespace(AttentionNormalizationOp=SimpleNamespace(SOFTMAX=softmax))
    older = Backend("tensorrt_rtx", "1.4.0.76", trt)
    network = SimpleNamespace(add_attention=lambda *arguments: arguments)
    assert add_attention(older, network, "q", "k", "v") == ("q", "k", "v", softmax, False)


def test_both_methods_add_the_same_attention(backend, builder):
    """The older method without the flag gives the layer that the newer one gives."""
    shape = (1, 2, 4, 16)

    def added(hidden=()):
        network = create_network(backend, builder.builder)
        tensors = [network.add_input(name, backend.trt.DataType.HALF, shape) for name in "qkv"]
        methods = {name: getattr(network, name) for name in ("add_attention", "add_attention_v2")}
        kept = {name: method for name, method in methods.items() if name not in hidden}
        layer = add_attention(backend, SimpleNamespace(**kept), *tensors)
        return layer.causal_kind, layer.norm_op, tuple(layer.get_output(0).shape)

    assert added() == added(hidden=("add_attention_v2",))
    assert added()[0] == backend.trt.CausalMaskKind.NONE


@pytest.mark.parametrize(("flavour", "bound"), [("tensorrt", True), ("tensorrt_rtx", False)])
def test_plans_of_tensorrt_are_for_the_gpu_at_hand(backend, flavour, bound):
    """TensorRT's plans are for the GPU that built them, TensorRT-RTX's for any."""
    assert Backend(flavour, "1", backend.trt).builds_for_gpu_at_hand is bound
