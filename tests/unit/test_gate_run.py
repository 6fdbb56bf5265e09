"""GateRun: which cells a run owes, what keeps it red, and what it may write as a baseline."""

from dataclasses import fields, replace

import numpy as np
import pytest

from gptneo_trt import baselines
from gptneo_trt.backend import Backend
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import (
    Cell,
    Interval,
    Measurement,
    Metrics,
    PairedDifference,
    Plan,
    Provenance,
    Speedup,
    TextSet,
    TokenMetrics,
)
from gptneo_trt.errors import BaselineError
from gptneo_trt.scales import ranges_from_values
from gptneo_trt.targets import TARGETS, Gpu
from gptneo_trt.variants import VARIANTS
from tests.gate.reporting import results_of
from tests.gate.run import GateRun, baseline_key, regression_tokens, stored_baseline
from tests.gate.storing import UNSTORED, update_baselines

PROVENANCE = Provenance("cpu/made-up-1.0", "4446f63", "2026-01-02T03:04:05+00:00", "pytest")
KL = "prefill/prose/bf16/kl_mean_nats"
STORED_KL = "prefill/regression/kl_mean_nats"
LIMIT, REGRESSION = "kl_mean_nats", "regression/kl_mean_nats"


def cell(variant, metric=LIMIT, verdict="passed", obtained=0.1):
    """Return a cell of prefill."""
    return Cell(variant, "prefill", metric, obtained, None, None, verdict, f"made up: {verdict}")


@pytest.fixture
def folder(tmp_path):
    """Return the folder of one target and model; nothing is stored yet."""
    return tmp_path / "baselines" / "cpu" / "made-up-1.0" / "bundled"


@pytest.fixture
def run(folder, t0):
    """Return a run that owes a limit and a regression of fp16 and fp8; nothing is judged yet."""
    return GateRun(
        expected={
            (row, "prefill", each) for row in ("fp16", "fp8") for each in (LIMIT, REGRESSION)
        },
        values={
            "fp16": {KL: 2e-4, "prefill/build_s": 3.0, "prefill/load_s": 0.2},
            "fp8": {KL: 7e-3},
        },
        tokens={row: {STORED_KL: np.full(4, 0.1)} for row in ("fp16", "fp8")},
        checkpoint=t0,
        provenance=PROVENANCE,
        key={"checkpoint_sha256": t0.sha256},
        folder=folder,
    )


def stored_files(folder):
    """Return file name -> bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


# Cells


def test_has_cell_knows_variant_phase_and_metric():
    """A cell of another row, phase or metric is not this one; its verdict does not matter."""
    run = GateRun(cells=[cell("fp8", verdict="not measured")])

    assert run.has_cell(("fp8", "prefill", LIMIT))
    assert not run.has_cell(("fp16", "prefill", LIMIT))
    assert not run.has_cell(("fp8", "decode", LIMIT))
    assert not run.has_cell(("fp8", "prefill", REGRESSION))


def test_run_is_green_when_every_owed_cell_passed(run):
    """Nothing is left to say about a run whose cells all passed, once."""
    run.cells = [cell(variant, metric) for variant, _, metric in run.expected]

    assert run.problems() == []


@pytest.mark.parametrize("verdict", ["failed", "inconclusive", "not measured"])
def test_any_other_verdict_is_a_problem(run, verdict):
    """Only passed is green."""
    run.cells = [cell(variant, metric) for variant, _, metric in run.expected]
    run.cells[0] = replace(run.cells[0], verdict=verdict, reason="why")
    name = f"{run.cells[0].variant}/prefill/{run.cells[0].metric}"

    assert run.problems() == [f"{name}: {verdict}: why"]


def test_a_cell_that_nobody_gave_is_a_problem(run):
    """A test that returned early, or never ran, is not a pass."""
    run.cells = [cell("fp16"), cell("fp16", REGRESSION), cell("fp8")]

    assert run.problems() == [f"fp8/prefill/{REGRESSION}: not measured: no cell"]


def test_B02_a_renamed_cell_is_two_problems(run):
    """B-02: the old name is missing, the new one was not expected."""
    run.cells = [cell("fp16"), cell("fp16", REGRESSION), cell("fp8", REGRESSION), cell("fp8_v2")]

    assert run.problems() == [
        f"fp8/prefill/{LIMIT}: not measured: no cell",
        f"fp8_v2/prefill/{LIMIT}: unexpected cell",
    ]


def test_a_run_without_gate_tests_has_no_problems():
    """Plain unit tests owe no cell; that nothing was selected is pytest's own exit status 5."""
    assert GateRun().problems() == []


