"""Pipeline and references: what is scored, what a second roll compares, what a cache may hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny import CONFIG, T0, changed, tiny_checkpoint, write_folder

from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.data import Decoded
from gptneo_trt.errors import CheckpointError
from gptneo_trt.variants import VARIANTS
from tests.gate import measure, references
from tests.gate.measure import Pipeline
from tests.gate.measurer import CONTEXT, DECODE_TOKENS, Measurer, Setup
from tests.gate.references import ScoredTexts, reference_logits

FP32 = VARIANTS["fp32"]
LENGTHS = (CONTEXT, 200, CONTEXT)
CONFIG_256 = CONFIG | {"max_position_embeddings": CONTEXT}


def token_ids(*lengths):
    """Return texts of random tokens of T0's vocabulary."""
    generator = np.random.default_rng(7)
    return [generator.integers(0, 64, length, dtype=np.int32) for length in lengths]


@pytest.fixture(scope="module")
def checkpoint():
    """Return T0 with as many positions as the gate's texts."""
    return tiny_checkpoint(replace(T0, max_positions=CONTEXT))


@pytest.fixture
def pipeline(checkpoint, tmp_path):
    """Return a function (lengths of sampled texts) -> pipeline on T0 with two windows of prose."""
    threads = torch.get_num_threads()

    def make(*sampled):
        made = Pipeline(Setup("bundled", "tensorrt_rtx", "bundled", tmp_path))
        made.checkpoint = checkpoint
        made.prose = np.stack(token_ids(CONTEXT, CONTEXT))
        made.next_token_texts, made.sampled_texts = token_ids(5, 9), token_ids(*sampled)
        return made

    yield make
    torch.set_num_threads(threads)


def test_each_text_set_is_scored_against_both_references(pipeline):
    """Prefill scores three sets, of the sampled one every token and none of the padding."""
    prefill, logits = pipeline(*LENGTHS).measure_prefill(FP32, None)
    sets = ("next_token", "prose", "sampled")
    assert sorted(prefill.metrics) == [
        f"{name}/{to}" for name in sets for to in ("bf16", "float32")
    ]
    assert prefill.metrics["sampled/float32"].values["positions"] == sum(LENGTHS)
    assert prefill.metrics["sampled/float32"].values["scored_tokens"] == sum(LENGTHS) - 3
    assert prefill.metrics["sampled/float32"].values["kl_max_nats"] < 1e-6
    assert logits.shape == (2, DECODE_TOKENS, 64)


def test_a_source_without_sampled_text_has_no_such_figure(pipeline):
    """The study sampled nothing: its other figures are as they would be."""
    without, _ = pipeline().measure_prefill(FP32, None)
    with_some, _ = pipeline(*LENGTHS).measure_prefill(FP32, None)
    assert [name for name in without.metrics if "sampled" in name] == []
    for name, found in without.metrics.items():
        assert found.values == with_some.metrics[name].values


def test_study_has_no_sampled_text(tmp_path):
    """Nothing is read, from the hub or elsewhere."""
    assert Pipeline(Setup("owner/name@1", "tensorrt_rtx", "study", tmp_path)).sampled_texts == []


@pytest.mark.parametrize("name", ["logits", "keys", "values"])
def test_sampled_text_that_is_not_finite_is_named(pipeline, name, monkeypatch):
    """A NaN at the end of the last group of sampled texts alone is found, whatever its tensor."""
    real, groups = measure.decoder.prefill, []

    def prefill(executor, architecture, ids):
        decoded = real(executor, architecture, ids)
        groups.append(len(ids))
        if len(groups) == 4:  # prose, next token, two groups of sampled texts
            array = getattr(decoded, name).copy()
            array.flat[-1] = np.nan
            return replace(decoded, **{name: array})
        return decoded

    monkeypatch.setattr(measure.decoder, "prefill", prefill)
    found, _ = pipeline(*[CONTEXT] * 8).measure_prefill(FP32, None)
    assert groups == [2, 2, 6, 2]
    assert found.non_finite.startswith(f"sampled texts from 6: {name}[1, ")
    assert found.metrics == {}


def test_texts_run_in_groups_and_keep_their_order(pipeline):
    """Logits are those of text after text, rows of padding left out."""
    texts = token_ids(*range(2, 12))

    def run(ids):
        logits = ids[..., None].astype(np.float32)
        return Decoded(logits, logits, logits)

    rows, non_finite = measure._scored_logits(run, texts)
    assert non_finite is None
    np.testing.assert_array_equal(rows[:, 0], np.concatenate(texts))


def test_second_roll_compares_what_regressions_need(pipeline):
    """Float32 reference, prose and sampled text, in another order, over the same references."""
    first = pipeline(*LENGTHS)
    again = first.second_roll
    found, natural = again.measure(FP32, None), first.measure(FP32, None)
    assert sorted(found["prefill"].metrics) == ["prose/float32", "sampled/float32"]
    assert sorted(found["decode"].metrics) == ["prose/float32"]
    assert again.references["sampled"]["float32"] is first.references["sampled"]["float32"]
    assert (first.setup.summation_order, again.setup.summation_order) == (0, 1)
    for phase, measured in found.items():
        obtained = measured.metrics["prose/float32"].tokens.nll_nats
        expected = natural[phase].metrics["prose/float32"].tokens.nll_nats
        np.testing.assert_allclose(obtained, expected, atol=1e-4)
        assert not np.array_equal(obtained, expected, equal_nan=True)


