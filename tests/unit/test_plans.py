"""Plans: built in a child process, kept by what shapes them, and never half there."""

import hashlib
import json
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save
from sources import imported_modules
from tiny import T0, changed, fixed_scales

from gptneo_trt import network, plan_worker, plans
from gptneo_trt.data import Plan
from gptneo_trt.errors import BuildError, CalibrationError, CrashError
from gptneo_trt.plans import PlanRequest, build_plan, plan_key
from gptneo_trt.variant import Variant
from gptneo_trt.variants import VARIANTS


@pytest.fixture(scope="module")
def request_of(backend, t0):
    """Return a function that makes a request of T0: the FP8 recipe in decode, and changes."""

    def make(**changes):
        made = PlanRequest(backend, t0, VARIANTS["fp8"], fixed_scales(t0), "decode", 8)
        return replace(with_other_ranges(made, 4.0), **changes)

    return make


@pytest.fixture(scope="module")
def built(request_of, tmp_path_factory):
    """Return a folder with one plan in it, its request and the plan."""
    cache = tmp_path_factory.mktemp("cache")
    request = request_of()
    plan = build_plan(request, cache)
    return SimpleNamespace(cache=cache, request=request, plan=plan, bytes=plan.path.read_bytes())


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Return a function that puts a Python script in the worker's place."""

    def install(*lines):
        script = tmp_path / "worker.py"
        script.write_text("\n".join(("import json, os, pathlib, signal, sys, time", *lines)))
        command = tmp_path / "python"
        command.write_text(f'#!/bin/sh\nexec "{real}" -S -E "{script}" "$@"\n')
        command.chmod(0o755)
        monkeypatch.setattr(plans.sys, "executable", str(command))

    real = sys.executable
    return install


def left_over(cache):
    """Return the files of a cache folder that are neither locks nor the stored weights."""
    names = [path.relative_to(cache) for path in cache.rglob("*") if path.is_file()]
    return sorted(str(n) for n in names if n.suffix != ".lock" and n.parts[0] != "weights")


def test_plan_is_built_once(built):
    """The first call builds, the second takes the same file as it is."""
    again = build_plan(built.request, built.cache)
    assert (built.plan.cached, again.cached) == (False, True)
    assert again == replace(built.plan, cached=True)
    assert again.path.read_bytes() == built.bytes
    assert built.plan.plan_mib == len(built.bytes) / 2**20
    assert built.plan.build_s > 0


def test_plan_is_what_tensorrt_reads(backend, built):
    """The file is a serialized engine, and its side-car says of which version and what bytes."""
    record = json.loads(built.plan.path.with_suffix(".json").read_text())
    assert record["sha256"] == hashlib.sha256(built.bytes).hexdigest() == built.plan.sha256
    assert (record["flavour"], record["version"]) == (backend.flavour, backend.version)
    assert (record["bytes"], record["plan"]) == (len(built.bytes), built.plan.path.name)
    assert built.plan.path.name == f"{plan_key(built.request)}.plan"


def test_plan_is_there_only_whole(built):
    """Beside plan and side-car no temporary file is left."""
    key = plan_key(built.request)
    assert left_over(built.cache) == [f"plans/{key}.json", f"plans/{key}.plan"]


def test_prefill_and_capabilities_build(built, request_of):
    """A prefill plan for two compute capabilities builds, without a GPU."""
    request = request_of(phase="prefill", capabilities=("8.9", "12.0"))
    plan = build_plan(request, built.cache)
    record = json.loads(plan.path.with_suffix(".json").read_text())
    assert record["capabilities"] == ["8.9", "12.0"]
    assert plan.path.read_bytes() != built.bytes


def with_range(request, module, amax):
    """Return the request with one range replaced."""
    ranges = {**request.scales.activation_amax, module: amax}
    return replace(request, scales=replace(request.scales, activation_amax=ranges))


def with_architecture(request, **fields):
    """Return the request with fields of its architecture replaced."""
    other = replace(request.checkpoint.architecture, **fields)
    return replace(request, checkpoint=replace(request.checkpoint, architecture=other))


def with_row(request, **fields):
    """Return the request with fields of its row replaced."""
    return replace(request, variant=replace(request.variant, **fields))


