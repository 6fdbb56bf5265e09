"""KL, top-1, perplexity and the non-finite check: golden values, then properties."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gptneo_trt import metrics
from gptneo_trt.data import TokenMetrics
from gptneo_trt.errors import MetricError

LARGEST = np.finfo(np.float32).max
ordinary = st.floats(-30, 30, width=32)
extreme = st.one_of(
    ordinary,
    st.sampled_from([1e4, -1e4, 3e38, -3e38, float(LARGEST), -float(LARGEST), 1e-45]),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
halves = st.floats(width=16, allow_nan=False, allow_infinity=False)


def compared(reference, obtained, targets=None, text=None):
    """Compare two [M, V] arrays; one text and no targets unless given."""
    reference, obtained = np.asarray(reference), np.asarray(obtained)
    targets = np.full(len(reference), -1) if targets is None else np.asarray(targets)
    text = np.zeros(len(reference), dtype=int) if text is None else np.asarray(text)
    return metrics.compare(metrics.reference_distribution(reference, targets, text), obtained)


def tokens_of(nll, text=None, kl=None):
    """Return TokenMetrics with these NLLs under both models."""
    nll = np.asarray(nll, dtype=float)
    same = np.ones(len(nll), dtype=bool)
    text = np.zeros(len(nll), dtype=int) if text is None else np.asarray(text)
    kl = np.zeros(len(nll)) if kl is None else np.asarray(kl, dtype=float)
    return TokenMetrics(kl, nll, nll, same, text, same)


@st.composite
def logit_pairs(draw, elements, dtype=np.float32):
    """Draw two [M, V] arrays of one shape and type."""
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    one = hnp.arrays(dtype, shape, elements=elements)
    return draw(one), draw(one)


def test_M03_golden_values_direction_and_reduction():
    """KL([1/4, 3/4] || [1/2, 1/2]) is 0.130812 nats, and a mean is over rows, not elements."""
    reference, obtained = np.array([[0, np.log(3)]]), np.zeros((1, 2))

    assert compared(reference, obtained).kl_nats[0] == pytest.approx(0.130812, abs=5e-7)
    assert compared(obtained, reference).kl_nats[0] == pytest.approx(0.143841, abs=5e-7)

    rows = np.vstack([reference, obtained, obtained])
    mean = metrics.summarize(compared(rows, np.zeros((3, 2)))).values["kl_mean_nats"]
    assert mean == pytest.approx(0.043604, abs=5e-7)


def test_M03_golden_values_shift():
    """Adding 10000 to every logit of a row leaves KL within 1e-9 of 0."""
    reference = np.array([[0, np.log(3)]])

    assert abs(compared(reference, reference + 10000).kl_nats[0]) <= 1e-9


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_M03_golden_values_precision(dtype):
    """Noise of 0.02 on 4 x 50257 logits is 1.748e-4 nats within 1 %: the sum is in float64."""
    random = np.random.default_rng(0)
    reference = random.normal(0, 3, (4, 50257))
    obtained = reference + random.normal(0, 0.02, (4, 50257))

    tokens = compared(reference.astype(dtype), obtained.astype(dtype))

    assert tokens.kl_nats.dtype == np.float64
    assert np.mean(tokens.kl_nats) == pytest.approx(1.748e-4, rel=0.01)


def test_M01_perplexity_weighs_tokens_not_windows():
    """255 tokens of NLL 4 and one of 8 give exp(1028 / 256) = 55.458."""
    tokens = tokens_of([4.0] * 255 + [8.0], text=[0] * 255 + [1])

    values = metrics.summarize(tokens).values

    assert values["perplexity"] == pytest.approx(55.458, abs=5e-4)
    assert values["reference_perplexity"] == values["perplexity"]
    assert values["perplexity_ratio"] == 1.0
    assert values["scored_tokens"] == 256


@pytest.mark.parametrize(
    ("lengths", "scored"), [([256, 256, 1], 510), ([256] * 6, 1530), ([1], 0)], ids=str
)
def test_M01_window_edges(lengths, scored):
    """A window of T tokens scores T - 1 targets; a tail of one token scores none, never NaN."""
    token_ids = [np.arange(length, dtype=np.int32) for length in lengths]

    text, position, target = metrics.scored_rows(token_ids, "every")

    assert len(text) == len(position) == len(target) == sum(lengths)
    assert (target >= 0).sum() == scored
    tokens = tokens_of(np.where(target >= 0, 4.0, np.nan), text)
    values = metrics.summarize(tokens).values
    assert values["scored_tokens"] == scored
    assert all(np.isfinite(value) for value in values.values())
    assert ("perplexity" in values) == (scored > 0)


def test_B01_nothing_scored_is_an_error():
    """An empty prompt list is "nothing was scored", never a mean of nothing."""
    text, _, target = metrics.scored_rows([], "last")
    empty = np.empty((0, 4), dtype=np.float32)

    with pytest.raises(MetricError, match="nothing was scored"):
        metrics.summarize(compared(empty, empty, target, text))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_B01_non_finite_logits_never_become_metrics(bad):
    """A bad logit is named by row and column, in either argument, also beyond one chunk."""
    good = np.zeros((700, 512), dtype=np.float32)
    wrong = good.copy()
    wrong[650, 3] = wrong[651, 1] = bad

    with pytest.raises(MetricError, match=r"^obtained logits: non-finite .*row 650, column 3,"):
        compared(good, wrong)
    with pytest.raises(MetricError, match=r"^reference logits: non-finite .*row 650, column 3,"):
        compared(wrong, good)


def test_B01_non_finite_values_are_not_summarized():
    """A NaN KL, or an infinite NLL of a scored token, is an error."""
    with pytest.raises(MetricError, match=r"kl_nats\[1\] = nan"):
        metrics.summarize(tokens_of([1.0, 1.0], kl=[0.0, np.nan]))
    with pytest.raises(MetricError, match=r"scored nll_nats\[0\] = inf"):
        metrics.summarize(tokens_of([np.inf, 1.0]))


def test_float64_beyond_float32_is_refused():
    """A float64 logit that float32 cannot hold counts as non-finite."""
    with pytest.raises(MetricError, match="1e\\+39 at row 0, column 1"):
        compared(np.zeros((1, 2)), np.array([[0, 1e39]]))


def test_L08_unequal_vocabulary_is_refused():
    """A head padded from 50257 to 50264 columns, or another row count, is named with shapes."""
    reference = np.zeros((2, 50257), dtype=np.float32)

    with pytest.raises(MetricError, match=r"\(2, 50264\), expected \(2, 50257\).*vocab_size"):
        compared(reference, np.zeros((2, 50264), dtype=np.float32))
    with pytest.raises(MetricError, match=r"\(3, 50257\), expected \(2, 50257\)"):
        compared(reference, np.zeros((3, 50257), dtype=np.float32))


def test_every_mismatch_is_named_at_once():
    """Types, shapes and targets that do not fit appear in one sorted message."""
    logits = np.zeros((2, 4), dtype=np.int32)

    with pytest.raises(MetricError) as caught:
        metrics.reference_distribution(logits, np.array([4, -2]), np.zeros(3, dtype=int))

    assert str(caught.value) == (
        "reference distribution: reference logits of type int32, expected one of "
        "['float16', 'float32', 'float64']; targets: obtained -2 to 4, expected -1 to 3; "
        "text: obtained int64 (3,), expected int (2,) [M]"
    )


def test_no_reference_is_an_error():
    """Comparing with no reference is refused, not an empty success."""
    with pytest.raises(MetricError, match="0 references"):
        metrics.compare_many([], np.zeros((1, 2), dtype=np.float32))


def test_top1_first_index_wins_a_tie():
    """Ties count as agreement in tied_top1 only, whichever side has them."""
    tied, second, third = [1.0, 1.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0]

    tokens = compared([tied, second, tied, tied], [second, tied, third, tied])

    assert tokens.top1.tolist() == [False, False, False, True]
    assert tokens.tied_top1.tolist() == [True, True, False, True]
    values = metrics.summarize(tokens).values
    assert (values["top1_frac"], values["top1_tied_frac"]) == (0.25, 0.75)


def test_summary_statistics():
    """Every value equals its definition, on two texts with a missing last target each."""
    reference = np.log(np.array([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]))
    obtained = np.log(np.array([[0.25, 0.75], [0.25, 0.75], [0.75, 0.25], [0.5, 0.5]]))

    tokens = compared(reference, obtained, targets=[1, -1, 1, -1], text=[0, 0, 1, 1])
    values = metrics.summarize(tokens).values

    kl = 0.5 * np.log(4 / 3)
    assert tokens.kl_nats == pytest.approx([kl, 0, kl, 0], abs=1e-15)
    assert np.isnan(tokens.nll_nats).tolist() == [False, True, False, True]
    assert values == pytest.approx(
        {
            "positions": 4,
            "scored_tokens": 2,
            "kl_mean_nats": kl / 2,
            "kl_median_nats": kl / 2,
            "kl_p99_nats": kl,
            "kl_max_nats": kl,
            "kl_mean_stderr_nats": 0,
            "top1_frac": 0.75,
            "top1_stderr_frac": 0.25,
            "top1_tied_frac": 1,
            "perplexity": (0.75 * 0.25) ** -0.5,
            "reference_perplexity": 2,
            "perplexity_ratio": (0.75 * 0.25) ** -0.5 / 2,
            "perplexity_ratio_log_stderr": np.log(3) / 2,
            "true_prob_rms_frac": 0.25,
        },
        abs=1e-12,
    )


def test_prompts_have_no_perplexity():
    """Without a single target the perplexity keys are absent rather than NaN."""
    values = metrics.summarize(compared(np.zeros((2, 3)), np.zeros((2, 3)))).values

    assert not {key for key in values if "perplexity" in key or key.startswith("true_prob")}
    assert "kl_mean_stderr_nats" not in values
    assert values["scored_tokens"] == 0


def test_overflowing_perplexity_is_infinite():
    """A hopeless NLL gives an infinite perplexity, which no verdict accepts, and no warning."""
    assert metrics.summarize(tokens_of([1e4])).values["perplexity"] == np.inf


def test_targets_must_be_at_the_same_places():
    """NLLs of the two models at different positions are not averaged side by side."""
    tokens = replace(tokens_of([1.0, 2.0]), nll_nats=np.array([1.0, np.nan]))

    with pytest.raises(MetricError, match=r"obtained 1 positions with an NLL, expected .* 2"):
        metrics.summarize(tokens)


def test_scored_rows_of_ragged_texts():
    """Every position with its next token, or the last position alone, gathers padded logits."""
    ids = [np.array([7, 8, 9], dtype=np.int32), np.array([5], dtype=np.int32)]

    text, position, target = metrics.scored_rows(ids, "every")
    assert text.tolist() == [0, 0, 0, 1]
    assert position.tolist() == [0, 1, 2, 0]
    assert target.tolist() == [8, 9, -1, -1]
    assert np.zeros((2, 3, 11))[text, position].shape == (4, 11)

    text, position, target = metrics.scored_rows(ids, "last")
    assert (text.tolist(), position.tolist(), target.tolist()) == ([0, 1], [2, 0], [-1, -1])


def test_scored_rows_refuses_what_it_cannot_score():
    """An unknown rule, an empty text, a negative id and a matrix are named together."""
    ids = [np.array([], dtype=np.int32), np.array([3, -1]), np.zeros((2, 2), dtype=int)]

    with pytest.raises(MetricError, match=r"'some', .*text 0: .*text 1: .*text 2: "):
        metrics.scored_rows(ids, "some")


def test_first_non_finite_names_tensor_index_and_value():
    """The first bad tensor in the mapping's order is named, and None means all are finite."""
    logits, keys = np.zeros((2, 3)), np.zeros((2, 2, 2), dtype=np.float16)
    assert metrics.first_non_finite({"logits": logits, "K": keys}) is None

    keys[1, 0, 1] = keys[1, 1, 1] = -np.inf
    assert metrics.first_non_finite({"logits": logits, "K": keys}) == "K[1, 0, 1] = -inf"
    logits[0, 2] = np.nan
    assert metrics.first_non_finite({"logits": logits, "K": keys}) == "logits[0, 2] = nan"
    assert metrics.first_non_finite({"loss": np.float32(np.inf)}) == "loss = inf"


