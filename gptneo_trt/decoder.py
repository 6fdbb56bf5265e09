"""Decode texts through an executor: tokens -> logits, K and V, by prefill or step by step.

An executor evaluates one network: the interpreter anywhere, an engine on a GPU. The decoder does
not know which it holds.
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from gptneo_trt.data import Architecture, Decoded
from gptneo_trt.errors import RunError
from gptneo_trt.network import Network


class Executor(Protocol):
    """Run one network.

    Attributes:
        network: what is run; its phase and context are read.
        texts_at_once: how many texts ``run`` takes, None for any number.
    """

    network: Network
    texts_at_once: int | None

    def run(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Map inputs [N, *shape] by name to outputs [N, *shape] by name."""
        ...


def _checked(token_ids: np.ndarray, architecture: Architecture, executor: Executor) -> torch.Tensor:
    """Return int64 [N, 1, T].

    Raises:
        RunError: empty, longer than the context or the position table, or ids out of range.
    """
    network = executor.network
    wrong = []
    if token_ids.ndim != 2 or 0 in token_ids.shape:
        wrong.append(f"token ids of shape {token_ids.shape}, expected [N, T] with N, T >= 1")
    elif token_ids.shape[1] > network.context:
        wrong.append(
            f"{token_ids.shape[1]} tokens, the {network.phase} network takes {network.context}; "
            "shorten the text or build with a larger context"
        )
    if token_ids.size:
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= architecture.vocab_size:
            wrong.append(f"token ids {low} to {high}, expected 0 to {architecture.vocab_size - 1}")
    if wrong:
        raise RunError(f"variant {network.variant.name}, {network.phase}: {'; '.join(wrong)}")
    return torch.from_numpy(token_ids.astype(np.int64))[:, None]


def _expect_phase(executor: Executor, phase: str) -> None:
    if executor.network.phase != phase:
        raise RunError(f"executor of phase {executor.network.phase!r}, expected {phase!r}")


def _stack(outputs: Mapping[str, torch.Tensor], part: str, num_layers: int) -> torch.Tensor:
    """Return [N, L, H, T, D] of the new rows ``h.<i>.<part>``."""
    return torch.stack([outputs[f"h.{i}.{part}"][:, 0] for i in range(num_layers)], dim=1)


def prefill(executor: Executor, architecture: Architecture, token_ids: np.ndarray) -> Decoded:
    """Run whole texts at once.

    Args:
        executor: of a prefill network.
        architecture: of the checkpoint.
        token_ids: int [N, T]; right padding is allowed, since no position looks ahead.

    Raises:
        RunError: the texts do not fit the network.
    """
    _expect_phase(executor, "prefill")
    tokens = _checked(token_ids, architecture, executor)
    positions = torch.arange(tokens.shape[-1])[None, None].expand_as(tokens)
    logits, keys, values = [], [], []
    for start in range(0, len(tokens), executor.texts_at_once or len(tokens)):
        rows = slice(start, start + (executor.texts_at_once or len(tokens)))
        outputs = executor.run({"token_ids": tokens[rows], "position_ids": positions[rows]})
        logits.append(outputs["logits"][:, 0])
        keys.append(_stack(outputs, "key", architecture.num_layers))
        values.append(_stack(outputs, "value", architecture.num_layers))
    return Decoded(*(torch.cat(part).cpu().numpy() for part in (logits, keys, values)))


def decode(executor: Executor, architecture: Architecture, token_ids: np.ndarray) -> Decoded:
    """Run texts token by token from an empty cache, each step fed the true next token.

    Args:
        executor: of a decode network.
        architecture: of the checkpoint.
        token_ids: int [N, T].

    Raises:
        RunError: the texts do not fit the network.
    """
    _expect_phase(executor, "decode")
    tokens = _checked(token_ids, architecture, executor)
    width = executor.texts_at_once or len(tokens)
    parts = [
        _decode_together(executor, architecture, tokens[start : start + width])
        for start in range(0, len(tokens), width)
    ]
    return Decoded(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.values for part in parts]),
    )


def _decode_together(
    executor: Executor, architecture: Architecture, tokens: torch.Tensor
) -> Decoded:
    """Run int64 [N, 1, T] in lockstep; the caches start as zeros, so nothing can leak in."""
    texts, steps = tokens.shape[0], tokens.shape[-1]
    heads, width = architecture.num_heads, architecture.head_width
    names = [f"h.{i}.{part}" for i in range(architecture.num_layers) for part in ("key", "value")]
    shape = (texts, 1, heads, executor.network.context, width)
    caches = {name: torch.zeros(shape) for name in names}
    feeds = {f"past.{name}": cache for name, cache in caches.items()}
    logits = np.empty((texts, steps, architecture.vocab_size), dtype=np.float32)
    for step in range(steps):
        feeds["token_ids"] = tokens[:, :, step : step + 1]
        feeds["position_ids"] = torch.full((texts, 1, 1), step)
        outputs = executor.run(feeds)
        logits[:, step] = outputs["logits"][:, 0, 0].cpu().numpy()
        for name, cache in caches.items():
            cache[:, :, :, step] = outputs[name][:, :, :, 0]
    rows = {name: cache[:, :, :, :steps] for name, cache in caches.items()}
    keys = _stack(rows, "key", architecture.num_layers)
    values = _stack(rows, "value", architecture.num_layers)
    return Decoded(logits, keys.numpy(), values.numpy())
