"""Run an executor over the gate's texts and compare with the references; no verdicts here."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from gptneo_trt import decoder, metrics, reference
from gptneo_trt.data import Architecture, Checkpoint, Decoded, Metrics, TextSet
from gptneo_trt.decoder import Executor
from gptneo_trt.metrics import ReferenceDistribution

# The study's 1536 teacher-forced tokens, as 12 texts of 128 rather than 6 of 256: half the steps,
# twice the texts to resample, and still beyond the window of a local layer.
DECODE_TEXTS, DECODE_TOKENS = 12, 128
REFERENCE_TYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
NEXT_TOKEN = "questions"  # questions and prompts, scored at their last position
BUCKET = 32  # texts of similar length run together, so that padding stays small

References = Mapping[str, Mapping[str, ReferenceDistribution]]


@dataclass(frozen=True)
class Measurement:
    """Hold what one variant gave in one phase.

    Attributes:
        non_finite: the first NaN or infinity in logits, K or V, or None.
        metrics: "prose/bf16", "prose/float32", "questions/bf16" ... -> Metrics; empty when
            something was not finite.
        agreement: of decode with prefill on the same tokens; None in prefill.
    """

    non_finite: str | None
    metrics: Mapping[str, Metrics]
    agreement: Metrics | None = None


def stacked(text: TextSet) -> np.ndarray:
    """Return int32 [N, T] of equally long texts."""
    return np.stack(text.token_ids)


def buckets(texts: Mapping[str, TextSet]) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """Return (indices, token ids right padded with 0 [n, T], lengths) of questions and prompts."""
    ragged = [ids for name in ("questions", "prompts") for ids in texts[name].token_ids]
    order = sorted(range(len(ragged)), key=lambda index: len(ragged[index]))
    groups = [order[start : start + BUCKET] for start in range(0, len(order), BUCKET)]
    found = []
    for group in groups:
        lengths = np.array([len(ragged[index]) for index in group])
        padded = np.zeros((len(group), lengths.max()), dtype=np.int32)
        for row, index in enumerate(group):
            padded[row, : lengths[row]] = ragged[index]
        found.append((group, padded, lengths))
    return found


def references_of(checkpoint: Checkpoint, texts: Mapping[str, TextSet]) -> References:
    """Return "prefill/prose", "decode/prose", "prefill/questions" -> reference type -> what
    comparisons reuse, from Hugging Face's own model.
    """  # fmt: skip
    prose = stacked(texts["prose"])
    found: dict[str, dict[str, ReferenceDistribution]] = {}
    for type_name, dtype in REFERENCE_TYPES.items():
        model = reference.torch_model(checkpoint, dtype)
        logits = reference.logits(model, prose)
        some = logits[:DECODE_TEXTS, :DECODE_TOKENS]
        last = _last_rows(lambda padded, m=model: reference.logits(m, padded), texts)
        rows = {
            "prefill/prose": (prose, logits),
            "decode/prose": (prose[:DECODE_TEXTS, :DECODE_TOKENS], some),
        }
        for name, (token_ids, part) in rows.items():
            found.setdefault(name, {})[type_name] = _distribution(token_ids, part)
        no_target = np.full(len(last), -1)
        found.setdefault(f"prefill/{NEXT_TOKEN}", {})[type_name] = metrics.reference_distribution(
            last, no_target, np.arange(len(last))
        )
    return found


def _distribution(token_ids: np.ndarray, logits: np.ndarray) -> ReferenceDistribution:
    text, position, target = metrics.scored_rows(list(token_ids), "every")
    return metrics.reference_distribution(logits[text, position], target, text)


def _last_rows(run, texts: Mapping[str, TextSet]) -> np.ndarray:
    """Return float32 [M, V], the logits at the last token of each question and prompt."""
    rows = {}
    for group, padded, lengths in buckets(texts):
        logits = run(padded)
        rows |= {index: logits[row, lengths[row] - 1] for row, index in enumerate(group)}
    return np.stack([rows[index] for index in sorted(rows)])


def measure_prefill(
    executor: Executor,
    architecture: Architecture,
    texts: Mapping[str, TextSet],
    references: References,
) -> tuple[Measurement, np.ndarray]:
    """Return the measurement, and the logits [12, 128, V] that decode is held against."""
    decoded = decoder.prefill(executor, architecture, stacked(texts["prose"]))
    non_finite = _non_finite(decoded)
    kept = decoded.logits[:DECODE_TEXTS, :DECODE_TOKENS].copy()
    if non_finite:
        return Measurement(non_finite, {}), kept
    found = _compared("prose", references["prefill/prose"], decoded.logits)
    last = _last_rows(
        lambda padded: decoder.prefill(executor, architecture, padded).logits, texts
    )
    non_finite = metrics.first_non_finite({"next-token logits": last})
    if non_finite:
        return Measurement(non_finite, {}), kept
    found |= _compared(NEXT_TOKEN, references[f"prefill/{NEXT_TOKEN}"], last)
    return Measurement(None, found), kept


def measure_decode(
    executor: Executor,
    architecture: Architecture,
    texts: Mapping[str, TextSet],
    references: References,
    prefill_logits: np.ndarray,
) -> Measurement:
    """Return the measurement of teacher-forced decode, with its agreement with prefill."""
    token_ids = stacked(texts["prose"])[:DECODE_TEXTS, :DECODE_TOKENS]
    decoded = decoder.decode(executor, architecture, token_ids)
    non_finite = _non_finite(decoded)
    if non_finite:
        return Measurement(non_finite, {})
    found = _compared("prose", references["decode/prose"], decoded.logits)
    vocabulary = decoded.logits.shape[-1]
    own = _distribution(token_ids, prefill_logits)
    agreement = metrics.compare(own, decoded.logits.reshape(-1, vocabulary))
    return Measurement(None, found, metrics.summarize(agreement))


def _non_finite(decoded: Decoded) -> str | None:
    arrays = {"logits": decoded.logits, "keys": decoded.keys, "values": decoded.values}
    return metrics.first_non_finite(arrays)


def _compared(
    name: str, references: Mapping[str, ReferenceDistribution], logits: np.ndarray
) -> dict[str, Metrics]:
    rows = logits.reshape(-1, logits.shape[-1])
    compared = metrics.compare_many(list(references.values()), rows)
    return {
        f"{name}/{type_name}": metrics.summarize(tokens)
        for type_name, tokens in zip(references, compared, strict=True)
    }
