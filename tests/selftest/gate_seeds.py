"""Seeds of faults in what the gate measures and judges with: plans, texts, metrics, stored runs,
references. None of them changes a limit or a verdict."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptneo_trt import baselines, calibrate, decoder, metrics, plans, reference, scales, texts
from gptneo_trt.data import Decoded
from gptneo_trt.layers import weight_scale
from gptneo_trt.operators import to_fp8
from gptneo_trt.plans import PlanRequest
from gptneo_trt.variants import VARIANTS
from tests.gate import measure
from tests.gate.cells import ROOT
from tests.selftest.seeds import Seed, everywhere

TOKENS = "tokens.npz"


def plan_of(other: Callable[[PlanRequest], PlanRequest]) -> Seed:
    """Return a seed: a plan's cache key overlooks something, so another plan has its name."""
    build_plan = plans.build_plan

    def build(request, cache, *rest):
        return build_plan(other(request), cache, *rest)

    return lambda patch: everywhere(patch, build_plan, build)


def worker_is(program: str, timeout_s: float = 60.0) -> Seed:
    """Return a seed: the process that builds a plan runs a line of Python instead."""
    run_worker = plans._run_worker

    def run(request, command, job, _):
        run_worker(request, [sys.executable, "-c", program], job, timeout_s)

    return lambda patch: patch.setattr(plans, "_run_worker", run)


