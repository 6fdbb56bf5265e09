"""Measure what runs without a change differ by: ``python -m tests.measure_noise --repeats N``.

Runs the gate N times, each in a process of its own, and prints for every run its exit status,
seconds and red cells, which are false alarms; and for every metric the row that differed most,
next to the tolerance that must be larger. With ``--fresh`` each run has an empty cache, so every
plan is built again: the noise of a build. With ``--orders`` run K interprets with
``--summation-order K``: the noise of another processor. What follows ``--`` is handed to pytest.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptneo_trt.targets import TARGETS
from tests.gate import tolerances
from tests.measure_gate import Cost, gate_command, measure

Results = Mapping[str, Any]  # content of results.json


@dataclass(frozen=True)
class Metric:
    """Hold a metric whose values are compared between runs.

    Attributes:
        name: of a value, without its phase.
        tolerance: that the gate allows; None where it compares no two runs.
        is_absolute: whether spread and tolerance are in the metric's unit, not fractions.
    """

    name: str
    tolerance: float | None
    is_absolute: bool = False


@dataclass(frozen=True)
class Spread:
    """Hold the row in which a metric differed most between runs.

    Attributes:
        metric: name, without its phase.
        row: variant and phase.
        spread: largest less smallest value, over their mean unless ``is_absolute``.
        is_absolute: see Metric.
        least, most: the two values.
        runs: that have the value.
        tolerance: see Metric.
    """

    metric: str
    row: str
    spread: float
    is_absolute: bool
    least: float
    most: float
    runs: int
    tolerance: float | None


@dataclass(frozen=True)
class Run:
    """Hold what one run of the gate took and found.

    Attributes:
        cost: seconds, memory and exit status.
        red: a line a cell that did not pass or was not measured.
        results: content of ``results.json``; empty where the run wrote none.
    """

    cost: Cost
    red: tuple[str, ...]
    results: Results


def _metrics() -> Iterator[Metric]:
    """Yield the metrics whose noise tolerances come from, and the times beside them."""
    for text_set in ("prose", "sampled"):
        kl = tolerances.REGRESSIONS.get((text_set, "kl_mean_nats"))
        for reference in ("float32", "bf16"):
            prefix = f"{text_set}/{reference}"
            yield Metric(f"{prefix}/kl_mean_nats", kl)
            # A perplexity is exp(mean NLL): a fraction of it is a difference of NLL in nats.
            nll = tolerances.REGRESSIONS.get((text_set, "nll_mean_nats"))
            yield Metric(f"{prefix}/perplexity", nll)
            top1 = tolerances.REGRESSIONS.get((text_set, "top1_disagreement_frac"))
            yield Metric(f"{prefix}/top1_frac", top1, is_absolute=True)
    yield Metric("plan_mib", tolerances.PLAN_SIZE_FRAC)
    yield Metric("speedup_x", tolerances.SPEEDUP_FRAC)
    yield Metric("noise_x", tolerances.NOISE_FRAC, is_absolute=True)
    yield from (Metric(name, None) for name in ("latency_us", "fp16_latency_us", "step_overhead_x"))


def red_cells(results: Results) -> tuple[str, ...]:
    """Return what keeps a run from being green, a line each: of a run without a change, noise."""
    if not results:
        return ("no results.json: the run ended before anything was judged",)
    lines = [
        f"{cell['variant']}/{cell['phase']}/{cell['metric']}: {cell['verdict']}"
        for cell in results["cells"]
        if cell["verdict"] != "passed"
    ]
    missing = set(results["coverage"]["missing"]) - {line.partition(":")[0] for line in lines}
    return (*lines, *(f"{name}: not measured" for name in sorted(missing)))


def spreads(runs: Sequence[Results]) -> list[Spread]:
    """Return the largest spread of every metric that two runs have, of all rows and phases."""
    found = []
    for metric in _metrics():
        own = [spread for spread in _spreads_of(metric, runs) if spread.runs > 1]
        if own:
            found.append(max(own, key=lambda spread: spread.spread))
    return found


def _spreads_of(metric: Metric, runs: Sequence[Results]) -> Iterator[Spread]:
    """Yield the spread of a metric in each row and phase."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for variant, row in run.get("values", {}).items():
            for name, value in row.items():
                phase, _, rest = name.partition("/")
                # A value that is not finite is stored as text, and its cell is red.
                if rest == metric.name and not isinstance(value, str):
                    values.setdefault(f"{variant}/{phase}", []).append(value)
    for row, found in values.items():
        least, most = min(found), max(found)
        mean = math.fsum(found) / len(found)
        scale = 1.0 if metric.is_absolute else abs(mean) or 1.0
        spread = (most - least) / scale
        allowed = None if metric.tolerance is None else float(metric.tolerance)
        yield Spread(metric.name, row, spread, metric.is_absolute, least, most, len(found), allowed)


