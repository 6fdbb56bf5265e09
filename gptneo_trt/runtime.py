"""Load a plan on the GPU at hand: plan -> ``ICudaEngine`` and ``IExecutionContext``; and read back
what the engine really computes in FP8.

Kernels that TensorRT-RTX compiles, while it loads and at the first run of a length, are kept in
a file beside the plan, one a GPU and driver. A file that TensorRT does not accept is compiled
anew and replaced.
"""

import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptneo_trt.backend import (
    Backend,
    Log,
    create_context,
    create_runtime,
    kernels_of,
    log_collector,
    refuse_none,
)
from gptneo_trt.errors import RunError
from gptneo_trt.json_file import object_from_file
from gptneo_trt.whole_file import whole_file

DIGEST_BYTES = 32  # in front of the kernels in their file: their SHA-256
ANEW = "they are compiled anew, and the file replaced"
MODULE = re.compile(r"transformer\.h\.\d+\.(?:attn\.attention|mlp)\.\w+_(?:proj|fc)|\blm_head")


@dataclass(frozen=True)
class Loaded:
    """Hold an engine and everything that must live as long as it.

    Attributes:
        runtime: the ``IRuntime``.
        engine: the ``ICudaEngine``.
        context: its ``IExecutionContext``, with all kernels compiled.
        log: TensorRT's warnings and errors since loading began.
        load_s: seconds from file to context.
        cache: the ``IRuntimeCache`` that kernels are compiled into; None where there is none.
        kernels: file that its content is kept in; None keeps none.
    """

    runtime: Any
    engine: Any
    context: Any
    log: Log
    load_s: float
    cache: Any = None
    kernels: Path | None = None

    def keep_kernels(self) -> None:
        """Write the kernels compiled so far where the file has fewer or more bytes of them."""
        if self.cache is None or self.kernels is None:
            return
        content = kernels_of(self.cache)
        if content is None:
            return
        size = len(content) + DIGEST_BYTES
        if not self.kernels.exists() or size != self.kernels.stat().st_size:
            _write(self.kernels, content)


def load(backend: Backend, plan: Path, kernels: Path | None = None) -> Loaded:
    """Load a plan.

    Args:
        backend: the flavour.
        plan: the serialized engine; its side-car names what built it.
        kernels: file of compiled kernels, read if it is there, written where there are others; None
            keeps none.

    Raises:
        RunError: there is no such plan, or TensorRT refuses it; the message has the version that
            built it, the version at hand and TensorRT's own lines.
    """
    started = time.perf_counter()
    log = log_collector(backend.trt)
    try:
        content = plan.read_bytes()
    except OSError as error:
        raise RunError(f"plan {plan.name} cannot be read: {error}; build it again") from error
    runtime = create_runtime(backend, log)
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise RunError(_refused(backend, plan, "deserialize_cuda_engine", log))
    known = _kept_kernels(kernels, log) if kernels else None
    context, cache, taken = create_context(backend, engine, known)
    if context is None:
        raise RunError(_refused(backend, plan, "create_execution_context", log))
    load_s = time.perf_counter() - started
    if kernels and cache is not None and not taken:
        if known is not None:
            log.add(f"[WARNING] {kernels.name}: TensorRT refused these kernels; {ANEW}")
        compiled = kernels_of(cache)
        if compiled is not None:
            _write(kernels, compiled)
    return Loaded(runtime, engine, context, log, load_s, cache, kernels)


def _write(kernels: Path, content: bytes) -> None:
    with whole_file(kernels) as temporary:
        temporary.write_bytes(hashlib.sha256(content).digest() + content)


def _kept_kernels(kernels: Path, log: Log) -> bytes | None:
    """Return the kernels in a file; None where there are none that ``_write`` wrote.

    TensorRT is not asked whether other bytes are kernels: native code reads them.
    """
    if not kernels.exists():
        return None
    content = kernels.read_bytes()
    digest, known = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if hashlib.sha256(known).digest() == digest:
        return known
    log.add(f"[WARNING] {kernels.name}: not kernels as they were written; {ANEW}")
    return None


def _refused(backend: Backend, plan: Path, call: str, log: Log) -> str:
    """Return what to say of a plan that TensorRT does not load."""
    lines = "".join(f"\n  TensorRT: {line}" for line in log.lines)
    return (
        f"plan {plan.name}, built by {_builder(plan)}: {call} of {backend.target} returned None; "
        f"build it again with the TensorRT and for the GPU that run it{lines}"
    )


def _builder(plan: Path) -> str:
    """Return the flavour, version and GPU that a plan's side-car names."""
    try:
        record = object_from_file(plan.with_suffix(".json"), RunError, "build it again")
        built_by = f"{record['flavour']}-{record['version']}"
        return f"{built_by} for {record['gpu']}" if record["gpu"] else built_by
    except (RunError, KeyError):
        return "an unknown TensorRT (no readable side-car)"


def quantized_modules(backend: Backend, loaded: Loaded, number_format: str) -> tuple[str, ...]:
    """Return the modules that an engine multiplies in "fp8" or "int8", sorted, by its inspector.

    A layer counts when it reads both a tensor and a constant of that format. TensorRT names a
    product after the network's layer, and a fused one after all of them: ``q_proj+k_proj``.

    Raises:
        RunError: a layer multiplies in it and names no module, or the engine tells nothing.
    """
    inspector = loaded.engine.create_engine_inspector()
    refuse_none(backend, "create_engine_inspector", inspector, RunError)
    information = inspector.get_engine_information(backend.trt.LayerInformationFormat.JSON)
    refuse_none(backend, "get_engine_information", information, RunError)
    return quantized_modules_of(json.loads(information), number_format)


def quantized_modules_of(information: dict[str, Any], number_format: str) -> tuple[str, ...]:
    """Return what an inspector's JSON shows in a format, sorted; see ``quantized_modules``."""
    layers = information.get("Layers", [])
    if not layers or not all(isinstance(layer, dict) for layer in layers):
        raise RunError(
            f"engine inspector: obtained {len(layers)} layers without types, expected layers with "
            "their tensors; build with detailed profiling verbosity"
        )
    found: set[str] = set()
    unnamed = []
    for layer in layers:
        read = (layer.get("Inputs", []), layer.get("Constants", []))
        if not all(_any_in(tensors, number_format) for tensors in read):
            continue
        named = set(MODULE.findall(layer["Name"])) or {
            name for each in layer["Constants"] for name in MODULE.findall(each["Name"])
        }
        found |= named
        if not named:
            unnamed.append(layer["Name"])
    if unnamed:
        told = f"{number_format.upper()} layers that name no projection: {sorted(unnamed)}"
        raise RunError(f"engine inspector: {told}")
    return tuple(sorted(found))


def _any_in(tensors: list[dict[str, Any]], number_format: str) -> bool:
    """Return whether one of a layer's tensors is in a format; its key differs between versions."""
    types = (each.get("Datatype") or each.get("Format/Datatype") or "" for each in tensors)
    return any(number_format in str(each).lower() for each in types)
