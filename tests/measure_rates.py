"""Measure how often the regression verdict errs: ``python -m tests.measure_rates [--runs 200]``.

Two stored runs of the same recipes are needed: by default those of interpreted networks
(``baselines/cpu``) and of engines (``baselines/h200``), whose FP8 roundings fall differently
token by token. Their differences a token, less their mean, are what a run without a regression
may show, and more: another processor or a rebuild differ by less. A simulated run draws whole
texts with replacement, the same for all its cells, and is judged as the gate judges. Three true
shifts of the mean are tried: none; just the tolerance, the worst that is still no regression;
and the tolerance plus the minimum detectable effect, which is to be found.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gptneo_trt import baselines
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import PairedDifference
from gptneo_trt.paired import paired_difference
from gptneo_trt.variants import VARIANTS
from gptneo_trt.verdicts import judge_regression
from tests.gate import tolerances
from tests.gate.run import BASELINE_PREFIX

ROOT = Path(__file__).parents[1] / "baselines"
MODEL = "tensorrt_rtx-1.6.1.120/bundled"
RUNS = 200
LEVEL = 0.05  # of each bound: tolerances.CONFIDENCE
COLUMNS = (("failed", 9), ("inconcl.", 10), ("at tol.", 9), ("found", 8))
SHIFTS = ("none", "tolerance", "detectable")


@dataclass(frozen=True, eq=False)
class Population:
    """Hold one cell's values a token, a row a text, of which simulated runs draw rows.

    Attributes:
        row, phase, metric: of the cell; metric without its prefix.
        stored: float64 [N, T].
        difference: float64 [N, T], of a run without a regression; mean 0.
    """

    row: str
    phase: str
    metric: str
    stored: np.ndarray
    difference: np.ndarray

    @property
    def tolerance(self) -> float:
        """Return by how much the mean may exceed the stored one."""
        text_set, _, name = self.metric.rpartition("/")
        mean = float(self.stored.mean())
        return tolerances.regression_tolerance(text_set or "prose", name, mean)

    def drawn(self, texts: np.ndarray) -> PairedDifference:
        """Return the paired difference over the texts drawn, int [N]."""
        stored = self.stored[texts]
        index = np.repeat(np.arange(len(texts)), stored.shape[1])
        current = stored + self.difference[texts]
        return paired_difference(
            stored.ravel(), current.ravel(), index, tolerances.CONFIDENCE, tolerances.POWER
        )

    def verdict(self, paired: PairedDifference, shift: float) -> str:
        """Return the gate's verdict where the true mean is shifted by this much more."""
        bounds = {name: getattr(paired, name) + shift for name in ("mean", "lower", "upper")}
        shifted, mean = replace(paired, **bounds), float(self.stored.mean())
        cell = judge_regression(self.row, self.phase, self.metric, shifted, mean, self.tolerance)
        return cell.verdict


@dataclass
class Rates:
    """Count verdicts.

    Attributes:
        cells: simulated, over all runs.
        verdicts: (shift, verdict) -> cells.
        red_runs: runs with a failed cell where nothing shifted.
    """

    cells: int = 0
    verdicts: dict[tuple[str, str], int] = field(default_factory=dict)
    red_runs: set[int] = field(default_factory=set)

    def add(self, run: int, shift: str, verdict: str) -> None:
        """Count one cell."""
        self.cells += shift == SHIFTS[0]
        self.verdicts[shift, verdict] = self.verdicts.get((shift, verdict), 0) + 1
        if (shift, verdict) == (SHIFTS[0], "failed"):
            self.red_runs.add(run)

    def frac(self, shift: str, verdict: str) -> float:
        """Return the share of cells with this verdict."""
        return self.verdicts.get((shift, verdict), 0) / self.cells