def table(runs: Sequence[Run]) -> list[str]:
    """Return the lines that are printed: a run each, its red cells, and a metric each."""
    lines = []
    for number, run in enumerate(runs, 1):
        alarms = f"{len(run.red)} red cells" if run.red else "green"
        lines.append(
            f"run {number}: exit status {run.cost.status}, {run.cost.wall_s:.0f} s, {alarms}"
        )
        lines += [f"  {line}" for line in run.red]
    lines.append(f"{'metric':28}{'spread':>10}{'tolerance':>11}  least to most, row")
    for found in spreads([run.results for run in runs]):
        allowed = "-" if found.tolerance is None else _number(found.tolerance, found.is_absolute)
        lines.append(
            f"{found.metric:28}{_number(found.spread, found.is_absolute):>10}{allowed:>11}  "
            f"{found.least:.6g} to {found.most:.6g}, {found.row}, {found.runs} runs"
        )
    return lines


def _number(value: float, is_absolute: bool) -> str:
    return f"{value:.3g}" if is_absolute else f"{100 * value:.3g} %"


def document(target: str, runs: Sequence[Run]) -> dict[str, object]:
    """Return what ``--json`` writes: the figures of the table, and where they come from."""
    return {
        "target": target,
        "runs": [
            asdict(run.cost) | {"red": run.red, "provenance": run.results.get("provenance", {})}
            for run in runs
        ],
        "spreads": [asdict(found) for found in spreads([run.results for run in runs])],
    }


def _run(options: argparse.Namespace, number: int) -> Run:
    """Run the gate once and return what it found."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-report-")))
        command = gate_command(options.target, f"--gate-report={folder}", *options.pytest)
        if options.fresh:
            cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="gate-cache-"))
            command.append(f"--gate-cache={cache}")
        if options.orders:
            command.append(f"--summation-order={number}")
        cost, written = measure(command), folder / "results.json"
        results = json.loads(written.read_text("utf-8")) if written.is_file() else {}
    return Run(cost, red_cells(results), results)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.measure_noise")
    parser.add_argument("--target", choices=sorted(TARGETS), default="cpu")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the gate (default: 5)")
    parser.add_argument("--fresh", action="store_true", help="an empty cache for each run")
    parser.add_argument("--orders", action="store_true", help="run K with --summation-order K")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("pytest", nargs="*", help="after --: options of pytest")
    options = parser.parse_args(arguments)
    if options.orders and TARGETS[options.target].needs_gpu:
        parser.error("--orders: only the interpreter of the target cpu has an order of summation")
    if options.repeats < 1:
        parser.error(f"--repeats: obtained {options.repeats}, expected at least 1")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the gate as often as asked for, print the table, and fail on any false alarm."""
    options = _parsed(arguments)
    runs = []
    for number in range(1, options.repeats + 1):
        runs.append(_run(options, number))
        if options.json:  # after each: what was measured outlives a run that is cut short
            content = json.dumps(document(options.target, runs), indent=1) + "\n"
            options.json.write_text(content, encoding="utf-8")
    print("\n".join(table(runs)))
    return int(any(run.red or run.cost.status for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
