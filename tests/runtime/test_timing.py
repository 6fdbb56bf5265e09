"""What is timed is the GPU's work, ordered among streams, captured or refused, and nothing else."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from gptneo_trt.backend import backend_named
from gptneo_trt.data import Checkpoint, Plan
from gptneo_trt.decoder import DecodeLoop
from gptneo_trt.engine import Engine
from gptneo_trt.errors import RunError
from gptneo_trt.plans import PlanRequest
from gptneo_trt.timing import FEWEST_ROUNDS, PairedTimer, Timed
from gptneo_trt.variants import VARIANTS
from tests.gate.measurer import CONTEXT

pytestmark = pytest.mark.runtime

TOKENS = np.random.default_rng(5).integers(0, 64, (1, CONTEXT)).astype(np.int32)
HELD_MS = 10.0
TRIAL_CYCLES = 20_000_000  # about 10 ms at 2 GHz
ALLOCATIONS = "allocation.all.allocated"


@pytest.fixture(scope="module")
def hold(runs_on):
    """Return a function that keeps the current stream busy for more than HELD_MS."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):  # the first ones find the clock of an idle GPU
        start.record()
        torch.cuda._sleep(TRIAL_CYCLES)
        end.record()
        end.synchronize()
    cycles = int(1.5 * TRIAL_CYCLES * HELD_MS / start.elapsed_time(end))
    return lambda: torch.cuda._sleep(cycles)


def text(device: torch.device | str = "cuda") -> dict[str, torch.Tensor]:
    """Return the feeds of a prefill of TOKENS."""
    positions = np.arange(CONTEXT, dtype=np.int32)[None]
    arrays = {"token_ids": TOKENS, "position_ids": positions}
    return {name: torch.tensor(array, device=device)[:, None] for name, array in arrays.items()}


@pytest.fixture(scope="module")
def prefill(engine_of):
    """Return a prefill engine of T0."""
    return engine_of("prefill")


@pytest.fixture(scope="module")
def expected(prefill):
    """Return the logits of TOKENS, on the GPU."""
    logits = prefill.run(text())["logits"].clone()
    torch.cuda.synchronize()
    return logits


def measured(replay: Callable[[], object]) -> tuple[float, float]:
    """Return microseconds a replay, as the timer and as the launching host sees it."""
    launches = []

    def launched() -> None:
        started = time.perf_counter()
        replay()
        launches.append(1e6 * (time.perf_counter() - started))

    work = Timed("held", launched, lambda: None, lambda: np.ones(1, np.float32))
    timer = PairedTimer(work, work, replays=2)
    timer.check_outputs()
    timer.warm_up(1)
    for _ in range(FEWEST_ROUNDS):
        timer.round()
    timer.check_outputs()
    return timer.speedup().latency_us, float(np.median(launches))


def test_R05_work_that_holds_its_stream_is_waited_for(hold):
    """A replay of 10 ms that is launched at once takes 10 ms."""
    latency_us, launch_us = measured(hold)
    assert latency_us >= 1e3 * HELD_MS
    assert launch_us < 0.2 * latency_us


def test_R05_a_captured_engine_that_holds_its_stream_is_waited_for(hold, prefill):
    """The same in a graph: what is timed is the replay, not its launch."""
    feeds = text()

    def held() -> None:
        hold()
        prefill.run(feeds)

    latency_us, launch_us = measured(prefill.repeat(held))
    assert latency_us >= 1e3 * HELD_MS
    assert launch_us < 0.2 * latency_us


# Streams


def test_R05_inputs_of_another_stream_are_waited_for(hold, prefill, expected):
    """Tokens that a busy stream has yet to write are those that the engine reads."""
    other, feeds, late = torch.cuda.Stream(), text(), text()["token_ids"]
    feeds["token_ids"].zero_()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        hold()
        feeds["token_ids"].copy_(late)
        logits = prefill.run(feeds)["logits"].clone()
    other.synchronize()
    assert torch.equal(logits, expected)


def test_R05_inputs_may_be_overwritten_after_a_run(hold, prefill, expected):
    """What the caller launches after a run happens after it: inputs are read before."""
    feeds = text()
    torch.cuda.synchronize()
    hold()
    outputs = prefill.run(feeds)
    feeds["token_ids"].zero_()
    assert torch.equal(outputs["logits"], expected)


