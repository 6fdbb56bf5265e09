"""Values a token: the bytes that are written, and what is refused on reading."""

import hashlib
import io

import numpy as np
import pytest

from gptneo_trt.errors import BaselineError
from gptneo_trt.token_values import npz_bytes, read_tokens

TOKENS = {
    "prefill/prose/bf16/kl_nats": np.array([0.001, 0.002, 0.003], np.float32),
    "decode/prose/bf16/kl_nats": np.array([1e-9, -0.0], np.float32),
}


def read_back(folder, content):
    """Return what is read from a file of these bytes beside a JSON with their hash."""
    path = folder / "fp8_recipe.tokens.npz"
    path.write_bytes(content)
    return read_tokens(path, hashlib.sha256(content).hexdigest())


def npz(**arrays):
    """Return the bytes of an npz of any arrays."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_values_are_read_back_bit_for_bit(tmp_path):
    """Every array has its name and its bytes, whatever the order they were given in."""
    content = npz_bytes(TOKENS)

    tokens = read_back(tmp_path, content)

    assert npz_bytes(dict(reversed(TOKENS.items()))) == content
    assert list(tokens) == sorted(TOKENS)
    for name, array in TOKENS.items():
        assert tokens[name].dtype == np.float32
        assert tokens[name].tobytes() == array.tobytes()


def test_a_matrix_is_refused_on_read(tmp_path):
    """An array of two dimensions is not values a token; both headers are shown."""
    with pytest.raises(BaselineError, match=r"kl_nats: obtained .*\(2, 2\).*float32 .*\(4,\)"):
        read_back(tmp_path, npz(kl_nats=np.zeros((2, 2), np.float32)))


def test_tokens_that_are_not_float32_are_refused_on_read(tmp_path):
    """An npz of another type with the right hash is still not accepted."""
    with pytest.raises(BaselineError, match=r"tokens/kl_nats: obtained .*<f8.* expected float32"):
        read_back(tmp_path, npz(kl_nats=np.array([1.0, 2.0])))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, np.nan, np.inf], np.float32), r"shape \(3,\) with 2 non-finite values"),
        (np.zeros(0, np.float32), r"shape \(0,\) with 0"),
    ],
    ids=["non-finite", "empty"],
)
def test_B01_non_finite_or_empty_is_refused_on_read(tmp_path, array, message):
    """The right hash and type do not make NaN or nothing a value a token."""
    with pytest.raises(BaselineError, match=rf"tokens\.npz: tokens/kl_nats: obtained {message}"):
        read_back(tmp_path, npz(kl_nats=array))


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 and no more", npz(kl_nats=np.array([None]))],
    ids=["nothing", "cut", "pickle"],
)
def test_B04_bytes_that_are_no_arrays(tmp_path, content):
    """A file that is empty, cut or pickled is a BaselineError that names it and the remedy."""
    message = r"fp8_recipe\.tokens\.npz: not token values: .*; write it again with --update"

    with pytest.raises(BaselineError, match=message):
        read_back(tmp_path, content)
