"""Add the terms of every sum in another order, as another processor or thread count does.

The function is mathematically the same: the axes that a layer sums over are permuted alike in all
its inputs. What differs is the rounding of float32 sums, which FP8 rounding then amplifies: so
this shows how far a run without any regression moves.
"""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch


def summed_axes(layer: Any, trt: ModuleType) -> dict[int, tuple[int, ...]]:
    """Return input index -> axes that a layer sums over, from the end; nothing of other layers.

    A product sums over its contraction axis, an attention over head width and keys (in the
    softmax too), a normalization over channels. Sums of two terms have one order.
    """
    kind = layer.type.name
    if kind == "MATRIX_MULTIPLY":
        layer.__class__ = trt.IMatrixMultiplyLayer
        transpose = trt.MatrixOperation.TRANSPOSE
        return {
            0: (-2,) if layer.op0 == transpose else (-1,),
            1: (-1,) if layer.op1 == transpose else (-2,),
        }
    if kind == "ATTENTION_INPUT":  # query, key [H, T, D], value, mask [1, T, keys]
        return {0: (-1,), 1: (-2, -1), 2: (-2,), 3: (-1,)}
    return {0: (-1,), 1: (-1,), 2: (-1,)} if kind == "NORMALIZATION" else {}


def keeps_its_axis(layer: Any) -> bool:
    """Return whether the axis that a layer sums over is one of its output's, to be put back."""
    return layer.type.name == "NORMALIZATION"


def permuted(axes: tuple[int, ...], order: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what permutes these axes of a tensor as ``order`` says."""

    def permute(tensor: torch.Tensor) -> torch.Tensor:
        for axis in axes:
            index = permutation(tensor.shape[axis], order)[0]
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor

    return permute


def put_back(tensor: torch.Tensor, order: int) -> torch.Tensor:
    """Undo the permutation of the last axis."""
    index = permutation(tensor.shape[-1], order)[1]
    return tensor.index_select(-1, index.to(tensor.device))


@cache
def permutation(size: int, order: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [size] twice: the permutation of an axis, the same for all, and its inverse."""
    indices = np.random.default_rng((order, size)).permutation(size)
    return torch.from_numpy(indices), torch.from_numpy(np.argsort(indices))
