"""Neither the order of texts nor what they run together with changes a result."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tiny import fixed_scales

from gptneo_trt import decoder, metrics
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import PHASES, build_network
from gptneo_trt.variants import VARIANTS
from tests.gate import measure
from tests.gate.last_rows import last_rows, padded

pytestmark = pytest.mark.usefixtures("one_thread")

PHASE_FUNCTIONS = {"prefill": decoder.prefill, "decode": decoder.decode}


@pytest.fixture(scope="module")
def executor(backend, t0):
    """Return a function that interprets a row of T0 in one phase, each once."""
    made = {}

    def make(row, phase):
        if (row, phase) not in made:
            network = build_network(backend, t0, VARIANTS[row], fixed_scales(t0), phase, 64)
            made[row, phase] = Interpreter(network)
        return made[row, phase]

    return make


def split(array, sizes):
    """Return consecutive parts of an array of these sizes, and what is left."""
    return [part for part in np.split(array, np.cumsum(sizes)) if len(part)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("row", ["fp32", "fp16", "fp8-all"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_results_do_not_depend_on_order_or_batching(executor, t0, row, phase, data):
    """Logits, K and V of a text are bitwise the same in any order and any batch, also alone."""
    tokens = data.draw(hnp.arrays(np.int32, (6, 9), elements=st.integers(0, 63)))
    order = np.array(data.draw(st.permutations(range(6))))
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=5))
    made, run = executor(row, phase), PHASE_FUNCTIONS[phase]

    expected = vars(run(made, t0.architecture, tokens))
    parts = [vars(run(made, t0.architecture, part)) for part in split(tokens[order], sizes)]

    for name, array in expected.items():
        obtained = np.concatenate([part[name] for part in parts])
        assert np.array_equal(obtained, array[order]), name


def ragged(seed, lengths):
    """Return random texts of T0's vocabulary of these lengths."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 64, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("row", ["fp16", "fp8"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_gate_scores_texts_alike_in_any_order_and_group(executor, t0, row, data):
    """Sampled texts padded to the context give bitwise the same logits in groups of any size.

    So do last tokens at given widths, whatever the order of the texts.
    """
    lengths = data.draw(st.lists(st.integers(2, 64), min_size=2, max_size=7))
    order = data.draw(st.permutations(range(len(lengths))))
    texts, made = ragged(data.draw(st.integers(0, 99)), lengths), executor(row, "prefill")

    def run(ids):
        return decoder.prefill(made, t0.architecture, ids)

    def scored(chosen, at_once):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "TEXTS_AT_ONCE", at_once)
            patch.setattr(measure, "CONTEXT", 64)
            logits, non_finite = measure._scored_logits(run, chosen)
        assert non_finite is None
        return split(logits, [len(ids) for ids in chosen])

    expected, shuffled = scored(texts, 6), scored([texts[index] for index in order], 2)
    for place, index in enumerate(order):
        assert np.array_equal(shuffled[place], expected[index])

    last = last_rows(lambda ids: run(ids).logits, texts, (64,))
    again = last_rows(lambda ids: run(ids).logits, [texts[index] for index in order], (64,))
    assert np.array_equal(again, last[list(order)])
    assert np.array_equal(last, [logits[-1] for logits in expected])


@settings(deadline=None)
@given(data=st.data())
def test_last_tokens_are_the_same_in_any_order(data):
    """Nor does the order decide which texts run together, and so how far each is padded."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=9))
    order = data.draw(st.permutations(range(len(lengths))))
    texts = ragged(data.draw(st.integers(0, 99)), lengths)
    # Of two equal texts, which one is which says nothing.
    assume(len({text.tobytes() for text in texts}) == len(texts))

    def run(ids):
        """Return what shows a token, its text and how far that was padded."""
        return np.stack(np.broadcast_arrays(ids, ids.sum(1)[:, None], ids.shape[1]), -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.gate.last_rows.BUCKET", 2)
        expected = last_rows(run, texts)
        assert np.array_equal(
            last_rows(run, [texts[index] for index in order]), expected[list(order)]
        )


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.integers(3, 20), st.integers(0, 40))
def test_padding_to_another_width_changes_sums_alone(executor, t0, seed, length, more):
    """In float32 a text padded to any width gives its logits up to the order of a sum."""
    text, made = ragged(seed, [length]), executor("fp32", "prefill")

    short, wide = (
        decoder.prefill(made, t0.architecture, padded(text, width)).logits[0, :length]
        for width in (length, length + more)
    )

    np.testing.assert_allclose(wide, short, atol=1e-4, rtol=0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_statistics_do_not_depend_on_the_order_of_texts(data):
    """Every summary value is the same for texts in another order, up to the order of a sum."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    order = data.draw(st.permutations(range(5)))
    random = np.random.default_rng(seed)
    reference, obtained = random.normal(0, 3, (2, 5, 7, 11)).astype(np.float32)
    ids = random.integers(0, 11, (5, 7)).astype(np.int32)

    def summary(chosen):
        text, position, target = metrics.scored_rows(list(ids[chosen]), "every")
        known = metrics.reference_distribution(reference[chosen][text, position], target, text)
        return metrics.summarize(metrics.compare(known, obtained[chosen][text, position])).values

    expected = summary(list(range(5)))
    assert summary(list(order)) == pytest.approx(expected, rel=1e-12, abs=1e-15)
