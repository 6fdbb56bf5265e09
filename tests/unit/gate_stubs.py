"""Run the whole gate in a child process on stubs; there, this module is the plugin with the stubs.

pytest, the conftest files, the gate's tests and pytest.ini are this repository's own. Replaced is
what is slow or needs a device: plans, engines and measurements give what the stored baselines
hold, TensorRT's version and the GPU are those that a run names, and a row of ``seeds`` changes
what they give.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from gptneo_trt import (
    backend,
    baselines,
    checkpoint,
    metrics,
    plans,
    provenance,
    runtime,
    targets,
)
from gptneo_trt.data import Measurement, Metrics, Plan, Scales, Speedup, TokenMetrics
from gptneo_trt.errors import BuildError, CheckpointError, RunError
from gptneo_trt.scales import values_from_ranges
from gptneo_trt.targets import Gpu
from gptneo_trt.variants import VARIANTS
from tests.child import child_environment
from tests.gate import measurer
from tests.gate.run import BASELINE_PREFIX

ROOT = Path(__file__).parents[2]
VARIABLE = "GATE_STUBS"
WINDOWS = {"prefill": 256, "decode": 128}
LAYERS, AMAX = 6, 8.0  # of the bundled checkpoint; the range that every projection has here
OTHER_AMAX = 5.0  # by every other method
COMMIT = "4446f63"
SPEEDUPS = {"fp16": 1.0, "fp8": 1.05}
H200 = Gpu("NVIDIA H200", "9.0", "580.1", "GPU-made-up", 140.0)
B200 = Gpu("NVIDIA B200", "10.0", "580.1", "GPU-made-up", 180.0)
TIMING = {"regions": {"decode": {"timed": "made up"}}}
# Of the seed plan/<row>/<phase>: what TensorRT says.
REFUSALS = {
    "refused": "refused",
    "known": "Error Code 4: element types of two inputs differ: FP8 and Half",
    "out of memory": "out of memory",
}


@cache
def stored_folder():
    """Return the stored runs of the bundled checkpoint on the installed TensorRT."""
    return ROOT / "baselines" / "cpu" / backend.backend_named("tensorrt_rtx").target / "bundled"


@dataclass(frozen=True)
class Stubs:
    """Say what a run is on.

    Attributes:
        root: where baselines/ is, for the run.
        target: of the marker.
        tensorrt: flavour and version, "tensorrt-11.4.0.106"; "" for the one that is installed.
        gpu: fields of the Gpu at hand; None is no GPU.
        seeds: what is wrong -> how.
    """

    root: str
    target: str
    tensorrt: str
    gpu: dict | None
    seeds: dict = field(default_factory=dict)

    @property
    def folder(self):
        """Return where the run's baselines are."""
        version = self.tensorrt or stored_folder().parent.name
        return Path(self.root, "baselines", self.target, version, "bundled")

    def baseline(self, row):
        """Return a stored row, as a run on this target would have measured it."""
        found = baselines.read(stored_folder(), row)
        flavour, _, version = self.folder.parent.name.partition("-")
        gpu = self.gpu["name"] if self.gpu else "cpu"
        key = {**found.key, "flavour": flavour, "gpu": gpu, "version": version}
        if self.target != "cpu":
            key |= {"model": "bundled", "revision": "", "target": self.target}
        speed = {f"{phase}/speedup_x": SPEEDUPS.get(row, 1.0) for phase in WINDOWS}
        values = found.values | (speed if self.gpu else {})
        values = {name: value for name, value in values.items() if not name.startswith("scales/")}
        values |= {f"{name}/noise": 0.0 for name in found.tokens}  # of two equal rolls
        amax = AMAX if VARIANTS[row].calibration_method == "max" else OTHER_AMAX
        ranges = dict.fromkeys(VARIANTS[row].quantized_modules(LAYERS), amax)
        return replace(found, key=key, values=values | values_from_ranges(ranges))


