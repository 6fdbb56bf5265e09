"""Build plans in child processes and keep them: network inputs -> plan.

A plan's cache key is over everything that shapes it: weights, ranges of the projections that the
row quantizes, the row, phase, context, batch, flavour, version, compute capabilities, the GPU where
plans depend on it, and the source of the modules that build networks. A plan that is there is used
when it is byte by byte what its side-car says, and the side-car names this very plan, TensorRT and
GPU.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from gptneo_trt.backend import Backend
from gptneo_trt.child_process import ending, environment
from gptneo_trt.data import Checkpoint, Plan, Scales
from gptneo_trt.errors import BuildError, CrashError, GptNeoTrtError
from gptneo_trt.json_file import object_from_file
from gptneo_trt.network import activation_scales, smoothing_factors
from gptneo_trt.plan_worker import EXHAUSTED, REFUSED
from gptneo_trt.variant import Variant
from gptneo_trt.whole_file import remove_abandoned, write_tensors, writer_lock

MIB = 1 << 20
FOLDER = Path(__file__).parent
SOURCES = (
    "backend.py", "blocks.py", "data.py", "layers.py", "masks.py", "network.py", "nvfp4.py",
    "plan_worker.py", "smoothing.py", "variant.py",
)  # fmt: skip
# Number format -> what its plans are built for where no GPU runs them: the default may be older.
ABSENT_GPU = {"nvfp4": ("12.0",)}
# A builder that takes longer than this, and this much for every 2 ** 30 parameters, hangs.
TIMEOUT_S, TIMEOUT_S_A_GIGA = 300.0, 300.0
LAST_LINES = 12  # of a dead worker's output, enough to hold TensorRT's own last words
REMEDY = "build it again"
# Of the pipes of a worker whose own child outlives it.
DRAIN_S = 5.0


@dataclass(frozen=True)
class PlanRequest:
    """Say what to build.

    Attributes:
        backend: the TensorRT flavour.
        checkpoint: weights and shapes.
        variant: the row.
        scales: calibrated ranges, or None for a row that quantizes nothing.
        phase: "prefill" or "decode".
        context: cache rows in decode, largest T in prefill.
        capabilities: compute capabilities, for example ("8.9", "12.0"); empty for the default of
            the row, see ``built_for``.
        gpu: name and driver of the GPU that will run the plan; "" when nothing will.
        batch: texts that go through it together.
    """

    backend: Backend
    checkpoint: Checkpoint
    variant: Variant
    scales: Scales | None
    phase: str
    context: int
    capabilities: tuple[str, ...] = ()
    gpu: str = ""
    batch: int = 1

    @property
    def title(self) -> str:
        """Return what an error message calls it: row, phase, TensorRT, precision and GPU."""
        row, number_format = self.variant.name, self.variant.number_format
        gpu = self.gpu or "no GPU"
        return f"variant {row}, {self.phase}, {self.backend.target}, {number_format}, {gpu}"

    @property
    def built_for(self) -> tuple[str, ...]:
        """Return the compute capabilities that are asked for; empty for TensorRT's default."""
        if self.capabilities or self.gpu or self.backend.builds_for_gpu_at_hand:
            return self.capabilities
        return ABSENT_GPU.get(self.variant.number_format, ())

    @property
    def bound_to(self) -> str:
        """Return the GPU where a plan is for no other; "" where it is for any."""
        return self.gpu if self.backend.builds_for_gpu_at_hand else ""


def plan_key(request: PlanRequest) -> str:
    """Return the SHA-256 over everything that shapes the plan."""
    identity = _job(request) | {"sources": _sources_sha256()}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _sources_sha256() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()