def populations(stored: Path, other: Path) -> Iterator[Population]:
    """Yield every regression cell with values a token in both folders, of rows with FP8.

    Raises:
        BaselineError: a stored run cannot be read.
    """
    for row in VARIANTS.values():
        if row.quantized and row.name in baselines.names(stored) & baselines.names(other):
            yield from _of_row(
                row.name, baselines.read(stored, row.name), baselines.read(other, row.name)
            )


def _of_row(row: str, stored: Baseline, other: Baseline) -> Iterator[Population]:
    for name in sorted(stored.tokens.keys() & other.tokens.keys()):
        phase, _, metric = name.partition(f"/{BASELINE_PREFIX}")
        texts = texts_of(stored, metric)
        before, after = (
            each.tokens[name].astype(np.float64).reshape(texts, -1) for each in (stored, other)
        )
        difference = after - before
        yield Population(row, phase, metric, before, difference - difference.mean())


def texts_of(stored: Baseline, metric: str) -> int:
    """Return the number of texts that a regression metric was measured on."""
    prefix, _, _ = metric.rpartition("/")
    return stored.key["texts"][prefix]["texts"] if prefix else stored.key["prose_texts"]


def simulate(cells: list[Population], runs: int) -> dict[tuple[str, str], Rates]:
    """Return (phase, metric) -> Rates over simulated runs without and with a shift."""
    found: dict[tuple[str, str], Rates] = {}
    detectable = [cell.drawn(np.arange(len(cell.stored))).minimum_detectable for cell in cells]
    for run in range(runs):
        rng = np.random.default_rng(run)
        draws = {count: rng.integers(count, size=count) for count in {len(c.stored) for c in cells}}
        for cell, effect in zip(cells, detectable, strict=True):
            paired = cell.drawn(draws[len(cell.stored)])
            shifts = (0.0, cell.tolerance, cell.tolerance + effect)
            rates = found.setdefault((cell.phase, cell.metric), Rates())
            for name, shift in zip(SHIFTS, shifts, strict=True):
                rates.add(run, name, cell.verdict(paired, shift))
    return found


def lines(found: dict[tuple[str, str], Rates], runs: int) -> list[str]:
    """Return the table, and the share of runs with a false alarm."""
    rows = [f"{'phase':9}{'metric':32}{'cells':>8}" + "".join(f"{h:>{w}}" for h, w in COLUMNS)]
    for (phase, metric), rates in sorted(found.items()):
        shares = (
            rates.frac("none", "failed"),
            rates.frac("none", "inconclusive"),
            rates.frac("tolerance", "failed"),
            rates.frac("detectable", "failed"),
        )
        figures = (f"{s:{w}.1%}" for s, (_, w) in zip(shares, COLUMNS, strict=True))
        rows.append(f"{phase:9}{metric:32}{rates.cells:8}" + "".join(figures))
    red = _red(found)
    rows += [
        "failed, inconcl.: no shift; at tol.: failed at a shift of the tolerance; found: failed at",
        "the tolerance + minimum detectable effect",
        f"simulated runs without a regression: {runs}, with a failed cell: {len(red)} "
        f"({len(red) / runs:.1%}, expected at most {LEVEL:.0%})",
    ]
    return rows


def main(arguments: list[str]) -> int:
    """Print the rates; fail where more than LEVEL of the runs raise a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.measure_rates")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--stored", type=Path, default=ROOT / "cpu" / MODEL)
    parser.add_argument("--other", type=Path, default=ROOT / "h200" / MODEL)
    options = parser.parse_args(arguments)
    found = simulate(list(populations(options.stored, options.other)), options.runs)
    print("\n".join(lines(found, options.runs)))
    return 1 if too_many(found, options.runs) else 0


def too_many(found: dict[tuple[str, str], Rates], runs: int) -> bool:
    """Return whether more than LEVEL of the runs without a regression had a failed cell."""
    return not found or len(_red(found)) > LEVEL * runs


def _red(found: dict[tuple[str, str], Rates]) -> set[int]:
    return set().union(*(rates.red_runs for rates in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