# Figures


def metrics(value, scored):
    """Return metrics of 4 positions, the last without a next token."""
    nll = np.array([1.0, 2.0, 3.0, np.nan])
    tokens = TokenMetrics(
        kl_nats=np.full(4, value),
        nll_nats=nll,
        reference_nll_nats=nll,
        top1=np.array([True, False, True, True]),
        text=np.zeros(4, dtype=np.int32),
        tied_top1=np.ones(4, dtype=bool),
    )
    return Metrics({"kl_mean_nats": value, "scored_tokens": scored}, tokens)


def test_regression_tokens_are_larger_when_worse():
    """KL at every position, NLL where there is a next token, and disagreement as 0 or 1."""
    found = regression_tokens(metrics(0.5, 3.0).tokens)

    assert {name: values.tolist() for name, (values, _) in found.items()} == {
        "kl_mean_nats": [0.5] * 4,
        "nll_mean_nats": [1.0, 2.0, 3.0],
        "top1_disagreement_frac": [0.0, 1.0, 0.0, 0.0],
    }
    assert all(len(values) == len(text) for values, text in found.values())


def test_figures_have_flat_names_and_add_up():
    """A row keeps plan, both texts and the agreement; tokens are those of float32 prose."""
    run = GateRun()
    measured = {"prose/bf16": metrics(0.1, 3.0), "prose/float32": metrics(0.2, 3.0)}

    run.add_plan("fp8", "decode", Plan("plan", 8.75, 4.0, True, ()))
    run.add_measurement("fp8", "decode", Measurement(None, measured, metrics(0.3, 3.0)))

    assert run.values == {
        "fp8": {
            "decode/plan_mib": 8.75,
            "decode/build_s": 4.0,
            "decode/prose/bf16/kl_mean_nats": 0.1,
            "decode/prose/bf16/scored_tokens": 3.0,
            "decode/prose/float32/kl_mean_nats": 0.2,
            "decode/prose/float32/scored_tokens": 3.0,
            "decode/agreement/kl_mean_nats": 0.3,
        }
    }
    assert sorted(run.tokens["fp8"]) == [
        "decode/regression/kl_mean_nats",
        "decode/regression/nll_mean_nats",
        "decode/regression/top1_disagreement_frac",
    ]
    np.testing.assert_array_equal(run.tokens["fp8"]["decode/regression/kl_mean_nats"], [0.2] * 4)


def test_a_row_that_is_not_finite_keeps_no_figure():
    """There is nothing to average, and no token to store."""
    run = GateRun()

    run.add_measurement("fp8", "prefill", Measurement("logits: NaN at 3", {}))

    assert run.values == {"fp8": {}}
    assert run.tokens == {"fp8": {}}


def test_figures_of_engines_have_flat_names():
    """A ratio and an excess keep both ends of their interval, and what they are relative to."""
    run, paired = GateRun(), PairedDifference(0.2, 0.1, 0.3, 0.05, 0.15, 0.975, 12, 1536)

    run.add_excess("fp8", "decode", "bf16", 2.0, paired)
    run.add_speedup("fp8", "decode", speedup(1.1, 90.0), speedup(1.001, 99.0))
    run.add_value("fp8", "decode/load_s", 0.5)

    assert run.values == {
        "fp8": {
            "decode/recipe/bf16/kl_mean_nats": 2.0,
            "decode/excess/bf16/kl_mean_nats": 0.2,
            "decode/excess/bf16/kl_lower_nats": 0.1,
            "decode/excess/bf16/kl_upper_nats": 0.3,
            "decode/speedup_x": 1.1,
            "decode/speedup_lower_x": 1.0,
            "decode/speedup_upper_x": 1.2,
            "decode/latency_us": 90.0,
            "decode/fp16_latency_us": 99.0,
            "decode/noise_x": 1.001,
            "decode/load_s": 0.5,
        }
    }
    assert run.speedup_values("fp8", "decode") == {
        "speedup_x": 1.1,
        "speedup_lower_x": 1.0,
        "speedup_upper_x": 1.2,
        "fp16_latency_us": 99.0,
        "noise_x": 1.001,
    }