def _job(request: PlanRequest) -> dict[str, Any]:
    """Return the part of the worker's job that shapes the plan."""
    checkpoint, variant = request.checkpoint, request.variant
    method, scales = variant.calibration_method, request.scales
    used = activation_scales(variant, scales, checkpoint.architecture.num_layers)
    known: Mapping[str, float] = scales.ranges(method) if scales else {}
    row = {
        name: value for name, value in asdict(variant).items() if name not in ("name", "summary")
    }
    return {
        "flavour": request.backend.flavour,
        "version": request.backend.version,
        "capabilities": list(request.built_for),
        "gpu": request.bound_to,
        "architecture": asdict(checkpoint.architecture),
        "checkpoint_sha256": checkpoint.sha256,
        "variant": row,
        "activation_amax": {module: float(known[module]) for module in sorted(used)},
        "smoothing": dict(smoothing_factors(variant, scales)),
        "phase": request.phase,
        "context": request.context,
        "batch": request.batch,
    }


def build_plan(request: PlanRequest, cache: Path, timeout_s: float | None = None) -> Plan:
    """Return the plan of a request, from the cache or built in a child process.

    Args:
        request: what to build.
        cache: folder of plans; made when absent. Two processes may share it.
        timeout_s: after which the child is killed; by default what the checkpoint's size allows.

    Raises:
        BuildError: the builder refused; the message has TensorRT's own lines. Or another process
            has held the plan's lock for too long.
        CrashError: the builder died, hung, or ran out of memory or disk; with its last lines.
        CalibrationError: a range is missing.
        StorageError: the cache cannot be written.
    """
    if timeout_s is None:
        timeout_s = TIMEOUT_S + TIMEOUT_S_A_GIGA * request.checkpoint.parameters / 2**30
    key = plan_key(request)
    plan_path = cache / "plans" / f"{key}.plan"
    try:
        with writer_lock(plan_path, timeout_s=2 * timeout_s):
            found, why = _stored_plan(plan_path, request)
            if found is None:
                found = _build(request, cache, plan_path, timeout_s)
                found = replace(found, log=(*why, *found.log))
            return replace(found, kernels=_kernels(plan_path, request))
    except Timeout as error:
        raise BuildError(
            f"{request.title}: another process has held {error.lock_file} for {2 * timeout_s} s; "
            "end it, or use another cache folder"
        ) from error


def _kernels(plan_path: Path, request: PlanRequest) -> Path | None:
    """Return where the kernels of a plan are kept for the request's GPU."""
    if not request.gpu:
        return None
    gpu = hashlib.sha256(request.gpu.encode()).hexdigest()[:12]
    return plan_path.with_suffix(f".{gpu}.kernels")


def _stored_plan(plan_path: Path, request: PlanRequest) -> tuple[Plan | None, tuple[str, ...]]:
    """Return the plan if it may be used; else None and, unless there is none, a line why not."""
    side_car = plan_path.with_suffix(".json")
    if not plan_path.exists() and not side_car.exists():
        return None, ()
    try:
        record = object_from_file(side_car, BuildError, REMEDY)
        with plan_path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell() / MIB
        wrong = _differences(record, _identity(plan_path, request) | {"sha256": digest})
        log, build_s = record["log"], record["build_s"]
        if type(log) is not list or {*map(type, log)} - {str} or type(build_s) is not float:
            wrong.append(f"its side-car says log {log!r}, build_s {build_s!r}")
    except (BuildError, KeyError, OSError, TypeError, ValueError) as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        return None, (f"[WARNING] {plan_path.name} is not used but built again: {wrong[0]}",)
    return Plan(plan_path, size, build_s, cached=True, log=tuple(log), sha256=digest), ()


def _identity(plan_path: Path, request: PlanRequest) -> dict[str, Any]:
    """Return what the side-car of this very plan says."""
    identity = {
        "plan": plan_path.name,
        "flavour": request.backend.flavour,
        "version": request.backend.version,
        "capabilities": list(request.built_for),
    }
    return identity | ({"gpu": request.gpu} if request.bound_to else {})


