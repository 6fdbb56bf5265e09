"""The child process that builds one plan: ``python -m gptneo_trt.plan_worker < JOB``.

TensorRT runs in here so that a crash, a hang or a refusal costs one plan. The job, in JSON, names
its inputs and where the plan goes; the plan appears only whole, beside a side-car that says what it
is. TensorRT's log lines go to standard error as they come, so that the parent has them even
when this process dies. Where a GPU will run the plan, its kernels are compiled here too, in
parallel to other plans; whether it loads is for the process that runs it to say.
"""

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from gptneo_trt.backend import Backend, backend_named, create_config, refuse_none
from gptneo_trt.child_process import die_with
from gptneo_trt.data import Architecture, Checkpoint, Scales, weights_sha256
from gptneo_trt.errors import BuildError, CheckpointError, GptNeoTrtError, RunError, StorageError
from gptneo_trt.network import Network, build_network
from gptneo_trt.runtime import load
from gptneo_trt.stored_tensors import arrays_in_file, tensors_in_file
from gptneo_trt.variant import Variant
from gptneo_trt.whole_file import whole_file

# Exit status of an error that has a message on standard output: of network or TensorRT; of memory
# or disk.
REFUSED, EXHAUSTED = 3, 4
# TensorRT's words for it, in lower case; the last where a thread finds no room for its stack.
NO_MEMORY = ("bad_alloc", "out of memory", "resource temporarily unavailable")
SPARE_BYTES = 64 * 2**20  # whoever has less left when TensorRT fails has run out


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Build the plan that a job asks for; return what the side-car holds.

    Raises:
        GptNeoTrtError: the network or TensorRT refused, or a file cannot be written.
        MemoryError: there is not enough.
    """
    backend = backend_named(job["flavour"])
    if backend.version != job["version"]:
        raise BuildError(
            f"{backend.flavour}: version {backend.version} is installed, the job asks for "
            f"{job['version']}; build again"
        )
    started = time.perf_counter()
    network = _network_of(job, backend)
    network.log.echo = sys.stderr
    config = create_config(backend, network.builder, job["capabilities"])
    if network.phase == "prefill":
        _add_profile(network, config)
    serialized = network.builder.build_serialized_network(network.definition, config)
    lines = tuple(network.log.lines)
    if serialized is None:
        what = f"{backend.target}: build_serialized_network returned None"
        if _is_out_of_memory(lines):
            raise MemoryError(what)
        raise BuildError(what, lines)
    plan = memoryview(serialized)  # no copy: it may be gigabytes
    record = {
        "flavour": backend.flavour,
        "version": backend.version,
        "capabilities": job["capabilities"],
        "gpu": job["runs_on"],
        "bytes": plan.nbytes,
        "sha256": hashlib.sha256(plan).hexdigest(),
        "build_s": round(time.perf_counter() - started, 3),
        "log": lines,
    }
    with whole_file(Path(job["plan"])) as temporary:
        temporary.write_bytes(plan)
    if job["kernels"]:
        with suppress(RunError):
            load(backend, Path(job["plan"]), Path(job["kernels"]))
    return record


def _is_out_of_memory(lines: Sequence[str]) -> bool:
    """Return whether a build failed for want of memory, by TensorRT's words or by what is left."""
    if any(words in line.lower() for line in lines for words in NO_MEMORY):
        return True
    try:
        bytearray(SPARE_BYTES)
    except MemoryError:
        return True
    return False


def _network_of(job: dict[str, Any], backend: Backend) -> Network:
    shape = job["architecture"] | {
        "attention_layers": tuple(job["architecture"]["attention_layers"])
    }
    architecture = Architecture(**shape)
    checkpoint = Checkpoint(
        name=job["checkpoint"],
        revision="",
        architecture=architecture,
        weights=_weights(job, architecture),
        sha256=job["checkpoint_sha256"],
    )
    known = {field.name for field in fields(Variant)}
    variant = Variant(**{name: value for name, value in job["variant"].items() if name in known})
    amax, method = job["activation_amax"], variant.calibration_method
    smoothing = {variant.smoothing: job["smoothing"]} if variant.smoothing else {}
    scales = None
    if variant.reads_scales:
        scales = Scales(amax, method, checkpoint.sha256, "", 0, "", smoothing=smoothing)
    sizes = job["context"], job["batch"]
    return build_network(backend, checkpoint, variant, scales, job["phase"], *sizes)


def _weights(job: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the weights in a job's file, and remove it where they are not the checkpoint's.

    Raises:
        CheckpointError: they differ in any bit, or cannot be read.
    """
    file, remedy = Path(job["weights"]), "it is removed, run again"
    try:
        weights = arrays_in_file(file, tensors_in_file(file, remedy), remedy)
        obtained = weights_sha256(architecture, weights)
        if obtained != job["checkpoint_sha256"]:
            expected = f"expected the checkpoint {job['checkpoint_sha256']}"
            raise CheckpointError(f"{file}: obtained {obtained}, {expected}; {remedy}")
    except CheckpointError:
        file.unlink(missing_ok=True)
        raise
    return weights


def _add_profile(network: Network, config: Any) -> None:
    """Declare T from 1 to the context, tuned for the context; the batch is fixed."""
    profile = network.builder.create_optimization_profile()
    refuse_none(network.backend, "create_optimization_profile", profile)
    shortest, longest = (network.batch, 1), (network.batch, network.context)
    for name in ("token_ids", "position_ids"):
        profile.set_shape(name, shortest, longest, longest)
    if config.add_optimization_profile(profile) < 0:
        raise BuildError("prefill: the optimization profile was refused", tuple(network.log.lines))


def main(command: str) -> int:
    """Build one job; write the side-car last, so that it vouches for the plan beside it."""
    job = json.loads(command)
    die_with(job["parent"])
    try:
        record = build(job) | {"plan": Path(job["plan"]).name}
        with whole_file(Path(job["side_car"])) as temporary:
            side_car = json.dumps(record, indent=1, sort_keys=True)
            temporary.write_text(side_car, encoding="utf-8")
    except (StorageError, MemoryError) as error:
        return _told(f"{type(error).__name__}: {error}", (), EXHAUSTED)
    except GptNeoTrtError as error:
        return _told(getattr(error, "message", str(error)), getattr(error, "log", ()), REFUSED)
    return 0


def _told(message: str, log: tuple[str, ...], status: int) -> int:
    """Print what failed for the parent, and return the exit status."""
    print(json.dumps({"error": message, "log": log}))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.stdin.read()))
