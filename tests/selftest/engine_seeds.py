"""Seeds of faults in what loads, runs and times an engine."""

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from gptneo_trt import decoder, network, runtime
from gptneo_trt.variants import VARIANTS
from tests.selftest.seeds import Seed, everywhere


def network_of_row(name: str) -> Seed:
    """Return a seed: whatever row is asked for, the network is that of another."""
    build_network = network.build_network

    def build(backend, checkpoint, variant, *rest):
        return build_network(backend, checkpoint, VARIANTS[name], *rest)

    return lambda patch: everywhere(patch, build_network, build)


def damaged_plan(patch: pytest.MonkeyPatch) -> None:
    """Lose the second half of a plan before it is loaded."""
    load = runtime.load

    def damaged(flavour, plan, kernels=None):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, plan.name)
            content = plan.read_bytes()
            copy.write_bytes(content[: len(content) // 2])
            shutil.copy(plan.with_suffix(".json"), folder)
            return load(flavour, copy)

    everywhere(patch, load, damaged)


def kept_cache(patch: pytest.MonkeyPatch) -> None:
    """Let a new text start with the cache rows of the one before."""
    start = decoder.DecodeLoop.start

    def kept(loop, tokens):
        rows = loop.cache.clone()
        start(loop, tokens)
        loop.cache.copy_(rows)

    patch.setattr(decoder.DecodeLoop, "start", kept)


def copied_logits(only: str = "") -> Seed:
    """Return a seed: a decode step, of one row or of all, copies all logits to the host."""
    step = decoder.DecodeLoop._step

    def copying(loop):
        step(loop)
        if only in ("", loop._executor.variant.name):
            if not hasattr(loop, "on_host"):  # the first step comes before the capture
                loop.on_host = torch.empty(loop.logits.shape, pin_memory=True)
            loop.on_host.copy_(loop.logits, non_blocking=True)

    return lambda patch: patch.setattr(decoder.DecodeLoop, "_step", copying)


class HostEvent:
    """Take the host's time, and wait for nothing: what it measures is the launch."""

    def __init__(self) -> None:
        """Mark the start of time."""
        self._at_s = 0.0

    def record(self) -> None:
        """Mark this moment."""
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: "HostEvent") -> float:
        """Return milliseconds between two marks."""
        return 1e3 * (end._at_s - self._at_s)


def host_clock(patch: pytest.MonkeyPatch) -> None:
    """Stop the clock when the work is launched, not when it is done."""
    # Only here: it loads transformers, which no process that builds plans needs.
    from tests.gate import speed

    patch.setattr(speed, "PairedTimer", partial(speed.PairedTimer, event=HostEvent))
