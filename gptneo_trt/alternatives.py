"""Run what a user has without TensorRT, for the speed table: ALTERNATIVES, one row each.

    phase     rows                                       one replay
    decode    hugging_face_eager, static_graph,          one token at position context - 1, after
              static_compiled_graph                      context - 1 others, of each text
    decode    weights_read                               a copy that moves the weights' bytes
    prefill   hugging_face_eager, hugging_face_compiled  context tokens of each text, after none

A batch of texts, the ids of ``seeded_token_ids``, on the device beforehand. Rows with ``graph`` are
float16, replay one CUDA graph and allocate nothing. Hugging Face's are bf16 with eager attention
(``reference.torch_model``), are called from Python as a user calls them, and allocate what they
return. No replay holds a transfer to or from the host, compilation, or the choice of the next
token.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from gptneo_trt import reference
from gptneo_trt.cuda_graph import captured
from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import RunError
from gptneo_trt.static_step import Device, Shape, float32_on_host, seeded_token_ids, static_step
from gptneo_trt.timing import Timed

# Calls before a capture: the first compiles, chooses kernels and allocates workspaces.
WARMUPS = 3
# Values that weights_read puts out: they show that the copy ran.
READ_SAMPLE = 1024


class HuggingFaceForward:
    """Call one forward of Hugging Face's model with ``use_cache=True``, from the same past.

    Attributes:
        logits: [B, T, V] in the model's type, before softmax, of the last step.
    """

    def __init__(self, forward: Any, token_ids: torch.Tensor, past: DynamicCache | None) -> None:
        """Run a first step, which compiles ``forward`` where it is a compiled model.

        ``token_ids``: int64 [B, T]. ``past``: the cache of the tokens before, None for none.
        """
        self._forward, self._token_ids, self._past = forward, token_ids, past
        layers: list[Any] = past.layers if past is not None else []
        self._rows = [(layer, layer.keys, layer.values) for layer in layers]
        self.logits = self.step()

    def prepare(self) -> None:
        """Put the cache, which grows with every step, back: assignments, no copy."""
        for layer, keys, values in self._rows:
            layer.keys, layer.values = keys, values

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Put the cache back and run one forward; return ``logits``."""
        self.prepare()
        outputs = self._forward(self._token_ids, past_key_values=self._past, use_cache=True)
        self.logits = outputs.logits
        return self.logits

    def outputs(self) -> np.ndarray:
        """Return the logits of the last step, float32 [B, V] of one token, else [B, T, V]."""
        return float32_on_host(self.logits[:, 0] if self.logits.shape[1] == 1 else self.logits)


def hugging_face_step(
    checkpoint: Checkpoint, shape: Shape, device: Device, dtype: torch.dtype
) -> HuggingFaceForward:
    """Return the eager forward of one token after context - 1 others, in a ``DynamicCache``."""
    token_ids = torch.tensor(seeded_token_ids(checkpoint, shape), device=device)
    model: Any = reference.torch_model(checkpoint, dtype)
    model, past = model.to(device), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(token_ids[:, :-1], past_key_values=past, use_cache=True)
    return HuggingFaceForward(model, token_ids[:, -1:], past)


def hugging_face_prefill(
    checkpoint: Checkpoint, shape: Shape, device: Device, dtype: torch.dtype, compiled: bool
) -> HuggingFaceForward:
    """Return the forward of whole texts into a new cache, eager or compiled."""
    token_ids = torch.tensor(seeded_token_ids(checkpoint, shape), device=device)
    model: Any = reference.torch_model(checkpoint, dtype)
    model = model.to(device)
    forward = torch.compile(model, dynamic=False) if compiled else model
    with warnings.catch_warnings():
        # Advice of torch.compile for the float32 scores; the model stays as the reference is.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        return HuggingFaceForward(forward, token_ids, None)


class WeightsRead:
    """Move as many bytes as reading all weights once.

    A copy of b bytes reads b and writes b. So half of the weights' bytes is copied: that takes
    the time to read all of them once at the card's copy bandwidth, the least that a decode step
    can take while the weights exceed the card's cache. (Where they fit, repeated copies and
    repeated steps are both served from there.)

    Attributes:
        source, destination: flat, half of the weights each.
        bytes_moved: read plus written by a step.
    """

    def __init__(self, source: torch.Tensor) -> None:
        """Allocate the destination."""
        self.source, self.destination = source, torch.zeros_like(source)
        self.bytes_moved = source.nbytes + self.destination.nbytes

    def prepare(self) -> None:
        """Clear the values that ``outputs`` returns."""
        self.destination[:READ_SAMPLE].zero_()

    def step(self) -> None:
        """Launch the copy, as a kernel: a graph's memcpy reaches two thirds of its bandwidth."""
        torch.add(self.source, 0, out=self.destination)

    def outputs(self) -> np.ndarray:
        """Return the first READ_SAMPLE values copied, float32."""
        return float32_on_host(self.destination[:READ_SAMPLE])


