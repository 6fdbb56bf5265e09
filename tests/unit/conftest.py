"""What several unit test files build on; none of it imports torch."""

import pytest
from tiny import tiny_checkpoint

from gptneo_trt.backend import backend_named
from gptneo_trt.checkpoint import checkpoint_from_source


@pytest.fixture(scope="session")
def backend():
    """Return the flavour whose builder needs no GPU."""
    return backend_named("tensorrt_rtx")


@pytest.fixture(scope="session")
def t0():
    """Return T0: 2 layers, window 4, vocabulary 64, 64 positions."""
    return tiny_checkpoint()


@pytest.fixture(scope="session")
def bundled():
    """Return the bundled checkpoint: 6 layers, window 64, vocabulary 4096."""
    return checkpoint_from_source("bundled")


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: sums are then always split alike, and a busy machine costs little."""
    import torch  # only here: most files need none of it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