def sampled_texts(kl_nats):
    """Return metrics of texts of 4 positions with a KL each, all scored."""
    kl, text = np.repeat(kl_nats, 4), np.repeat(np.arange(len(kl_nats), dtype=np.int32), 4)
    nll, same = np.ones(len(kl)), np.ones(len(kl), dtype=bool)
    return Metrics({"kl_mean_nats": 1.0}, TokenMetrics(kl, nll, nll, same, text, same))


def test_sampled_text_is_kept_apart():
    """Its KL a token is stored under its own name; what else it gives is a value."""
    measured = {"prose/float32": metrics(0.2, 3.0), "sampled/float32": sampled_texts([0.1, 0.3])}
    run = GateRun()

    run.add_measurement("fp8", "prefill", Measurement(None, measured))

    assert sorted(run.tokens["fp8"]) == [
        "prefill/regression/kl_mean_nats",
        "prefill/regression/nll_mean_nats",
        "prefill/regression/sampled/kl_mean_nats",
        "prefill/regression/top1_disagreement_frac",
    ]
    found = run.tokens["fp8"]["prefill/regression/sampled/kl_mean_nats"]
    np.testing.assert_array_equal(found, [0.1] * 4 + [0.3] * 4)
    assert run.values["fp8"]["prefill/sampled/float32/kl_mean_nats"] == 1.0


NOISE = "prefill/regression/sampled/kl_mean_nats"


def rolled_twice(moved, *, is_bound=False):
    """Return a run whose second roll of fp8 moved 24 sampled texts by this much, up or down."""
    run, base = GateRun(), np.full(24, 1.0)
    signs = np.where(np.arange(24) % 2, 1, -1)
    first, second = (
        Measurement(None, {"sampled/float32": sampled_texts(each)})
        for each in (base, base + moved * signs)
    )
    run.add_noise("fp8", "prefill", first, second, is_bound=is_bound)
    return run


def test_noise_is_the_standard_error_of_the_paired_mean():
    """24 texts that move by 0.01 up or down: 0.01 / sqrt(23), in the metric's unit."""
    run = rolled_twice(0.01)

    assert run.values["fp8"] == {f"{NOISE}/noise": pytest.approx(0.01 / 23**0.5)}
    assert run.unresolved == {}


def test_noise_that_hides_the_tolerance_is_refused():
    """Texts that move by as much as the stored mean resolve no tolerance; the noise is kept."""
    run = rolled_twice(1.0)

    assert list(run.unresolved["fp8"]) == [NOISE]
    assert run.unresolved["fp8"][NOISE].startswith(f"{NOISE}: the sample cannot resolve the tol")
    assert run.values["fp8"] == {f"{NOISE}/noise": pytest.approx(1 / 23**0.5)}


def test_noise_that_is_an_upper_bound_refuses_nothing():
    """An engine next to its network: two engines of one plan differ by less."""
    run = rolled_twice(1.0, is_bound=True)

    assert run.unresolved == {}
    assert f"{NOISE}/noise" in run.values["fp8"]


def test_second_roll_that_is_not_finite_is_refused():
    """There is no noise to store, so there is no row to store."""
    run = GateRun()
    first = Measurement(None, {"sampled/float32": sampled_texts([0.1, 0.3])})

    run.add_noise("fp8", "prefill", first, Measurement("logits[0] = nan", {}), is_bound=False)

    assert run.unresolved["fp8"] == {NOISE: f"{NOISE}: no noise: second roll: logits[0] = nan"}


