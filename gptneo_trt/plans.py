"""Build plans in child processes and keep them: network inputs -> plan.

A plan's cache key is over everything that shapes it: weights, ranges of the projections that the
row quantizes, the row, phase, context, flavour, version, compute capabilities, the GPU where plans
depend on it, and the source of the modules that build networks.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors.numpy import save_file

from gptneo_trt.backend import Backend
from gptneo_trt.data import Checkpoint, Plan, Scales
from gptneo_trt.errors import BuildError
from gptneo_trt.network import activation_scales
from gptneo_trt.plan_worker import REFUSED
from gptneo_trt.variants import Variant
from gptneo_trt.whole_file import whole_file

MIB = 1 << 20
SOURCES = ("backend.py", "layers.py", "network.py", "plan_worker.py")
LAST_LINES = 12  # of a dead worker's output, enough to hold TensorRT's own last words


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
        capabilities: compute capabilities, for example ("8.9", "12.0"); empty for the default.
        gpu: name and driver of the GPU that will run the plan; "" when nothing will.
    """

    backend: Backend
    checkpoint: Checkpoint
    variant: Variant
    scales: Scales | None
    phase: str
    context: int
    capabilities: tuple[str, ...] = ()
    gpu: str = ""

    @property
    def title(self) -> str:
        """Return what an error message calls it."""
        return f"variant {self.variant.name}, {self.phase}, {self.backend.target}"


def plan_key(request: PlanRequest) -> str:
    """Return the SHA-256 over everything that shapes the plan."""
    identity = _job(request) | {"sources": _sources_sha256()}
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _sources_sha256() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _job(request: PlanRequest) -> dict[str, Any]:
    """Return the part of the worker's job that shapes the plan."""
    checkpoint, variant = request.checkpoint, request.variant
    used = activation_scales(variant, request.scales, checkpoint.architecture.num_layers)
    known: Mapping[str, float] = request.scales.activation_amax if request.scales else {}
    row = {
        name: value for name, value in asdict(variant).items() if name not in ("name", "summary")
    }
    return {
        "flavour": request.backend.flavour,
        "version": request.backend.version,
        "capabilities": list(request.capabilities),
        "gpu": request.gpu if request.backend.builds_for_gpu_at_hand else "",
        "architecture": asdict(checkpoint.architecture),
        "checkpoint_sha256": checkpoint.sha256,
        "variant": row,
        "activation_amax": {module: float(known[module]) for module in sorted(used)},
        "phase": request.phase,
        "context": request.context,
    }


def build_plan(request: PlanRequest, cache: Path, timeout_s: float = 300.0) -> Plan:
    """Return the plan of a request, from the cache or built in a child process.

    Args:
        request: what to build.
        cache: folder of plans; made when absent. Two processes may share it.
        timeout_s: after which the child is killed.

    Raises:
        BuildError: the builder refused, crashed or hung; the message has TensorRT's own lines.
        CalibrationError: a range is missing.
    """
    folder = cache / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    key = plan_key(request)
    plan_path = folder / f"{key}.plan"
    try:
        with FileLock(folder / f"{key}.lock", timeout=2 * timeout_s):
            found = _stored_plan(plan_path, cached=True)
            found = found or _build(request, cache, plan_path, timeout_s)
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


def _stored_plan(plan_path: Path, cached: bool) -> Plan | None:
    """Return the plan if it is whole and is what its side-car says; None otherwise."""
    try:
        record = json.loads(plan_path.with_suffix(".json").read_text(encoding="utf-8"))
        digest = hashlib.sha256(plan_path.read_bytes()).hexdigest()
        if digest != record["sha256"]:
            return None
        size, log = plan_path.stat().st_size / MIB, tuple(record["log"])
        return Plan(plan_path, size, record["build_s"], cached, log, sha256=digest)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _stored_weights(checkpoint: Checkpoint, cache: Path) -> Path:
    """Return a safetensors file of the checkpoint's weights, written once for the workers."""
    folder = cache / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{checkpoint.sha256}.safetensors"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with whole_file(path) as temporary:
                save_file(dict(checkpoint.weights), temporary)
    return path


def _build(request: PlanRequest, cache: Path, plan_path: Path, timeout_s: float) -> Plan:
    side_car = plan_path.with_suffix(".json")
    _clear(plan_path)
    variant = _job(request)["variant"] | {"name": request.variant.name, "summary": ""}
    job = _job(request) | {
        "variant": variant,
        "checkpoint": request.checkpoint.name,
        "weights": str(_stored_weights(request.checkpoint, cache)),
        "plan": str(plan_path),
        "side_car": str(side_car),
        "runs_on": request.gpu,
        "kernels": str(_kernels(plan_path, request) or ""),
    }
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", "gptneo_trt.plan_worker", str(job_file)]
        try:
            _run_worker(request, command, Path(folder), timeout_s)
        except BuildError:
            _clear(plan_path)
            raise
    plan = _stored_plan(plan_path, cached=False)
    if plan is None:
        raise BuildError(f"{request.title}: the worker ended well but {plan_path} is not whole")
    return plan


def _clear(plan_path: Path) -> None:
    """Remove plan, side-car and what a worker that was killed was still writing."""
    for path in plan_path.parent.glob(f"{plan_path.stem}.*"):
        if path.suffix != ".lock":
            path.unlink(missing_ok=True)


def _run_worker(
    request: PlanRequest, command: Sequence[str], folder: Path, timeout_s: float
) -> None:
    """Run the child; turn every way in which it can end badly into a BuildError."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    output, errors = folder / "stdout", folder / "stderr"
    with output.open("wb") as out, errors.open("wb") as err:
        worker = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            status = worker.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    if status == 0:
        return
    said = errors.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    if status == REFUSED:
        # The last line: native code may have written to standard output before.
        refusal = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
        raise BuildError(f"{request.title}: {refusal['error']}", tuple(refusal["log"]))
    if status is None:
        reason = f"the builder hung and was killed after {timeout_s:g} s"
    elif status < 0:
        reason = f"the builder died of {signal.Signals(-status).name}"
    else:
        reason = f"the builder ended with status {status}"
    raise BuildError(f"{request.title}: {reason}", tuple(said))
