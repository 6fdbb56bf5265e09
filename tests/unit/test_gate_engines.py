"""EnginePipeline: which engines are kept, and checks that can fail; the interpreter stands in."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import T0, kl_nats, tiny_checkpoint

from gptneo_trt import decoder
from gptneo_trt.errors import CalibrationError, RunError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import PHASES, build_network
from gptneo_trt.variants import VARIANTS
from tests.gate import tolerances
from tests.gate.engines import COMPARED, EnginePipeline
from tests.gate.measurer import CONTEXT, Setup

FP16, FP32, FP8 = (VARIANTS[name] for name in ("fp16", "fp32", "fp8"))


class Forgetful(Interpreter):
    """Give other logits after a number of runs, as an engine does that exchanges a kernel."""

    runs = 0

    def run(self, feeds, into=None):
        """Add half a unit to the logits from the 50th run on."""
        outputs = super().run(feeds, into)
        self.runs += 1
        if self.runs >= 50:
            outputs["logits"] = outputs["logits"] + 0.5
        return outputs


@pytest.fixture
def pipeline(backend, tmp_path):
    """Return a function (kind, batch) -> pipeline on T0, and the list of what it loads."""
    threads = torch.get_num_threads()
    checkpoint = tiny_checkpoint(replace(T0, max_positions=CONTEXT))
    loaded = []

    def make(kind=Interpreter, batch=1):
        def load(variant, phase):
            loaded.append((variant.name, phase))
            if variant == FP8:
                raise RunError(f"{phase}: refused")
            executor = kind(
                build_network(backend, checkpoint, variant, None, phase, CONTEXT, batch)
            )
            executor.keep_kernels = lambda: loaded.append("kernels kept")
            return executor

        made = EnginePipeline(Setup("bundled", "tensorrt_rtx", "bundled", tmp_path), load)
        made.checkpoint = checkpoint
        return made

    yield make, loaded
    torch.set_num_threads(threads)


def test_floor_and_row_in_hand_are_kept(pipeline):
    """fp16 is loaded once a run, another row once until the next one is asked for."""
    make, loaded = pipeline
    engines = make()
    for variant in (FP16, FP32, FP16, FP32, VARIANTS["fp8-v_proj"], FP32, FP16):
        with suppress(CalibrationError):  # T0 has no scales here
            engines.engine(variant, "decode")
    assert [name for name, _ in loaded] == ["fp16", "fp32", "fp8-v_proj", "fp32"]


def test_a_failed_load_fails_again_and_is_not_tried_again(pipeline):
    """Whoever asks gets the same error."""
    make, loaded = pipeline
    engines = make()
    errors = []
    for _ in range(2):
        with pytest.raises(RunError, match="prefill: refused") as caught:
            engines.engine(FP8, "prefill")
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert loaded == [("fp8", "prefill")]


def test_kernels_of_the_lengths_that_ran_are_kept(pipeline):
    """What the hundred calls compiled is there for the next run."""
    make, loaded = pipeline
    make().first_and_last_logits(FP16, "prefill")
    assert loaded == [("fp16", "prefill"), "kernels kept"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("batch", [1, 2])
def test_an_executor_that_repeats_itself_gives_the_same_bits(pipeline, phase, batch):
    """The control: first and last logits are bitwise equal, of every text of a batch."""
    first, last = pipeline[0](batch=batch).first_and_last_logits(FP16, phase)
    assert first.tobytes() == last.tobytes()
    assert first.shape == (batch, CONTEXT, 64)


@pytest.mark.parametrize("phase", PHASES)
def test_a_kernel_that_is_exchanged_is_seen(pipeline, phase):
    """Logits that change after 50 runs differ between the first call and the last."""
    first, last = pipeline[0](Forgetful).first_and_last_logits(FP16, phase)
    assert first.tobytes() != last.tobytes()


class Leaking(Interpreter):
    """Add a hundredth of the first text of a batch to the logits of all others."""

    def run(self, feeds, into=None):
        """Return logits that another text has touched."""
        outputs = super().run(feeds, into)
        logits = outputs["logits"].clone()
        logits[:, 1:] += 0.01 * logits[:, :1]
        return outputs | {"logits": logits}


@pytest.mark.parametrize("phase", PHASES)
def test_a_text_gives_the_same_in_another_place(pipeline, phase):
    """The control: of a batch of 3, two texts move up, bitwise the same, beside another one."""
    token_ids, before, after = pipeline[0](batch=3).logits_in_other_places(FP16, phase)
    assert before.tobytes() == after.tobytes()
    assert (token_ids.shape, before.shape) == ((2, COMPARED), (2, COMPARED, 64))


@pytest.mark.parametrize("phase", PHASES)
def test_a_text_that_another_one_touches_is_seen(pipeline, phase):
    """What leaks into the others of a batch depends on the batch, far beyond the tolerance."""
    _, before, after = pipeline[0](Leaking, 3).logits_in_other_places(FP16, phase)
    assert kl_nats(before, after).mean() > tolerances.DIRECT_KL_NATS


class Infinite(Interpreter):
    """Give one infinite value of the last text of a batch."""

    def run(self, feeds, into=None):
        """Return an output with an infinity."""
        outputs = super().run(feeds, into)
        logits = outputs["logits"].clone()
        logits[-1, -1, -1, 5] = torch.inf
        return outputs | {"logits": logits}


@pytest.mark.parametrize("phase", PHASES)
def test_a_value_that_is_not_finite_is_named(pipeline, phase):
    """By tensor, text, position and token; a pipeline whose values are finite names none."""
    make, _ = pipeline
    position = 255 if phase == "prefill" else 0
    assert make(batch=2).non_finite(FP16, phase) is None
    assert make(Infinite, 2).non_finite(FP16, phase) == f"logits[1, {position}, 5] = inf"


@pytest.mark.parametrize("left", [np.nan, 6e4])
@pytest.mark.parametrize("batch", [1, 2])
def test_R02_a_cache_that_is_not_cleared_is_seen(pipeline, monkeypatch, left, batch):
    """Cleared, what is left behind changes no bit; not cleared, NaN does."""
    engines = pipeline[0](batch=batch)
    alone, after = engines.logits_after_another_text(FP16, left)
    assert alone.tobytes() == after.tobytes()

    def start(loop, tokens):
        kept = loop.cache.clone()
        real(loop, tokens)
        loop.cache.copy_(kept)

    real = decoder.DecodeLoop.start
    monkeypatch.setattr(decoder.DecodeLoop, "start", start)
    alone, after = engines.logits_after_another_text(FP16, left)
    # 6e4 behind a mask changes nothing in the interpreter, which selects; NaN changes every sum.
    assert (alone.tobytes() != after.tobytes()) == bool(np.isnan(left))
