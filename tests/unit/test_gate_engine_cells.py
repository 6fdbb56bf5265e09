"""Each cell that only a GPU has turns red on what it looks for; its control stays green."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Measurement, Metrics, Speedup, TokenMetrics
from gptneo_trt.targets import TARGETS
from gptneo_trt.variants import VARIANTS
from tests.gate import test_engine, test_speed
from tests.gate.cells import SlowerThanPyTorchError
from tests.gate.shape import STORED_SHAPE
from tests.selftest.judging import judged, wanted_cells

FP8, FP16 = VARIANTS["fp8"], VARIANTS["fp16"]
SAME = np.ones((1, 2, 3), dtype=np.float32)
OTHER = np.full((1, 2, 3), 2, dtype=np.float32)
MODULES = FP8.quantized_modules(2)


def comparison(ratio, disturbances=()):
    """Return a ratio known to a thousandth."""
    known = Speedup(ratio, ratio * 0.999, ratio * 1.001, 0.95, 100.0, 100.0 * ratio, 30, 10)
    return SimpleNamespace(speedup=known, own_us=(100.0,) * 30, disturbances=disturbances)


def measurement(kl_nats, non_finite=None):
    """Return what 4 texts of 8 tokens gave, the same KL to both references."""
    kl = kl_nats + np.tile(np.linspace(-1e-4, 1e-4, 8), 4)
    nll, same = np.ones(32), np.ones(32, dtype=bool)
    tokens = TokenMetrics(kl, nll, nll, same, np.repeat(np.arange(4, dtype=np.int32), 8), same)
    metrics = Metrics({"kl_mean_nats": float(kl.mean())}, tokens)
    return Measurement(non_finite, {"prose/bf16": metrics, "prose/float32": metrics})


def fixtures(**wrong):
    """Return stand-ins for all that the tests ask for, good but for ``wrong``."""
    good = {
        "modules": MODULES, "last": SAME, "after": SAME, "engine_nats": 0.01, "non_finite": None,
        "direct_nats": 1e-5, "direct_top1": 1.0, "overhead": 1.0, "alternative": 0.5,
        "clock": 0.95,
        "speedup": 1.0, "noise": 1.0, "disabled": False, "disturbed": (), "noise_disturbed": (),
        "moved": SAME,
    }  # fmt: skip
    is_ = SimpleNamespace(**good | wrong)
    loaded = SimpleNamespace(load_s=0.1, log=SimpleNamespace(lines=[]))
    engine = SimpleNamespace(loaded=loaded, quantized_modules=lambda: is_.modules)
    direct = {"kl_mean_nats": is_.direct_nats, "top1_frac": is_.direct_top1}
    stored = {f"{phase}/speedup_x": 1.0 for phase in ("prefill", "decode")}
    return {
        "engines": SimpleNamespace(
            engine=lambda variant, phase: engine,
            first_and_last_logits=lambda variant, phase: (SAME, is_.last),
            logits_after_another_text=lambda variant, left: (SAME, is_.after),
            logits_in_other_places=lambda variant, phase: (np.ones((1, 2), int), SAME, is_.moved),
            non_finite=lambda variant, phase: is_.non_finite,
        ),
        "checkpoint": SimpleNamespace(
            name="bundled", architecture=SimpleNamespace(num_layers=2)
        ),
        "measured": lambda variant, phase: measurement(is_.engine_nats, is_.non_finite),
        "interpreted": lambda variant, phase: measurement(0.01),
        "direct": lambda variant, phase: SimpleNamespace(values=direct),
        "stopwatch": SimpleNamespace(
            timed=lambda variant, phase: None,
            against_floor=lambda own, phase, is_settled: (
                comparison(is_.speedup, is_.disturbed),
                comparison(is_.noise, is_.noise_disturbed),
            ),
            clock_frac=lambda phase: is_.clock,
            overhead=lambda variant: comparison(is_.overhead, is_.disturbed),
            alternative=lambda name, phase: comparison(
                1 if name == "weights_read" else is_.alternative, is_.disturbed
            ),
        ),
        "benchmark": SimpleNamespace(
            disabled=is_.disabled, group="", extra_info={}, pedantic=lambda *_, **options: None
        ),
        "stored": lambda variant: Baseline({}, {}, stored, {}),
    }  # fmt: skip


TESTS = {
    "fp8": test_engine.test_exactly_the_intended_projections_run_quantized,
    "repeats": test_engine.test_first_and_hundredth_call_give_the_same_bits,
    "forgets": test_engine.test_R02_an_earlier_text_leaves_nothing_behind,
    "finite": test_engine.test_engine_gives_finite_values,
    "places": test_engine.test_a_text_gives_the_same_wherever_it_stands_in_a_batch,
    "excess": test_engine.test_engine_loses_what_its_recipe_loses,
    "direct": test_engine.test_engine_gives_what_its_network_gives,
    "clock": test_speed.test_clock_counts_what_the_device_does,
    "overhead": test_speed.test_step_is_little_more_than_its_engine,
    "decode": test_speed.test_decode_against_what_a_user_would_run,
    "prefill": test_speed.test_prefill_against_what_a_user_would_run,
    "speed": test_speed.test_speed_against_fp16_is_the_stored_one,
    "resolved": test_speed.test_speed_against_fp16_is_resolved,
}
THROTTLED = {"disturbed": ("throttled: x",)}
# Name -> test, what is wrong, the verdict that some of its cells have, and what their reason says.
FAULTS = {
    "a projection in fp16": ("fp8", {"modules": MODULES[1:]}, "failed", "missing: .*q_proj"),
    "a projection too many": (
        "fp8", {"modules": (*MODULES, "transformer.h.0.attn.attention.out_proj")}, "failed",
        "not intended: .*out_proj",
    ),
    "an exchanged kernel": ("repeats", {"last": OTHER}, "failed", "after 100 calls: 6 of 6"),
    "a stale cache": ("forgets", {"after": OTHER}, "failed", "nan in the cache: 6 of 6"),
    "an infinite key": ("finite", {"non_finite": "keys[0] = inf"}, "failed", "keys.0. = inf"),
    "texts that touch each other": (
        "places", {"moved": SAME * [1, 1, 1.1]}, "failed", "expected at most 5e-05",
    ),
    "an engine that loses more": ("excess", {"engine_nats": 0.012}, "failed", "loses more than"),
    "an engine that loses less": ("excess", {"engine_nats": 0.008}, "failed", "loses less than"),
    "an engine with a NaN": ("excess", {"non_finite": "logits[0] = nan"}, "not measured", "nan"),
    "an engine off its network": ("direct", {"direct_nats": 6e-5}, "failed", "at most 5e-05"),
    "other top tokens": ("direct", {"direct_top1": 0.99}, "failed", "expected at least 0.995"),
    "a slow step": ("overhead", {"overhead": 1.2}, "failed", "expected at most 1.15"),
    "a clock of the launch": ("clock", {"clock": 0.05}, "failed", "expected at least 0.5"),
    "PyTorch is faster": ("decode", {"alternative": 1.1}, "failed", "expected at least 1"),
    "Hugging Face is faster": ("prefill", {"alternative": 1.1}, "failed", "expected at least 1"),
    "a slower row": ("speed", {"speedup": 0.9}, "failed", "slower than the baseline"),
    "a noisy machine": ("speed", {"noise": 1.02}, "inconclusive", "too noisy"),
    "a throttled GPU": ("speed", THROTTLED, "inconclusive", "measured twice, disturbed: throttled"),
    "a throttled A/A run": (
        "speed", {"noise_disturbed": ("throttled: x",)}, "inconclusive", "disturbed: A/A: thrott",
    ),
    "a throttled step": ("overhead", THROTTLED, "inconclusive", "otherwise passed: obtained 1,"),
    "a throttled alternative": ("decode", THROTTLED, "inconclusive", "otherwise passed: obtai"),
    "a noisy machine elsewhere": ("resolved", {"noise": 1.02}, "inconclusive", "too noisy"),
    "a throttled GPU elsewhere": ("resolved", THROTTLED, "inconclusive", "measured twice, disturb"),
    "no benchmark elsewhere": ("resolved", {"disabled": True}, "not measured", "are disabled"),
    "no benchmark": ("speed", {"disabled": True}, "not measured", "benchmarks are disabled"),
}  # fmt: skip


@pytest.mark.parametrize("name", TESTS)
def test_control_is_green(name):
    """Without a fault every cell of the test passes."""
    variant = (
        FP16 if name in ("direct", "places", "clock", "overhead", "decode", "prefill") else FP8
    )
    cells = judged([TESTS[name]], variant, **fixtures())
    assert cells.keys() == wanted_cells([TESTS[name]])
    assert {cell.verdict for cell in cells.values()} == {"passed"}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_seen(fault):
    """With the fault a cell has the verdict, and a reason that names it."""
    name, wrong, verdict, reason = FAULTS[fault]
    cells = judged([TESTS[name]], FP8, **fixtures(**wrong)).values()
    seen = [cell.reason for cell in cells if cell.verdict == verdict]
    assert seen
    assert all(re.search(reason, each) for each in seen), seen


def test_a_clock_that_stops_too_early_is_seen():
    """An engine faster than reading its weights once is no engine."""
    given = fixtures()
    given["stopwatch"].alternative = lambda name, phase: comparison(0.5)
    cells = judged([TESTS["decode"]], FP16, **given)
    cell = cells["decode", "alternative/weights_read_x"]
    assert (cell.verdict, cell.obtained) == ("failed", 2.0)


# Where compiled PyTorch is known to be faster: its time over fp16's there, the verdict on the
# cell, and what its reason says.
KNOWN = {
    "as known": (
        1 / 0.95,
        "passed",
        "slower than PyTorch, as known: obtained 0.95, expected at le",
    ),
    "slower than known": (1 / 0.9, "failed", "^obtained 0.9, expected at least 1"),
    "the faster one": (1 / 1.05, "passed", "^obtained 1.05, expected at least 1"),
}


@pytest.mark.parametrize(("faster", "verdict", "reason"), KNOWN.values(), ids=KNOWN)
def test_what_is_known_to_be_slower_is_so_by_a_bounded_amount(faster, verdict, reason):
    """Only that alternative of that model on that target; pytest turns an unexpected pass red."""
    given = fixtures(alternative=faster) | {"target": TARGETS["h200"]}
    given["checkpoint"].name = "random:gpt-neo-1.3B"
    cells = judged([TESTS["decode"]], FP16, **given)

    found = cells["decode", "alternative/static_compiled_graph_x"]
    assert found.verdict == verdict
    assert re.search(reason, found.reason)
    other = "failed" if faster > 1 else "passed"
    assert cells["decode", "alternative/static_graph_x"].verdict == other


def test_what_is_known_to_be_slower_fails_with_an_error_of_its_own():
    """The strict expected failure is bound to it; without one, pytest's test would pass."""
    given = fixtures(alternative=1 / 0.95)
    run = SimpleNamespace(cells=[], add_value=lambda *_: None)
    with pytest.raises(SlowerThanPyTorchError, match=r"as known: obtained 0\.95"):
        TESTS["decode"](
            FP16, "decode", "alternative/static_compiled_graph_x", given["stopwatch"], run,
            SimpleNamespace(name="random:gpt-neo-1.3B"), pytest.fail, TARGETS["h200"], STORED_SHAPE,
        )  # fmt: skip


def test_a_disturbed_run_does_not_show_what_is_known():
    """Inconclusive, not an expected failure."""
    given = fixtures(alternative=1 / 0.95, **THROTTLED) | {"target": TARGETS["h200"]}
    given["checkpoint"].name = "random:gpt-neo-1.3B"
    cell = judged([TESTS["decode"]], FP16, **given)["decode", "alternative/static_compiled_graph_x"]
    assert cell.verdict == "inconclusive"


@pytest.mark.parametrize(("modules", "verdict"), [((), "passed"), (MODULES[:1], "failed")])
def test_weights_alone_are_multiplied_in_the_compute_type(modules, verdict):
    """An engine that quantizes the activations of such a row too is another recipe."""
    cells = judged([TESTS["fp8"]], VARIANTS["int8-weights"], **fixtures(modules=modules))
    assert {cell.verdict for cell in cells.values()} == {verdict}
