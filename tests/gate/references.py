"""Reference logits of Hugging Face's model, computed once and kept in the cache.

Computing them takes seconds, and so does importing transformers, which a warm run then does
without. The key covers all that shapes them: checkpoint, token ids, type, library versions and
the source of what makes and pads them. A file whose logits are not, bit by bit, those that were
written is computed again: every loss of a run would be to something else.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

import gptneo_trt
from gptneo_trt.data import Checkpoint, arrays_sha256
from gptneo_trt.whole_file import write_tensors, writer_lock
from tests.gate.last_rows import Run, last_rows, padded

SOURCES = (
    Path(gptneo_trt.__file__).with_name("reference.py"),
    Path(__file__).with_name("last_rows.py"),
    Path(__file__),
)
PACKAGES = ("numpy", "torch", "transformers")
TYPES = {"bf16": "bfloat16", "float32": "float32"}
ARRAYS = ("prose", "next_token", "sampled")
DIGEST = "logits_sha256"  # beside the provenance in a file's metadata


@dataclass(frozen=True)
class ScoredTexts:
    """Hold the token ids that a reference and every row run on.

    Attributes:
        prose: int32 [N, T].
        next_token: int32 [T] each, scored at their last token.
        sampled: int32 [T] each, scored at every token; none where the source has no such text.
    """

    prose: np.ndarray
    next_token: Sequence[np.ndarray]
    sampled: Sequence[np.ndarray]

    def identity(self) -> dict[str, list[str]]:
        """Return text set -> the SHA-256 of the shape and ids of each array in it."""
        arrays = {"prose": [self.prose], "next_token": self.next_token, "sampled": self.sampled}
        return {name: [_sha256(ids) for ids in each] for name, each in arrays.items()}


@dataclass(frozen=True)
class ReferenceLogits:
    """Hold what the reference gave.

    Attributes:
        prose: float32 [N, T, V].
        next_token: float32 [M, V], at the last token of each question and prompt.
        sampled: float32 [N, T, V], T of the longest; N of 0 where there is no sampled text.
        provenance: of the model that gave them; see ``reference.provenance``.
    """

    prose: np.ndarray
    next_token: np.ndarray
    sampled: np.ndarray
    provenance: Mapping[str, str]


def reference_logits(
    checkpoint: Checkpoint, texts: ScoredTexts, type_name: str, cache: Path
) -> ReferenceLogits:
    """Return the reference's logits, from the cache or computed now.

    Args:
        checkpoint: weights and shapes.
        texts: what it runs on.
        type_name: "bf16" or "float32".
        cache: folder; two processes may share it.
    """
    path = cache / "references" / f"{_key(checkpoint, texts, type_name)}.safetensors"
    with writer_lock(path):
        found = _stored(path)
        if found is None:
            found = _computed(checkpoint, texts, type_name)
            arrays = {name: getattr(found, name) for name in ARRAYS}
            write_tensors(path, arrays, {**found.provenance, DIGEST: arrays_sha256(arrays)})
    return found


def _sha256(ids: np.ndarray) -> str:
    shaped = f"{ids.shape}".encode() + ids.astype(np.int64).tobytes()
    return hashlib.sha256(shaped).hexdigest()


def _key(checkpoint: Checkpoint, texts: ScoredTexts, type_name: str) -> str:
    identity = {
        "checkpoint": checkpoint.sha256,
        "sources": [hashlib.sha256(source.read_bytes()).hexdigest() for source in SOURCES],
        "texts": texts.identity(),
        "type": type_name,
        "versions": [metadata.version(package) for package in PACKAGES],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _stored(path: Path) -> ReferenceLogits | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            if set(file.keys()) != set(ARRAYS) or not file.metadata():
                return None
            arrays = {name: file.get_tensor(name) for name in ARRAYS}
            provenance = dict(file.metadata())
    except SafetensorError:
        return None
    if provenance.pop(DIGEST, None) != arrays_sha256(arrays):
        return None
    return ReferenceLogits(**arrays, provenance=provenance)


def _computed(checkpoint: Checkpoint, texts: ScoredTexts, type_name: str) -> ReferenceLogits:
    # Only a cold run needs torch's model and transformers.
    import torch

    from gptneo_trt import reference

    model = reference.torch_model(checkpoint, getattr(torch, TYPES[type_name]))
    return ReferenceLogits(
        prose=reference.logits(model, texts.prose),
        next_token=last_rows(lambda ids: reference.logits(model, ids), texts.next_token),
        sampled=_padded_logits(lambda ids: reference.logits(model, ids), texts.sampled),
        provenance=reference.provenance(model),
    )


def _padded_logits(run: Run, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return float32 [N, T, V] of texts of any lengths; no text gives N of 0."""
    if not texts:
        return np.empty((0, 0, 0), dtype=np.float32)
    return run(padded(texts, max(map(len, texts))))
