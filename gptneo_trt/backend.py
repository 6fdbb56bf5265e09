"""Load a TensorRT flavour, keep its log lines, and hold what differs between flavours.

``tensorrt`` and ``tensorrt_rtx`` share the network API; this module is the only one that
knows which of the two it holds.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, TextIO

from gptneo_trt.errors import BuildError, GptNeoTrtError, RunError

FLAVOURS = {
    "tensorrt_rtx": "pip install 'tensorrt-rtx==1.6.1.120'",
    "tensorrt": "pip install --extra-index-url https://pypi.nvidia.com 'tensorrt==11.4.*'",
}


@dataclass(frozen=True)
class Backend:
    """Hold one TensorRT flavour.

    Attributes:
        flavour: import name, "tensorrt" or "tensorrt_rtx".
        version: as the module says.
        trt: the module.
    """

    flavour: str
    version: str
    trt: ModuleType

    @property
    def target(self) -> str:
        """Return for example "tensorrt_rtx-1.6.1.120", a folder name under baselines/."""
        return f"{self.flavour}-{self.version}"

    @property
    def builds_for_gpu_at_hand(self) -> bool:
        """Return whether a plan is for the GPU that it was built on, and no other."""
        return self.flavour == "tensorrt"


def backend_named(flavour: str) -> Backend:
    """Import a flavour.

    Raises:
        BuildError: unknown or not installed; the message gives the install command.
    """
    if flavour not in FLAVOURS:
        raise BuildError(f"TensorRT flavour {flavour!r}: expected one of {sorted(FLAVOURS)}")
    try:
        trt = import_module(flavour)
    except ImportError as error:
        raise BuildError(
            f"TensorRT flavour {flavour!r} cannot be imported: {error}; do: {FLAVOURS[flavour]}"
        ) from error
    return Backend(flavour, trt.__version__, trt)


class Log:
    """Keep TensorRT's warnings and errors from now on.

    TensorRT keeps the first logger that a process gives it and ignores all others, so there is
    one, which hands each line to every Log that is alive.

    Attributes:
        logger: the process's ``ILogger``, for ``Builder`` and ``Runtime``.
        lines: "[ERROR] ..." and "[WARNING] ...", in order.
        echo: a text stream that gets each line too, at once: a process that is about to crash
            leaves TensorRT's last words behind.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.lines: list[str] = []
        self.echo: TextIO | None = None
        logger.logs.add(self)

    def add(self, line: str) -> None:
        """Keep a line."""
        self.lines.append(line)
        if self.echo:
            print(line, file=self.echo, flush=True)


def log_collector(trt: ModuleType) -> Log:
    """Return a Log of the process's only ``ILogger``."""
    return Log(_logger(trt.ILogger))


@cache
def _logger(interface: Any) -> Any:
    class Logger(interface):  # type: ignore[misc]
        def __init__(self) -> None:
            interface.__init__(self)
            self.logs: weakref.WeakSet[Log] = weakref.WeakSet()

        def log(self, severity: Any, message: str) -> None:
            if severity <= interface.WARNING:
                for log in list(self.logs):
                    log.add(f"[{severity.name}] {message}")

    return Logger()


def refuse_none(
    backend: Backend, call: str, result: Any, error: type[GptNeoTrtError] = BuildError
) -> None:
    """Check what a call of TensorRT gave.

    Raises:
        GptNeoTrtError: of the class ``error``: it gave None, and its log says why.
    """
    if result is None:
        raise error(f"{backend.target}: {call} returned None")


def create_builder(backend: Backend, log: Log) -> Any:
    """Return a ``Builder``.

    Raises:
        BuildError: TensorRT gave none.
    """
    try:
        return backend.trt.Builder(log.logger)
    except TypeError as error:  # pybind11's "factory function returned nullptr"
        raise BuildError(f"{backend.target}: no Builder: {error}", tuple(log.lines)) from error


def create_runtime(backend: Backend, log: Log) -> Any:
    """Return a ``Runtime``.

    Raises:
        RunError: TensorRT gave none.
    """
    try:
        return backend.trt.Runtime(log.logger)
    except TypeError as error:  # pybind11's "factory function returned nullptr"
        lines = "".join(f"\n  TensorRT: {line}" for line in log.lines)
        raise RunError(f"{backend.target}: no Runtime: {error}{lines}") from error


