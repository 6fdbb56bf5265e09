"""Turn rows into tests, tests into cells, and cells into the verdict of the run.

A gate test is one cell. Its marker ``cells`` names the phases and metrics it runs for; it hands
its Cell to the fixture ``judge``, which records it and fails the test unless it passed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gptneo_trt.backend import Backend
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Cell, Checkpoint, Measurement, Plan, Provenance, Scales, TextSet
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.inspection import fingerprint
from gptneo_trt.network import PHASES, Network, build_network
from gptneo_trt.scales import ranges_sha256
from gptneo_trt.targets import Gpu, Target
from gptneo_trt.token_profiles import described
from gptneo_trt.tokenizer import text_from_file
from gptneo_trt.variant import Variant
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import cells, hardware
from tests.gate.blame import with_changes
from tests.gate.counting import RUN, is_worker
from tests.gate.run import BASELINE_PREFIX, GateRun, baseline_key, stored_baseline
from tests.gate.selection import target_of, unsupported_here
from tests.gate.shape import Shape

if TYPE_CHECKING:
    from tests.gate.speed import Stopwatch


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs a GPU where the target has none: importing torch takes seconds."""
    needs_gpu = collection_path.name in ("test_engine.py", "test_speed.py")
    is_gate = collection_path.parent == Path(__file__).parent
    return True if needs_gpu and is_gate and not target_of(config).needs_gpu else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked ``cells`` for every selected row, phase and metric."""
    marker = metafunc.definition.get_closest_marker("cells")
    if marker is not None:
        rows = list(cells.parameters_of(metafunc.config, marker))
        metafunc.parametrize(("variant", "phase", "metric"), rows)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    """Return the parameters of a gate test; none of any other test."""
    if item.get_closest_marker("cells") is None:
        return {}
    return dict(getattr(getattr(item, "callspec", None), "params", {}))


def _has_no_rows(item: pytest.Item) -> bool:
    """Return whether this is pytest's stand-in for a test without rows: a model without quality."""
    return not isinstance(_parameters(item).get("variant", FLOOR), str | Variant)


