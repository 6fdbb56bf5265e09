"""Decode texts through an executor: tokens -> logits, K and V, by prefill or step by step.

An executor evaluates one network: the interpreter anywhere, an engine on a GPU. The decoder does
not know which it holds.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from gptneo_trt.data import Architecture, Decoded
from gptneo_trt.errors import RunError
from gptneo_trt.variant import Variant

Tensors = Mapping[str, torch.Tensor]
PARTS = ("key", "value")
# Of 32-bit counters in a loop: 256 bytes, to which TensorRT is given addresses aligned elsewhere.
FIRST_POSITION = 64


class Executor(Protocol):
    """Run the network of one row and phase.

    Attributes:
        variant: the row.
        phase: "prefill" or "decode".
        context: cache rows in decode, largest T in prefill.
        batch: B, texts that go through the network together.
        batches_at_once: how many batches ``run`` takes, None for any number.
        device: where inputs are taken from and outputs are put.
        cache_type: in which K and V are taken and given.
    """

    variant: Variant
    phase: str
    context: int
    batch: int
    batches_at_once: int | None
    device: torch.device
    cache_type: torch.dtype

    def run(self, feeds: Tensors, into: Tensors | None = None) -> dict[str, torch.Tensor]:
        """Map inputs [N, *shape] of N batches by name to outputs [N, *shape] by name.

        Token and position ids are int32. Outputs named in ``into`` are written there; the others
        are valid until the next run.
        """
        ...

    def repeat(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return what does the same as a function of runs and tensor operations, launched at once.

        The function is called once or more meanwhile, so its state has to be put back afterwards.
        """
        ...


def checked_tokens(
    token_ids: np.ndarray, architecture: Architecture, executor: Executor
) -> torch.Tensor:
    """Return int32 [N / B, B, T], on the host, of token ids int [N, T].

    Raises:
        RunError: empty, longer than the context or the position table, texts that do not fill
            their last batch, or ids that are no integers or out of range.
    """
    wrong = []
    if token_ids.dtype.kind not in "iu":
        wrong.append(f"token ids of type {token_ids.dtype}, expected integers")
    if token_ids.ndim != 2 or 0 in token_ids.shape:
        wrong.append(f"token ids of shape {token_ids.shape}, expected [N, T] with N, T >= 1")
    elif token_ids.shape[1] > executor.context:
        wrong.append(
            f"{token_ids.shape[1]} tokens, the {executor.phase} network takes {executor.context}; "
            "shorten the text or build with a larger context"
        )
    elif len(token_ids) % executor.batch:
        wrong.append(f"{len(token_ids)} texts, expected a multiple of the batch {executor.batch}")
    if token_ids.size and token_ids.dtype.kind in "iu":
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= architecture.vocab_size:
            wrong.append(f"token ids {low} to {high}, expected 0 to {architecture.vocab_size - 1}")
    if wrong:
        raise RunError(f"variant {executor.variant.name}, {executor.phase}: {'; '.join(wrong)}")
    texts = torch.from_numpy(token_ids.astype(np.int32))
    return texts.unflatten(0, (-1, executor.batch))


def _expect_phase(executor: Executor, phase: str) -> None:
    if executor.phase != phase:
        raise RunError(f"executor of phase {executor.phase!r}, expected {phase!r}")


def _batches(executor: Executor, texts: int) -> tuple[int, int]:
    """Return in how many batches of which size an executor takes so many texts.

    Raises:
        RunError: they do not fill the last one.
    """
    if texts < 1 or texts % executor.batch:
        raise RunError(
            f"variant {executor.variant.name}, {executor.phase}: {texts} texts, expected a "
            f"multiple of the batch {executor.batch}"
        )
    return texts // executor.batch, executor.batch


def _groups(tokens: torch.Tensor, executor: Executor) -> tuple[torch.Tensor, ...]:
    """Split [N, B, T] into as many batches at once as the executor takes."""
    return torch.split(tokens, executor.batches_at_once or len(tokens))


def _stack(outputs: Tensors, part: str, num_layers: int) -> torch.Tensor:
    """Return float32 [N, L, H, T, D] of the new rows ``h.<i>.<part>`` of N texts."""
    rows = [outputs[f"h.{i}.{part}"].flatten(0, 1) for i in range(num_layers)]
    return torch.stack(rows, 1).float()


