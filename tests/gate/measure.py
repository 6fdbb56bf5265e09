"""Run networks over the gate's texts and compare with the references; no verdicts here."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from gptneo_trt import decoder, metrics
from gptneo_trt.backend import backend_named
from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.data import Decoded, Measurement, Metrics, ReferenceDistribution, Scales, TextSet
from gptneo_trt.decoder import Executor
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import build_network
from gptneo_trt.texts import text_set
from gptneo_trt.variants import Variant
from tests.gate.last_rows import last_rows
from tests.gate.measurer import CONTEXT, DECODE_TOKENS, PROSE_TEXTS, Setup
from tests.gate.references import TYPES, reference_logits


def distribution(token_ids: np.ndarray, logits: np.ndarray) -> ReferenceDistribution:
    """Return what comparisons with logits [N, T, V] of texts [N, T] reuse."""
    text, position, target = metrics.scored_rows(list(token_ids), "every")
    return metrics.reference_distribution(logits[text, position], target, text)


def compared(
    name: str, references: Mapping[str, ReferenceDistribution], logits: np.ndarray
) -> dict[str, Metrics]:
    """Return "<name>/<reference type>" -> Metrics of logits [..., V]."""
    rows = logits.reshape(-1, logits.shape[-1])
    found = metrics.compare_many(list(references.values()), rows)
    return {
        f"{name}/{type_name}": metrics.summarize(tokens)
        for type_name, tokens in zip(references, found, strict=True)
    }


class Pipeline:
    """Hold one checkpoint, its texts and its references, and measure rows on them.

    Attributes:
        widths: lengths to which short texts are padded, None for no more than needed.
    """

    widths: tuple[int, ...] | None = None

    def __init__(self, setup: Setup) -> None:
        """Remember what to load; nothing is loaded before it is needed."""
        torch.set_num_threads(1)
        self.setup, self.cache = setup, setup.cache
        self.provenances: dict[str, Mapping[str, str]] = {}  # filled with the references

    @cached_property
    def checkpoint(self):
        """Return the checkpoint."""
        return checkpoint_from_source(self.setup.model)

    @cached_property
    def prose(self) -> np.ndarray:
        """Return int32 [N, T]: the first windows of the prose."""
        return np.stack(self._text("prose").token_ids[:PROSE_TEXTS])

    @cached_property
    def next_token_texts(self) -> list[np.ndarray]:
        """Return the questions and the prompts, scored at their last token."""
        return [ids for name in ("questions", "prompts") for ids in self._text(name).token_ids]

    def _text(self, name: str) -> TextSet:
        shapes, file = self.checkpoint.architecture, self.checkpoint.tokenizer_file
        return text_set(name, self.setup.text_source, file, CONTEXT, shapes.vocab_size)

    @cached_property
    def references(self) -> dict[str, dict[str, ReferenceDistribution]]:
        """Return "prefill", "decode" and "next_token" -> reference type -> distribution.

        The logits are those of Hugging Face's own model.
        """
        found: dict[str, dict[str, ReferenceDistribution]] = {}
        for type_name in TYPES:
            logits = reference_logits(
                self.checkpoint, self.prose, self.next_token_texts, type_name, self.cache
            )
            self.provenances[type_name] = logits.provenance
            count = len(logits.next_token)
            for name, part in {
                "prefill": distribution(self.prose, logits.prose),
                "decode": distribution(
                    self.prose[:, :DECODE_TOKENS], logits.prose[:, :DECODE_TOKENS]
                ),
                "next_token": metrics.reference_distribution(
                    logits.next_token, np.full(count, -1), np.arange(count)
                ),
            }.items():
                found.setdefault(name, {})[type_name] = part
        return found

    def load(self) -> None:
        """Load everything that a measurement needs."""
        if self.checkpoint.has_quality:
            _ = self.references

    def calibrate(self, text: TextSet, modules: Sequence[str]) -> Scales:
        """Return the calibrated ranges of these modules; the model is made for this alone."""
        # Only a cold run calibrates; importing transformers takes seconds.
        from gptneo_trt import calibrate, reference

        model = reference.torch_model(self.checkpoint, torch.bfloat16)
        return calibrate.calibrate(model, self.checkpoint, text, modules)

    def measure(
        self, variant: Variant, scales: Scales | None
    ) -> dict[str, Measurement | GptNeoTrtError]:
        """Return phase -> what the row gave, or the error that kept it from giving anything."""
        found: dict[str, Measurement | GptNeoTrtError] = {}
        try:
            found["prefill"], logits = self.measure_prefill(variant, scales)
        except GptNeoTrtError as error:
            return {"prefill": error, "decode": error}
        try:
            found["decode"] = self.measure_decode(variant, scales, logits)
        except GptNeoTrtError as error:
            found["decode"] = error
        return found

    def executor(self, variant: Variant, scales: Scales | None, phase: str) -> Executor:
        """Return what runs the network of a row: here the interpreter."""
        backend = backend_named(self.setup.flavour)
        network = build_network(backend, self.checkpoint, variant, scales, phase, CONTEXT)
        return Interpreter(network)

    def _kept(self, variant: Variant, logits: np.ndarray) -> np.ndarray | None:
        """Return logits that another executor's are held against, where that says something."""
        return logits if self.setup.keep_logits and not variant.quantized else None

    def measure_prefill(
        self, variant: Variant, scales: Scales | None
    ) -> tuple[Measurement, np.ndarray]:
        """Return the measurement, and the logits [N, 128, V] that decode is held against."""
        executor = self.executor(variant, scales, "prefill")
        architecture = self.checkpoint.architecture
        decoded = decoder.prefill(executor, architecture, self.prose)
        last = last_rows(
            lambda ids: decoder.prefill(executor, architecture, ids).logits,
            self.next_token_texts,
            self.widths,
        )
        kept = decoded.logits[:, :DECODE_TOKENS]
        non_finite = _first_non_finite(decoded, {"next-token logits": last})
        if non_finite:
            return Measurement(non_finite, {}), kept
        found = compared("prose", self.references["prefill"], decoded.logits)
        found |= compared("next_token", self.references["next_token"], last)
        logits = self._kept(variant, decoded.logits)
        return Measurement(None, found, logits=logits, references=self.provenances), kept

    def measure_decode(
        self, variant: Variant, scales: Scales | None, prefill_logits: np.ndarray
    ) -> Measurement:
        """Return the measurement of teacher-forced decode, with its agreement with prefill."""
        executor = self.executor(variant, scales, "decode")
        token_ids = self.prose[:, :DECODE_TOKENS]
        decoded = decoder.decode(executor, self.checkpoint.architecture, token_ids)
        non_finite = _first_non_finite(decoded, {"prefill logits": prefill_logits})
        if non_finite:
            return Measurement(non_finite, {})
        found = compared("prose", self.references["decode"], decoded.logits)
        own = {"prefill": distribution(token_ids, prefill_logits)}
        agreement = compared("agreement", own, decoded.logits)["agreement/prefill"]
        logits = self._kept(variant, decoded.logits)
        return Measurement(None, found, agreement, logits, self.provenances)


def _first_non_finite(decoded: Decoded, more: Mapping[str, np.ndarray]) -> str | None:
    arrays = {"logits": decoded.logits, "keys": decoded.keys, "values": decoded.values}
    return metrics.first_non_finite(arrays | dict(more))