def _differences(record: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return one line with all that a side-car says otherwise; none where it says the same."""
    other = [name for name in expected if record.get(name) != expected[name]]
    if not other:
        return []
    found = ", ".join(f"{name} {record.get(name)!r}" for name in other)
    wanted = ", ".join(f"{name} {expected[name]!r}" for name in other)
    return [f"its side-car says {found}; this run needs {wanted}"]


def _stored_weights(checkpoint: Checkpoint, cache: Path) -> Path:
    """Return a safetensors file of the checkpoint's weights, written once for the workers."""
    path = cache / "weights" / f"{checkpoint.sha256}.safetensors"
    with writer_lock(path):
        if not path.exists():
            write_tensors(path, checkpoint.weights)
    return path


def _build(request: PlanRequest, cache: Path, plan_path: Path, timeout_s: float) -> Plan:
    _clear(plan_path)
    shaping = _job(request)
    job = shaping | {
        "variant": shaping["variant"] | {"name": request.variant.name, "summary": ""},
        "checkpoint": request.checkpoint.name,
        "weights": str(_stored_weights(request.checkpoint, cache)),
        "plan": str(plan_path),
        "side_car": str(plan_path.with_suffix(".json")),
        "kernels": str(_kernels(plan_path, request) or ""),
        "runs_on": request.gpu,
        "parent": os.getpid(),
    }
    command = [sys.executable, "-m", "gptneo_trt.plan_worker"]
    try:
        _run_worker(request, command, job, timeout_s)
    except GptNeoTrtError:
        _clear(plan_path)
        raise
    plan, why = _stored_plan(plan_path, request)
    if plan is None:
        raise CrashError(
            f"{request.title}: the worker ended well but {plan_path} is not whole", why
        )
    return replace(plan, cached=False)


def _clear(plan_path: Path) -> None:
    """Remove plan, side-car and what a worker that was killed was still writing."""
    remove_abandoned(plan_path.parent)
    for path in plan_path.parent.glob(f"{plan_path.stem}.*"):
        if path.suffix != ".lock":
            path.unlink(missing_ok=True)


def _run_worker(
    request: PlanRequest, command: Sequence[str], job: Mapping[str, Any], timeout_s: float
) -> None:
    """Run the child; turn every way in which it can end badly into an error."""
    started = time.monotonic()
    worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
    )
    try:
        worker.communicate(json.dumps(job).encode(), timeout_s)
    except subprocess.TimeoutExpired:
        pass  # what it said so far is kept
    finally:
        status, seconds = worker.poll(), time.monotonic() - started
        output, errors = _end(worker)
    if status != 0:
        raise _error(request, status, seconds, (output, errors))


def _end(worker: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Kill a worker and all that it started; return its output and its errors."""
    with suppress(ProcessLookupError):  # they are gone already
        os.killpg(worker.pid, signal.SIGKILL)
    try:
        said = worker.communicate(timeout=DRAIN_S)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"", error.stderr or b"")
    output, errors = (each.decode(errors="replace") for each in said)
    return output, errors


def _error(
    request: PlanRequest, status: int | None, seconds: float, said: tuple[str, str]
) -> BuildError | CrashError:
    """Return the error of a worker that ended so, or did not, with its output and errors."""
    output, errors = (each.splitlines() for each in said)
    told = _told(output) if status in (REFUSED, EXHAUSTED) else None
    if told and status == REFUSED:
        log = told["log"] or errors[-LAST_LINES:]  # TensorRT's lines, as they came
        return BuildError(f"{request.title}: {told['error']}", tuple(log))
    how = f"gave up after {seconds:.1f} s: {told['error']}" if told else ending(status, seconds)
    return CrashError(f"{request.title}: the builder {how}", tuple(errors[-LAST_LINES:]))


def _told(output: Sequence[str]) -> dict[str, Any] | None:
    """Return what a worker has told, in its last line; None where it has told nothing.

    Native code may have written to standard output before, and may exit with any status.
    """
    try:
        told = json.loads(output[-1])
        return {"error": str(told["error"]), "log": [str(line) for line in told["log"]]}
    except (IndexError, KeyError, TypeError, ValueError):
        return None