def with_other_ranges(request, amax):
    """Return the request with ranges by another method, each the same."""
    other = {"percentile": dict.fromkeys(request.scales.activation_amax, amax)}
    return replace(request, scales=replace(request.scales, other_amax=other))


# What changes -> the changed request; the key must be another one.
OTHER_PLANS = {
    "a weight": lambda r: replace(
        r, checkpoint=changed(r.checkpoint, {"transformer.ln_f.bias": lambda bias: bias + 1})
    ),
    "the window": lambda r: with_architecture(r, window_size=5),
    "a range": lambda r: with_range(r, "transformer.h.1.mlp.c_fc", 8.5),
    "fewer projections": lambda r: with_row(r, quantized=("c_fc",)),
    "dequantize type": lambda r: with_row(r, dequantize_type="fp32"),
    "compute type": lambda r: with_row(r, compute_type="fp32"),
    "scale factor": lambda r: with_row(r, activation_scale_factor=1.5),
    "format": lambda r: with_row(r, quantized_format="int8"),
    "weight scales": lambda r: with_row(r, weight_scales="channel"),
    "weights alone": lambda r: with_row(r, quantized_activations=False),
    "calibration": lambda r: with_row(r, calibration="percentile"),
    "phase": lambda r: replace(r, phase="prefill"),
    "context": lambda r: replace(r, context=9),
    "batch": lambda r: replace(r, batch=2),
    "capabilities": lambda r: replace(r, capabilities=("8.9",)),
    "version": lambda r: replace(r, backend=replace(r.backend, version="1.5.0.114")),
    "flavour": lambda r: replace(r, backend=replace(r.backend, flavour="tensorrt")),
    "epsilon": lambda r: with_architecture(r, layer_norm_epsilon=1e-6),
    "activation": lambda r: with_architecture(r, activation="relu"),
    "a layer's kind": lambda r: with_architecture(r, attention_layers=("local", "global")),
}
# The same for what does not shape a plan: the key must be the same.
SAME_PLAN = {
    "row name": lambda r: with_row(r, name="fp8-again"),
    "summary": lambda r: with_row(r, summary="in other words"),
    "checkpoint name": lambda r: replace(r, checkpoint=replace(r.checkpoint, name="elsewhere")),
    "a range that the row does not use": lambda r: with_range(
        r, "transformer.h.1.attn.attention.out_proj", 3.0
    ),
    "ranges by a method that the row does not use": lambda r: with_other_ranges(r, 3.0),
    "calibration tokens": lambda r: replace(r, scales=replace(r.scales, tokens=999)),
}


@pytest.mark.parametrize("change", OTHER_PLANS.values(), ids=OTHER_PLANS)
def test_R06_what_shapes_a_plan_is_in_its_key(request_of, change):
    """Changing anything that shapes the plan asks for another file."""
    assert plan_key(change(request_of())) != plan_key(request_of())


def test_R06_a_plan_has_the_factors_of_its_row_s_smoothing(built, request_of):
    """They are in the key and reach the worker, which builds another plan of them."""
    request = with_row(request_of(), smoothing="smoothquant")
    ranges = {"smoothquant": request.scales.activation_amax}
    norms, width = request.scales.smoothing["smoothquant"], T0.hidden_size
    plans_of = []
    for factor in (1.0, 0.5):
        smoothing = {"smoothquant": dict.fromkeys(norms, (factor,) * width)}
        scales = replace(request.scales, other_amax=ranges, smoothing=smoothing)
        plans_of.append(build_plan(replace(request, scales=scales), built.cache))
    assert len({plan.path for plan in plans_of}) == len({plan.sha256 for plan in plans_of}) == 2


@pytest.mark.parametrize("kind", ["max", "percentile"])
def test_R06_a_plan_has_the_ranges_of_its_row_s_calibration(request_of, kind):
    """They are in the key and reach the worker; those of another method do neither."""
    request = with_row(request_of(), calibration=kind)
    amax = {"max": 8.0, "percentile": 4.0}[kind]
    assert set(plans._job(request)["activation_amax"].values()) == {amax}
    others = with_other_ranges(request, 5.0)
    assert (plan_key(others) == plan_key(request)) == (kind == "max")


