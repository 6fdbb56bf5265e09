"""The reference: Hugging Face's model, in the type and with the attention that was asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import CONFIG, T0, tiny_checkpoint, write_folder
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from gptneo_trt import reference
from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.errors import CheckpointError, RunError

TOKENS = np.random.default_rng(5).integers(0, 64, (3, 12))


@pytest.fixture(scope="module")
def tiny():
    """Return T0 in memory."""
    return tiny_checkpoint()


@pytest.fixture(scope="module")
def model(tiny):
    """Return T0's float32 reference."""
    return reference.torch_model(tiny, torch.float32)


def kl_nats(expected, obtained):
    """Return KL(expected || obtained), the mean over positions, from float32 logits."""
    logs = [torch.from_numpy(x).double().log_softmax(-1) for x in (expected, obtained)]
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


@pytest.mark.parametrize("tied", [True, False])
def test_L01_same_logits_as_from_pretrained(tmp_path, tied):
    """A folder that save_pretrained wrote gives bitwise the logits of from_pretrained."""
    torch.manual_seed(3)
    config = GPTNeoConfig(**CONFIG, initializer_range=0.3, tie_word_embeddings=tied)
    GPTNeoForCausalLM._from_config(config).save_pretrained(tmp_path)
    expected = GPTNeoForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.inference_mode():
        expected_logits = expected(torch.from_numpy(TOKENS), use_cache=False).logits.numpy()
    loaded = reference.torch_model(checkpoint_from_source(str(tmp_path)), torch.float32)
    obtained = reference.logits(loaded, TOKENS)
    assert np.array_equal(obtained, expected_logits)
    assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == tied


