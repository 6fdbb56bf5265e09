"""Texts of different lengths: padded, and the logits at their ends."""

from collections.abc import Callable, Sequence

import numpy as np

BUCKET = 34  # texts of similar length run together, so that little is padded

Run = Callable[[np.ndarray], np.ndarray]  # token ids [N, T] -> logits [N, T, V]


def padded(texts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return int32 [N, width]: texts, right padded with token 0, which no earlier position sees."""
    return np.stack([np.pad(ids, (0, width - len(ids))) for ids in texts]).astype(np.int32)


def last_rows(
    run: Run, texts: Sequence[np.ndarray], widths: Sequence[int] | None = None
) -> np.ndarray:
    """Return float32 [N, V]: the logits at the last token of each text, int32 [T].

    Texts are padded to the longest of those that run together, or to the next of ``widths``,
    ascending, where these are given.
    """
    # By content where lengths are equal, so that the order of the texts decides nothing.
    order = sorted(range(len(texts)), key=lambda i: (len(texts[i]), texts[i].tobytes()))
    rows: dict[int, np.ndarray] = {}
    for start in range(0, len(order), BUCKET):
        group = order[start : start + BUCKET]
        longest = len(texts[group[-1]])
        width = next((each for each in widths or () if each >= longest), longest)
        logits = run(padded([texts[index] for index in group], width))
        rows |= {index: logits[row, len(texts[index]) - 1] for row, index in enumerate(group)}
    return np.stack([rows[index] for index in range(len(texts))])