def test_a_row_with_another_calibration_builds(request_of, tmp_path):
    """The worker takes the ranges for those of the row's method."""
    assert build_plan(with_row(request_of(), calibration="percentile"), tmp_path).plan_mib > 0


@pytest.mark.parametrize("change", SAME_PLAN.values(), ids=SAME_PLAN)
def test_R06_what_does_not_shape_a_plan_is_not(request_of, change):
    """Names, summaries and ranges of other projections do not ask for another file."""
    assert plan_key(change(request_of())) == plan_key(request_of())


@pytest.mark.parametrize("name", plans.SOURCES)
def test_R06_the_source_is_in_the_key(monkeypatch, request_of, tmp_path, name):
    """A cache from an older commit: another source of a module that shapes plans is another key."""
    before = plan_key(request_of())
    for source in plans.SOURCES:
        content = (plans.FOLDER / source).read_bytes()
        (tmp_path / source).write_bytes(content + (b"#" if source == name else b""))
    monkeypatch.setattr(plans, "FOLDER", tmp_path)
    assert plan_key(request_of()) != before


# What the worker imports and no plan depends on: how errors and side-cars read, how files and
# processes end, the reading of weights that are compared by hash, and the loading of a plan that
# is built.
SHAPELESS = {
    "__init__.py", "child_process.py", "errors.py", "json_file.py", "runtime.py",
    "stored_tensors.py", "whole_file.py",
}  # fmt: skip


def test_R06_every_module_that_shapes_plans_is_in_the_key():
    """Whatever the worker imports is in the key, or is named here as of no consequence."""
    assert imported_modules("plan_worker.py") - SHAPELESS == set(plans.SOURCES)


def flipped(content):
    """Return the bytes with one bit of the middle byte turned."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


# Damage to plan and side-car: (plan bytes -> bytes or None, side-car text -> text or None).
DAMAGE = {
    "half a plan": (lambda b: b[: len(b) // 2], lambda t: t),
    "an empty plan": (lambda b: b"", lambda t: t),
    "first bytes": (lambda b: bytes(16) + b[16:], lambda t: t),
    "one bit": (flipped, lambda t: t),
    "no plan": (lambda b: None, lambda t: t),
    "no side-car": (lambda b: b, lambda t: None),
    "an empty side-car": (lambda b: b, lambda t: ""),
    "half a side-car": (lambda b: b, lambda t: t[: len(t) // 2]),
    "a side-car of something else": (lambda b: b, lambda t: "[1, 2]"),
    "a side-car without a hash": (lambda b: b, lambda t: t.replace('"sha256"', '"sha"')),
}


def stored(folder, built, plan_change=lambda b: b, text_change=lambda t: t, request=None):
    """Return what is found of a copy of the built plan, changed; and the lines that say why."""
    text = built.plan.path.with_suffix(".json").read_text()
    plan = folder / built.plan.path.name
    for suffix, content in ((".plan", plan_change(built.bytes)), (".json", text_change(text))):
        if content is not None:
            data = content if isinstance(content, bytes) else content.encode()
            plan.with_suffix(suffix).write_bytes(data)
    return plans._stored_plan(plan, request or built.request)


@pytest.mark.parametrize(("plan_change", "text_change"), DAMAGE.values(), ids=DAMAGE)
def test_R06_damaged_plans_are_not_used(tmp_path, built, plan_change, text_change):
    """A plan that is not byte by byte what its side-car says is named, and as good as absent."""
    found, (why,) = stored(tmp_path, built, plan_change, text_change)
    assert found is None
    assert why.startswith(f"[WARNING] {built.plan.path.name} is not used but built again: ")


def test_R06_whole_plans_are_used(tmp_path, built):
    """The copy that is not damaged is used: the check above can fail."""
    found, why = stored(tmp_path, built)
    assert (found.cached, found.sha256, why) == (True, built.plan.sha256, ())


def test_R06_no_plan_at_all_is_nothing_to_warn_of(tmp_path, built):
    """A first build says nothing of a plan that never was."""
    assert plans._stored_plan(tmp_path / "x.plan", built.request) == (None, ())


def with_side_car(**members):
    """Return a change of a side-car's text."""
    return lambda text: json.dumps(json.loads(text) | members)


