"""Faults in what the gate judges with: read-back networks, plans, baselines and references."""

import hashlib
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from gptneo_trt import baselines, calibrate, reference
from gptneo_trt.data import Plan
from gptneo_trt.errors import BaselineError, RunError
from gptneo_trt.layers import weight_scale
from gptneo_trt.network import PHASES
from gptneo_trt.operators import to_fp8
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate import test_build, test_quality
from tests.gate.measure import Pipeline
from tests.gate.measurer import Setup
from tests.selftest.conftest import FLAVOUR
from tests.selftest.faults import C_FC, linear
from tests.selftest.judging import judged

FP16, FP8 = VARIANTS[FLOOR], VARIANTS["fp8"]
QUANTIZED = [test_build.test_exactly_the_intended_projections_are_quantized]
REGRESSION = [test_quality.test_loss_is_the_stored_one]
OUT_PROJ = "transformer.h.1.attn.attention.out_proj"


@pytest.fixture
def read_back(backend, checkpoint, scales):
    """Return a function () -> the cells of the fp8 row's networks, read back from TensorRT."""
    return lambda: judged(QUANTIZED, FP8, backend=backend, checkpoint=checkpoint, scales=scales)


@pytest.fixture
def baseline(tmp_path, gate_run, monkeypatch):
    """Return a copy of the floor's stored run, from which the gate reads."""
    for name in (f"{FLOOR}.json", f"{FLOOR}.tokens.npz", "fp8.tokens.npz"):
        shutil.copy(gate_run.folder / name, tmp_path)
    monkeypatch.setattr(gate_run, "folder", tmp_path)
    return tmp_path / f"{FLOOR}.json"


@pytest.fixture
def regression(control, stored):
    """Return a function () -> the floor's cells that are judged against the stored run."""
    return lambda: judged(
        REGRESSION, FP16, measured=lambda row, phase: control(row).phases[phase], stored=stored
    )


@pytest.fixture
def other_pipeline(tmp_path):
    """Return a pipeline that finds no reference in its cache."""
    made = Pipeline(Setup("bundled", FLAVOUR, "bundled", tmp_path))
    made.next_token_texts = made.next_token_texts[:2]
    return made


def test_control_quantizes_what_it_should(read_back):
    """Without a fault both networks of the fp8 row pass."""
    assert {cell.verdict for cell in read_back().values()} == {"passed"}


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        pytest.param(
            linear(C_FC, activation_scale=None),
            rf"29 of 37 products read FP8; missing: \['{C_FC}'\]; not intended: \[\]$",
            id="one-too-few",
        ),
        pytest.param(
            linear(OUT_PROJ, activation_scale=0.01),
            rf"31 of 37 products read FP8; missing: \[\]; not intended: \['{OUT_PROJ}'\]$",
            id="one-too-many",
        ),
        pytest.param(
            linear(C_FC, activation_scale=0.01),
            rf"30 of 37 products read FP8; .*; other scales: {C_FC}: 0\.0099.*, expected [0-9.]+$",
            id="another-scale",
        ),
    ],
)
def test_other_projections_than_intended_are_named(seed, reason, read_back, monkeypatch):
    """One projection in fp16, one in FP8 that should not be, or one with another scale fails."""
    seed(monkeypatch)
    cells = read_back()
    assert sorted(cells) == sorted((phase, "quantized_projections") for phase in PHASES)
    for cell in cells.values():
        assert cell.verdict == "failed"
        assert re.match(reason, cell.reason), cell


@pytest.mark.parametrize("phase", PHASES)
def test_a_plan_of_another_size_is_seen(phase, gate_run, stored):
    """A plan of the fp8 row as large as the stored fp16 plan was not built from this row."""
    size = baselines.read(gate_run.folder, FLOOR).values[f"{phase}/plan_mib"]
    swapped = Plan(gate_run.folder, size, 0.0, True, ())
    tests = [test_build.test_plan_size_is_the_stored_one]
    cells = judged(tests, FP8, planned=lambda *_: swapped, stored=stored)
    cell = cells[phase, "regression/plan_mib"]
    assert cell.verdict == "failed"
    assert re.match(rf"obtained {size:.6g}, expected \S+ \+- ", cell.reason)