def create_network(backend: Backend, builder: Any) -> Any:
    """Return an empty, strongly typed ``INetworkDefinition``."""
    flag = 1 << int(backend.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flag)
    refuse_none(backend, "create_network", network)
    return network


def create_config(backend: Backend, builder: Any, capabilities: Sequence[str]) -> Any:
    """Return an ``IBuilderConfig`` for the named compute capabilities, for example "8.9".

    An empty sequence keeps TensorRT's default. TensorRT-RTX alone can build for a GPU that is
    absent; TensorRT always builds for the GPU at hand.

    Raises:
        BuildError: a capability that this flavour cannot be asked for; the message lists those
            that it declares.
    """
    config = builder.create_builder_config()
    refuse_none(backend, "create_builder_config", config)
    # Without it the inspector names no types; the plan's size does not depend on it.
    config.profiling_verbosity = backend.trt.ProfilingVerbosity.DETAILED
    if not capabilities:
        return config
    if backend.flavour != "tensorrt_rtx":
        raise BuildError(
            f"{backend.target}: builds for the GPU at hand only, obtained compute capabilities "
            f"{list(capabilities)}; leave them out or use tensorrt_rtx"
        )
    declared = {
        f"{name[2:-1]}.{name[-1]}": value
        for name, value in backend.trt.ComputeCapability.__members__.items()
        if name.startswith("SM")
    }
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        known = declared.get(capability)
        if known is None or not config.set_compute_capability(known, index):
            raise BuildError(
                f"{backend.target}: compute capability {capability!r} is refused; expected one "
                f"of {', '.join(sorted(declared))}"
            )
    return config


def add_attention(backend: Backend, network: Any, query: Any, key: Any, value: Any) -> Any:
    """Add the fused attention layer without the causal flag; return ``IAttention`` or None.

    TensorRT-RTX 1.4 has the older of the two methods only.
    """
    softmax = backend.trt.AttentionNormalizationOp.SOFTMAX
    if hasattr(network, "add_attention_v2"):
        none = backend.trt.CausalMaskKind.NONE
        return network.add_attention_v2(query, key, value, softmax, none)
    return network.add_attention(query, key, value, softmax, False)


def create_context(
    backend: Backend, engine: Any, kernels: bytes | None = None
) -> tuple[Any, Any, bool]:
    """Return an ``IExecutionContext`` whose kernels never change, and the cache they are kept in.

    TensorRT-RTX compiles kernels when a context is created, and more at the first run of every
    new length. By default it runs others until the specialised ones are ready, which changes
    logits and times between calls: here it waits for them. TensorRT compiled its kernels when
    the plan was built.

    Args:
        backend: the flavour.
        engine: ``ICudaEngine``.
        kernels: what such a cache held when it was serialized, for this plan on this GPU: seconds
            become milliseconds. What TensorRT refuses is compiled anew.

    Returns:
        The context, None when TensorRT refuses; its ``IRuntimeCache``, which holds every kernel
        compiled so far, None where the flavour has none; and whether it took ``kernels``.
    """
    if backend.flavour != "tensorrt_rtx":
        return engine.create_execution_context(), None, False
    config = engine.create_runtime_config()
    refuse_none(backend, "create_runtime_config", config, RunError)
    config.dynamic_shapes_kernel_specialization_strategy = (
        backend.trt.DynamicShapesKernelSpecializationStrategy.EAGER
    )
    cache = config.create_runtime_cache()
    refuse_none(backend, "create_runtime_cache", cache, RunError)
    taken = kernels is not None and cache.deserialize(kernels)
    if not config.set_runtime_cache(cache):
        raise RunError(f"{backend.target}: set_runtime_cache returned False")
    return engine.create_execution_context(config), cache, taken


def kernels_of(cache: Any) -> bytes | None:
    """Return what the ``IRuntimeCache`` of ``create_context`` holds, to be given to it again.

    None where TensorRT does not tell: they are compiled again.
    """
    content = cache.serialize()
    return None if content is None else bytes(content)