def test_logits_match_the_formula(tiny, model):
    """The logits are those of GPT-Neo written out: unscaled scores, 0 <= i - j < window."""
    w = {name: torch.from_numpy(array).double() for name, array in tiny.weights.items()}
    norm = torch.nn.functional.layer_norm

    def block(x, layer, seen):
        h = f"transformer.h.{layer}."
        y = norm(x, (32,), w[h + "ln_1.weight"], w[h + "ln_1.bias"])
        q, k, v = (
            (y @ w[f"{h}attn.attention.{n}_proj.weight"].T).unflatten(-1, (2, 16)).transpose(1, 2)
            for n in "qkv"
        )
        scores = (q @ k.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = "attn.attention.out_proj."
        x = x + y @ w[h + out + "weight"].T + w[h + out + "bias"]
        y = norm(x, (32,), w[h + "ln_2.weight"], w[h + "ln_2.bias"])
        y = y @ w[h + "mlp.c_fc.weight"].T + w[h + "mlp.c_fc.bias"]
        y = torch.nn.functional.gelu(y, approximate="tanh")
        return x + y @ w[h + "mlp.c_proj.weight"].T + w[h + "mlp.c_proj.bias"]

    distance = torch.arange(12)[:, None] - torch.arange(12)
    x = w["transformer.wte.weight"][torch.from_numpy(TOKENS)] + w["transformer.wpe.weight"][:12]
    x = block(x, 0, distance >= 0)
    x = block(x, 1, (distance >= 0) & (distance < 4))
    x = norm(x, (32,), w["transformer.ln_f.weight"], w["transformer.ln_f.bias"])
    expected = (x @ w["transformer.wte.weight"].T).numpy()
    np.testing.assert_allclose(reference.logits(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", [None, "eager", "sdpa", "flash_attention_2"])
@pytest.mark.parametrize("stored", [None, "float16", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_L09_type_and_attention_are_explicit(tmp_path, tiny, model, stored, attention, dtype):
    """Whatever the file says, the type is the one asked for, and the attention is eager."""
    said = {
        **dict.fromkeys(("dtype", "torch_dtype"), stored),
        **dict.fromkeys(("attn_implementation", "_attn_implementation"), attention),
    }
    said = {name: value for name, value in said.items() if value is not None}
    folder = write_folder(tmp_path, tiny.weights, CONFIG | said)
    built = reference.torch_model(checkpoint_from_source(str(folder)), dtype)
    assert {parameter.dtype for parameter in built.parameters()} == {dtype}
    obtained = reference.provenance(built)
    assert obtained["dtype"] == str(dtype).removeprefix("torch.")
    assert obtained["attention"] == "eager"
    assert set(obtained) == {"transformers", "torch", "dtype", "attention", "device"}
    if dtype == torch.float32:
        assert np.array_equal(reference.logits(built, TOKENS), reference.logits(model, TOKENS))


def test_L09_bfloat16_is_near_float32(tiny, model):
    """bf16 differs from float32 by its rounding, and by no more."""
    rounded = reference.logits(reference.torch_model(tiny, torch.bfloat16), TOKENS)
    assert 0 < kl_nats(reference.logits(model, TOKENS), rounded) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_L09_other_types_are_refused(tiny, dtype):
    """Another type than float32 and bf16 is refused, naming those."""
    with pytest.raises(CheckpointError, match=f"{dtype}, expected one of .*bfloat16"):
        reference.torch_model(tiny, dtype)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: setattr(m.config, "_attn_implementation", "sdpa"), "obtained 'sdpa'"),
        (lambda m: m.transformer.ln_f.double(), "torch.float64, expected torch.float32"),
        (lambda m: m.transformer.h[1].attn.attention.bias.fill_(True), "another mask.*'local', 4"),
        (
            lambda m: setattr(m.transformer.h[1].attn.attention, "attention_type", "global"),
            "'global', expected GPTNeoSelfAttention 'local'",
        ),
        (lambda m: setattr(m.transformer.drop, "p", 0.1), "dropout 0.1, expected 0"),
        (lambda m: setattr(m, "lm_head", torch.nn.Linear(32, 64, False)), "tied head"),
    ],
)
def test_L09_another_model_than_asked_for_is_refused(tiny, monkeypatch, spoil, message):
    """A model that a future transformers builds otherwise is an error, not a reference."""
    load = reference._load

    def load_and_spoil(model, checkpoint):
        load(model, checkpoint)
        spoil(model)

    monkeypatch.setattr(reference, "_load", load_and_spoil)
    with pytest.raises(CheckpointError, match=f"(?s)another model than asked for.*{message}"):
        reference.torch_model(tiny, torch.float32)


def test_window_acts_from_its_size_on(tiny, model):
    """Against all-global layers, positions 0 to 3 agree and later ones differ (window 4)."""
    architecture = replace(T0, attention_layers=("global", "global"))
    everywhere = reference.torch_model(replace(tiny, architecture=architecture), torch.float32)
    local, full = reference.logits(model, TOKENS), reference.logits(everywhere, TOKENS)
    np.testing.assert_allclose(local[:, :4], full[:, :4], rtol=1e-5, atol=1e-5)
    assert (np.abs(local - full).max(axis=(0, 2))[4:] > 1e-3).all()


def test_weights_are_all_accounted_for(tiny):
    """A missing and an unknown weight are both named; nothing is left as drawn."""
    weights = dict(tiny.weights) | {"transformer.h.9.ln_1.bias": np.zeros(32, np.float32)}
    del weights["transformer.h.1.mlp.c_fc.bias"]
    with pytest.raises(CheckpointError, match=r"(?s)h.1.mlp.c_fc.bias.*None.*h.9.ln_1.bias"):
        reference.torch_model(replace(tiny, weights=weights), torch.float32)


def test_model_is_a_copy_for_inference(tiny):
    """Changing the model changes no checkpoint, and no parameter takes a gradient."""
    before = tiny.weights["transformer.wte.weight"].copy()
    model = reference.torch_model(tiny, torch.float32)
    model.transformer.wte.weight.zero_()
    assert np.array_equal(tiny.weights["transformer.wte.weight"], before)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_random_state_is_left_alone(tiny):
    """Building the model draws nothing from the caller's generator."""
    before = torch.get_rng_state()
    reference.torch_model(tiny, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_do_not_change_logits(model, monkeypatch):
    """One text a pass gives the logits of all texts in one pass, in the same order."""
    together = reference.logits(model, TOKENS)
    monkeypatch.setattr(reference, "LOGITS_BYTES", 1)
    apart = reference.logits(model, TOKENS)
    assert together.dtype == np.float32
    assert together.shape == (3, 12, 64)
    np.testing.assert_allclose(apart, together, rtol=1e-5, atol=1e-5)


class TensorQuantizer(torch.nn.Identity):
    """Stand in for ModelOpt's."""


def test_quantized_model_is_no_reference(tiny):
    """A model with a quantizer is refused by the quantizer's path."""
    model = reference.torch_model(tiny, torch.float32)
    model.transformer.h[0].mlp.c_fc.input_quantizer = TensorQuantizer()
    with pytest.raises(RunError, match=r"is quantized.*h\.0\.mlp\.c_fc\.input_quantizer"):
        reference.logits(model, TOKENS)


def test_training_mode_is_refused(tiny):
    """A model in training mode is refused."""
    with pytest.raises(RunError, match="training mode"):
        reference.logits(reference.torch_model(tiny, torch.float32).train(), TOKENS)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        (np.zeros((1, 65), np.int32), "65 tokens a text, expected at most max_positions 64"),
        (np.array([[0, 64]]), r"0 to 64, expected 0 to vocab_size - 1 = 63"),
        (np.array([[-1, 3]]), "-1 to 3, expected"),
        (np.zeros((1, 4), np.float32), r"float32 \[1, 4\], expected integers"),
        (np.zeros(4, np.int32), r"int32 \[4\], expected integers"),
        (np.zeros((0, 4), np.int32), "at least one text"),
        (np.zeros((2, 0), np.int32), "one token"),
    ],
)
def test_token_ids_that_do_not_fit(model, token_ids, message):
    """Ids outside the vocabulary, too many positions, or another shape are refused."""
    with pytest.raises(RunError, match=message):
        reference.logits(model, token_ids)
