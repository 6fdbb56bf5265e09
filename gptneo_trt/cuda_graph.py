"""Capture work on a GPU in one CUDA graph, or say why that failed."""

from collections.abc import Callable

import torch

from gptneo_trt.errors import RunError


def captured(
    function: Callable[[], object], stream: torch.cuda.Stream, warm_ups: int, title: str
) -> Callable[[], None]:
    """Return a replay of what a function launches, captured in one CUDA graph.

    Args:
        function: launches the work. It runs ``warm_ups`` times before it is captured, since first
            calls compile, choose kernels and allocate; its tensors have to stay where they are.
        stream: where it runs and is captured; waits for the current one before.
        warm_ups: at least 1.
        title: what is captured, for the error.

    Raises:
        RunError: a warm-up or the capture failed. There is no slower way around that.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm_ups):
                function()
        stream.synchronize()
        # The outer one puts the caller's stream back: a failed capture leaves its own behind.
        with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
            function()
    except RuntimeError as error:
        raise RunError(f"{title}: CUDA graph: warm-up or capture failed: {error}") from error
    return graph.replay