# Graphs


def test_R05_a_new_engine_may_be_captured_at_once(new_engine, expected):
    """Its first run, which may set things up, comes before the capture; a replay computes."""
    engine, feeds, outputs = new_engine("prefill"), text(), {}
    replay = engine.repeat(lambda: outputs.update(engine.run(feeds)))
    outputs["logits"].zero_()
    replay()
    assert torch.equal(outputs["logits"], expected)


def test_R05_a_replay_reads_its_inputs_anew(prefill, expected):
    """Tokens that are changed in place between two replays change the logits."""
    feeds, outputs = text(), {}
    replay = prefill.repeat(lambda: outputs.update(prefill.run(feeds)))
    feeds["token_ids"].zero_()
    replay()
    zeros = outputs["logits"].clone()
    feeds["token_ids"].copy_(text()["token_ids"])
    replay()
    assert torch.equal(outputs["logits"], expected)
    assert not torch.equal(zeros, expected)


def capture_a_wait(flavour: str, checkpoint: Checkpoint, plan: Plan) -> tuple[str, bool, bool]:
    """Return the error of a capture that waits, and whether bits and current stream stay."""
    request = PlanRequest(
        backend_named(flavour), checkpoint, VARIANTS["fp16"], None, "prefill", CONTEXT
    )
    engine, feeds, current = Engine(request, plan), text(), torch.cuda.current_stream()
    before = engine.run(feeds)["logits"].cpu()
    try:
        engine.repeat(lambda: engine.run(feeds)["logits"][0, 0, 0, 0].item())
    except RunError as error:
        stays = torch.cuda.current_stream() == current
        return str(error), torch.equal(before, engine.run(feeds)["logits"].cpu()), stays
    return "", False, False


def test_R05_a_function_that_cannot_be_captured_is_an_error(backend, checkpoints, plan_of):
    """Waiting for the device inside gives no slower replay instead, and the engine still runs.

    In a process of its own: PyTorch before 2.12 takes no capture after one that failed
    (https://github.com/pytorch/pytorch/pull/180395).
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        arguments = (backend.flavour, checkpoints["t0"], plan_of("prefill"))
        message, same_bits, same_stream = pool.submit(capture_a_wait, *arguments).result()
    assert message.startswith(f"variant fp16, prefill, {backend.target}, ")
    assert ": CUDA graph: " in message
    assert "capture failed" in message
    assert same_bits
    assert same_stream


# Nothing else in the region


@pytest.fixture(scope="module")
def loop(engine_of, checkpoints):
    """Return a loop of T0 that has room for 256 steps, at its first one."""
    made = DecodeLoop(engine_of("decode"), checkpoints["t0"].architecture, 1, CONTEXT)
    made.start(torch.from_numpy(TOKENS)[:, None])
    return made


def test_R05_steps_allocate_nothing(loop):
    """50 steps of a decode loop leave PyTorch's count of allocations as it is."""
    loop.seek(0)
    loop.step()
    before = torch.cuda.memory_stats()[ALLOCATIONS]
    for _ in range(50):
        loop.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()[ALLOCATIONS] == before


def test_runs_allocate_nothing(prefill):
    """50 plain runs put their outputs where the first one did."""
    feeds = text()
    address = prefill.run(feeds)["logits"].data_ptr()
    before = torch.cuda.memory_stats()[ALLOCATIONS]
    addresses = {prefill.run(feeds)["logits"].data_ptr() for _ in range(50)}
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()[ALLOCATIONS] == before
    assert addresses == {address}


def seen_on_device(function: Callable[[], object]) -> list[str]:
    """Return the names of the kernels and copies that a function causes on the device."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as seen:
        function()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]


def test_R05_steps_copy_nothing_between_host_and_device(loop):
    """20 steps run kernels and no copy from or to the host; such a copy would be seen."""

    def steps() -> None:
        for _ in range(20):
            loop.step()

    def copies(names: list[str]) -> list[str]:
        return [name for name in names if "HtoD" in name or "DtoH" in name]

    loop.seek(0)
    names = seen_on_device(steps)
    assert len(names) > 20
    assert copies(names) == []
    assert copies(seen_on_device(lambda: loop.logits[:, 0].cpu()))