@pytest.mark.parametrize("nothing", [{}, {"K": np.zeros((2, 0))}], ids=["no tensor", "no element"])
def test_first_non_finite_refuses_nothing(nothing):
    """A check that looked at nothing is an error, not a pass."""
    with pytest.raises(MetricError, match="nothing to check"):
        metrics.first_non_finite(nothing)


def test_imports_without_frameworks():
    """The pure modules load where torch, transformers, modelopt and TensorRT are not installed."""
    program = """
import sys

class NotInstalled:
    names = {"torch", "transformers", "modelopt", "tensorrt", "tensorrt_rtx", "datasets"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
import gptneo_trt.baselines, gptneo_trt.engine_verdicts, gptneo_trt.metrics, gptneo_trt.paired
import gptneo_trt.report, gptneo_trt.verdicts
"""
    root = Path(metrics.__file__).parents[1]

    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60, cwd=root)


ANY_LOGITS = {
    "float16": logit_pairs(halves, np.float16),
    "float32": logit_pairs(extreme),
    "float64": logit_pairs(extreme, np.float64),
}


@pytest.mark.parametrize("pairs", ANY_LOGITS.values(), ids=ANY_LOGITS)
@settings(deadline=None)
@given(data=st.data())
def test_M03_kl_is_finite_and_not_negative(pairs, data):
    """Any finite logits, the largest included, give a finite KL of at least -1e-7, and NLLs."""
    pair = data.draw(pairs)
    tokens = compared(*pair, targets=np.zeros(len(pair[0]), dtype=int))

    assert np.isfinite(tokens.kl_nats).all()
    assert np.isfinite([tokens.nll_nats, tokens.reference_nll_nats]).all()
    assert (tokens.kl_nats >= -1e-7).all()
    assert np.isfinite(metrics.summarize(tokens).values["kl_mean_nats"])