def prefill_of(
    change_ids: Callable[[np.ndarray], np.ndarray] = lambda ids: ids,
    change: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> Seed:
    """Return a seed: prefill runs other tokens, or gives other logits, K and V."""
    prefill = decoder.prefill

    def changed(executor, architecture, token_ids):
        found = prefill(executor, architecture, change_ids(token_ids))
        return Decoded(change(found.logits), change(found.keys), change(found.values))

    return lambda patch: patch.setattr(decoder, "prefill", changed)


def last_token_left_out(patch: pytest.MonkeyPatch) -> None:
    """Score the token before the last of each question and prompt."""
    last_rows = measure.last_rows

    def rows(run, token_ids, widths=None):
        return last_rows(run, [ids[: max(1, len(ids) - 1)] for ids in token_ids], widths)

    patch.setattr(measure, "last_rows", rows)


def nothing_is_checked(patch: pytest.MonkeyPatch) -> None:
    """Let the check for NaN and infinity find nothing."""
    patch.setattr(metrics, "first_non_finite", lambda arrays: None)


def compared_as(change: Callable[..., Any]) -> Seed:
    """Return a seed: ``change(compare_many, references, obtained)`` compares instead."""
    compare_many = metrics.compare_many

    def compare(references, obtained):
        return change(compare_many, references, obtained)

    return lambda patch: patch.setattr(metrics, "compare_many", compare)


def clamped(compare_many, references, obtained):
    """Compare what is not finite as zero."""
    return compare_many(references, np.nan_to_num(obtained))


def reversed_kl(compare_many, references, obtained):
    """Give KL(obtained || reference)."""
    own = metrics.reference_distribution(obtained, references[0].targets, references[0].text)
    return [
        replace(tokens, kl_nats=compare_many([own], each.logits)[0].kl_nats)
        for each, tokens in zip(references, compare_many(references, obtained), strict=True)
    ]


def times_kl(factor: float) -> Callable[..., Any]:
    """Return a comparison whose KL is in another unit."""

    def scaled(compare_many, references, obtained):
        return [
            replace(tokens, kl_nats=factor * tokens.kl_nats)
            for tokens in compare_many(references, obtained)
        ]

    return scaled


def last_index_wins(compare_many, references, obtained):
    """Take the last of tied maxima as the most likely token of the obtained logits."""
    top = obtained.shape[1] - 1 - np.argmax(obtained[:, ::-1], axis=1)
    return [
        replace(tokens, top1=top == each.top)
        for each, tokens in zip(references, compare_many(references, obtained), strict=True)
    ]


def targets_moved(patch: pytest.MonkeyPatch) -> None:
    """Score the token that is read, not the one that follows."""
    scored_rows = metrics.scored_rows

    def moved(token_ids, scored):
        text, position, target = scored_rows(token_ids, scored)
        own = np.array([token_ids[i][at] for i, at in zip(text, position, strict=True)])
        return text, position, np.where(target < 0, target, own)

    patch.setattr(metrics, "scored_rows", moved)


def scored_against(change: Callable[[np.ndarray], np.ndarray]) -> Seed:
    """Return a seed: the cached reference logits of the prose are changed."""
    reference_logits = measure.reference_logits

    def changed(*arguments):
        found = reference_logits(*arguments)
        return replace(found, prose=change(found.prose))

    return lambda patch: patch.setattr(measure, "reference_logits", changed)


def prose_is(change: Callable[..., Any]) -> Seed:
    """Return a seed: ``change(prose, calibration text)`` is the prose of the run."""
    text_set = texts.text_set

    def changed(name, *rest):
        found = text_set(name, *rest)
        return change(found, text_set("calibration", *rest)) if name == "prose" else found

    return lambda patch: everywhere(patch, text_set, changed)


def other_text(prose, calibration):
    """Return the calibration text under the prose's name."""
    return replace(calibration, name="prose")


def cut_elsewhere(prose, calibration):
    """Return the prose cut one token later."""
    stream = np.roll(np.concatenate(prose.token_ids), 1)
    return replace(prose, token_ids=tuple(np.split(stream, len(prose.token_ids))))


def other_tokenizer(prose, calibration):
    """Return the prose as another tokenizer.json would name it."""
    return replace(prose, tokenizer_sha256=hashlib.sha256(b"another").hexdigest())


def cached_ranges(factor: float) -> Seed:
    """Return a seed: the ranges that calibration left in the cache are multiplied."""
    read_scales = scales.read_scales

    def read(*arguments):
        found = read_scales(*arguments)
        amax = {name: factor * value for name, value in found.activation_amax.items()}
        return replace(found, activation_amax=amax)

    return lambda patch: everywhere(patch, read_scales, read)


def stored_run(change: Callable[[Path], None]) -> Seed:
    """Return a seed: ``change(JSON file)`` spoils a copy of each stored run before it is read."""
    read = baselines.read

    def spoilt(folder, variant):
        with tempfile.TemporaryDirectory() as copy:
            for path in folder.glob("*"):
                shutil.copy(path, copy)
            change(Path(copy, f"{variant}.json"))
            return read(Path(copy), variant)

    return lambda patch: patch.setattr(baselines, "read", spoilt)


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the content of a JSON file in place."""

    def edit(path: Path) -> None:
        content = json.loads(path.read_text("utf-8"))
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")

    return edit


def nan_token(path: Path) -> None:
    """Make one stored value a token NaN, with the hash of the file put right."""
    tokens = path.with_suffix(f".{TOKENS}")
    with np.load(tokens) as archive:
        arrays = {name: archive[name].copy() for name in archive.files}
    arrays["prefill/regression/kl_mean_nats"][7] = np.nan
    np.savez(tokens, **arrays)
    digest = hashlib.sha256(tokens.read_bytes()).hexdigest()
    edited(lambda content: content.update(tokens_sha256=digest))(path)


def tokens_of(row: str) -> Callable[[Path], None]:
    """Return what puts the values a token of another row in place of a row's own."""
    return lambda path: path.with_name(f"{row}.{TOKENS}").replace(path.with_suffix(f".{TOKENS}"))


def cut_tokens(path: Path) -> None:
    """Lose the second half of the values a token."""
    tokens = path.with_suffix(f".{TOKENS}")
    content = tokens.read_bytes()
    tokens.write_bytes(content[: len(content) // 2])


def run_of(other: str) -> Callable[[Path], None]:
    """Return what puts a whole stored run of another row under this row's name."""

    def replaced(path: Path) -> None:
        for suffix in (".json", f".{TOKENS}"):
            path.with_name(f"{other}{suffix}").replace(path.with_suffix(suffix))

    return replaced


def run_of_another_gpu(patch: pytest.MonkeyPatch) -> None:
    """Read the run that another target stored."""
    read = baselines.read

    def other(folder, variant):
        target = "cpu" if folder.parents[1].name == "h200" else "h200"
        return read(ROOT / "baselines" / target / folder.parent.name / folder.name, variant)

    patch.setattr(baselines, "read", other)


def quantized_reference(patch: pytest.MonkeyPatch) -> None:
    """Take the model that ModelOpt quantized as the reference."""
    torch_model = reference.torch_model

    def quantized(checkpoint, dtype):
        model = torch_model(checkpoint, dtype)
        modules = VARIANTS["fp8"].quantized_modules(checkpoint.architecture.num_layers)
        return calibrate.quantized_model(model, modules, [np.zeros(8, dtype=np.int32)])

    patch.setattr(reference, "torch_model", quantized)


def training_reference(patch: pytest.MonkeyPatch) -> None:
    """Leave the reference in training mode, with its dropout."""
    torch_model = reference.torch_model
    patch.setattr(reference, "torch_model", lambda *given: torch_model(*given).train())


def reference_of(change: Callable[[str, np.ndarray], np.ndarray]) -> Seed:
    """Return a seed: the reference has other weights; ``change(name, array)`` gives them."""
    torch_model = reference.torch_model

    def changed(checkpoint, dtype):
        weights = {name: change(name, array) for name, array in checkpoint.weights.items()}
        return torch_model(replace(checkpoint, weights=weights), dtype)

    return lambda patch: patch.setattr(reference, "torch_model", changed)


def rounded_c_fc(name: str, array: np.ndarray) -> np.ndarray:
    """Return a c_fc that went through FP8; other weights as they are."""
    if not name.endswith("c_fc.weight"):
        return array
    scale = weight_scale(name, array)
    return to_fp8(torch.from_numpy(array.astype(np.float32) / scale)).numpy() * np.float32(scale)
