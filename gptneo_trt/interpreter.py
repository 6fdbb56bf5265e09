"""Evaluate an ``INetworkDefinition`` with PyTorch, layer by layer, without running TensorRT.

The network is read back from TensorRT's own objects, so what is judged is what a plan is built
from. Every layer is computed in float32 and rounded to its declared type. Products of one layer
are summed in another order than on a GPU: for fp16 and fp32 rows that is all that differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gptneo_trt.errors import RunError
from gptneo_trt.network import Network
from gptneo_trt.operators import MOVES_ONLY, read_outputs, rounding
from gptneo_trt.quantizing import read_packed
from gptneo_trt.summation import keeps_its_axis, permuted, put_back, summed_axes
from gptneo_trt.supported import Operation


@dataclass(frozen=True)
class _Step:
    name: str
    operation: Operation
    round: Operation | None
    inputs: tuple[str, ...]
    output: str


class Interpreter:
    """Run a network on N batches of texts at once.

    On one thread, what a text gives depends bitwise on its own inputs alone: neither on the other
    texts nor on their number or order.

    Attributes:
        network: what is evaluated.
        variant, phase, context, batch: the network's.
        batches_at_once: None, any number.
        device: where values are computed.
        cache_type: float32, which holds values of the declared type.
    """

    batches_at_once: int | None = None
    cache_type = torch.float32

    def __init__(self, network: Network, device: str = "cpu", summation_order: int = 0) -> None:
        """Read the layers and evaluate what depends on constants alone, once.

        Args:
            network: what is evaluated.
            device: where.
            summation_order: 0 for the natural order of every sum; another number for one of its
                own, see ``summation``.

        Raises:
            RunError: a layer, attribute or type that the interpreter does not know.
        """
        self.network = network
        self.variant, self.phase, self.context = network.variant, network.phase, network.context
        self.batch = network.batch
        self.device = torch.device(device)
        definition, trt = network.definition, network.backend.trt
        inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
        outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
        self._types = {t.name: (t.dtype, tuple(t.shape), rounding(trt, t.dtype)) for t in inputs}
        self._output_names = tuple(t.name for t in outputs)
        layers = [definition.get_layer(i) for i in range(definition.num_layers)]
        steps = [step for layer in layers for step in _read_steps(layer, trt, network.packed)]
        if summation_order:
            sources = [layer for layer in layers for _ in range(layer.num_outputs)]
            axes = [summed_axes(layer, trt) for layer in sources]
            restored = [keeps_its_axis(layer) for layer in sources]
            steps = _reordered(steps, axes, restored, summation_order)
        self._constants: dict[str, torch.Tensor] = {}
        self._steps = self._fold(steps)
        self._last_use = _last_uses(self._steps, self._output_names)

    @torch.inference_mode()
    def _fold(self, steps: Sequence[_Step]) -> tuple[_Step, ...]:
        """Evaluate steps that see constants only; return the others, in order."""
        remaining = []
        for step in steps:
            if all(name in self._constants for name in step.inputs):
                arguments = [self._constants[name] for name in step.inputs]
                value = step.operation(*arguments)
                value = step.round(value) if step.round else value
                self._constants[step.output] = value.to(self.device)
            else:
                remaining.append(step)
        used = {name for step in remaining for name in step.inputs}
        used.update(self._output_names)
        self._constants = {name: t for name, t in self._constants.items() if name in used}
        return tuple(remaining)

    @torch.inference_mode()
    def run(
        self, feeds: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Evaluate the network.

        Args:
            feeds: network input name -> tensor [N, *shape of the input], holding values of
                the declared type (what an earlier run put out does).
            into: output name -> tensor that gets this output.

        Returns:
            Network output name -> tensor [N, *shape of the output]; floating-point outputs are
            float32 tensors that hold values of the declared type.

        Raises:
            RunError: missing, unknown or wrongly shaped feeds, all in one message.
        """
        self._check(feeds)
        values = dict(self._constants)
        for name, tensor in feeds.items():
            values[name] = tensor.to(self.device)
        for index, step in enumerate(self._steps):
            value = step.operation(*[values[name] for name in step.inputs])
            values[step.output] = step.round(value) if step.round else value
            for name in self._last_use.get(index, ()):
                del values[name]
        outputs = {name: values[name] for name in self._output_names}
        for name, tensor in (into or {}).items():
            outputs[name] = tensor.copy_(outputs[name])
        return outputs

    def repeat(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return the function: here nothing is launched."""
        return function

    def _check(self, feeds: Mapping[str, torch.Tensor]) -> None:
        wrong = [f"{name}: missing" for name in self._types if name not in feeds]
        wrong += [f"{name}: no such input" for name in feeds if name not in self._types]
        for name, (_, shape, _) in self._types.items():
            obtained = tuple(feeds[name].shape[1:]) if name in feeds else shape
            fits = len(obtained) == len(shape) and all(
                e in (-1, o) for o, e in zip(obtained, shape, strict=False)
            )
            if not fits:
                wrong.append(f"{name}: obtained {obtained}, expected {shape}")
        texts = {name: tensor.shape[0] for name, tensor in feeds.items() if tensor.ndim}
        if len(set(texts.values())) > 1:
            wrong.append(f"numbers of texts differ: {texts}")
        if wrong:
            name, phase = self.variant.name, self.phase
            raise RunError(f"variant {name}, {phase}: inputs: {'; '.join(sorted(wrong))}")


def _read_steps(layer: Any, trt: ModuleType, packed: Mapping[str, np.ndarray]) -> list[_Step]:
    """Return a step for each output of a layer."""
    name, kind = layer.name, layer.type.name
    inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    if any(tensor is None for tensor in inputs):
        raise RunError(f"layer {name}: an optional input is left out; add it to operators.py")
    if name in packed:
        operations: tuple[Operation, ...] = (read_packed(layer, trt, packed[name]),)
    else:
        operations = read_outputs(layer, trt)
    names, steps = tuple(tensor.name for tensor in inputs), []
    for index, operation in enumerate(operations):
        output = layer.get_output(index)
        round_output = None if kind in MOVES_ONLY else rounding(trt, output.dtype)
        steps.append(_Step(name, operation, round_output, names, output.name))
    return steps


def _reordered(
    steps: Sequence[_Step],
    axes: Sequence[Mapping[int, tuple[int, ...]]],
    restored: Sequence[bool],
    order: int,
) -> list[_Step]:
    """Return the steps with a step before them for each input whose terms are put in order.

    One of a constant is evaluated once, as any other step.
    """
    found: dict[str, _Step] = {}
    for step, own, restores in zip(steps, axes, restored, strict=True):
        inputs = list(step.inputs)
        for index, summed in own.items():
            source = step.inputs[index]
            inputs[index] = f"{source}.permuted{summed}"
            operation = permuted(summed, order)
            found.setdefault(
                inputs[index], _Step(inputs[index], operation, None, (source,), inputs[index])
            )
        operation = _then_put_back(step.operation, order) if restores else step.operation
        found[step.output] = replace(step, operation=operation, inputs=tuple(inputs))
    return list(found.values())


def _then_put_back(operation: Operation, order: int) -> Operation:
    return lambda *inputs: put_back(operation(*inputs), order)


def _last_uses(steps: Sequence[_Step], kept: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return step index -> tensors that no later step reads, so that memory stays small."""
    produced = {step.output for step in steps}
    last: dict[str, int] = {step.output: index for index, step in enumerate(steps)}
    for index, step in enumerate(steps):
        last.update({name: index for name in step.inputs if name in produced})
    grouped: dict[int, tuple[str, ...]] = {}
    for name, index in last.items():
        if name not in kept:
            grouped[index] = (*grouped.get(index, ()), name)
    return grouped