def test_order_of_a_run_is_that_of_its_setup(pipeline):
    """``--summation-order 3`` reaches the interpreter, through what workers load."""
    found = []
    for order in (0, 3, 3):
        made = pipeline(*LENGTHS)
        made.setup = replace(made.setup, summation_order=order)
        found.append(made.measure_prefill(FP32, None)[1])
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(found[1], found[2])


def test_a_checkpoint_that_changed_while_the_gate_ran_is_refused(checkpoint, tmp_path):
    """A worker that loads other weights than the run began with measures nothing with them."""
    folder = write_folder(tmp_path / "t0", checkpoint.weights, CONFIG_256)
    began = checkpoint_from_source(str(folder)).sha256
    setup = Setup(str(folder), "tensorrt_rtx", "bundled", tmp_path, checkpoint_sha256=began)
    assert Pipeline(setup).checkpoint.sha256 == began
    other = changed(checkpoint, {"transformer.ln_f.bias": lambda bias: bias + 1})
    write_folder(folder, other.weights, CONFIG_256)
    with pytest.raises(CheckpointError, match=rf"changed while .* expected {began}; run again"):
        Pipeline(setup).measure_prefill(FP32, None)


def test_measurer_gives_the_second_roll_apart(pipeline, monkeypatch, tmp_path):
    """A row and its second roll are two results; in this process where there are no workers."""
    monkeypatch.setattr(measure, "Pipeline", lambda setup: pipeline(*LENGTHS))
    with Measurer(Setup("bundled", "tensorrt_rtx", "bundled", tmp_path), 0) as measurer:
        measurer.submit(FP32, None)
        measurer.submit_second_roll(FP32, None)
        first, second = measurer.result(FP32, "decode"), measurer.second_roll(FP32, "decode")
    assert sorted(first.metrics) == ["prose/bf16", "prose/float32"]
    assert sorted(second.metrics) == ["prose/float32"]


# References


def test_key_tells_text_sets_apart():
    """A text that is sampled is not one that is scored at its end, and a shape is no other one."""
    prose, (one, two) = np.stack(token_ids(8, 8)), token_ids(5, 5)
    sets = [
        ScoredTexts(prose, [one, two], []),
        ScoredTexts(prose, [one], [two]),
        ScoredTexts(prose.reshape(4, 4), [one, two], []),
    ]
    assert len({str(each.identity()) for each in sets}) == 3


@pytest.mark.parametrize("lost", ["sampled", "prose"])
def test_a_cache_without_an_array_is_computed_again(checkpoint, tmp_path, monkeypatch, lost):
    """A file of an older version lacks the sampled text: it is replaced, not misread."""
    texts = ScoredTexts(np.stack(token_ids(8, 8)), token_ids(5), token_ids(8, 6))
    first = reference_logits(checkpoint, texts, "float32", tmp_path)
    (path,) = (tmp_path / "references").glob("*.safetensors")
    arrays = load_file(path)
    del arrays[lost]
    save_file(arrays, path, metadata=dict(first.provenance))
    again = reference_logits(checkpoint, texts, "float32", tmp_path)
    monkeypatch.setattr(references, "_computed", lambda *_: pytest.fail("computed again"))
    stored = reference_logits(checkpoint, texts, "float32", tmp_path)
    for found in (again, stored):
        np.testing.assert_array_equal(getattr(found, lost), getattr(first, lost))


# What is done to a file of the cache: (arrays, metadata) -> changes both in place.
CHANGED = {
    "a bit of a logit": lambda arrays, _: arrays["prose"].view(np.uint32).__ixor__(1),
    "two arrays": lambda arrays, _: arrays.update(prose=arrays["prose"][::-1].copy()),
    "another type": lambda arrays, _: arrays.update(prose=arrays["prose"].astype(np.float64)),
    "the same bytes of another type": lambda arrays, _: arrays.update(
        prose=arrays["prose"].view(np.int32)
    ),
    "no hash": lambda _, metadata: metadata.pop(references.DIGEST),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_cache_with_other_logits_is_computed_again(checkpoint, tmp_path, monkeypatch, change):
    """Whatever a file holds now, losses are to what the model gives."""
    texts = ScoredTexts(np.stack(token_ids(8, 8)), token_ids(5), token_ids(8, 6))
    first = reference_logits(checkpoint, texts, "float32", tmp_path)
    (path,) = (tmp_path / "references").glob("*.safetensors")
    arrays = load_file(path)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    change(arrays, metadata)
    save_file(arrays, path, metadata=metadata)

    again = reference_logits(checkpoint, texts, "float32", tmp_path)
    monkeypatch.setattr(references, "_computed", lambda *_: pytest.fail("computed again"))
    stored = reference_logits(checkpoint, texts, "float32", tmp_path)

    for found in (again, stored):
        np.testing.assert_array_equal(found.prose, first.prose)
        assert found.prose.dtype == np.float32
        assert found.provenance == first.provenance


def test_no_sampled_text_is_kept_as_none_at_all(checkpoint, tmp_path, monkeypatch):
    """An empty set is stored and read back as such."""
    texts = ScoredTexts(np.stack(token_ids(8, 8)), token_ids(5), [])
    assert len(reference_logits(checkpoint, texts, "float32", tmp_path).sampled) == 0
    monkeypatch.setattr(references, "_computed", lambda *_: pytest.fail("computed again"))
    assert len(reference_logits(checkpoint, texts, "float32", tmp_path).sampled) == 0
