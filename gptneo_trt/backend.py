"""Load a TensorRT flavour, keep its log lines, and hold what differs between flavours.

``tensorrt`` and ``tensorrt_rtx`` share the network API; this module is the only one that
knows which of the two it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, TextIO

from gptneo_trt.errors import BuildError

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

    def supports_fp8(self) -> bool:
        """Return whether the data type FP8 is declared."""
        return hasattr(self.trt.DataType, "FP8")


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


def log_collector(trt: ModuleType) -> Any:
    """Return an ``ILogger`` that keeps warnings and errors in its list ``lines``.

    With its ``echo`` set to a text stream, it writes each there too, at once: a process that is
    about to crash leaves TensorRT's last words behind.
    """

    class LogCollector(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []
            self.echo: TextIO | None = None

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                line = f"[{severity.name}] {message}"
                self.lines.append(line)
                if self.echo:
                    print(line, file=self.echo, flush=True)

    return LogCollector()


def create_network(backend: Backend, builder: Any) -> Any:
    """Return an empty, strongly typed ``INetworkDefinition``."""
    flag = 1 << int(backend.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flag)
    if network is None:
        raise BuildError(f"{backend.target}: create_network returned None")
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
