"""A CUDA graph is captured after its warm-up, on one stream, or not at all."""

from contextlib import contextmanager

import pytest
import torch

from gptneo_trt.cuda_graph import captured
from gptneo_trt.errors import RunError


class StubGraph:
    """Stand in for a CUDA graph."""

    def replay(self):
        """Be replayed."""


class StubStream:
    """Stand in for a CUDA stream: says what it waits for."""

    def __init__(self, said, name):
        self.said, self.name, self.device = said, name, None

    def wait_stream(self, other):
        """Say what is waited for."""
        self.said.append(f"{self.name} waits for {other.name}")

    def synchronize(self):
        """Say that the host waits."""
        self.said.append(f"host waits for {self.name}")


@pytest.fixture
def stub_cuda(monkeypatch):
    """Let torch.cuda say what would be launched where; return what it said, and a stream."""
    said = []
    current, side = StubStream(said, "current"), StubStream(said, "side")

    @contextmanager
    def inside(stream):
        said.append(f"enter {stream.name}")
        yield
        said.append("leave")

    @contextmanager
    def capturing(graph, stream):
        said.append(f"enter {type(graph).__name__} on {stream.name}")
        yield
        said.append("leave")

    for name, stub in {
        "CUDAGraph": StubGraph,
        "current_stream": lambda device: current,
        "stream": inside,
        "graph": capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return said, side


def test_R05_capture_follows_the_warm_up(stub_cuda):
    """Warm-ups run on a side stream, ordered with the current one, before one captured call."""
    said, side = stub_cuda
    replay = captured(lambda: said.append("run"), side, 3, "a step")
    warm_up = ["enter side", "run", "run", "run", "leave", "host waits for side"]
    capture = ["enter side", "enter StubGraph on side", "run", "leave", "leave"]
    assert said == ["side waits for current", *warm_up, *capture]
    assert isinstance(replay.__self__, StubGraph)


@pytest.mark.parametrize("successes", [0, 3])
def test_R05_failed_capture_is_an_error(stub_cuda, successes):
    """A function that fails, warming up or captured, gives no call at all."""
    said, side = stub_cuda

    def step():
        if said.count("run") == successes:
            raise RuntimeError("operation not permitted when stream is capturing")
        said.append("run")

    with pytest.raises(RunError, match=r"a step: CUDA graph: warm-up or capture failed: .*capturi"):
        captured(step, side, 3, "a step")
