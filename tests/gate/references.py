"""Reference logits of Hugging Face's model, computed once and kept in the cache.

Computing them takes seconds, and so does importing transformers, which a warm run then does
without. The key covers all that shapes them: checkpoint, token ids, type, library versions and
the source of ``gptneo_trt.reference``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import gptneo_trt
from gptneo_trt.data import Checkpoint
from gptneo_trt.whole_file import whole_file
from tests.gate.last_rows import last_rows

SOURCE = Path(gptneo_trt.__file__).parent / "reference.py"
TYPES = {"bf16": "bfloat16", "float32": "float32"}


@dataclass(frozen=True)
class ReferenceLogits:
    """Hold what the reference gave.

    Attributes:
        prose: float32 [N, T, V].
        next_token: float32 [M, V], at the last token of each question and prompt.
        provenance: of the model that gave them; see ``reference.provenance``.
    """

    prose: np.ndarray
    next_token: np.ndarray
    provenance: Mapping[str, str]


def reference_logits(
    checkpoint: Checkpoint,
    prose: np.ndarray,
    next_token_texts: Sequence[np.ndarray],
    type_name: str,
    cache: Path,
) -> ReferenceLogits:
    """Return the reference's logits, from the cache or computed now.

    Args:
        checkpoint: weights and shapes.
        prose: int32 [N, T].
        next_token_texts: int32 [T] each.
        type_name: "bf16" or "float32".
        cache: folder; two processes may share it.
    """
    folder = cache / "references"
    folder.mkdir(parents=True, exist_ok=True)
    key = _key(checkpoint, [prose.ravel(), *next_token_texts], type_name)
    path = folder / f"{key}.safetensors"
    with FileLock(path.with_suffix(".lock")):
        found = _stored(path)
        if found is None:
            found = _computed(checkpoint, prose, next_token_texts, type_name)
            arrays = {"prose": found.prose, "next_token": found.next_token}
            with whole_file(path) as temporary:
                save_file(arrays, temporary, metadata=dict(found.provenance))
    return found


def _key(checkpoint: Checkpoint, texts: Sequence[np.ndarray], type_name: str) -> str:
    identity = {
        "checkpoint": checkpoint.sha256,
        "source": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
        "texts": [hashlib.sha256(ids.astype(np.int64).tobytes()).hexdigest() for ids in texts],
        "type": type_name,
        "versions": [metadata.version(package) for package in ("torch", "transformers")],
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _stored(path: Path) -> ReferenceLogits | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, "numpy") as file:
            if set(file.keys()) != {"prose", "next_token"} or not file.metadata():
                return None
            arrays = {name: file.get_tensor(name) for name in ("prose", "next_token")}
            return ReferenceLogits(**arrays, provenance=file.metadata())
    except SafetensorError:
        return None


def _computed(
    checkpoint: Checkpoint,
    prose: np.ndarray,
    next_token_texts: Sequence[np.ndarray],
    type_name: str,
) -> ReferenceLogits:
    # Only a cold run needs torch's model and transformers.
    import torch

    from gptneo_trt import reference

    model = reference.torch_model(checkpoint, getattr(torch, TYPES[type_name]))
    return ReferenceLogits(
        prose=reference.logits(model, prose),
        next_token=last_rows(lambda ids: reference.logits(model, ids), next_token_texts),
        provenance=reference.provenance(model),
    )
