"""Run Hugging Face's own GPT-Neo, so that the reference can contradict our graph.

The model is built from the Checkpoint, in an explicit type and with eager attention: GPT-Neo's
flash path passes no window, so there local layers would act as global ones.
"""

from collections.abc import Iterator

import numpy as np
import torch
import transformers
from transformers import GPTNeoConfig, GPTNeoForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from gptneo_trt.data import Architecture, Checkpoint
from gptneo_trt.errors import CheckpointError, RunError

ATTENTION = "eager"
DTYPES = (torch.float32, torch.bfloat16)
# Float32 logits of one forward pass; the largest temporary of a small model.
LOGITS_BYTES = 256 << 20


def torch_model(checkpoint: Checkpoint, dtype: torch.dtype) -> GPTNeoForCausalLM:
    """Return Hugging Face's model with a copy of the checkpoint's weights, for inference only.

    Args:
        checkpoint: configuration and weights; the type they are stored in does not matter.
        dtype: torch.float32, or torch.bfloat16 (the study's).

    Raises:
        CheckpointError: another type, weights that are not exactly the model's, or a model
            that is not what was asked for (type, attention, windows, head).
    """
    if dtype not in DTYPES:
        raise CheckpointError(
            f"reference of {checkpoint.name!r}: obtained {dtype}, expected one of {list(DTYPES)}"
        )
    config = _config(checkpoint.architecture)
    # No weight is drawn: _load overwrites every one, and the caller's random state is kept.
    # Without initialisation the head is left untied, so tying follows.
    with no_init_weights():
        model = GPTNeoForCausalLM._from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    model.tie_weights()
    _load(model, checkpoint)
    model.eval().requires_grad_(False)
    wrong = sorted(_differences(model, checkpoint.architecture, dtype))
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise CheckpointError(
            f"reference of {checkpoint.name!r}: transformers {transformers.__version__} built "
            f"another model than asked for:\n{listed}"
        )
    return model


def _config(architecture: Architecture) -> GPTNeoConfig:
    return GPTNeoConfig(
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
        num_layers=architecture.num_layers,
        num_heads=architecture.num_heads,
        intermediate_size=architecture.intermediate_size,
        max_position_embeddings=architecture.max_positions,
        window_size=architecture.window_size,
        attention_types=[[list(architecture.attention_layers), 1]],
        activation_function=architecture.activation,
        layer_norm_epsilon=architecture.layer_norm_epsilon,
        tie_word_embeddings=architecture.tied_head,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _load(model: GPTNeoForCausalLM, checkpoint: Checkpoint) -> None:
    """Copy every weight into the model; none is left as it was drawn.

    Raises:
        CheckpointError: names or shapes differ; all of them, sorted.
    """
    weights = dict(checkpoint.weights)
    if checkpoint.architecture.tied_head and "transformer.wte.weight" in weights:
        weights.setdefault("lm_head.weight", weights["transformer.wte.weight"])
    obtained = {name: tuple(array.shape) for name, array in weights.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [
        f"  {name}: obtained {obtained.get(name)}, expected {expected.get(name)}"
        for name in sorted(obtained.keys() | expected.keys())
        if obtained.get(name) != expected.get(name)
    ]
    if wrong:
        listed = "\n".join(wrong)
        raise CheckpointError(f"weights of {checkpoint.name!r} are not the model's:\n{listed}")
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})