def test_ratio_to_the_floor_is_kept_and_not_stored():
    """It is of two rows: a new baseline of one would leave the other's behind."""
    run = GateRun()

    run.add_floor_ratio("fp8", "decode", Interval(35.0, 34.0, 36.5, 0.95))

    name = "decode/prose/bf16/floor_ratio"
    values = {f"{name}_x": 35.0, f"{name}_lower_x": 34.0, f"{name}_upper_x": 36.5}
    assert run.values == {"fp8": values}
    assert all(each.endswith(UNSTORED) for each in values)


def speedup(ratio, latency_us):
    """Return a ratio with an interval of a tenth on both sides, against 99 us."""
    lower, upper = round(ratio - 0.1, 3), round(ratio + 0.1, 3)
    return Speedup(ratio, lower, upper, 0.95, latency_us, 99.0, 30, 10)


# Keys


KEY_OF_T0 = {
    "context": 256,
    "decode_tokens": 128,
    "flavour": "tensorrt_rtx",
    "gpu": "NVIDIA H200",
    "model": "t0",
    "prose_texts": 12,
    "revision": "4446f63",
    "target": "h200",
    "texts": {"prose": {"sha256": "c0ffee"}},
    "version": "1.6.1.120",
}


class Text:
    """Stand in for a TextSet."""

    def key(self):
        """Return what names the text."""
        return {"sha256": "c0ffee"}


def key_of(checkpoint, target="h200", gpu=None):
    """Return the key of a run on the installed flavour."""
    backend = Backend("tensorrt_rtx", "1.6.1.120", None)
    return baseline_key(TARGETS[target], backend, gpu, checkpoint, {"prose": Text()})


def test_key_names_all_that_must_be_equal(t0):
    """Checkpoint, texts, target, GPU, flavour and version; the driver may differ."""
    h200 = Gpu("NVIDIA H200", "9.0", "580.1", "GPU-made-up", 140.0)
    checkpoint = replace(t0, name="t0", revision="4446f63")

    found = key_of(checkpoint, gpu=h200)

    assert found == KEY_OF_T0 | {"checkpoint_sha256": t0.sha256}
    assert key_of(checkpoint, gpu=replace(h200, driver="590.2", uuid="another")) == found


def test_key_of_the_interpreter_names_no_gpu(t0):
    """One that happens to be there computes nothing, and nothing is published of it."""
    names = KEY_OF_T0.keys() - {"model", "revision", "target"}
    found = key_of(t0, target="cpu")

    assert found == {name: KEY_OF_T0[name] for name in names} | {
        "checkpoint_sha256": t0.sha256, "gpu": "cpu",
    }  # fmt: skip


def test_key_of_a_checkpoint_in_a_folder_has_no_path(t0, tmp_path):
    """The hash says which it is; the folder of this machine says nothing."""
    assert key_of(replace(t0, name=str(tmp_path)))["model"] == "a folder"


def test_stored_run_of_another_key_is_refused_with_both_sides(run, folder):
    """Figures of another checkpoint or GPU are not compared."""
    baselines.write(folder, "fp8", Baseline({"gpu": "NVIDIA B200"}, {}, {KL: 7e-3}, {}))
    run.key = {"gpu": "NVIDIA H200"}

    message = (
        '^baseline of fp8 is of something else: gpu: stored "NVIDIA B200", current "NVIDIA H200"; '
        "compare like with like, or write it again with --update-baselines$"
    )
    with pytest.raises(BaselineError, match=message):
        stored_baseline(run, VARIANTS["fp8"])


TEXT = TextSet("prose", "a", (np.arange(4, dtype=np.int32),), "every", "aa", "\n", "bb", 256)
# What a run may differ in -> the name of it in the key, and the run that differs.
OTHER_RUNS = {
    "checkpoint": ("checkpoint_sha256", {"checkpoint": {"sha256": "bad"}}),
    "text": ("texts/prose/sha256", {"text": {"sha256": "other"}}),
    "token ids": ("texts/prose/token_ids_sha256", {"text": {"token_ids": (np.zeros(4, "i4"),)}}),
    "tokenizer": ("texts/prose/tokenizer_sha256", {"text": {"tokenizer_sha256": "other"}}),
    "window": ("texts/prose/window", {"text": {"window": 128}}),
    "flavour": ("flavour", {"backend": {"flavour": "tensorrt"}}),
    "version": ("version", {"backend": {"version": "1.6.1.121"}}),
    "GPU": ("gpu", {"gpu": {"name": "NVIDIA H20"}}),
}


