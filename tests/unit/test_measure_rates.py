"""Simulated runs: texts are drawn whole, no shift is no failure, and a shift is found."""

import numpy as np
import pytest

from gptneo_trt import baselines
from gptneo_trt.baselines import Baseline
from tests import measure_rates
from tests.measure_rates import Population, Rates

KL = "kl_mean_nats"


def population(seed=0, texts=12, tokens=64, noise=0.02):
    """Return a cell whose KL is 1 nat a token and whose runs differ by noise a token."""
    random = np.random.default_rng(seed)
    stored = random.exponential(1.0, (texts, tokens))
    difference = noise * random.normal(size=(texts, tokens))
    return Population("fp8", "prefill", KL, stored, difference - difference.mean())


def test_runs_without_a_regression_raise_no_alarm():
    """200 simulated runs of three cells: at most 5 % have a failed cell at the 5 % level."""
    cells = [population(seed) for seed in range(3)]
    found = measure_rates.simulate(cells, 200)
    assert not measure_rates.too_many(found, 200)
    rates = found["prefill", KL]
    assert rates.cells == 600
    assert rates.frac("none", "failed") == 0
    assert rates.frac("none", "inconclusive") == 0


def test_a_shift_beyond_the_tolerance_is_found_with_the_power_that_is_claimed():
    """At the tolerance about 5 % fail; at the minimum detectable effect beyond it about 90 %."""
    rates = measure_rates.simulate([population(seed) for seed in range(5)], 200)["prefill", KL]
    assert rates.frac("tolerance", "failed") < 0.08
    assert rates.frac("detectable", "failed") > 0.85


def test_cells_that_fail_without_a_shift_are_too_many():
    """A difference that is not centred is an alarm in every run, and the command says so."""
    shifted = population()
    biased = Population("fp8", "prefill", KL, shifted.stored, shifted.difference + 0.5)
    found = measure_rates.simulate([biased], 20)
    assert measure_rates.too_many(found, 20)
    assert measure_rates.lines(found, 20)[-1].startswith(
        "simulated runs without a regression: 20, with a failed cell: 20 (100.0%"
    )


def test_nothing_simulated_is_no_success():
    """Without a cell no rate is known."""
    assert measure_rates.too_many({}, 200)


def test_whole_texts_are_drawn():
    """A text drawn twelve times has no spread between texts: the bounds are its own mean."""
    cell = population()
    paired = cell.drawn(np.zeros(12, dtype=int))
    assert paired.mean == pytest.approx(cell.difference[0].mean())
    assert paired.standard_error == pytest.approx(0, abs=1e-12)


def test_populations_are_the_cells_that_both_folders_have(tmp_path):
    """Rows with FP8 that both runs stored; the difference a token has mean 0."""
    key = {"prose_texts": 2, "texts": {"sampled": {"texts": 4}}}
    for name, offset in (("one", 0.0), ("other", 0.25)):
        tokens = {
            f"prefill/regression/{KL}": np.arange(8, dtype=np.float32) + offset,
            f"prefill/regression/sampled/{KL}": np.arange(8, dtype=np.float32),
        }
        for row in ("fp16", "fp8", *(("fp8-qkv",) if name == "one" else ())):
            baselines.write(tmp_path / name, row, Baseline(key, {}, {"x": 1.0}, tokens))
    cells = list(measure_rates.populations(tmp_path / "one", tmp_path / "other"))
    assert [(cell.row, cell.phase, cell.metric) for cell in cells] == [
        ("fp8", "prefill", KL),
        ("fp8", "prefill", f"sampled/{KL}"),
    ]
    assert [cell.stored.shape for cell in cells] == [(2, 4), (4, 2)]
    assert all(cell.difference.mean() == 0 for cell in cells)


def test_rates_count_each_verdict_of_each_shift():
    """Cells are counted once, not once a shift."""
    rates = Rates()
    for shift in measure_rates.SHIFTS:
        rates.add(7, shift, "failed")
    assert rates.cells == 1
    assert rates.red_runs == {7}
    assert rates.frac("detectable", "failed") == 1