def weights_read(checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> WeightsRead:
    """Return the copy for all weights in ``dtype``; a tied head counts once.

    The bytes moved are those of the weights, and one element more where their number is odd.
    """
    parts = [torch.tensor(array, dtype=dtype).flatten() for array in checkpoint.weights.values()]
    flat = torch.cat(parts)
    return WeightsRead(flat[: (len(flat) + 1) // 2].to(device))


def _expect_gpu(name: str, device: Device) -> None:
    if torch.device(device).type != "cuda":
        raise RunError(
            f"CUDA graph of {name}: obtained device {device}, expected a GPU; run on a host with "
            "one and with a CUDA build of torch"
        )


@dataclass(frozen=True)
class Alternative:
    """Describe one row.

    Attributes:
        name: row name.
        phase: "prefill" or "decode".
        summary: one line for people.
        needs: what it takes to run it.
        graph: whether ``step`` is captured in a CUDA graph.
        make: checkpoint, shape, device -> object with ``prepare``, ``step`` and ``outputs``.
        spread: see ``Timed``; PyTorch does not promise the same order of summation twice.
    """

    name: str
    phase: str
    summary: str
    needs: str
    graph: bool
    make: Callable[[Checkpoint, Shape, Device], Any]
    spread: float = 0.0


# Four units in the last place of the largest value. On an H200 two replays of the static graph
# differed by one, with 2,048 rows in the cache.
_HALF, _BFLOAT16 = (4 * torch.finfo(each).eps for each in (torch.float16, torch.bfloat16))
_COMPILER = "a GPU, Triton and a C compiler"
ALTERNATIVES = (
    Alternative(
        "hugging_face_eager", "decode", "Hugging Face's model, eager", "a GPU", False,
        partial(hugging_face_step, dtype=torch.bfloat16), _BFLOAT16,
    ),
    Alternative(
        "static_graph", "decode", "PyTorch with a static cache", "a GPU", True,
        partial(static_step, dtype=torch.float16, compiled=False), _HALF,
    ),
    Alternative(
        "static_compiled_graph", "decode", "the same, compiled", _COMPILER, True,
        partial(static_step, dtype=torch.float16, compiled=True), _HALF,
    ),
    Alternative(
        "weights_read", "decode", "all weights read once, at copy bandwidth", "a GPU", True,
        lambda checkpoint, _, device: weights_read(checkpoint, device, torch.float16),
    ),
    Alternative(
        "hugging_face_eager", "prefill", "Hugging Face's model, eager", "a GPU", False,
        partial(hugging_face_prefill, dtype=torch.bfloat16, compiled=False), _BFLOAT16,
    ),
    Alternative(
        "hugging_face_compiled", "prefill", "the same, compiled", _COMPILER, False,
        partial(hugging_face_prefill, dtype=torch.bfloat16, compiled=True), _BFLOAT16,
    ),
)  # fmt: skip


def alternative(
    name: str, phase: str, checkpoint: Checkpoint, shape: Shape, device: Device
) -> Timed:
    """Return one row of ALTERNATIVES, ready to be timed. Nothing is kept but by the caller.

    Compiled rows take tens of seconds to make.

    Raises:
        RunError: no such row, it does not fit the checkpoint, or it cannot be made here.
        CheckpointError: see ``reference.torch_model``.
    """
    rows = {(row.name, row.phase): row for row in ALTERNATIVES}
    if (name, phase) not in rows:
        known = ", ".join(f"{row.name} ({row.phase})" for row in ALTERNATIVES)
        raise RunError(f"no alternative {name!r} in {phase!r}; the rows are: {known}")
    row = rows[name, phase]
    if row.graph:
        _expect_gpu(name, device)
    try:
        runner = row.make(checkpoint, shape, device)
        if row.graph:
            stream = torch.cuda.Stream(device)
            replay: Any = captured(runner.step, stream, WARMUPS, f"alternative {name}, {phase}")
        else:
            replay = runner.step
    except RuntimeError as error:
        raise RunError(f"alternative {name}, {phase}: {error}; it needs {row.needs}") from error
    return Timed(name, replay, runner.prepare, runner.outputs, row.spread)
