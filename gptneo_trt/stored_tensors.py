"""Read one safetensors file: what its header says, checked, and the values of a tensor.

Reading takes at most MEMORY_FACTOR of ``json_file`` times the size of the header, and 3 times that
of the tensors, since bfloat16 becomes float32.
"""

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from gptneo_trt.errors import CheckpointError
from gptneo_trt.json_file import MAX_BYTES, object_from_bytes


@dataclass(frozen=True)
class StoredTensor:
    """Say where a tensor is, as the header of its file has it; ``dtype`` for example "F16"."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def tensors_in_file(file: Path, remedy: str) -> dict[str, StoredTensor]:
    """Return name -> tensor as the header says, after comparing sizes.

    Format: 8 bytes of length, little endian; that much JSON; the data
    (https://github.com/huggingface/safetensors#format).

    Args:
        file: of safetensors.
        remedy: what to do about a damaged one, the end of every message.

    Raises:
        CheckpointError: not readable, malformed, or shorter or longer than the header says.
    """
    try:
        with file.open("rb") as stream:
            actual = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(min(length, MAX_BYTES + 1)) if 0 < length <= actual - 8 else b""
    except OSError as error:
        raise CheckpointError(f"{file}: obtained {error}, expected a readable file") from error
    if not text:
        raise CheckpointError(
            f"{file}: obtained {actual} bytes without a safetensors header, expected one of "
            f"{length} bytes; {remedy}"
        )
    header = object_from_bytes(text, f"{file}, its header", CheckpointError, remedy)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    wrong = [
        reprlib.repr({name: entry}) for name, entry in entries.items() if not _is_tensor(entry)
    ]
    if wrong:
        raise CheckpointError(
            f"{file}, its header: obtained {wrong[0]}, expected dtype, shape and data_offsets; "
            f"{remedy}"
        )
    expected = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if actual != expected:
        raise CheckpointError(f"{file}: obtained {actual} bytes, expected {expected}; {remedy}")
    return {
        name: StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]))
        for name, entry in entries.items()
    }


def _is_tensor(entry: Any) -> bool:
    """Return whether an entry of a header has the three members of a tensor, of their types."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    sizes = all(type(size) is int and size >= 0 for size in shape + offsets)
    return isinstance(entry["dtype"], str) and sizes


def arrays_in_file(
    file: Path, tensors: Mapping[str, StoredTensor], remedy: str
) -> dict[str, np.ndarray]:
    """Return the values of tensors as float16 or float32, which holds bfloat16 exactly.

    Args:
        file: that all of them are in.
        tensors: any name -> float16, bfloat16 or float32.
        remedy: what to do about a damaged file, the end of the message.

    Raises:
        CheckpointError: the header contradicts itself: tensors overlap, leave a gap, or have
            another size than their shape.
    """
    # numpy has no bfloat16, so PyTorch reads and widens it.
    has_bfloat16 = any(tensor.dtype == "BF16" for tensor in tensors.values())
    try:
        with safe_open(file, framework="pt" if has_bfloat16 else "np") as opened:
            values = {name: opened.get_tensor(tensor.name) for name, tensor in tensors.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: {error}; {remedy}") from error
    if not has_bfloat16:
        return values
    wide = {name: each.float() for name, each in values.items() if tensors[name].dtype == "BF16"}
    return {name: each.numpy() for name, each in (values | wide).items()}