def run_pytest(*arguments, environment=None, folder=ROOT):
    """Run pytest in a child process on this repository; return its status and output."""
    plugins = ("-p", "no:cacheprovider", "-p", "pytest_benchmark.plugin")
    quiet = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "pytest", *plugins, *arguments]
    run = subprocess.run(
        command,
        cwd=folder,
        env=child_environment(**quiet | (environment or {})),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return SimpleNamespace(status=run.returncode, text=run.stdout + run.stderr)


def run_gate(root, *arguments, target="cpu", stored=(), tensorrt="", gpu=None, seeds=None):
    """Run the gate on stubs, with these rows stored before.

    Returns:
        ``status``, ``text``, ``root``, and ``folder`` and ``before``: where the run's stored rows
        are, and file name -> content of them before the run.
    """
    stubs = Stubs(str(root), target, tensorrt, asdict(gpu) if gpu else None, seeds or {})
    for row in stored:
        baselines.write(stubs.folder, row, stubs.baseline(row))
    before = contents(stubs.folder)
    # Colours off: pytest's own words are matched.
    options = ("-m", target, "--color=no", f"--gate-cache={root / 'cache'}")
    environment = {VARIABLE: json.dumps(asdict(stubs))}
    command = ("-p", "tests.unit.gate_stubs", *options, *arguments)
    found = run_pytest(*command, environment=environment)
    return SimpleNamespace(**vars(found), root=root, folder=stubs.folder, before=before)


class Options:
    """Stand in for pytest's configuration: the gate's options with their defaults, and a stash."""

    def __init__(self, expression="cpu", **given):
        target = targets.target_of_expression(expression)
        self.stash = pytest.Stash()
        self._given = {
            "markexpr": expression,
            "model": target.model,
            "tensorrt": target.flavour,
            "variants": "",
            "dequantize": "fp16",
            "summation_order": 0,
            "batch": 1,
            "context": 256,
            "update_baselines": False,
        } | given

    def getoption(self, name):
        """Return an option by the name that the command line gives it."""
        return self._given[name.removeprefix("--").replace("-", "_")]


def contents(folder):
    """Return relative path -> content of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def line_of(text, start):
    """Return the only line of a text that starts so."""
    lines = [line for line in text.splitlines() if line.startswith(start)]
    assert len(lines) == 1, lines
    return lines[0]


# In the child process


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Put the stubs where the conftest files are about to find them."""
    stubs = Stubs(**json.loads(os.environ[VARIABLE]))
    stages = Stages(stubs)
    backend.backend_named = stages.backend_named
    checkpoint.checkpoint_from_source = stages.checkpoint_from_source
    plans.build_plan, runtime.load = stages.build_plan, stages.load
    # Whatever state the working tree is in while its tests run.
    commit = stubs.seeds.get("commit", COMMIT)
    real = provenance.provenance
    provenance.provenance = lambda *asked: replace(real(*asked), commit=commit)
    targets.gpu_at_hand = lambda: Gpu(**stubs.gpu) if stubs.gpu else None
    measurer.Measurer = lambda setup, workers: Interpreters(stages)
    # Modules that load torch or datasets are replaced whole.
    modules = {
        "gptneo_trt.texts": {"text_set": stages.text_set},
        "gptneo_trt.engine": {"Engine": None},
        "tests.gate.measure": {"distribution": distribution},
        "tests.gate.engines": {"EnginePipeline": lambda setup, load: Engines(stages)},
        "tests.gate.speed": {
            "CLOCK": Clock(),
            "Stopwatch": Stopwatch,
            "timing": lambda shape: TIMING,
        },
    }
    for name, members in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)


