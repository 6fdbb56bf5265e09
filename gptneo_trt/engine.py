"""Run a plan on the GPU: the executor of the hardware gate.

Inputs and outputs are torch tensors on the GPU, whose addresses TensorRT is given; nothing is
copied to or from the host. Work runs on one stream of its own, ordered after what the caller's
current stream was given before, and before what it is given later.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gptneo_trt.cuda_graph import captured
from gptneo_trt.data import Plan
from gptneo_trt.errors import RunError
from gptneo_trt.plans import PlanRequest
from gptneo_trt.runtime import load, quantized_modules

TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "INT32": torch.int32}


@dataclass(frozen=True)
class _Port:
    shape: tuple[int, ...]  # -1 where the length of the text goes
    type: torch.dtype
    is_input: bool

    def sized(self, length: int) -> tuple[int, ...]:
        """Return the shape for a text of this length."""
        return tuple(length if axis == -1 else axis for axis in self.shape)


class Engine:
    """Run one plan, one batch of texts at a time.

    Attributes:
        variant, phase, context, batch: of the request.
        batches_at_once: 1.
        device: the GPU.
        cache_type: of K and V, as the plan declares it.
        loaded: what TensorRT gave.
    """

    batches_at_once: int | None = 1

    def __init__(self, request: PlanRequest, plan: Plan, device: str = "cuda") -> None:
        """Load a plan and make room for its largest outputs.

        Raises:
            RunError: TensorRT refuses the plan, or it has a type that no tensor here has; with row,
                phase, TensorRT and GPU at hand.
        """
        self.variant, self.phase, self.context = request.variant, request.phase, request.context
        self.batch = request.batch
        self.device = torch.device(device)
        self._title = request.title
        try:
            self.loaded = load(request.backend, plan.path, plan.kernels)
        except RunError as error:
            raise RunError(f"{self._title}: {error}") from error
        self._backend, self._context = request.backend, self.loaded.context
        self._ports = self._read_ports(request.backend.trt.TensorIOMode.INPUT)
        self.cache_type = self._ports["h.0.key"].type
        self._outputs = {
            name: torch.empty(
                math.prod(port.sized(self.context)), dtype=port.type, device=self.device
            )
            for name, port in self._ports.items()
            if not port.is_input
        }
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stream = torch.cuda.Stream(self.device)

    def _read_ports(self, input_mode: object) -> dict[str, _Port]:
        engine, ports = self.loaded.engine, {}
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            type_name = engine.get_tensor_dtype(name).name
            if type_name not in TYPES:
                raise RunError(
                    f"{self._title}: tensor {name} of type {type_name}, expected one of "
                    f"{sorted(TYPES)}; add it to engine.TYPES"
                )
            shape = tuple(engine.get_tensor_shape(name))
            is_input = engine.get_tensor_mode(name) == input_mode
            ports[name] = _Port(shape, TYPES[type_name], is_input)
        return ports

    def keep_kernels(self) -> None:
        """Keep what TensorRT-RTX compiled at the first run of each length for the next process."""
        self.loaded.keep_kernels()

    def quantized_modules(self) -> tuple[str, ...]:
        """Return the modules that the engine multiplies in the row's quantized format, sorted."""
        return quantized_modules(self._backend, self.loaded, self.variant.quantized_format)

    def run(
        self, feeds: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Run the engine; returns when the work is queued.

        Args:
            feeds: every input by name, [1, *shape], contiguous, of the declared type, on the GPU.
            into: output name -> tensor [1, *shape] that gets this output.

        Returns:
            Output name -> tensor [1, *shape]; where ``into`` names none, valid until the next run.

        Raises:
            RunError: inputs or outputs that do not fit, all in one message, before anything runs;
                or TensorRT refuses a shape, an address or the run.
        """
        ids = feeds.get("token_ids")
        length = ids.shape[-1] if ids is not None and ids.ndim else 0
        given = dict(into or {})
        self._check(feeds, given, length)
        outputs = {}
        for name, port in self._ports.items():
            shape = port.sized(length)
            if port.is_input:
                self._set_shape(name, port, shape)
                self._set_address(name, feeds[name])
            else:
                room = self._outputs[name][: math.prod(shape)].view(1, *shape)
                outputs[name] = given.get(name, room)
                self._set_address(name, outputs[name])
        with self._ordered_stream():
            self._accepted(
                self._context.execute_async_v3(self._stream.cuda_stream), "execute_async_v3"
            )
        return outputs

    def _set_shape(self, name: str, port: _Port, shape: tuple[int, ...]) -> None:
        if -1 in port.shape and self._shapes.get(name) != shape:
            self._accepted(self._context.set_input_shape(name, shape), f"set_input_shape {name}")
            self._shapes[name] = shape

    def _set_address(self, name: str, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if self._addresses.get(name) != address:
            accepted = self._context.set_tensor_address(name, address)
            self._accepted(accepted, f"set_tensor_address {name}")
            self._addresses[name] = address

    def _accepted(self, accepted: bool, call: str) -> None:
        """Raise unless TensorRT said True."""
        if not accepted:
            # What TensorRT holds now is unknown: the next run sets everything again.
            self._shapes.clear()
            self._addresses.clear()
            lines = "".join(f"\n  TensorRT: {line}" for line in self.loaded.log.lines)
            raise RunError(f"{self._title}: {call} returned {accepted}{lines}")

    @contextmanager
    def _ordered_stream(self) -> Iterator[None]:
        """Make the engine's stream wait for the current one, and the current one for it."""
        current = torch.cuda.current_stream(self.device)
        inside = current == self._stream  # while ``repeat`` captures
        if not inside:
            self._stream.wait_stream(current)
        yield
        if not inside:
            current.wait_stream(self._stream)

    def _check(
        self, feeds: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor], length: int
    ) -> None:
        inputs = {name for name, port in self._ports.items() if port.is_input}
        wrong = [f"{name}: missing" for name in inputs - feeds.keys()]
        wrong += [f"{name}: no such input" for name in feeds.keys() - inputs]
        wrong += [f"{name}: no such output" for name in into.keys() - (self._ports.keys() - inputs)]
        if not wrong and not 1 <= length <= self.context:
            wrong.append(f"token_ids: {length} tokens, expected 1 to {self.context}")
        for name, tensor in (*feeds.items(), *into.items()):
            port = self._ports.get(name)
            if port is None:
                continue
            obtained = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
            expected = ((1, *port.sized(length)), port.type, self.device.type)
            if obtained != expected:
                wrong.append(f"{name}: obtained {obtained}, expected {expected}")
            elif not tensor.is_contiguous():
                wrong.append(f"{name}: not contiguous")
        if wrong:
            raise RunError(f"{self._title}: {'; '.join(sorted(wrong))}")

    def repeat(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return a replay of what a function launches, captured in one CUDA graph.

        The function runs once before the capture, since the first run sets up more than later
        ones. Its tensors have to stay where they are.

        Raises:
            RunError: it cannot be captured. There is no slower way around that.
        """
        return captured(function, self._stream, warm_ups=1, title=self._title)