def _edited(path, change):
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def _nan_value(path):
    _edited(path, lambda content: content["values"].update({"decode/plan_mib": float("nan")}))


def _nan_token(path):
    tokens = path.with_name(f"{FLOOR}.tokens.npz")
    with np.load(tokens) as archive:
        arrays = {name: archive[name].copy() for name in archive.files}
    arrays["prefill/regression/kl_mean_nats"][7] = np.nan
    np.savez(tokens, **arrays)
    digest = hashlib.sha256(tokens.read_bytes()).hexdigest()
    _edited(path, lambda content: content.update(tokens_sha256=digest))


def _other_text(path):
    _edited(path, lambda content: content["key"]["texts"]["prose"].update(sha256="0" * 64))


def _other_tokens(path):
    path.with_name("fp8.tokens.npz").replace(path.with_name(f"{FLOOR}.tokens.npz"))


def test_control_reads_the_copied_baseline(baseline, regression):
    """The copy of a stored run that the faults below are made in is green."""
    assert {cell.verdict for cell in regression().values()} == {"passed"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(_nan_value, "NaN", id="nan-value"),
        pytest.param(_nan_token, "with 1 non-finite values, expected finite", id="nan-token"),
        pytest.param(_other_text, "of something else: texts/prose/sha256: stored ", id="text"),
        pytest.param(_other_tokens, "of another JSON", id="tokens-of-another-row"),
    ],
)
def test_no_cell_is_judged_against_a_spoilt_baseline(spoil, message, baseline, regression):
    """A stored run that is not finite, of another text or of another row is refused by name."""
    spoil(baseline)
    with pytest.raises(BaselineError, match=message):
        regression()


def test_a_baseline_of_other_tokens_of_the_same_text_is_refused(texts):
    """Two cuts of one text, a token apart, do not have one key: they cannot be paired."""
    prose = texts["prose"]
    stream = np.roll(np.concatenate(prose.token_ids), 1)
    cut_elsewhere = replace(prose, token_ids=tuple(np.split(stream, len(prose.token_ids))))
    assert cut_elsewhere.key() != prose.key()


def test_a_quantized_reference_is_refused(other_pipeline, scales, monkeypatch):
    """The model that ModelOpt quantized is no reference, and none of its logits are kept."""
    torch_model = reference.torch_model
    modules = FP8.quantized_modules(other_pipeline.checkpoint.architecture.num_layers)

    def quantized(checkpoint, dtype):
        model = torch_model(checkpoint, dtype)
        return calibrate.quantized_model(model, modules, [other_pipeline.prose[0, :8]])

    monkeypatch.setattr(reference, "torch_model", quantized)
    outcomes = other_pipeline.measure(FP16, None)
    for error in outcomes.values():
        assert isinstance(error, RunError)
        assert str(error).startswith("the reference is quantized: obtained ")
    assert not list(other_pipeline.cache.rglob("*.safetensors"))


def test_a_reference_of_rounded_weights_is_seen(other_pipeline, control, quality, monkeypatch):
    """A reference whose c_fc weights went through FP8 is contradicted by the fp16 row."""
    torch_model = reference.torch_model

    def rounded(checkpoint, dtype):
        weights = dict(checkpoint.weights)
        for name in weights:
            if name.endswith("c_fc.weight"):
                scale = weight_scale(name, weights[name])
                array = torch.from_numpy(weights[name].astype(np.float32) / scale)
                weights[name] = to_fp8(array).numpy() * np.float32(scale)
        return torch_model(replace(checkpoint, weights=weights), dtype)

    monkeypatch.setattr(reference, "torch_model", rounded)
    measured, _ = other_pipeline.measure_prefill(FP16, None)
    cell = quality(FP16, control(FP16).phases | {"prefill": measured})["prefill", "kl_mean_nats"]
    assert cell.verdict == "failed"
    assert re.match(r"obtained \S+, expected at most 0\.0004$", cell.reason)
