"""Options of the gate, and the session fixtures that join the stages of ``gptneo_trt``.

The fixtures are the pipeline: checkpoint -> scales -> plan, and -> network -> executor -> logits
-> metrics (in worker processes, ``tests/gate/measure.py``). Each stage runs once a variant and
phase; a stage that failed fails again with the same error for whoever asks.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gptneo_trt import checkpoint as checkpoints
from gptneo_trt import provenance as provenances
from gptneo_trt.backend import FLAVOURS, Backend, backend_named
from gptneo_trt.data import Checkpoint, Measurement, Plan, Provenance, Scales, TextSet
from gptneo_trt.network import PHASES
from gptneo_trt.plans import PlanRequest, build_plan
from gptneo_trt.scales import constant_scales, read_scales, scales_path, write_scales
from gptneo_trt.texts import text_set
from gptneo_trt.variants import FLOOR, VARIANTS, Variant
from tests.gate.measurer import CONTEXT, Measurer, Setup
from tests.gate.selection import selected_names

ROOT = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the gate's options."""
    group = parser.getgroup("gate", "GPT-Neo TensorRT gate")
    group.addoption(
        "--model",
        default="bundled",
        help='"bundled", a folder, a hub id "owner/name@commit", or "random:gpt-neo-125m" '
        "(build and plan size only)",
    )
    group.addoption("--variants", default="", help="rows to run, comma separated; all by default")
    group.addoption(
        "--tensorrt", default="tensorrt_rtx", choices=sorted(FLAVOURS), help="flavour that builds"
    )
    group.addoption(
        "--gate-report",
        metavar="DIR",
        type=Path,
        help="write results.json into this folder; write --gate-report=DIR, since pytest takes a "
        "separate, existing folder for a place of tests",
    )
    group.addoption(
        "--gate-cache",
        metavar="DIR",
        type=Path,
        default=ROOT / ".cache" / "gate",
        help="folder of plans, weights, scales and reference logits (default: .cache/gate); write "
        "--gate-cache=DIR",
    )
    group.addoption(
        "--workers",
        type=int,
        default=min(os.cpu_count() or 1, 4),
        help="processes that run networks; 0: in this process (default: one a core, at most 4)",
    )
    group.addoption(
        "--update-baselines",
        action="store_true",
        help="write baselines/ from this run, which then fails: commit, and run again without",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse unknown rows before anything is collected."""
    unknown = sorted(set(selected_names(config)) - set(VARIANTS))
    if unknown:
        raise pytest.UsageError(
            f"--variants: unknown rows {unknown}; the rows are: {', '.join(VARIANTS)}"
        )


def text_source_of(checkpoint: Checkpoint) -> str:
    """Return which texts judge a checkpoint: the study's for one of the hub."""
    return "study" if checkpoint.revision else "bundled"


@pytest.fixture(scope="session")
def variants(pytestconfig: pytest.Config) -> list[Variant]:
    """Return the selected rows."""
    return [VARIANTS[name] for name in selected_names(pytestconfig)]


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> Backend:
    """Return the TensorRT flavour that builds."""
    return backend_named(pytestconfig.getoption("--tensorrt"))


@pytest.fixture(scope="session")
def checkpoint(pytestconfig: pytest.Config) -> Checkpoint:
    """Return the checkpoint of ``--model``."""
    return checkpoints.checkpoint_from_source(pytestconfig.getoption("--model"))


@pytest.fixture(scope="session")
def run_provenance(pytestconfig: pytest.Config, backend: Backend) -> Provenance:
    """Return where this run's figures come from."""
    # The options that shape figures; the others name folders of this machine.
    options = [f"--model={_model_name(pytestconfig)}", f"--tensorrt={backend.flavour}"]
    if pytestconfig.getoption("--variants"):
        options.append(f"--variants={pytestconfig.getoption('--variants')}")
    return provenances.provenance(f"cpu/{backend.target}", ["pytest", "-m", "cpu", *options])


def _model_name(config: pytest.Config) -> str:
    model = str(config.getoption("--model"))
    return Path(model).name if Path(model).is_dir() else model


@pytest.fixture(scope="session")
def baseline_folder(checkpoint: Checkpoint, backend: Backend) -> Path:
    """Return ``baselines/cpu/<flavour>-<version>/<model>``."""
    name = checkpoint.name.replace(":", "-").replace("/", "--")
    if Path(checkpoint.name).is_dir():
        name = f"local-{checkpoint.sha256[:12]}"
    return ROOT / "baselines" / "cpu" / backend.target / name


@pytest.fixture(scope="session")
def texts(checkpoint: Checkpoint) -> dict[str, TextSet]:
    """Return the texts that calibrate and judge a checkpoint; none for random weights."""
    if not checkpoint.has_quality:
        return {}
    source, shapes = text_source_of(checkpoint), checkpoint.architecture
    return {
        name: text_set(name, source, checkpoint.tokenizer_file, CONTEXT, shapes.vocab_size)
        for name in ("calibration", "prose", "questions", "prompts")
    }


@pytest.fixture(scope="session")
def measurer(pytestconfig: pytest.Config, checkpoint: Checkpoint) -> Iterator[Measurer]:
    """Return what runs networks, in worker processes that start to load at once."""
    model, flavour = (pytestconfig.getoption(name) for name in ("--model", "--tensorrt"))
    cache = pytestconfig.getoption("--gate-cache")
    setup = Setup(model, flavour, text_source_of(checkpoint), cache)
    with Measurer(setup, pytestconfig.getoption("--workers")) as measuring:
        yield measuring


@pytest.fixture(scope="session")
def scales(
    pytestconfig: pytest.Config,
    checkpoint: Checkpoint,
    texts: dict[str, TextSet],
    variants: list[Variant],
    request: pytest.FixtureRequest,
) -> Scales | None:
    """Return the input ranges of every projection, calibrated once and kept in the cache.

    None where no selected row quantizes anything.
    """
    if not any(row.quantized for row in variants):
        return None
    modules = VARIANTS["fp8-all"].quantized_modules(checkpoint.architecture.num_layers)
    if not checkpoint.has_quality:
        return constant_scales(checkpoint, modules)
    measurer, text = request.getfixturevalue("measurer"), texts["calibration"]
    path = scales_path(pytestconfig.getoption("--gate-cache"), checkpoint, text)
    found = read_scales(path, checkpoint, text, modules)
    if found is None:
        progress(pytestconfig, f"calibrating {len(modules)} projections with ModelOpt ")
        found = measurer.calibrate(text, modules)
        write_scales(path, found)
    return found


@pytest.fixture(scope="session")
def plan(
    pytestconfig: pytest.Config,
    backend: Backend,
    checkpoint: Checkpoint,
    scales: Scales | None,
    variants: list[Variant],
) -> Iterator[Callable[[Variant, str], Plan]]:
    """Return a function (variant, phase) -> Plan; all selected plans are built ahead of it."""
    cache = pytestconfig.getoption("--gate-cache")

    def build(variant: Variant, phase: str) -> Plan:
        request = PlanRequest(
            backend, checkpoint, variant, scales if variant.quantized else None, phase, CONTEXT
        )
        return build_plan(request, cache)

    with ThreadPoolExecutor(max_workers=1) as pool:
        ahead = {
            (row.name, phase): pool.submit(build, row, phase)
            for row in variants
            for phase in PHASES
        }
        yield lambda variant, phase: ahead[variant.name, phase].result()
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def measurement(
    pytestconfig: pytest.Config,
    variants: list[Variant],
    scales: Scales | None,
    measurer: Measurer,
) -> Callable[[Variant, str], Measurement]:
    """Return a function (variant, phase) -> Measurement; the selected rows run ahead of it."""
    floor = VARIANTS[FLOOR]
    rows = [floor, *(row for row in variants if row != floor)]
    for row in rows:
        measurer.submit(row, scales)
    shown: set[str] = set()

    def measured(variant: Variant, phase: str) -> Measurement:
        found = measurer.result(variant, phase)
        if variant.name not in shown:
            shown.add(variant.name)
            progress(pytestconfig, f"[{len(shown)}/{len(rows)}] {_summary(variant, found)}")
        return found

    return measured


def _summary(variant: Variant, measurement: Measurement) -> str:
    """Return one line about a row that was measured."""
    if measurement.non_finite:
        return f"{variant.name}: {measurement.non_finite}"
    values = measurement.metrics["prose/bf16"].values
    loss, error = values["kl_mean_nats"], values["kl_mean_stderr_nats"]
    return f"{variant.name}: KL {loss:.3g} +- {error:.1g} nats, top-1 {values['top1_frac']:.3f} "


def progress(config: pytest.Config, line: str) -> None:
    """Write a line to the terminal at once, in spite of pytest's capture."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        sys.stdout.write(f"\n{line}")
        sys.stdout.flush()