def pytest_configure():
    """Let the gate read and write the baselines of this run."""
    stubs = Stubs(**json.loads(os.environ[VARIABLE]))
    sys.modules["tests.gate.cells"].ROOT = Path(stubs.root)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Stand in for a test that returns before it judges anything, or that ends its process."""
    seeds = json.loads(os.environ[VARIABLE])["seeds"]
    if pyfuncitem.name == seeds.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    return True if pyfuncitem.name == seeds.get("returns early") else None


class Stages:
    """Stand in for what the session fixtures call."""

    def __init__(self, stubs):
        self.stubs, self.seeds = stubs, stubs.seeds
        self.key = baselines.read(stored_folder(), "fp16").key
        self._backend_named, self._load = backend.backend_named, checkpoint.checkpoint_from_source

    def backend_named(self, flavour):
        """Return the installed TensorRT under the flavour and version of the run."""
        asked, _, version = self.stubs.tensorrt.partition("-")
        if flavour != asked:
            return self._backend_named(flavour)
        return replace(self._backend_named("tensorrt_rtx"), flavour=flavour, version=version)

    def checkpoint_from_source(self, source):
        """Return the checkpoint, or fail as seeded."""
        seed = self.seeds.get("checkpoint")
        if seed == "crash":
            raise RuntimeError("disk on fire")
        if seed == "refused":
            raise CheckpointError("bundled: no config.json")
        if seed == "skip":
            pytest.skip("no device")
        return self._load(source)

    def text_set(self, name, *rest):
        """Return the stored identity of a text."""
        key = self.key["texts"][name]
        same = {each: key[each] for each in ("sha256", "tokens", "token_ids_sha256")}
        return SimpleNamespace(name=name, key=lambda: key, **same)

    def build_plan(self, request, cache):
        """Return a plan of the stored size, or fail as seeded."""
        seed = self.seeds.get(f"plan/{request.variant.name}/{request.phase}")
        if seed in REFUSALS:
            raise BuildError(f"{request.title}: {REFUSALS[seed]}", ("[ERROR] no kernel",))
        if seed == "type error":
            raise TypeError("unsupported operand")
        if seed == "skip":
            pytest.skip("no device")
        assert seed is None, seed
        values = baselines.read(stored_folder(), request.variant.name).values
        return Plan(Path("stub.plan"), values[f"{request.phase}/plan_mib"], 1.0, False, ())

    def load(self, backend, plan, kernels=None):
        """Load nothing, or be refused as seeded."""
        if "load" in self.seeds:
            raise RunError(f"plan {plan.name}: {self.seeds['load']}")

    def measurement(self, variant, phase):
        """Return the stored measurement, or what is seeded."""
        seed = self.seeds.get(f"{variant.name}/{phase}")
        if seed == "type error":
            raise TypeError("unsupported operand")
        if seed == "skip":
            pytest.skip("no device")
        if seed == "nan":
            return Measurement("logits: NaN at text 0, token 3", {})
        if seed == "as fp16":
            return measured("fp16", phase)
        if seed == "three times the loss":
            return measured(variant.name, phase, factor=3.0)
        if seed == "infinite perplexity":
            infinite = {"perplexity": float("inf"), "perplexity_ratio": float("inf")}
            return measured(variant.name, phase, changes=infinite)
        assert seed is None, seed
        return measured(variant.name, phase)


def sampled_metrics(stored, factor):
    """Return the stored KL a token of the sampled text times a factor; nothing else is stored."""
    kl = stored.tokens["prefill/regression/sampled/kl_mean_nats"].astype(np.float64) * factor
    text = np.arange(len(kl), dtype=np.int32) // WINDOWS["prefill"]
    unscored, same = np.full(len(kl), np.nan), np.ones(len(kl), dtype=bool)
    return TokenMetrics(kl, unscored, unscored, same, text, same)


def token_metrics(stored, phase, factor):
    """Return the stored values a token, their KL times a factor."""
    values = {name: array.astype(np.float64) for name, array in stored.tokens.items()}
    kl, nll, disagreement = (
        values[f"{phase}/regression/{name}"]
        for name in ("kl_mean_nats", "nll_mean_nats", "top1_disagreement_frac")
    )
    rows = len(kl) // WINDOWS[phase]
    padded = np.full((rows, WINDOWS[phase]), np.nan)
    padded[:, :-1] = nll.reshape(rows, -1)
    text = np.repeat(np.arange(rows, dtype=np.int32), WINDOWS[phase])
    same = disagreement == 0
    return TokenMetrics(kl * factor, padded.ravel(), padded.ravel(), same, text, same)


def measured(variant, phase, factor=1.0, changes=None):
    """Return a stored row as a measurement; logits of rows without FP8 are made up."""
    stored = baselines.read(stored_folder(), variant)
    tokens, found = token_metrics(stored, phase, factor), {}
    for name, value in stored.values.items():
        where, _, metric = name.rpartition("/")
        is_text_set = where.count("/") == 2 and f"/{BASELINE_PREFIX}" not in name
        if where.startswith(f"{phase}/") and is_text_set:
            row = found.setdefault(where.removeprefix(f"{phase}/"), {})
            row[metric] = value * factor if metric.startswith("kl_") else value
            row[metric] = (changes or {}).get(metric, row[metric])
    found = {
        name: Metrics(
            values, sampled_metrics(stored, factor) if name.startswith("sampled/") else tokens
        )
        for name, values in found.items()
    }
    agreement = {"kl_mean_nats": stored.values["decode/agreement/kl_mean_nats"]}
    logits = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    return Measurement(
        None,
        found,
        Metrics(agreement, tokens) if phase == "decode" else None,
        logits=None if "fp8" in variant else logits,
    )


def distribution(token_ids, logits):
    """Return what comparisons with made-up logits reuse."""
    text, position, target = metrics.scored_rows(list(token_ids), "every")
    return metrics.reference_distribution(logits[text, position], target, text)


class Interpreters:
    """Stand in for the Measurer."""

    def __init__(self, stages):
        self.stages, self.result = stages, stages.measurement

    def __enter__(self):
        """Return itself."""
        return self

    def __exit__(self, *error):
        """End nothing."""

    def calibrate(self, text, modules, other_methods=()):
        """Return one range for all projections, and another one by every other method."""
        amax = dict.fromkeys(modules, AMAX * self.stages.seeds.get("ranges", 1.0))
        sha256 = self.stages.key["checkpoint_sha256"]
        others = {method: dict.fromkeys(modules, OTHER_AMAX) for method in other_methods}
        return Scales(amax, "max", sha256, text.sha256, text.tokens, "0", other_amax=others)

    def submit(self, variant, scales):
        """Queue nothing."""

    def submit_second_roll(self, variant, scales):
        """Queue nothing."""

    def second_roll(self, variant, phase):
        """Return the same again, or a KL that is another one in every other text."""
        again = self.stages.measurement(variant, phase)
        if self.stages.seeds.get(f"second roll/{variant.name}/{phase}") != "noisy":
            return again
        found = dict(again.metrics)
        for name, each in found.items():
            kl = each.tokens.kl_nats * (1 + each.tokens.text % 2)
            found[name] = replace(each, tokens=replace(each.tokens, kl_nats=kl))
        return replace(again, metrics=found)


class Engines:
    """Stand in for the EnginePipeline: engines give what the interpreter gives."""

    def __init__(self, stages):
        self.measurement = stages.measurement
        self.prose = np.zeros((2, 16), dtype=np.int32)

    def engine(self, variant, phase):
        """Return an engine that multiplies in FP8 what its row says."""
        loaded = SimpleNamespace(load_s=0.1, log=SimpleNamespace(lines=[]))
        modules = variant.quantized_modules(LAYERS)
        return SimpleNamespace(loaded=loaded, quantized_modules=lambda: modules)

    def first_and_last_logits(self, variant, phase):
        """Return the same logits twice."""
        return (np.ones(4, dtype=np.float32),) * 2

    def logits_after_another_text(self, variant, left_behind):
        """Return the same logits twice."""
        return (np.ones(4, dtype=np.float32),) * 2


class Clock:
    """Stand in for the clock of the GPU, which pytest-benchmark reads."""

    def __init__(self):
        self.__name__ = "Clock"

    def __call__(self):
        """Return seconds."""
        return time.perf_counter()

    def advance_by(self, rounds_us):
        """Return what a benchmark calls for each round."""
        return lambda: None


class Stopwatch:
    """Stand in for the Stopwatch: rows are as much faster than fp16 as SPEEDUPS says."""

    def __init__(self, engines, uuid):
        self.record = {"measured_again": 0}

    def timed(self, variant, phase):
        """Return what is timed."""
        return variant

    def against_floor(self, own, phase, is_settled):
        """Return the row's ratio, and that of fp16 to itself."""
        return comparison(SPEEDUPS[own.name]), comparison(1.0)

    def clock_frac(self, phase):
        """Return how much of the time the clock counted."""
        return 0.95

    def overhead(self, variant):
        """Return a step's time over its engine's."""
        return comparison(1.01)

    def alternative(self, name, phase):
        """Return fp16's time over another's: all are slower, reading the weights is faster."""
        return comparison(1.5 if name == "weights_read" else 0.5)


def comparison(ratio):
    """Return a ratio that was measured while nothing disturbed the GPU."""
    return SimpleNamespace(speedup=speedup(ratio), own_us=(100.0,) * 30, disturbances=())


def speedup(ratio):
    """Return a ratio with a narrow interval."""
    return Speedup(ratio, ratio - 0.001, ratio + 0.001, 0.95, 100.0, 100.0 * ratio, 30, 10)