@pytest.mark.parametrize("target", ["cpu", "h200"])
@pytest.mark.parametrize(("name", "other"), OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_run_that_differs_is_refused_by_name(run, folder, t0, target, name, other):
    """Checkpoint, text, tokenizer, window, flavour, version, GPU: both sides, and nothing else."""

    def key(changes):
        backend = replace(Backend("tensorrt_rtx", "1.6.1.120", None), **changes.get("backend", {}))
        gpu = replace(Gpu("NVIDIA H200", "9.0", "580.1", "", 140.0), **changes.get("gpu", {}))
        checkpoint = replace(t0, **changes.get("checkpoint", {}))
        texts = {"prose": replace(TEXT, **changes.get("text", {}))}
        on_gpu = target != "cpu" or "gpu" in changes
        return baseline_key(TARGETS[target], backend, gpu if on_gpu else None, checkpoint, texts)

    baselines.write(folder, "fp8", Baseline(key(other), {}, {KL: 7e-3}, {}))
    run.key = key({})

    line = rf"{name}: stored [^;,]+, current [^;,]+"
    with pytest.raises(BaselineError, match=f"^baseline of fp8 is of something else: {line}; comp"):
        stored_baseline(run, VARIANTS["fp8"])


def test_baseline_from_before_there_were_hashes_is_read(run, folder):
    """Its figures are compared; what it lacks, only who needs it misses."""
    baselines.write(folder, "fp8", Baseline(run.key, {"commit": "4446f63"}, {KL: 7e-3}, {}))

    found = stored_baseline(run, VARIANTS["fp8"])

    assert ranges_from_values(found.values) == {}
    assert "hashes" not in found.provenance


def test_stored_run_of_this_key_is_returned(run, folder):
    """Whole, with the values that are compared."""
    baselines.write(folder, "fp8", Baseline(run.key, {}, {KL: 7e-3}, {}))

    assert stored_baseline(run, VARIANTS["fp8"]).values == {KL: 7e-3}


REFERENCES = {"float32": {"attention": "eager", "dtype": "float32", "transformers": "5.17.0"}}


@pytest.mark.parametrize(
    ("name", "other"),
    [("attention", "sdpa"), ("dtype", "float16"), ("transformers", "5.24.0")],
)
def test_L09_stored_run_of_another_reference_is_refused(run, folder, name, other):
    """Losses to another model are not compared: both sides are named; torch may differ."""
    stored = {"float32": REFERENCES["float32"] | {name: other, "torch": "2.11"}, "bf16": {}}
    baselines.write(folder, "fp8", Baseline(run.key, {"references": stored}, {KL: 7e-3}, {}))
    run.references = REFERENCES

    expected = (
        f'reference float32/{name}: stored "{other}", current "{REFERENCES["float32"][name]}"'
    )
    with pytest.raises(BaselineError, match=f"is of something else: {expected}; compare"):
        stored_baseline(run, VARIANTS["fp8"])


def test_L09_stored_run_of_this_reference_is_returned(run, folder):
    """Other types and other entries of the reference are not asked."""
    stored = {"float32": REFERENCES["float32"] | {"torch": "2.11"}, "bf16": {"dtype": "bfloat16"}}
    baselines.write(folder, "fp8", Baseline(run.key, {"references": stored}, {KL: 7e-3}, {}))
    run.references = REFERENCES

    assert stored_baseline(run, VARIANTS["fp8"]).values == {KL: 7e-3}


def test_published_run_is_asked_for_what_its_key_has(run, folder):
    """A publication states no hash; what it states has to be equal."""
    published = Baseline({"version": "11.4"}, {}, {KL: 7e-3}, {}, {KL: 5e-4})
    baselines.write(folder, "fp8", published)
    run.key = {"version": "11.4", "checkpoint_sha256": "c0ffee"}

    assert stored_baseline(run, VARIANTS["fp8"]).is_published
    run.key = {"version": "11.1", "checkpoint_sha256": "c0ffee"}
    with pytest.raises(BaselineError, match=r'version: stored "11\.4", current "11\.1"; compare'):
        stored_baseline(run, VARIANTS["fp8"])


# Baselines


def test_update_writes_rows_whose_other_cells_passed(run, folder):
    """Regressions are being written, so they are not asked; times of this machine stay out."""
    run.cells = [cell("fp16"), cell("fp16", REGRESSION, "not measured"), cell("fp8")]

    lines = update_baselines(run)

    assert [line.partition(": new (no baseline for ")[0] for line in lines] == ["fp16", "fp8"]
    stored = baselines.read(folder, "fp16")
    assert stored.values == {KL: 2e-4}
    assert stored.key == run.key
    assert stored.provenance["commit"] == "4446f63"
    np.testing.assert_array_equal(stored.tokens[STORED_KL], np.full(4, 0.1, dtype=np.float32))


@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        ("4446f63-dirty", "the working tree differs from commit 4446f63; commit first"),
        ("unknown", "the commit is unknown; run from a git clone"),
    ],
)
def test_update_writes_nothing_from_what_is_in_no_commit(run, folder, commit, reason):
    """Whoever doubts a figure must be able to check out what gave it."""
    run.cells = [cell("fp16"), cell("fp8")]
    run.provenance = replace(PROVENANCE, commit=commit)

    lines = update_baselines(run)

    assert lines == [f"fp16: not written: {reason}", f"fp8: not written: {reason}"]
    assert stored_files(folder) == {}


