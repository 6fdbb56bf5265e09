"""The child process that builds one plan: ``python -m gptneo_trt.plan_worker JOB.json``.

TensorRT runs in here so that a crash, a hang or a refusal costs one plan. The job names its
inputs and where the plan goes; the plan appears only whole, beside a side-car that says what it
is. TensorRT's log lines go to standard error as they come, so that the parent has them even
when this process dies. Where a GPU will run the plan, its kernels are compiled here too, in
parallel to other plans; whether it loads is for the process that runs it to say.
"""

import hashlib
import json
import sys
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from gptneo_trt.backend import Backend, backend_named, create_config
from gptneo_trt.data import Architecture, Checkpoint, Scales
from gptneo_trt.errors import BuildError, GptNeoTrtError, RunError
from gptneo_trt.network import Network, build_network
from gptneo_trt.runtime import load
from gptneo_trt.variants import Variant
from gptneo_trt.whole_file import whole_file

REFUSED = 3  # exit status of an error that has a message on standard output


def build(job: dict[str, Any]) -> dict[str, Any]:
    """Build the plan that a job asks for; return what the side-car holds.

    Raises:
        GptNeoTrtError: the network or TensorRT refused.
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
        raise BuildError(f"{backend.target}: build_serialized_network returned None", lines)
    plan = bytes(serialized)
    record = {
        "flavour": backend.flavour,
        "version": backend.version,
        "capabilities": job["capabilities"],
        "gpu": job["runs_on"],
        "bytes": len(plan),
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


def _network_of(job: dict[str, Any], backend: Backend) -> Network:
    shape = job["architecture"] | {
        "attention_layers": tuple(job["architecture"]["attention_layers"])
    }
    checkpoint = Checkpoint(
        name=job["checkpoint"],
        revision="",
        architecture=Architecture(**shape),
        weights=load_file(job["weights"]),
        sha256=job["checkpoint_sha256"],
    )
    known = {field.name for field in fields(Variant)}
    variant = Variant(**{name: value for name, value in job["variant"].items() if name in known})
    amax = job["activation_amax"]
    scales = Scales(amax, "max", checkpoint.sha256, "", 0, "") if amax else None
    return build_network(backend, checkpoint, variant, scales, job["phase"], job["context"])


def _add_profile(network: Network, config: Any) -> None:
    """Declare T from 1 to the context, tuned for the context."""
    profile = network.builder.create_optimization_profile()
    for name in ("token_ids", "position_ids"):
        profile.set_shape(name, (1, 1), (1, network.context), (1, network.context))
    if config.add_optimization_profile(profile) < 0:
        raise BuildError("prefill: the optimization profile was refused", tuple(network.log.lines))


def main(arguments: list[str]) -> int:
    """Build one job; write the side-car last, so that it vouches for the plan beside it."""
    job_file = Path(arguments[0])
    job = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        record = build(job)
    except GptNeoTrtError as error:
        lines, message = getattr(error, "log", ()), getattr(error, "message", str(error))
        print(json.dumps({"error": message, "log": lines}))
        return REFUSED
    side_car = json.dumps(record | {"plan": Path(job["plan"]).name}, indent=1, sort_keys=True)
    with whole_file(Path(job["side_car"])) as temporary:
        temporary.write_text(side_car, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