# What the side-car of another plan says -> a part of the message.
FOREIGN = {
    "another version": ({"version": "11.1.0.106"}, r"version '11\.1\.0\.106'.* needs .*'1\.6\."),
    "another flavour": ({"flavour": "tensorrt"}, "flavour 'tensorrt'.* needs .*'tensorrt_rtx'"),
    "another name": ({"plan": "0123.plan"}, r"plan '0123\.plan'"),
    "other capabilities": ({"capabilities": ["8.9"]}, r"capabilities \['8\.9'\].* needs .*\[\]"),
}


@pytest.mark.parametrize(("members", "message"), FOREIGN.values(), ids=FOREIGN)
def test_R06_a_plan_of_something_else_is_not_used(tmp_path, built, members, message):
    """A side-car of another TensorRT or another plan: both sides are named."""
    found, (why,) = stored(tmp_path, built, text_change=with_side_car(**members))
    assert found is None
    assert re.search(message, why)


@pytest.mark.parametrize(("flavour", "is_used"), [("tensorrt", False), ("tensorrt_rtx", True)])
def test_R06_a_plan_of_another_gpu_is_used_where_it_runs_there(tmp_path, built, flavour, is_used):
    """TensorRT's plan is for the GPU that it was built on; TensorRT-RTX's is for any."""
    other = replace(built.request.backend, flavour=flavour)
    request = replace(built.request, backend=other, gpu="NVIDIA B200, driver 1")
    change = with_side_car(flavour=flavour, gpu="NVIDIA B300, driver 1")
    found, why = stored(tmp_path, built, text_change=change, request=request)
    assert (found is not None) == is_used
    if not is_used:
        assert "gpu 'NVIDIA B300, driver 1'; this run needs gpu 'NVIDIA B200, dr" in why[0]


@pytest.mark.parametrize("damage", ["one bit", "no side-car"])
def test_R06_damaged_plans_are_rebuilt(built, damage):
    """A damaged plan is built again, and is whole afterwards."""
    plan_change, text_change = DAMAGE[damage]
    side_car = built.plan.path.with_suffix(".json")
    text = text_change(side_car.read_text())
    built.plan.path.write_bytes(plan_change(built.bytes))
    side_car.unlink() if text is None else side_car.write_text(text)
    again = build_plan(built.request, built.cache)
    assert not again.cached
    assert "is not used but built again" in again.log[0]
    assert build_plan(built.request, built.cache).cached


PLAN = 'plan = pathlib.Path(json.load(sys.stdin)["plan"])'
HALF = "(plan.parent / f'.{plan.name}.{0:016x}.tmp').mkdir(); "
HALF += "(plan.parent / f'.{plan.name}.{0:016x}.tmp' / plan.name).write_bytes(b'half')"
WHOLE = "plan.write_bytes(b'whole')"
SAY = "print('[ERROR] last words', file=sys.stderr, flush=True)"
FULL = "print(json.dumps({'error': 'StorageError: disk full', 'log': []})); "
FULL += f"sys.exit({plan_worker.EXHAUSTED})"
# How a worker ends -> its lines, and what the error says.
BAD_ENDS = {
    "crash": ((SAY, "os.kill(os.getpid(), signal.SIGSEGV)"), "the builder died of SIGSEGV after"),
    "killed while writing": (
        (SAY, PLAN, HALF, "os.kill(os.getpid(), signal.SIGKILL)"),
        r"the builder died of SIGKILL \(so does the kernel end it when memory runs out\) after",
    ),
    "killed before the side-car": (
        (SAY, PLAN, WHOLE, "os.kill(os.getpid(), signal.SIGABRT)"),
        "the builder died of SIGABRT after",
    ),
    "another status": (
        (SAY, PLAN, WHOLE, "sys.exit(1)"), "the builder ended with status 1 after",
    ),
    "a status of ours, untold": ((SAY, "sys.exit(3)"), "the builder ended with status 3 after"),
    "a full disk": ((SAY, PLAN, HALF, FULL), r"gave up after \d\.\d s: StorageError: disk full"),
    "hang": (
        (SAY, PLAN, HALF, "time.sleep(60)"), r"the builder hung and was killed after 2\.\d s",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "message"), BAD_ENDS.values(), ids=BAD_ENDS)
