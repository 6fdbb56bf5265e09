"""Values a token -> what a report shows of them: over position, their distribution, the worst."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gptneo_trt.data import ReferenceDistribution, TokenMetrics, WorstToken

POSITION_BIN = 16  # tokens
# Nats, from below what fp16 loses to above what any row does; a bin is a quarter of a decade.
KL_EDGES_NATS = tuple(float(edge) for edge in np.logspace(-7, 1, 33))
TOP = 5
CONTEXT = 24  # tokens shown before a worst one


def positions(tokens: TokenMetrics) -> np.ndarray:
    """Return int64 [M]: the position of each value within its text, whose values lie together."""
    text = tokens.text
    starts = np.flatnonzero(np.r_[True, text[1:] != text[:-1]]) if len(text) else np.zeros(0, int)
    lengths = np.diff(np.r_[starts, len(text)])
    return np.arange(len(text)) - np.repeat(starts, lengths)


def kl_over_position(tokens: TokenMetrics) -> list[float]:
    """Return the mean KL, nats a token, of every POSITION_BIN positions from the first on."""
    bins = positions(tokens) // POSITION_BIN
    sums = np.bincount(bins, weights=tokens.kl_nats)
    return [float(mean) for mean in sums / np.bincount(bins)]


def kl_by_text(tokens: TokenMetrics) -> list[float]:
    """Return the mean KL, nats a token, of each text, in the order of the texts."""
    _, text = np.unique(tokens.text, return_inverse=True)
    sums = np.bincount(text, weights=tokens.kl_nats)
    return [float(mean) for mean in sums / np.bincount(text)]


def kl_distribution(tokens: TokenMetrics) -> list[int]:
    """Return how many tokens lie between two KL_EDGES_NATS; what is beyond counts at the ends."""
    inside = np.clip(tokens.kl_nats, KL_EDGES_NATS[0], KL_EDGES_NATS[-1])
    return [int(count) for count in np.histogram(inside, KL_EDGES_NATS)[0]]


def worst_tokens(
    reference: ReferenceDistribution, obtained: np.ndarray, tokens: TokenMetrics, count: int
) -> tuple[WorstToken, ...]:
    """Return the positions with the largest KL, with both sides' most likely tokens.

    Args:
        reference: what was compared with.
        obtained: float32 [M, V], the logits that were compared.
        tokens: what the comparison gave.
        count: of positions returned, at most.
    """
    worst = np.argsort(-tokens.kl_nats, kind="stable")[:count]
    place = positions(tokens)
    return tuple(
        WorstToken(
            text=int(tokens.text[row]),
            position=int(place[row]),
            kl_nats=float(tokens.kl_nats[row]),
            target=int(reference.targets[row]),
            expected=_most_likely(reference.logits[row]),
            obtained=_most_likely(obtained[row]),
        )
        for row in worst
    )


def described(
    worst: Sequence[WorstToken],
    texts: Sequence[np.ndarray],
    text_of: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Return the same tokens with their texts, of JSON types.

    Args:
        worst: see ``worst_tokens``.
        texts: int32 [T] each, of the set that they are of.
        text_of: token ids -> text.
    """
    return [
        {
            "text": each.text,
            "position": each.position,
            "kl_nats": each.kl_nats,
            "before": text_of(
                texts[each.text][max(0, each.position + 1 - CONTEXT) : each.position + 1].tolist()
            ),
            "target": text_of([each.target]) if each.target >= 0 else "",
        }
        | {
            side: [
                {"token": text_of([token]), "probability": probability}
                for token, probability in getattr(each, side)
            ]
            for side in ("expected", "obtained")
        }
        for each in worst
    ]


def _most_likely(logits: np.ndarray) -> tuple[tuple[int, float], ...]:
    """Return the TOP (id, probability) of logits [V], falling."""
    shifted = logits.astype(np.float64) - logits.max()
    probabilities = np.exp(shifted) / np.exp(shifted).sum()
    top = np.argsort(-probabilities, kind="stable")[:TOP]
    return tuple((int(each), float(probabilities[each])) for each in top)