def prefill_feeds(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of a prefill network for int32 [N, B, T] on the executor's device."""
    positions = torch.arange(tokens.shape[-1], dtype=torch.int32, device=tokens.device)
    return {"token_ids": tokens, "position_ids": positions.expand_as(tokens).contiguous()}


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
    tokens = checked_tokens(token_ids, architecture, executor).to(executor.device)
    parts = []
    for group in _groups(tokens, executor):
        outputs = executor.run(prefill_feeds(group))
        rows = [_stack(outputs, part, architecture.num_layers) for part in PARTS]
        logits = outputs["logits"].flatten(0, 1)
        parts.append([part.to("cpu", copy=True) for part in (logits, *rows)])
    return Decoded(*(torch.cat(part).numpy() for part in zip(*parts, strict=True)))


class DecodeLoop:
    """Decode N texts in lockstep, everything of it on the executor's device.

    A step reads the token, runs the network, writes the new K and V rows of all layers into the
    cache, keeps the logits and moves on by one position: no transfer, no allocation, one launch
    where the executor can.

    Attributes:
        cache: [L, 2, N / B, B, H, context, D], K and V of each layer, in the executor's cache
            type, of N texts in batches of B.
        logits: float32 [N, steps, V], before softmax; NaN where no step has been.
        feeds: the network's inputs at the position of the next step.
    """

    def __init__(
        self, executor: Executor, architecture: Architecture, texts: int, steps: int
    ) -> None:
        """Make room for ``texts`` texts of ``steps`` tokens.

        Raises:
            RunError: not a decode network, more steps than its cache has rows, texts that do not
                fill their last batch, or steps that cannot be launched at once.
        """
        _expect_phase(executor, "decode")
        batches = _batches(executor, texts)
        if not 1 <= steps <= executor.context:
            raise RunError(
                f"variant {executor.variant.name}, decode: {steps} steps, expected 1 to "
                f"{executor.context}; build with a larger context"
            )
        heads, width, device = architecture.num_heads, architecture.head_width, executor.device
        layers = architecture.num_layers

        def new_cache(rows: int) -> torch.Tensor:
            shape = (layers, 2, *batches, heads, rows, width)
            return torch.zeros(shape, dtype=executor.cache_type, device=device)

        self.cache, self._rows = new_cache(executor.context), new_cache(1)
        shape = (texts, steps, architecture.vocab_size)
        self.logits = torch.full(shape, torch.nan, device=device)
        self._tokens = torch.zeros((*batches, steps), dtype=torch.int32, device=device)
        self._token = torch.zeros((*batches, 1), dtype=torch.int32, device=device)
        # One tensor to advance, not two: the position that indexes, whose low half is counted, and
        # from FIRST_POSITION on those that the network reads, one a text.
        self._one = torch.ones(FIRST_POSITION + texts, dtype=torch.int32, device=device)
        self._one[1:FIRST_POSITION] = 0
        self._counters = torch.zeros_like(self._one)
        self._position = self._counters[:2].view(torch.int64)
        positions = self._counters[FIRST_POSITION:].view(*batches, 1)
        parts = [(i, j, f"h.{i}.{name}") for i in range(layers) for j, name in enumerate(PARTS)]
        self.feeds = {"token_ids": self._token, "position_ids": positions}
        self.feeds |= {f"past.{name}": self.cache[i, j] for i, j, name in parts}
        self._into = {name: self._rows[i, j] for i, j, name in parts}
        self._executor, self._next, self._last = executor, 0, steps
        self._launch = executor.repeat(self._step)
        self.start(torch.zeros_like(self._tokens))

    def _step(self) -> None:
        torch.index_select(self._tokens, 2, self._position, out=self._token)
        outputs = self._executor.run(self.feeds, self._into)
        self.cache.index_copy_(5, self._position, self._rows)
        self.logits.index_copy_(1, self._position, outputs["logits"].flatten(0, 1))
        self._counters.add_(self._one)

    def start(self, tokens: torch.Tensor) -> None:
        """Forget everything, and take int32 [N / B, B, T] as the texts to decode.

        Raises:
            RunError: T is more than the steps there is room for.
        """
        if tokens.shape[-1] > self._tokens.shape[-1]:
            raise RunError(
                f"variant {self._executor.variant.name}, decode: {tokens.shape[-1]} tokens, room "
                f"for {self._tokens.shape[-1]}; make a longer loop"
            )
        self._last = tokens.shape[-1]
        self._tokens[..., : self._last].copy_(tokens)
        self.cache.zero_()
        self.logits.fill_(torch.nan)
        self.seek(0)

    def seek(self, position: int) -> None:
        """Put the next step at a position; cache and logits stay.

        Raises:
            RunError: the text has no such position.
        """
        if not 0 <= position < self._last:
            raise RunError(
                f"variant {self._executor.variant.name}, decode: position {position}, expected 0 "
                f"to {self._last - 1}"
            )
        torch.mul(self._one, position, out=self._counters)
        self._next = position

    def step(self) -> None:
        """Decode one token of each text.

        Raises:
            RunError: all steps are done.
        """
        if self._next >= self._last:
            name = self._executor.variant.name
            raise RunError(f"variant {name}, decode: all {self._last} steps are done; start again")
        self._next += 1
        self._launch()

    def decoded(self) -> Decoded:
        """Return the logits, and the K and V rows, of all positions decoded so far."""
        rows = self.cache.flatten(2, 3)[..., : self._next, :].float()
        kept = (self.logits[:, : self._next], *(rows[:, part].transpose(0, 1) for part in (0, 1)))
        return Decoded(*(part.to("cpu", copy=True).numpy() for part in kept))


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
    tokens = checked_tokens(token_ids, architecture, executor)
    parts: list[Decoded] = []
    loop = None
    for group in _groups(tokens, executor):
        steps, texts = group.shape[-1], group.shape[:-1].numel()
        if loop is None or loop.logits.shape[0] != texts:
            loop = DecodeLoop(executor, architecture, texts, steps)
        loop.start(group)
        for _ in range(steps):
            loop.step()
        parts.append(loop.decoded())
    return Decoded(
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.values for part in parts]),
    )
