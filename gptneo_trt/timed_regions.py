"""What a latency is the time of, a sentence each: for reports and baselines."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedRegion:
    """State what a latency of one phase is the time of; a sentence each.

    Attributes:
        timed: what one replay does.
        synchronisation: where the clock starts and stops, and who waits for what.
        transfers: between host and device, and allocations, inside the region.
        tokens: how many a replay stands for.
        outputs: how they are validated.
        graph: what is in the CUDA graph.
    """

    timed: str
    synchronisation: str
    transfers: str
    tokens: str
    outputs: str
    graph: str


_SYNCHRONISATION = (
    "a round is four stretches of replays, floor, own, own, floor; a CUDA event on the stream of "
    "the replays before the first replay of a stretch and one after its last; the host waits for "
    "the second event after each stretch and for nothing inside it; rounds to warm up come first "
    "and are not counted; NVML is read between rounds, and a round that is not counted follows"
)
_TRANSFERS = "none between host and device inside the region, and no allocation"
_OUTPUTS = (
    "logits of one replay from the same state, copied to the host before and after all rounds: "
    "bitwise equal (of PyTorch: but for rounding) and finite, else there is no figure"
)
# Phase -> what its latencies are the time of; the same for both executors of a ratio.
TIMED_REGIONS: Mapping[str, TimedRegion] = {
    "decode": TimedRegion(
        timed="one replay is one decode step: token ids are read from device memory, the engine "
        "runs, the K and V rows of all layers are written into the cache, the logits stay in "
        "device memory, and the position advances",
        synchronisation=_SYNCHRONISATION,
        transfers=_TRANSFERS,
        tokens="`batch` tokens a replay, one of each text; the cache has `context` rows, and a "
        "stretch covers positions just below its end",
        outputs=_OUTPUTS,
        graph="one CUDA graph holds the whole step",
    ),
    "prefill": TimedRegion(
        timed="one replay is one run of the engine on texts of T = `context` tokens: token ids are "
        "read from device memory, logits and the K and V rows of all layers stay in device memory",
        synchronisation=_SYNCHRONISATION,
        transfers=_TRANSFERS,
        tokens="`batch` x `context` tokens a replay, `context` of each text",
        outputs=_OUTPUTS,
        graph="one CUDA graph holds the whole run",
    ),
}