def _differences(
    model: GPTNeoForCausalLM, architecture: Architecture, dtype: torch.dtype
) -> Iterator[str]:
    """Yield what the built model is, where that is not what was asked for."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype:
            yield f"{name}: obtained {parameter.dtype}, expected {dtype}"
    implementation = model.config._attn_implementation
    if implementation != ATTENTION:
        yield f"attention implementation: obtained {implementation!r}, expected {ATTENTION!r}"
    tied = model.lm_head.weight is model.transformer.wte.weight
    if tied != architecture.tied_head:
        yield f"tied head: obtained {tied}, expected {architecture.tied_head}"
    masks = {name: _mask(architecture, name) for name in set(architecture.attention_layers)}
    for layer, expected in enumerate(architecture.attention_layers):
        attention = model.transformer.h[layer].attn.attention
        path = f"transformer.h.{layer}.attn.attention"
        if type(attention) is not GPTNeoSelfAttention or attention.attention_type != expected:
            obtained = f"{type(attention).__name__} {attention.attention_type!r}"
            yield f"{path}: obtained {obtained}, expected GPTNeoSelfAttention {expected!r}"
        if not torch.equal(attention.bias[0, 0], masks[expected]):
            yield f"{path}: obtained another mask than {expected!r}, {architecture.window_size}"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and (module.p or module.training):
            yield f"{name}: obtained dropout {module.p}, expected 0"


def _mask(architecture: Architecture, attention_type: str) -> torch.Tensor:
    """Return bool [query, key]: key j is seen when 0 <= i - j (local: < window_size)."""
    positions = torch.arange(architecture.max_positions)
    distance = positions[:, None] - positions[None, :]
    seen = distance >= 0
    return seen & (distance < architecture.window_size) if attention_type == "local" else seen


def logits(model: GPTNeoForCausalLM, token_ids: np.ndarray) -> np.ndarray:
    """Return the model's logits for equally long texts, without padding or cache.

    Args:
        model: as ``torch_model`` made it, on any device.
        token_ids: integers [N, T].

    Returns:
        float32 [N, T, V], before softmax, widened from the model's type. Texts run in batches
        that keep the logits of one pass within LOGITS_BYTES.

    Raises:
        RunError: the model is quantized or in training mode, or ids do not fit it.
    """
    _check_model(model)
    _check_token_ids(token_ids, model.config.vocab_size, model.config.max_position_embeddings)
    texts, tokens = token_ids.shape
    vocabulary = model.config.vocab_size
    rows = max(1, LOGITS_BYTES // (4 * tokens * vocabulary))
    obtained = np.empty((texts, tokens, vocabulary), np.float32)
    ids = torch.from_numpy(token_ids.astype(np.int64)).to(model.device)
    with torch.inference_mode():
        for start in range(0, texts, rows):
            batch = model(ids[start : start + rows], use_cache=False).logits
            obtained[start : start + rows] = batch.float().cpu().numpy()
    return obtained


def _check_model(model: GPTNeoForCausalLM) -> None:
    quantizers = [n for n, m in model.named_modules() if "Quantizer" in type(m).__name__]
    if quantizers:
        raise RunError(
            f"the reference is quantized: obtained {len(quantizers)} quantizers such as "
            f"{quantizers[0]}, expected none; make a second torch_model for calibration"
        )
    if model.training:
        raise RunError("the reference is in training mode: expected eval(); call model.eval()")


def _check_token_ids(token_ids: np.ndarray, vocab_size: int, max_positions: int) -> None:
    if token_ids.ndim != 2 or not token_ids.size or token_ids.dtype.kind not in "iu":
        raise RunError(
            f"token ids of the reference: obtained {token_ids.dtype} {list(token_ids.shape)}, "
            "expected integers [N, T] with at least one text and one token"
        )
    if token_ids.shape[1] > max_positions:
        raise RunError(
            f"token ids of the reference: obtained {token_ids.shape[1]} tokens a text, expected "
            f"at most max_positions {max_positions}; use shorter windows"
        )
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise RunError(
            f"token ids of the reference: obtained {lowest} to {highest}, expected 0 to "
            f"vocab_size - 1 = {vocab_size - 1}; use the checkpoint's own tokenizer"
        )


def provenance(model: GPTNeoForCausalLM) -> dict[str, str]:
    """Return what belongs beside a figure: versions, type, attention path and device."""
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "device": str(model.device),
    }