def test_N06_bad_ends_are_told_apart(tmp_path, request_of, worker, lines, message):
    """Crash, hang and full disk name variant, phase, version, precision, GPU and last words.

    They are no BuildErrors, which a known failure may be, and leave no plan, no side-car and no
    temporary file.
    """
    worker(*lines)
    cache = tmp_path / "cache"
    what = f"variant fp8, decode, tensorrt_rtx-.*, fp8, no GPU: .*{message}"
    with pytest.raises(CrashError, match=what) as e:
        build_plan(request_of(), cache, timeout_s=2 if "hung" in message else 60)
    assert "[ERROR] last words" in e.value.log
    assert left_over(cache) == []


def test_N06_a_large_checkpoint_may_take_longer(tmp_path, monkeypatch, t0, request_of):
    """300 s, and as much for every 2 ** 30 parameters; a caller's own limit goes before."""
    limits = []
    monkeypatch.setattr(
        plans,
        "_build",
        lambda *rest: limits.append(rest[-1]) or Plan(tmp_path / "x", 1.0, 1.0, False, ()),
    )
    large = replace(t0, weights={"wte": np.broadcast_to(np.float32(0), (1 << 30,))})
    for checkpoint, given in ((t0, ()), (large, ()), (large, (7.0,))):
        build_plan(request_of(checkpoint=checkpoint), tmp_path, *given)
    assert limits == [pytest.approx(300, abs=0.1), 600.0, 7.0]


