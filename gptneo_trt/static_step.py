"""A decode step in plain PyTorch with a static cache, and the texts that every step decodes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from gptneo_trt.data import Checkpoint
from gptneo_trt.errors import RunError

Device = torch.device | str
Shape = tuple[int, int]  # batch and context: texts, and tokens of each
TOKEN_SEED = 20
# Hugging Face's names; "gelu_new" is the tanh form.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}


def seeded_token_ids(checkpoint: Checkpoint, shape: Shape) -> np.ndarray:
    """Return int64 [batch, context], ids within the vocabulary, the same on every call.

    Raises:
        RunError: a context that leaves no past, or that the position table does not hold.
    """
    architecture, (_, context) = checkpoint.architecture, shape
    if not 2 <= context <= architecture.max_positions:
        raise RunError(
            f"context of {checkpoint.name!r}: obtained {context} tokens, expected 2 to "
            f"{architecture.max_positions}; choose one that the position table holds"
        )
    return np.random.default_rng(TOKEN_SEED).integers(0, architecture.vocab_size, shape)


def float32_on_host(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor of any type and device, float32."""
    return tensor.float().cpu().numpy()


class StaticStep:
    """Decode one token of each text at a time in plain PyTorch, all of it at a fixed address.

    One step reads the tokens and their position from device memory, writes their K and V rows into
    the cache in place and attends over all rows under a mask, so that rows beyond the position
    may hold anything finite. It neither waits for the host nor branches on data: it can be
    captured in a CUDA graph and compiled without a graph break. q, k and v are three products,
    as in the engines. The texts of a batch are in lockstep: one position is for all of them.

    Attributes:
        token_ids: int64 [B, context], the texts that are decoded.
        token, position: int64 [B] and [1], of the next step.
        keys, values: L tensors [B, H, context, D] in the step's type, zeros at first.
        logits: float32 [B, V], before softmax, of the last step.
    """

    def __init__(
        self, checkpoint: Checkpoint, shape: Shape, device: Device, dtype: torch.dtype
    ) -> None:
        """Copy the weights to the device; raises as ``seeded_token_ids`` does."""
        batch, context = shape
        self._architecture = architecture = checkpoint.architecture
        self.token_ids = torch.tensor(seeded_token_ids(checkpoint, shape), device=device)
        self._weights = {
            name: torch.tensor(array, dtype=dtype, device=device)
            for name, array in checkpoint.weights.items()
        }
        self._rows = torch.arange(context, device=device)
        self._run: Callable[[], object] = self._decode
        self.token = self.token_ids[:, 0].clone()
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        # A tensor a layer: of one for all layers, a compiled step would write a whole copy.
        rows = (batch, architecture.num_heads, context, architecture.head_width)
        layers = architecture.attention_layers
        self.keys = [torch.zeros(rows, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(rows, dtype=dtype, device=device) for _ in layers]
        self.logits = torch.zeros((batch, architecture.vocab_size), device=device)

    def compile(self, **options: Any) -> None:
        """Have the next step compiled, as one graph with fixed shapes."""
        self._run = torch.compile(self._decode, fullgraph=True, dynamic=False, **options)

    def prepare(self, position: int | None = None) -> None:
        """Set the position of the next step (None: the last row), and its tokens.

        Raises:
            RunError: the cache has no such row.
        """
        last = self.token_ids.shape[1] - 1
        position = last if position is None else position
        if not 0 <= position <= last:
            raise RunError(
                f"position of a static step: obtained {position}, expected 0 to {last}; make the "
                "step with a larger context"
            )
        self.position.fill_(position)
        self.token.copy_(self.token_ids[:, position])

    def step(self) -> torch.Tensor:
        """Run one step; return ``logits``, which the next step overwrites."""
        self._run()
        return self.logits

    def outputs(self) -> np.ndarray:
        """Return the logits of the last step, float32 [B, V]."""
        return float32_on_host(self.logits)

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
        self.logits.copy_(functional.linear(hidden, head))  # casts to float32

    def _block(self, layer: int, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run one transformer block on ``hidden`` [B, C]; ``mask`` is bool [1, 1, 1, context]."""
        block, architecture = f"transformer.h.{layer}", self._architecture
        heads, width = architecture.num_heads, architecture.head_width
        keys, values = self.keys[layer], self.values[layer]
        normal = self._norm(f"{block}.ln_1", hidden)
        query, key, value = (
            self._linear(f"{block}.attn.attention.{part}_proj", normal).view(-1, heads, 1, width)
            for part in "qkv"
        )
        keys.index_copy_(2, self.position, key)
        values.index_copy_(2, self.position, value)
        # GPT-Neo does not scale its scores, and they may exceed float16's range: PyTorch keeps
        # scores and softmax in float32 in here.
        attended = functional.scaled_dot_product_attention(query, keys, values, mask, scale=1.0)
        merged = attended.reshape(-1, heads * width)
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
    checkpoint: Checkpoint, shape: Shape, device: Device, dtype: torch.dtype, compiled: bool
) -> StaticStep:
    """Return a step at position context - 1 over the true rows of the tokens before it.

    ``compiled``: the first step from here on compiles.
    """
    static = StaticStep(checkpoint, shape, device, dtype)
    for position in range(shape[1] - 1):
        static.prepare(position)
        static.step()
    static.prepare()
    if compiled:
        static.compile()
    return static
