"""Another order of summation: the same function, other bits, and FP8 rows move token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fixed_scales, kl_nats

from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import build_network
from gptneo_trt.summation import permutation, permuted, put_back
from gptneo_trt.variants import VARIANTS

TOKENS = torch.from_numpy(np.random.default_rng(5).integers(0, 64, (8, 1, 16)))
FEEDS = {"token_ids": TOKENS, "position_ids": torch.arange(16)[None, None].expand_as(TOKENS)}
ORDERS = st.integers(1, 2**31)


@pytest.fixture(scope="module")
def made(backend, t0):
    """Return a function (row, order) -> interpreter of T0's prefill."""

    def make(row, order=0):
        scales = fixed_scales(t0)
        network = build_network(backend, t0, VARIANTS[row], scales, "prefill", 16)
        return Interpreter(network, summation_order=order)

    return make


@pytest.fixture(scope="module")
def logits(made):
    """Return a function (row, order) -> float32 [8, 16, 64]."""
    return lambda row, order=0: made(row, order).run(FEEDS)["logits"][:, 0].numpy()


@given(st.integers(1, 300), ORDERS)
def test_permutation_has_every_index_once_and_is_undone(size, order):
    """What is put back is what was permuted, for any size and order."""
    indices, inverse = permutation(size, order)
    assert sorted(indices.tolist()) == list(range(size))
    assert indices[inverse].tolist() == list(range(size))


@settings(deadline=None)  # PyTorch prepares its first product
@given(st.integers(1, 12), st.integers(1, 12), ORDERS)
def test_permuting_both_sides_keeps_a_product(left, right, order):
    """The sum over a contraction axis has the same terms; put back, an axis is as it was."""
    generator = torch.Generator().manual_seed(order)
    a, b = torch.randn(left, right, generator=generator), torch.randn(right, generator=generator)
    obtained = permuted((-1,), order)(a) @ permuted((-1,), order)(b)
    torch.testing.assert_close(obtained, a @ b)
    assert torch.equal(put_back(permuted((-1,), order)(a), order), a)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("order", [1, 2, 77])
def test_fp32_network_is_the_same_function(backend, t0, order, phase):
    """Logits, K and V in another order are equal up to float32 rounding, and not to the bit."""
    network = build_network(backend, t0, VARIANTS["fp32"], None, phase, 16)
    feeds = FEEDS if phase == "prefill" else {name: feed[..., 5:6] for name, feed in FEEDS.items()}
    for index in range(network.definition.num_inputs):
        tensor = network.definition.get_input(index)
        if tensor.name not in feeds:
            generator = torch.Generator().manual_seed(index)
            feeds[tensor.name] = torch.randn((8, *tensor.shape), generator=generator)
    expected = Interpreter(network).run(feeds)
    obtained = Interpreter(network, summation_order=order).run(feeds)
    for name, tensor in expected.items():
        torch.testing.assert_close(obtained[name], tensor, rtol=1e-4, atol=1e-4)
    assert not torch.equal(obtained["logits"], expected["logits"])


def test_an_order_repeats_and_another_one_differs(logits):
    """Order 3 gives the same bits again, built anew; order 4 gives others."""
    assert np.array_equal(logits("fp32", 3), logits("fp32", 3))
    assert not np.array_equal(logits("fp32", 3), logits("fp32", 4))


def test_order_0_is_the_natural_one(made, logits):
    """Nothing is added to the network's own layers; an order adds steps that permute."""
    natural, ordered = made("fp32"), made("fp32", 1)
    names = {step.name for step in natural._steps}
    assert names < {step.name for step in ordered._steps}
    assert not [name for name in names if ".permuted" in name]


def test_weights_are_permuted_once(made):
    """No step of a run depends on constants alone, and the natural weight is not kept beside."""
    executor = made("fp32", 1)
    held = executor._constants
    assert all(not set(step.inputs) <= set(held) for step in executor._steps)
    linear = [name for name in held if "mlp.c_fc" in name and "weight" in name]
    assert linear
    assert all(".permuted" in name for name in linear)


def test_fp8_tokens_move_and_their_mean_stays(backend, bundled):
    """Through six layers FP8 rounding turns last bits into steps: tokens move, the mean hardly."""
    tokens = torch.from_numpy(np.random.default_rng(5).integers(0, 4096, (6, 1, 64)))
    feeds = {"token_ids": tokens, "position_ids": torch.arange(64)[None, None].expand_as(tokens)}

    def logits(row, order=0):
        network = build_network(
            backend, bundled, VARIANTS[row], fixed_scales(bundled), "prefill", 64
        )
        return Interpreter(network, summation_order=order).run(feeds)["logits"][:, 0].numpy()

    expected = logits("fp32")
    natural, again = (kl_nats(expected, logits("fp8", order)) for order in (0, 1))
    change = again - natural
    assert np.median(np.abs(change)) > 0.02 * natural.mean()
    assert abs(change.mean()) < 0.1 * natural.mean()