def test_update_writes_nothing_from_a_run_with_deselected_cells(run, folder):
    """What -k left out of a row may be what it fails."""
    run.cells, run.deselected = [cell("fp16"), cell("fp8")], 3

    lines = update_baselines(run)

    reason = "3 cells were deselected; run all of them, --variants selects rows"
    assert lines == [f"fp16: not written: {reason}", f"fp8: not written: {reason}"]
    assert stored_files(folder) == {}


@pytest.mark.parametrize("verdict", ["failed", "inconclusive", "not measured"])
def test_update_writes_no_row_of_a_run_whose_floor_did_not_pass(run, folder, verdict):
    """What every row shares is suspect then; the line names the cell of fp16."""
    run.cells = [cell("fp16", verdict=verdict), cell("fp8")]

    lines = update_baselines(run)

    reason = f"fp16/prefill/{LIMIT}: {verdict}: made up: {verdict}"
    assert lines == [f"fp16: not written: {reason}", f"fp8: not written: {reason}"]
    assert stored_files(folder) == {}


def test_update_does_not_ask_for_the_comparisons_of_the_floor(run, folder):
    """They are being written too."""
    run.cells = [cell("fp16"), cell("fp16", REGRESSION, "failed"), cell("fp8")]

    update_baselines(run)

    assert baselines.names(folder) == {"fp16", "fp8"}


def test_update_stores_what_the_row_was_built_from(run, folder):
    """Hashes of ranges, network and plan in the provenance, each range among the values."""
    run.cells = [cell("fp16"), cell("fp8")]
    run.add_plan("fp8", "decode", Plan("plan", 8.75, 4.0, True, (), sha256="ab"))
    run.add_hash("fp8", "decode/network", "cd")
    run.add_ranges("fp8", {"transformer.h.0.mlp.c_fc": 3.0})

    update_baselines(run)

    stored = baselines.read(folder, "fp8")
    assert stored.provenance["hashes"] == {"decode/plan": "ab", "decode/network": "cd"}
    assert stored.values["scales/transformer.h.0.mlp.c_fc/amax"] == 3.0
    assert "hashes" not in baselines.read(folder, "fp16").provenance


def test_update_asks_for_the_ranges_that_a_later_run_compares(run, folder):
    """A comparison of ranges needs ranges; any of them is enough, they come together."""
    key = ("fp8", "both", "regression/activation_amax")
    run.expected.add(key)
    run.cells = [cell("fp16"), cell("fp8")]
    assert update_baselines(run)[1] == (
        f"fp8: not written: {'/'.join(key)}: not measured: no figure to store"
    )

    run.add_ranges("fp8", {"transformer.h.0.mlp.c_fc": 3.0})
    update_baselines(run)

    assert baselines.names(folder) == {"fp16", "fp8"}