@pytest.mark.parametrize("pairs", ANY_LOGITS.values(), ids=ANY_LOGITS)
@settings(deadline=None)
@given(data=st.data())
def test_M03_kl_of_equal_logits_is_zero(pairs, data):
    """Equal logits have exactly no divergence and agree on the top token."""
    logits = data.draw(pairs)[0]
    tokens = compared(logits, logits.copy())

    assert (tokens.kl_nats == 0).all()
    assert tokens.top1.all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_M03_differences_that_overflow_their_type(dtype):
    """Logits at both ends of their type are as far apart as float64 says, not infinitely."""
    largest = float(np.finfo(dtype).max)
    first, second = (np.array([ends], dtype) for ends in ((largest, -largest), (-largest, largest)))

    assert compared(first, second).kl_nats[0] == 2 * largest
    assert compared(first, second, targets=[0]).nll_nats[0] == 2 * largest


@settings(deadline=None)
@given(hnp.arrays(np.int64, (4, 7), elements=st.integers(-1000, 1000)), st.integers(-1000, 1000))
def test_M03_kl_ignores_a_shift_in_half_precision(logits, shift):
    """Whole numbers shift exactly in float16: KL of the shifted rows is bitwise the same."""
    reference, obtained = (half.astype(np.float16) for half in (logits[:2], logits[2:]))

    kl = compared(reference, obtained).kl_nats
    np.testing.assert_array_equal(compared(reference, obtained + np.float16(shift)).kl_nats, kl)


