"""Run what a user has without TensorRT, for the speed table: ALTERNATIVES, one row each.

    phase     rows                                       one replay
    decode    hugging_face_eager, static_graph,          one token at position context - 1, after
              static_compiled_graph                      context - 1 others
    decode    weights_read                               a copy that moves the weights' bytes
    prefill   hugging_face_eager, hugging_face_compiled  context tokens, after none

Batch 1, the ids of ``seeded_token_ids``, on the device beforehand. Rows with ``graph`` are
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
from torch.nn import functional
from transformers import DynamicCache

from gptneo_trt import reference
from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import RunError
from gptneo_trt.timing import Timed

Device = torch.device | str
TOKEN_SEED = 20
# Calls before a capture: the first compiles, chooses kernels and allocates workspaces.
WARMUPS = 3
# Values that weights_read puts out: they show that the copy ran.
READ_SAMPLE = 1024
# Hugging Face's names; "gelu_new" is the tanh form.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}


def seeded_token_ids(checkpoint: Checkpoint, context: int) -> np.ndarray:
    """Return int64 [context], ids within the vocabulary, the same on every call.

    Raises:
        RunError: a context that leaves no past, or that the position table does not hold.
    """
    architecture = checkpoint.architecture
    if not 2 <= context <= architecture.max_positions:
        raise RunError(
            f"context of {checkpoint.name!r}: obtained {context} tokens, expected 2 to "
            f"{architecture.max_positions}; choose one that the position table holds"
        )
    return np.random.default_rng(TOKEN_SEED).integers(0, architecture.vocab_size, context)


def _outputs(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().cpu().numpy()


class StaticStep:
    """Decode one token at a time in plain PyTorch, with everything at a fixed address.

    One step reads the token and its position from device memory, writes its K and V rows into
    the cache in place and attends over all rows under a mask, so that rows beyond the position
    may hold anything finite. It neither waits for the host nor branches on data: it can be
    captured in a CUDA graph and compiled without a graph break. q, k and v are three products,
    as in the engines.

    Attributes:
        token_ids: int64 [context], the text that is decoded.
        token, position: int64 [1], of the next step.
        keys, values: L tensors [1, H, context, D] in the step's type, zeros at first.
        logits: float32 [V], before softmax, of the last step.
    """

    def __init__(
        self, checkpoint: Checkpoint, context: int, device: Device, dtype: torch.dtype
    ) -> None:
        """Copy the weights to the device; raises as ``seeded_token_ids`` does."""
        self._architecture = architecture = checkpoint.architecture
        self.token_ids = torch.tensor(seeded_token_ids(checkpoint, context), device=device)
        self._weights = {
            name: torch.tensor(array, dtype=dtype, device=device)
            for name, array in checkpoint.weights.items()
        }
        self._rows = torch.arange(context, device=device)
        self._run: Callable[[], object] = self._decode
        self.token = self.token_ids[:1].clone()
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        # A tensor a layer: of one for all layers, a compiled step would write a whole copy.
        shape = (1, architecture.num_heads, context, architecture.head_width)
        layers = architecture.attention_layers
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.logits = torch.zeros(architecture.vocab_size, device=device)

    def compile(self, **options: Any) -> None:
        """Have the next step compiled, as one graph with fixed shapes."""
        self._run = torch.compile(self._decode, fullgraph=True, dynamic=False, **options)

    def prepare(self, position: int | None = None) -> None:
        """Set the position of the next step (None: the last row), and its token.

        Raises:
            RunError: the cache has no such row.
        """
        last = len(self.token_ids) - 1
        position = last if position is None else position
        if not 0 <= position <= last:
            raise RunError(
                f"position of a static step: obtained {position}, expected 0 to {last}; make the "
                "step with a larger context"
            )
        self.position.fill_(position)
        self.token.copy_(self.token_ids[position : position + 1])

    def step(self) -> torch.Tensor:
        """Run one step; return ``logits``, which the next step overwrites."""
        self._run()
        return self.logits

    def outputs(self) -> np.ndarray:
        """Return the logits of the last step, float32 [V]."""
        return _outputs(self.logits)

    def _decode(self) -> None:
        architecture, weights = self._architecture, self._weights
        wte = weights["transformer.wte.weight"]
        places = functional.embedding(self.position, weights["transformer.wpe.weight"])
        hidden = functional.embedding(self.token, wte) + places
        distance = (self.position - self._rows)[None, None, None]
        visible = distance >= 0
        masks = {"global": visible, "local": visible & (distance < architecture.window_size)}
        for layer, kind in enumerate(architecture.attention_layers):
            hidden = self._block(layer, hidden, masks[kind])
        hidden = self._norm("transformer.ln_f", hidden)
        head = wte if architecture.tied_head else weights["lm_head.weight"]
        self.logits.copy_(functional.linear(hidden, head)[0])  # casts to float32

    def _block(self, layer: int, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run one transformer block on ``hidden`` [1, C]; ``mask`` is bool [1, 1, 1, context]."""
        block, architecture = f"transformer.h.{layer}", self._architecture
        heads, width = architecture.num_heads, architecture.head_width
        keys, values = self.keys[layer], self.values[layer]
        normal = self._norm(f"{block}.ln_1", hidden)
        query, key, value = (
            self._linear(f"{block}.attn.attention.{part}_proj", normal).view(1, heads, 1, width)
            for part in "qkv"
        )
        keys.index_copy_(2, self.position, key)
        values.index_copy_(2, self.position, value)
        # GPT-Neo does not scale its scores, and they may exceed float16's range: PyTorch keeps
        # scores and softmax in float32 in here.
        attended = functional.scaled_dot_product_attention(query, keys, values, mask, scale=1.0)
        merged = attended.reshape(1, heads * width)
        hidden = hidden + self._linear(f"{block}.attn.attention.out_proj", merged)

        normal = self._norm(f"{block}.ln_2", hidden)
        wide = self._linear(f"{block}.mlp.c_fc", normal)
        active = ACTIVATIONS[architecture.activation](wide)
        return hidden + self._linear(f"{block}.mlp.c_proj", active)

    def _linear(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        return functional.linear(tensor, weights[f"{path}.weight"], weights.get(f"{path}.bias"))

    def _norm(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        weight, bias = self._weights[f"{path}.weight"], self._weights[f"{path}.bias"]
        epsilon = self._architecture.layer_norm_epsilon
        return functional.layer_norm(tensor, weight.shape, weight, bias, epsilon)


def static_step(
    checkpoint: Checkpoint, context: int, device: Device, dtype: torch.dtype, compiled: bool
) -> StaticStep:
    """Return a step at position context - 1 over the true rows of the tokens before it.

    ``compiled``: the first step from here on compiles.
    """
    static = StaticStep(checkpoint, context, device, dtype)
    for position in range(context - 1):
        static.prepare(position)
        static.step()
    static.prepare()
    if compiled:
        static.compile()
    return static


class HuggingFaceForward:
    """Call one forward of Hugging Face's model with ``use_cache=True``, from the same past.

    Attributes:
        logits: [1, T, V] in the model's type, before softmax, of the last step.
    """

    def __init__(self, forward: Any, token_ids: torch.Tensor, past: DynamicCache | None) -> None:
        """Run a first step, which compiles ``forward`` where it is a compiled model.

        ``token_ids``: int64 [1, T]. ``past``: the cache of the tokens before, None for none.
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
        """Return the logits of the last step, float32 [V] of one token, else [T, V]."""
        return _outputs(self.logits[0, 0] if self.logits.shape[1] == 1 else self.logits[0])


def hugging_face_step(
    checkpoint: Checkpoint, context: int, device: Device, dtype: torch.dtype
) -> HuggingFaceForward:
    """Return the eager forward of one token after context - 1 others, in a ``DynamicCache``."""
    token_ids = torch.tensor(seeded_token_ids(checkpoint, context)[None], device=device)
    model: Any = reference.torch_model(checkpoint, dtype)
    model, past = model.to(device), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(token_ids[:, :-1], past_key_values=past, use_cache=True)
    return HuggingFaceForward(model, token_ids[:, -1:], past)


def hugging_face_prefill(
    checkpoint: Checkpoint, context: int, device: Device, dtype: torch.dtype, compiled: bool
) -> HuggingFaceForward:
    """Return the forward of ``context`` tokens into a new cache, eager or compiled."""
    token_ids = torch.tensor(seeded_token_ids(checkpoint, context)[None], device=device)
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
        """Launch the copy."""
        self.destination.copy_(self.source)

    def outputs(self) -> np.ndarray:
        """Return the first READ_SAMPLE values copied, float32."""
        return _outputs(self.destination[:READ_SAMPLE])


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


def captured(function: Callable[[], object], device: Device) -> Callable[[], None]:
    """Return a call that replays, as one CUDA graph, what ``function`` launches.

    ``function`` runs WARMUPS times on a side stream before it is captured.

    Raises:
        RunError: there is no GPU, or a warm-up or the capture failed; never a slower call.
    """
    name = getattr(function, "__qualname__", repr(function))
    _expect_gpu(name, device)
    with torch.cuda.device(torch.device(device)):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                function()
        except RuntimeError as error:
            raise RunError(f"CUDA graph of {name}: warm-up or capture failed: {error}") from error
    return graph.replay


@dataclass(frozen=True)
class Alternative:
    """Describe one row.

    Attributes:
        name: row name.
        phase: "prefill" or "decode".
        summary: one line for people.
        needs: what it takes to run it.
        graph: whether ``step`` is captured in a CUDA graph.
        make: checkpoint, context, device -> object with ``prepare``, ``step`` and ``outputs``.
    """

    name: str
    phase: str
    summary: str
    needs: str
    graph: bool
    make: Callable[[Checkpoint, int, Device], Any]


_COMPILER = "a GPU, Triton and a C compiler"
ALTERNATIVES = (
    Alternative(
        "hugging_face_eager", "decode", "Hugging Face's model, eager", "a GPU", False,
        partial(hugging_face_step, dtype=torch.bfloat16),
    ),
    Alternative(
        "static_graph", "decode", "PyTorch with a static cache", "a GPU", True,
        partial(static_step, dtype=torch.float16, compiled=False),
    ),
    Alternative(
        "static_compiled_graph", "decode", "the same, compiled", _COMPILER, True,
        partial(static_step, dtype=torch.float16, compiled=True),
    ),
    Alternative(
        "weights_read", "decode", "all weights read once, at copy bandwidth", "a GPU", True,
        lambda checkpoint, _, device: weights_read(checkpoint, device, torch.float16),
    ),
    Alternative(
        "hugging_face_eager", "prefill", "Hugging Face's model, eager", "a GPU", False,
        partial(hugging_face_prefill, dtype=torch.bfloat16, compiled=False),
    ),
    Alternative(
        "hugging_face_compiled", "prefill", "the same, compiled", _COMPILER, False,
        partial(hugging_face_prefill, dtype=torch.bfloat16, compiled=True),
    ),
)  # fmt: skip


def alternative(
    name: str, phase: str, checkpoint: Checkpoint, context: int, device: Device
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
        runner = row.make(checkpoint, context, device)
        replay = captured(runner.step, device) if row.graph else runner.step
    except RuntimeError as error:
        raise RunError(f"alternative {name}, {phase}: {error}; it needs {row.needs}") from error
    return Timed(name, replay, runner.prepare, runner.outputs)