def test_update_stores_what_was_timed(run, folder):
    """A latency is worth nothing without what it is the time of."""
    run.cells = [cell("fp16"), cell("fp8")]
    run.timing = {"context": 256}

    update_baselines(run)

    assert baselines.read(folder, "fp8").provenance["timing"] == {"context": 256}


@pytest.mark.parametrize(
    "metric", ["regression/speedup_x", "regression/plan_mib", "regression/top1_disagreement_frac"]
)
def test_P03_update_refuses_a_row_without_a_figure_to_compare(run, folder, metric):
    """P-03: the comparison waits while baselines are written, its figure has to be there."""
    key = ("fp8", "decode", metric)
    run.expected.add(key)
    run.cells = [cell("fp16"), cell("fp8"), Cell(*key, None, None, None, "not measured", "why")]

    lines = update_baselines(run)

    assert lines[1].startswith(f"fp8: not written: fp8/decode/{metric}: not measured")
    assert baselines.names(folder) == {"fp16"}


@pytest.mark.parametrize("place", ["values", "tokens"])
def test_update_stores_a_figure_to_compare_whatever_its_cell(run, folder, place):
    """A value or values a token: either is what a later run is held against."""
    run.expected.add(("fp8", "decode", "regression/plan_mib"))
    run.cells = [cell("fp16"), cell("fp8")]
    if place == "values":
        run.values["fp8"]["decode/plan_mib"] = 9.0
    else:
        run.tokens["fp8"]["decode/regression/plan_mib"] = np.ones(4)

    update_baselines(run)

    assert baselines.names(folder) == {"fp16", "fp8"}


@pytest.mark.parametrize("verdict", ["failed", "inconclusive", "not measured"])
def test_B04_update_refuses_a_row_that_did_not_pass_and_says_why(run, folder, verdict):
    """B-04: one failed case keeps its old baseline; the other row is written."""
    run.cells = [cell("fp16"), cell("fp8", verdict=verdict)]

    lines = update_baselines(run)

    reason = f"fp8: not written: fp8/prefill/{LIMIT}: {verdict}: made up: {verdict}"
    assert lines[1:] == [reason]
    assert sorted(stored_files(folder)) == ["fp16.json", "fp16.tokens.npz"]


def test_update_refuses_a_row_whose_noise_hides_its_tolerance(run, folder):
    """Refused when it is written, not when it fails; the other row is written."""
    run.cells = [cell("fp16"), cell("fp8")]
    run.unresolved = rolled_twice(1.0).unresolved

    lines = update_baselines(run)

    assert lines[1].startswith(
        f"fp8: not written: {NOISE}: the sample cannot resolve the tolerance"
    )
    assert baselines.names(folder) == {"fp16"}


def test_update_refuses_a_row_with_a_cell_that_nobody_gave(run, folder):
    """A test that never ran is as bad as one that failed."""
    run.cells = [cell("fp16")]

    assert update_baselines(run)[1] == (
        f"fp8: not written: fp8/prefill/{LIMIT}: not measured: no cell"
    )
    assert baselines.names(folder) == {"fp16"}


def test_B04_update_prints_old_and_new(run, folder):
    """A changed value shows both sides and the change, an unchanged row says so."""
    run.cells = [cell("fp16"), cell("fp8")]
    update_baselines(run)
    run.values["fp8"] = {KL: 7.7e-3}

    lines = update_baselines(run)

    assert lines == ["fp16: unchanged", f"fp8: values/{KL}: 0.007 -> 0.0077 (+10.00 %)"]
    assert baselines.read(folder, "fp8").values == {KL: 7.7e-3}


def test_B04_update_keeps_every_other_row(run, folder):
    """Rows that were not selected, and rows that were refused, keep their bytes."""
    run.cells = [cell("fp16"), cell("fp8")]
    update_baselines(run)
    baselines.write(folder, "fp32", baselines.read(folder, "fp16"))
    before = stored_files(folder)
    run.cells = [cell("fp16"), cell("fp8", verdict="failed")]
    run.values["fp16"], run.values["fp8"] = {KL: 1.0}, {KL: 8e-3}

    update_baselines(run)

    changed = {name for name, content in stored_files(folder).items() if content != before[name]}
    assert changed == {"fp16.json"}