@settings(deadline=None)
@given(logit_pairs(ordinary), st.floats(-1e4, 1e4))
def test_kl_ignores_a_constant_shift(pair, shift):
    """A constant added to a row in float64 changes KL by rounding only."""
    reference, obtained = (each.astype(np.float64) for each in pair)

    kl = compared(reference, obtained).kl_nats
    assert compared(reference, obtained + shift).kl_nats == pytest.approx(kl, abs=1e-9)
    assert compared(reference + shift, obtained).kl_nats == pytest.approx(kl, abs=1e-9)


@settings(deadline=None)
@given(logit_pairs(ordinary))
def test_kl_equals_its_definition(pair):
    """The identity over shifted logits equals sum p log(p / q) in extended precision."""
    reference, obtained = (each.astype(np.longdouble) for each in pair)
    log_p = reference - np.log(np.exp(reference).sum(axis=1, keepdims=True))
    log_q = obtained - np.log(np.exp(obtained).sum(axis=1, keepdims=True))
    expected = (np.exp(log_p) * (log_p - log_q)).sum(axis=1)

    assert compared(*pair).kl_nats == pytest.approx(expected.astype(float), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.integers(1, 6000))
def test_row_order_and_company_do_not_matter(seed, rows, columns):
    """A row's metrics are bitwise the same alone, in another order and beside two references."""
    assume(rows * columns <= 100_000)
    random = np.random.default_rng(seed)
    reference, obtained = random.normal(0, 3, (2, rows, columns)).astype(np.float32)
    targets, text = random.integers(-1, columns, rows), np.arange(rows)
    order = random.permutation(rows)

    whole = metrics.reference_distribution(reference, targets, text)
    other = metrics.reference_distribution(obtained, targets, text)
    straight = metrics.compare_many([other, whole], obtained)[1]
    shuffled = compared(reference[order], obtained[order], targets[order], text[order])
    alone = compared(reference[:1], obtained[:1], targets[:1], text[:1])

    for name in ("kl_nats", "nll_nats", "reference_nll_nats", "top1", "tied_top1", "text"):
        expected = getattr(straight, name)
        np.testing.assert_array_equal(getattr(shuffled, name), expected[order])
        np.testing.assert_array_equal(getattr(alone, name), expected[:1])