def test_N06_a_worker_that_writes_nothing_is_an_error(tmp_path, request_of, worker):
    """A worker that ends well without a plan is an error too."""
    worker("sys.exit(0)")
    with pytest.raises(CrashError, match=r"the worker ended well but .* is not whole"):
        build_plan(request_of(), tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


def test_N06_a_build_after_a_crash_works(tmp_path, monkeypatch, request_of, worker):
    """After a crash the same request builds: nothing poisons the cache."""
    real, cache = sys.executable, tmp_path / "cache"
    worker(*BAD_ENDS["killed while writing"][0])
    with pytest.raises(CrashError, match="SIGKILL"):
        build_plan(request_of(), cache)
    monkeypatch.setattr(plans.sys, "executable", real)
    assert not build_plan(request_of(), cache).cached
    assert build_plan(request_of(), cache).cached


def test_N06_a_refusal_carries_the_worker_s_message(tmp_path, request_of):
    """What the worker refuses, a capability here, comes back with its own words; no file."""
    request, cache = request_of(capabilities=("9.0",)), tmp_path / "cache"
    with pytest.raises(BuildError, match=r"fp8, decode, .* capability '9.0' is refused; expected"):
        build_plan(request, cache)
    assert left_over(cache) == []


def test_missing_ranges_are_refused_before_a_child_starts(tmp_path, request_of, worker):
    """A request without the ranges that its row needs never reaches a worker."""
    worker("sys.exit(1)")
    with pytest.raises(CalibrationError, match="no calibrated range for 10 of 10 projections"):
        build_plan(request_of(scales=None), tmp_path / "cache")


@pytest.fixture
def job(tmp_path, request_of):
    """Return the job that a worker would get for the request."""
    request = request_of()
    named = plans._job(request)["variant"] | {"name": "fp8", "summary": ""}
    return plans._job(request) | {
        "variant": named,
        "checkpoint": "T0",
        "weights": str(plans._stored_weights(request.checkpoint, tmp_path)),
        "plan": str(tmp_path / "x.plan"),
        "side_car": str(tmp_path / "x.json"),
        "kernels": "",
        "runs_on": "",
        "parent": os.getppid(),
    }


class Logging:
    """Stand in for a builder that logs error lines, and returns a plan or nothing."""

    def __init__(self, network, serialized, lines):
        self._builder, self._log, self._serialized = network.builder, network.log, serialized
        self._lines = lines or ("element type (fp8_e4m3) differs", "no implementation")

    def __getattr__(self, name):
        return getattr(self._builder, name)

    def build_serialized_network(self, definition, config):
        """Log errors and return what was given."""
        for line in self._lines:
            logger = self._log.logger
            logger.log(logger.ERROR, line)
        return self._serialized


@pytest.fixture
def logging_builder(monkeypatch):
    """Return a function that makes plan_worker's builder log errors and return this."""

    def install(serialized, *lines):
        def build_network(*arguments):
            network = real(*arguments)
            return replace(network, builder=Logging(network, serialized, lines))

        real = plan_worker.build_network
        monkeypatch.setattr(plan_worker, "build_network", build_network)

    return install


def test_N06_none_carries_tensorrt_s_lines(job, logging_builder, tmp_path):
    """A builder that returns None after two log lines: version and both lines, and no file."""
    logging_builder(None)
    with pytest.raises(BuildError, match="build_serialized_network returned None") as caught:
        plan_worker.build(job)
    lines = ("[ERROR] element type (fp8_e4m3) differs", "[ERROR] no implementation")
    assert caught.value.log[-2:] == lines
    assert job["version"] in str(caught.value)
    assert not list(tmp_path.glob("x.*"))


def test_N06_the_refusal_goes_to_the_parent(job, logging_builder, monkeypatch, capsys):
    """The worker prints that error with TensorRT's lines as JSON, and ends as refused."""
    logging_builder(None)
    monkeypatch.setattr(plan_worker, "die_with", lambda parent: None)
    assert plan_worker.main(json.dumps(job)) == plan_worker.REFUSED
    said = json.loads(capsys.readouterr().out)
    assert said["error"].endswith("returned None")
    assert said["log"][-1] == "[ERROR] no implementation"


def test_N06_the_parent_keeps_tensorrt_s_lines(tmp_path, request_of, worker):
    """A refusal with log lines is a BuildError that has each of them once, and in its log."""
    refusal = BuildError("layer x: refused", ("[ERROR] Error Code 4",))
    said = json.dumps({"error": refusal.message, "log": refusal.log})
    worker("print('native chatter')", f"print({said!r})", f"sys.exit({plan_worker.REFUSED})")
    with pytest.raises(BuildError, match=r"variant fp8, .*: layer x: refused") as caught:
        build_plan(request_of(), tmp_path / "cache")
    assert caught.value.log == ("[ERROR] Error Code 4",)
    assert str(caught.value).count("[ERROR] Error Code 4") == 1


def test_N06_error_lines_beside_a_plan_are_kept(job, logging_builder, tmp_path):
    """Error lines of a build that gave a plan are in its record, and the plan is good."""
    logging_builder(b"a plan")
    record = plan_worker.build(job)
    assert record["log"][-1] == "[ERROR] no implementation"
    assert (tmp_path / "x.plan").read_bytes() == b"a plan"


@pytest.mark.parametrize("said", ["std::bad_alloc", "Resource temporarily unavailable"])
def test_N06_too_little_memory_is_no_refusal(job, logging_builder, monkeypatch, said):
    """What TensorRT says of it is told as exhaustion: no known failure excuses it."""
    logging_builder(None, f"Unexpected exception {said}")
    with pytest.raises(MemoryError, match="build_serialized_network returned None"):
        plan_worker.build(job)
    monkeypatch.setattr(plan_worker, "die_with", lambda parent: None)
    assert plan_worker.main(json.dumps(job)) == plan_worker.EXHAUSTED


def test_N06_a_failure_with_no_memory_left_is_no_refusal(job, logging_builder, monkeypatch):
    """Whatever TensorRT says of it; with memory left the same words are a refusal."""

    def none_left(_):
        raise MemoryError

    logging_builder(None, "Assertion layer failed")
    with pytest.raises(BuildError, match="build_serialized_network returned None"):
        plan_worker.build(job)
    monkeypatch.setattr(plan_worker, "bytearray", none_left, raising=False)
    with pytest.raises(MemoryError, match="build_serialized_network returned None"):
        plan_worker.build(job)


def test_N06_a_network_without_output_carries_tensorrt_s_lines(job, monkeypatch, tmp_path):
    """TensorRT's own words for a network with no marked output; no file."""
    monkeypatch.setattr(network, "_mark_output", lambda *arguments: None)
    with pytest.raises(BuildError, match="returned None") as caught:
        plan_worker.build(job)
    assert "Network must have at least one output" in caught.value.log[-1]
    assert not list(tmp_path.glob("x.*"))


# What may be None -> the words of the error.
NOTHINGS = {
    "create_builder_config": "create_builder_config returned None",
    "create_optimization_profile": "create_optimization_profile returned None",
}


@pytest.mark.parametrize(("call", "message"), NOTHINGS.items(), ids=NOTHINGS)
def test_N06_every_call_that_may_give_none_is_checked(job, monkeypatch, call, message):
    """None of a call before the build is an error that names it, not a missing attribute."""
    real = plan_worker.build_network

    def build_network(*arguments):
        made = real(*arguments)
        calls = {
            name: getattr(made.builder, name) for name in (*NOTHINGS, "build_serialized_network")
        }
        return replace(made, builder=SimpleNamespace(**calls | {call: lambda: None}))

    monkeypatch.setattr(plan_worker, "build_network", build_network)
    with pytest.raises(BuildError, match=message):
        plan_worker.build(job | {"phase": "prefill"})


def test_N06_a_builder_that_is_not_created_is_named(backend, request_of):
    """What pybind11 says of a null pointer becomes row, phase, flavour and version."""

    def refuse(logger):
        raise TypeError("pybind11::init(): factory function returned nullptr")

    broken = SimpleNamespace(ILogger=backend.trt.ILogger, Builder=refuse)
    r = request_of()
    with pytest.raises(BuildError, match=r"fp8, decode: tensorrt_rtx-1\.6\..*: no Builder: pybind"):
        network.build_network(
            replace(backend, trt=broken), r.checkpoint, r.variant, r.scales, r.phase, r.context
        )


def test_N06_an_input_that_is_refused_is_named(backend, request_of, monkeypatch):
    """None of ``add_input`` is an error that names the input."""
    create, r = network.create_network, request_of()

    def refusing(*arguments):
        made = create(*arguments)
        made.add_input("token_ids", backend.trt.DataType.INT32, (1, 1))  # a second one is refused
        return made

    monkeypatch.setattr(network, "create_network", refusing)
    with pytest.raises(BuildError, match=r"fp8, decode: .*: add_input token_ids returned None"):
        network.build_network(backend, r.checkpoint, r.variant, r.scales, r.phase, r.context)


def test_weights_in_the_cache_that_changed_are_refused_and_removed(tmp_path, request_of):
    """Other weights under the name of the checkpoint build nothing; the next run writes them."""
    request = request_of()
    path = plans._stored_weights(request.checkpoint, tmp_path)
    other = changed(request.checkpoint, {"transformer.ln_f.bias": lambda bias: bias + 1})
    damaged = {
        save(dict(other.weights)): r"obtained \w{64}, expected the checkpoint \w{64}",
        path.read_bytes()[:-1]: r"obtained \d+ bytes, expected \d+",
        b"no safetensors": "obtained 14 bytes without a safetensors header",
    }
    for content, message in damaged.items():
        path.write_bytes(content)
        with pytest.raises(
            BuildError, match=rf"safetensors: {message}.*; it is removed, run again"
        ):
            build_plan(request, tmp_path)
        assert not path.exists()
    assert not build_plan(request, tmp_path).cached


def test_another_version_is_refused_by_the_worker(job):
    """A worker that finds another version than asked for refuses, naming both."""
    job["version"] = "1.2.3"
    with pytest.raises(BuildError, match=r"version 1\.6.* is installed, the job asks for 1\.2\.3"):
        plan_worker.build(job)


def test_a_row_keeps_its_name_in_messages(tmp_path, backend, t0):
    """A refusal while the network is built names variant and projection, from the child."""
    zeros = changed(t0, {"transformer.h.1.mlp.c_fc.weight": np.zeros_like})
    row = Variant("fp8-mine", "", ("c_fc",))
    request = PlanRequest(backend, zeros, row, fixed_scales(zeros), "decode", 8)
    with pytest.raises(BuildError, match=r"fp8-mine, decode: transformer.h.1.mlp.c_fc.weight"):
        build_plan(request, tmp_path)
