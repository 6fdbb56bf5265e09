"""Turn texts into token ids, with the hashes and counts that a comparison must agree on.

Which texts there are: see ``text_sources``.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from datasets import IterableDataset

from gptneo_trt.data import TextSet
from gptneo_trt.errors import CheckpointError
from gptneo_trt.hub import folder_from_hub, unusable
from gptneo_trt.text_sources import TextSource, text_source
from gptneo_trt.tokenizer import tokenizer_from_file

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "text"
# How rows become token ids, and which positions are scored.
CUTS = {"windows": "every", "whole": "last", "truncated": "every"}


def text_set(
    name: str,
    source: str | TextSource,
    tokenizer_file: Path | None,
    window: int,
    vocab_size: int | None = None,
) -> TextSet:
    """Return a text as token ids.

    Args:
        name: "prose", "questions", "prompts", "sampled" or "calibration".
        source: "bundled", "study" or a row of your own; the study's calibration needs one:
            ``dataclasses.replace(STUDY["calibration"], revision=COMMIT)``.
        tokenizer_file: ``tokenizer.json`` of the checkpoint.
        window: tokens a text at most.
        vocab_size: of the checkpoint; ids must be below it.

    Raises:
        CheckpointError: the text or the tokenizer is missing, malformed, empty, too long or
            not of this vocabulary, or the hub cannot be reached and the cache lacks it.
    """
    row = text_source(name, source) if isinstance(source, str) else source
    return text_set_from_texts(row, texts_from_source(row), tokenizer_file, window, vocab_size)


def texts_from_source(row: TextSource) -> tuple[str, ...]:
    """Return the texts of the rows of a file, in order, read through ``datasets``.

    Raises:
        CheckpointError: missing, malformed, or fewer rows than ``row.rows``.
    """
    files = _files(row)
    texts: list[str] = []
    # Streaming writes no copy of the data, and the folder keeps lock files out of ~/.cache.
    # load_dataset would do, but it counts every load over the network.
    with tempfile.TemporaryDirectory() as cache:
        try:
            data = _reader(row)([str(file) for file in files], cache_dir=cache)
            for item in data if row.rows is None else data.take(row.rows):
                texts.append(row.text(item))
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"text {row.name!r}, row {len(texts) + 1} of {row.file}: obtained "
                f"{type(error).__name__} {error}, expected a row as {row.text.__name__} "
                "reads it; restore the file"
            ) from error
    if row.rows is not None and len(texts) != row.rows:
        raise CheckpointError(
            f"text {row.name!r}: obtained {len(texts)} rows in {row.file}, expected {row.rows}"
        )
    return tuple(texts)


def _reader(row: TextSource) -> Callable[..., IterableDataset]:
    """Return the reader of ``datasets`` for a row's kind of file."""
    return {
        ".jsonl": IterableDataset.from_json,
        ".parquet": IterableDataset.from_parquet,
        ".txt": partial(IterableDataset.from_text, sample_by="paragraph"),
    }[Path(row.file).suffix]


def _files(row: TextSource) -> list[Path]:
    """Return the files of a row, sorted.

    Raises:
        CheckpointError: none, an empty one, or not to be had from the hub.
    """
    folder = BUNDLED_FOLDER
    if row.repo:
        folder = folder_from_hub(row.repo, row.revision, [row.file], repo_type="dataset")
    files = sorted(folder.glob(row.file))
    sizes = {str(file): file.stat().st_size for file in files}
    if not files and row.repo:  # a download that was cut short
        why = f"no file in {folder}"
        raise unusable(row.repo, row.revision, "dataset", [row.file], why)
    if not files or not all(sizes.values()):
        raise CheckpointError(
            f"text {row.name!r}: obtained {sizes or 'no file'} for {row.file} in {folder}, "
            "expected files that are not empty (0 tokens); restore them"
        )
    return files


def text_set_from_texts(
    row: TextSource,
    texts: Sequence[str],
    tokenizer_file: Path | None,
    window: int,
    vocab_size: int | None = None,
) -> TextSet:
    """Return texts as token ids, cut as ``row`` says; see ``text_set``.

    The hash is over the rows joined by ``row.join``, before any cut; tokens dropped by a cut
    are counted in ``source``.

    Raises:
        CheckpointError: see ``text_set``.
    """
    tokenizer, tokenizer_sha256 = tokenizer_from_file(tokenizer_file)
    joined = row.join.join(texts)
    pieces = [joined] if row.cut == "windows" else list(texts)
    encodings = tokenizer.encode_batch(pieces, add_special_tokens=False)
    streams = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
    total = sum(len(stream) for stream in streams)
    token_ids = _cut(streams, row, window)
    _check(token_ids, row, vocab_size)
    dropped = total - sum(len(ids) for ids in token_ids)
    origin = f"{row.repo}@{row.revision}/{row.file}" if row.repo else row.file
    return TextSet(
        name=row.name,
        source=f"{origin}, {len(texts)} rows, {dropped} of {total} tokens dropped",
        token_ids=tuple(token_ids),
        scored=CUTS[row.cut],
        sha256=hashlib.sha256(joined.encode()).hexdigest(),
        join=row.join,
        tokenizer_sha256=tokenizer_sha256,
        window=window,
    )


def _cut(streams: Sequence[np.ndarray], row: TextSource, window: int) -> list[np.ndarray]:
    """Return at most ``window`` tokens a text.

    Raises:
        CheckpointError: a whole text is longer, or no window is full.
    """
    if row.cut == "truncated":
        return [stream[:window] for stream in streams]
    if row.cut == "whole":
        long = {number: len(ids) for number, ids in enumerate(streams, 1) if len(ids) > window}
        if long:
            raise CheckpointError(
                f"text {row.name!r}: obtained {long} tokens by row, expected at most {window}; "
                "use a longer window"
            )
        return list(streams)
    stream = streams[0][: row.max_tokens]
    windows = [stream[at : at + window] for at in range(0, len(stream) - window + 1, window)]
    if not windows:
        raise CheckpointError(
            f"text {row.name!r}: obtained {len(stream)} tokens, expected at least one window of "
            f"{window}; use more text or a shorter window"
        )
    return windows


def _check(token_ids: Sequence[np.ndarray], row: TextSource, vocab_size: int | None) -> None:
    """Check that every text has something to score, and only ids of the vocabulary.

    Raises:
        CheckpointError: no text, one that is too short, or an id that is too large.
    """
    total = sum(len(ids) for ids in token_ids)
    if not total:
        raise CheckpointError(
            f"text {row.name!r}: obtained 0 tokens in {len(token_ids)} texts, expected some; "
            "give text that is not empty"
        )
    least = 2 if CUTS[row.cut] == "every" else 1
    short = {number: len(ids) for number, ids in enumerate(token_ids, 1) if len(ids) < least}
    if short:
        raise CheckpointError(
            f"text {row.name!r}: obtained {short} tokens by row, expected at least {least} since "
            f"the {CUTS[row.cut]!r} position is scored; remove these rows"
        )
    highest = max(int(ids.max()) for ids in token_ids)
    if vocab_size is not None and highest >= vocab_size:
        raise CheckpointError(
            f"text {row.name!r}: obtained token id {highest}, expected less than vocab_size "
            f"{vocab_size}; use the tokenizer of the checkpoint"
        )