def _key(item: pytest.Item) -> tuple[str, str, str] | None:
    parameters = _parameters(item)
    if "metric" not in parameters or _has_no_rows(item):
        return None
    return parameters["variant"].name, parameters["phase"], parameters["metric"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the gate row by row, the floor first, so that results appear as rows are measured."""
    items[:] = [item for item in items if not _has_no_rows(item)]
    order = [FLOOR, *VARIANTS]

    def place(item: pytest.Item) -> int:
        key = _key(item)
        if key is None:
            return -1
        return order.index(key[0]) if key[0] in order else len(order)  # explored rows last

    items.sort(key=place)


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count gate cells that were left out by -k or -m."""
    owed = [item for item in items if not _has_no_rows(item) and _key(item)]
    if owed:  # -k and -m come before the collection is finished
        owed[0].config.stash.setdefault(RUN, GateRun()).deselected += len(owed)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember which cells this run owes."""
    run = session.config.stash.setdefault(RUN, GateRun())
    run.expected = {key for item in session.items if (key := _key(item))}
    if run.expected and not session.config.getoption("collectonly"):
        run.refusal = hardware.refusal(session.config) or ""
    if run.refusal and not is_worker(session.config):
        session.items.clear()  # nothing here can be measured: say so once, not once a cell


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Measure nothing of a row that the GPU cannot run, nor of a refused run.

    pytest-xdist needs all that was collected, so there a refused run still has its tests.
    """
    run, key = item.config.stash.get(RUN, None), _key(item)
    if run is None or key is None:
        return
    if run.refusal:
        pytest.fail(_told_once(run, run.refusal), pytrace=False)
    why = unsupported_here(item.config, key[0])
    if why:
        pytest.skip(why)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record a cell for a test that ended before it could judge one."""
    made = yield
    key, run = _key(item), item.config.stash[RUN]
    if key and call.excinfo and not run.has_cell(key):
        error = call.excinfo.value
        judged = call.when == "call" and isinstance(error, GptNeoTrtError)
        reason = f"{type(error).__name__}: {error}"
        if hasattr(made, "wasxfail") and made.skipped:
            run.known_failures.append(f"{'/'.join(key)}: {made.wasxfail}")
            run.cells.append(Cell(*key, "fails as known", None, None, "passed", reason))
        else:
            verdict = "failed" if judged else "not measured"
            run.cells.append(cells.errored(key, error, verdict))
        if isinstance(error, GptNeoTrtError) and made.failed:
            made.longrepr = _told_once(run, reason)
    if key and made.failed:  # an unexpected pass, or a teardown that failed
        run.fail_passed(key, str(made.longrepr))
    return made


def _told_once(run: GateRun, reason: str) -> str:
    """Return what to print of a refusal: thing and remedy without a trace, in full once."""
    if reason not in run.told:
        run.told.add(reason)
        return reason
    return f"{reason[:60]}... (as above)" if len(reason) > 60 else reason


@pytest.fixture(scope="session")
def gate_run(
    pytestconfig: pytest.Config,
    target: Target,
    backend: Backend,
    gpu: Gpu | None,
    checkpoint: Checkpoint,
    texts: dict[str, TextSet],
    run_provenance: Provenance,
    baseline_folder: Path,
    shape: Shape,
) -> GateRun:
    """Return the record of this run."""
    run = pytestconfig.stash[RUN]
    run.shape = {} if shape.is_stored else shape._asdict()
    run.checkpoint, run.provenance, run.folder = checkpoint, run_provenance, baseline_folder
    run.key = baseline_key(target, backend, gpu, checkpoint, texts)
    return run


@pytest.fixture(scope="session")
def planned(gate_run: GateRun, plan) -> Callable[[Variant, str], Plan]:
    """Return a function (variant, phase) -> Plan that keeps its figures."""

    def get(variant: Variant, phase: str) -> Plan:
        built = plan(variant, phase)
        gate_run.add_plan(variant.name, phase, built)
        return built

    return get


@pytest.fixture(scope="session")
def calibrated(
    gate_run: GateRun, checkpoint: Checkpoint, scales: Scales | None
) -> Callable[[Variant], dict[str, float]]:
    """Return a function variant -> (module -> calibrated range), which keeps them.

    They are those before the row's own factor.
    """

    def get(variant: Variant) -> dict[str, float]:
        ranges: dict[str, float] = {}
        if variant.is_calibrated:
            known = scales.ranges(variant.calibration_method)
            modules = variant.quantized_modules(checkpoint.architecture.num_layers)
            ranges = {module: known[module] for module in modules}
            gate_run.add_hash(variant.name, "scales", ranges_sha256(ranges))
        if checkpoint.has_quality:
            gate_run.add_ranges(variant.name, ranges)
        return ranges

    return get


@pytest.fixture(scope="session")
def built_network(
    gate_run: GateRun,
    backend: Backend,
    checkpoint: Checkpoint,
    scales: Scales | None,
    shape: Shape,
    calibrated,
) -> Callable[[Variant, str], Network]:
    """Return a function (variant, phase) -> Network, built now; its fingerprint is kept."""

    def get(variant: Variant, phase: str) -> Network:
        sizes = shape.context, shape.batch
        network = build_network(backend, checkpoint, variant, scales, phase, *sizes)
        calibrated(variant)
        gate_run.add_hash(variant.name, f"{phase}/network", fingerprint(network))
        return network

    return get


@pytest.fixture(scope="session")
def measured(
    gate_run: GateRun,
    measurement,
    second_roll,
    target: Target,
    variants: list[Variant],
    request: pytest.FixtureRequest,
) -> Callable[[Variant, str], Measurement]:
    """Return a function (variant, phase) -> Measurement that keeps its figures.

    Where baselines are written, those of a selected row's noise too; where a report is, the
    texts of its worst tokens.
    """
    rolled: set[tuple[str, str]] = set()
    reports = request.config.getoption("--gate-report")

    def get(variant: Variant, phase: str) -> Measurement:
        found = measurement(variant, phase)
        gate_run.add_measurement(variant.name, phase, found)
        if reports and found.worst:
            text_of, prose = request.getfixturevalue("text_of"), request.getfixturevalue("texts")
            worst = described(found.worst, prose["prose"].token_ids, text_of)
            gate_run.profiles[variant.name][phase]["worst"] = worst
        if second_roll and variant in variants and (variant.name, phase) not in rolled:
            again = second_roll(variant, phase)
            gate_run.add_noise(variant.name, phase, found, again, is_bound=target.needs_gpu)
            rolled.add((variant.name, phase))
        return found

    return get


@pytest.fixture(scope="session")
def text_of(checkpoint: Checkpoint) -> Callable[[Sequence[int]], str]:
    """Return a function token ids -> text."""
    return text_from_file(checkpoint.tokenizer_file)


@pytest.fixture(scope="session")
def stored(gate_run: GateRun) -> Callable[[Variant], Baseline]:
    """Return a function variant -> Baseline; see ``run.stored_baseline``."""
    return partial(stored_baseline, gate_run)


@pytest.fixture(scope="session")
def stopwatch(engines, gate_run: GateRun, plan, variants, gpu: Gpu, shape: Shape) -> "Stopwatch":
    """Return what times engines, once no other process of this run uses the GPU."""
    # Only here: without a GPU this process does not wait for torch.
    from tests.gate.speed import Stopwatch, timing

    for variant in variants:
        for phase in PHASES:
            with suppress(GptNeoTrtError):  # whoever asks for that plan is told
                plan(variant, phase)
    timer = Stopwatch(engines, gpu.uuid)
    gate_run.timing = timing(shape) | {"watch": timer.record}  # which grows with every measurement
    return timer


@pytest.fixture
def judge(gate_run: GateRun, request: pytest.FixtureRequest) -> Callable[[Cell], None]:
    """Return a function that records a cell and fails the test unless the cell passed."""

    def read(variant: Variant, phase: str) -> Network:
        return request.getfixturevalue("built_network")(variant, phase)

    def record(cell: Cell) -> None:
        cell = with_changes(cell, gate_run, read)
        gate_run.cells.append(cell)
        if cell.verdict != "passed":
            name = f"{cell.variant}/{cell.phase}/{cell.metric}"
            reason = cell.reason.removeprefix(f"{cell.verdict}: ")
            pytest.fail(f"{name}: {cell.verdict}: {reason}", pytrace=False)

    return record


@pytest.fixture
def comparing(pytestconfig: pytest.Config, metric: str) -> bool:
    """Return whether this metric is compared with a stored run now, not written."""
    return not (metric.startswith(BASELINE_PREFIX) and pytestconfig.getoption("--update-baselines"))