def test_B04_update_replaces_a_corrupt_file_and_says_so(run, folder):
    """The line names what was wrong with the old file."""
    run.cells = [cell("fp16"), cell("fp8")]
    update_baselines(run)
    (folder / "fp8.json").write_text('{"schema": 1, "ke')

    lines = update_baselines(run)

    assert lines[1].startswith("fp8: new (")
    assert "fp8.json: line 1, column 15: not JSON" in lines[1]
    assert baselines.read(folder, "fp8").values == {KL: 7e-3}


@pytest.mark.parametrize("absent", [{"folder": None}, {"provenance": None}, {"values": {}}])
def test_update_without_a_measurement_is_an_error(run, folder, absent):
    """A run that measured nothing has nothing to store."""
    run.cells = [cell("fp16"), cell("fp8")]

    with pytest.raises(BaselineError, match="nothing was measured; select gate tests"):
        update_baselines(replace(run, **absent))

    assert stored_files(folder) == {}


def test_update_refuses_a_row_without_values(run, folder):
    """Cells that read no value, such as the quantized projections, make no baseline."""
    run.cells = [cell("fp16"), cell("fp8")]
    del run.values["fp8"]

    lines = update_baselines(run)

    assert "fp8: not written" in lines[1]
    assert baselines.names(folder) == {"fp16"}


def test_B04_update_refuses_a_non_finite_row_and_writes_the_next(run, folder):
    """B-04: a value that is not finite is refused by name; other rows are written all the same."""
    run.cells = [cell("fp16"), cell("fp8")]
    run.values["fp16"][KL] = float("nan")

    lines = update_baselines(run)

    assert "fp16: not written" in lines[0]
    assert baselines.names(folder) == {"fp8"}


def test_B04_P03_update_from_a_part_of_the_tests_keeps_what_it_did_not_measure(run, folder):
    """``-k plan_mib --update-baselines`` must not take the stored tokens away (P-03, B-04)."""
    run.cells = [cell("fp16"), cell("fp8")]
    update_baselines(run)
    before = stored_files(folder)
    run.values["fp8"], run.tokens["fp8"] = {"prefill/plan_mib": 9.0}, {}

    lines = update_baselines(run)

    assert "fp8: not written" in lines[1]
    assert stored_files(folder) == before


# results.json


def test_report_has_exactly_these_members(run, t0):
    """Schema, target, model, provenance, cells of eight keys, coverage, and the values."""
    run.cells = [
        cell("fp16"),
        cell("fp8", verdict="failed"),
        cell("fp8", REGRESSION, "not measured"),
    ]

    found = results_of(run)

    assert list(found) == [
        "schema", "target", "model", "provenance", "cells", "coverage", "values", "rows",
        "ship_limits",
    ]  # fmt: skip
    assert found["schema"] == 1
    assert found["target"] == "cpu/made-up-1.0"
    assert found["model"]["sha256"] == t0.sha256
    assert found["provenance"]["commit"] == "4446f63"
    assert [list(each) for each in found["cells"]] == 3 * [[field.name for field in fields(Cell)]]
    assert found["coverage"] == {
        "measured": 2,
        "expected": 4,
        "missing": [f"fp16/prefill/{REGRESSION}", f"fp8/prefill/{REGRESSION}"],
    }
    assert found["values"]["fp8"] == {KL: 7e-3}
    assert list(found["rows"]) == list(VARIANTS)
    assert found["rows"]["fp8-c_fc"]["settings"]["quantized"] == ("c_fc",)
    assert found["ship_limits"]["floor_ratio_x"] == {"direction": "at most", "value": 2.0}


def test_report_lists_known_failures_and_what_was_timed(run):
    """Both only where there are some."""
    run.known_failures, run.timing = ["fp8/decode/build: made up"], {"context": 256}

    found = results_of(run)

    assert found["known_failures"] == ["fp8/decode/build: made up"]
    assert found["timing"] == {"context": 256}
