"""What a report shows of values a token."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt import metrics, token_profiles
from gptneo_trt.data import TokenMetrics
from gptneo_trt.token_profiles import KL_EDGES_NATS, POSITION_BIN, TOP


def tokens_of(kl_nats, text):
    """Return values a token of which only the KL and the text matter here."""
    kl, text = np.asarray(kl_nats, float), np.asarray(text, np.int32)
    same = np.ones(len(kl), bool)
    return TokenMetrics(kl, kl, kl, same, text, same)


def test_positions_start_again_with_every_text():
    """Ragged texts; a text of one token has position 0 alone."""
    assert token_profiles.positions(tokens_of([0] * 6, [0, 0, 0, 1, 4, 4])).tolist() == [
        0, 1, 2, 0, 0, 1,
    ]  # fmt: skip


def test_kl_over_position_is_the_mean_of_each_bin():
    """The texts count alike: a bin that one text alone reaches is that text's."""
    long, short = np.full(2 * POSITION_BIN, 3.0), np.full(POSITION_BIN, 1.0)
    long[POSITION_BIN:] = 5.0
    text = np.r_[np.zeros(len(long), int), np.ones(len(short), int)]

    assert token_profiles.kl_over_position(tokens_of(np.r_[long, short], text)) == [2.0, 5.0]


def test_kl_by_text_is_the_mean_of_each_text():
    """Ragged texts, whatever their index."""
    assert token_profiles.kl_by_text(tokens_of([1, 3, 5], [0, 0, 7])) == [2.0, 5.0]


@given(st.lists(st.floats(-1e-12, 1e6), min_size=1, max_size=50))
def test_every_token_is_in_the_distribution(kl_nats):
    """Also one below the first edge, above the last or, by rounding, below zero."""
    counts = token_profiles.kl_distribution(tokens_of(kl_nats, [0] * len(kl_nats)))
    assert len(counts) == len(KL_EDGES_NATS) - 1
    assert sum(counts) == len(kl_nats)


def test_distribution_puts_a_value_between_its_edges():
    """A KL of 0.02 is in the bin whose edges are around it."""
    (found,) = np.flatnonzero(token_profiles.kl_distribution(tokens_of([0.02], [0])))
    assert KL_EDGES_NATS[found] <= 0.02 < KL_EDGES_NATS[found + 1]


@pytest.fixture
def compared():
    """Return a reference, logits that differ from it most at row 4, and their comparison."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(6, 9)).astype(np.float32)
    obtained = logits + generator.normal(size=logits.shape).astype(np.float32) * 1e-3
    obtained[4, 7] += 9.0
    text = np.array([0, 0, 0, 1, 1, 1])
    reference = metrics.reference_distribution(logits, np.array([1, 2, -1, 4, 5, -1]), text)
    return reference, obtained, metrics.compare(reference, obtained)


def test_worst_tokens_fall_and_name_both_sides(compared):
    """The worst one is text 1, position 1, where the obtained logits prefer token 7."""
    reference, obtained, tokens = compared

    worst = token_profiles.worst_tokens(reference, obtained, tokens, 3)

    assert [each.kl_nats for each in worst] == sorted(tokens.kl_nats, reverse=True)[:3]
    first = worst[0]
    assert (first.text, first.position, first.target) == (1, 1, 5)
    assert first.obtained[0][0] == 7
    assert first.expected[0][0] == int(reference.logits[4].argmax())
    for side in (first.expected, first.obtained):
        assert len(side) == TOP
        probabilities = [probability for _, probability in side]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) <= 1


def test_no_more_worst_tokens_than_there_are(compared):
    """Of six positions, twenty cannot be shown."""
    assert len(token_profiles.worst_tokens(*compared, 20)) == 6


def test_described_tokens_have_their_texts(compared):
    """What stands before, up to the token itself; the true next one; both sides' five."""
    worst = token_profiles.worst_tokens(*compared, 6)
    texts = [np.array([10, 11, 12]), np.array([20, 21, 22])]

    found = token_profiles.described(worst, texts, lambda ids: " ".join(map(str, ids)))

    first = found[0]
    assert (first["text"], first["position"]) == (1, 1)
    assert (first["before"], first["target"]) == ("20 21", "5")
    assert first["obtained"][0]["token"] == "7"
    assert [each["target"] for each in found if each["position"] == 2] == ["", ""]
    json.dumps(found, allow_nan=False)


def test_only_the_last_tokens_before_are_shown(compared):
    """A long text is cut in front."""
    worst = token_profiles.worst_tokens(*compared, 1)
    long = np.arange(100)
    moved = [replace(worst[0], position=60)]

    (found,) = token_profiles.described(moved, [long, long], lambda ids: f"{ids[0]}-{ids[-1]}")

    assert found["before"] == f"{61 - token_profiles.CONTEXT}-60"
