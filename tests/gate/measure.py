"""Run networks over the gate's texts and compare with the references; no verdicts here."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from gptneo_trt import decoder, metrics
from gptneo_trt.backend import backend_named
from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.data import (
    Checkpoint,
    Decoded,
    Measurement,
    Metrics,
    ReferenceDistribution,
    Scales,
    TextSet,
    WorstToken,
)
from gptneo_trt.decoder import Executor
from gptneo_trt.errors import CheckpointError, GptNeoTrtError
from gptneo_trt.interpreter import Interpreter
from gptneo_trt.network import build_network
from gptneo_trt.text_sources import SOURCES
from gptneo_trt.texts import text_set
from gptneo_trt.token_profiles import worst_tokens
from gptneo_trt.variant import Variant
from tests.gate.last_rows import last_rows, padded
from tests.gate.measurer import CONTEXT, DECODE_TOKENS, PROSE_TEXTS, Setup
from tests.gate.references import TYPES, ScoredTexts, reference_logits
from tests.gate.run import STORED_REFERENCE

WORST_TOKENS = 8  # shown of each row
TEXTS_AT_ONCE = 6  # sampled texts; more need more memory and, in a core's cache, more time


def distribution(
    token_ids: np.ndarray | Sequence[np.ndarray], logits: np.ndarray
) -> ReferenceDistribution:
    """Return what comparisons with logits [N, T, V] of N texts, right padded to T, reuse."""
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
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint.

        Raises:
            CheckpointError: its files are not those that the run began with.
        """
        found, expected = checkpoint_from_source(self.setup.model), self.setup.checkpoint_sha256
        if expected and found.sha256 != expected:
            raise CheckpointError(
                f"{self.setup.model}: changed while the gate ran: obtained sha256 {found.sha256}, "
                f"expected {expected}; run again"
            )
        return found

    @cached_property
    def prose(self) -> np.ndarray:
        """Return int32 [N, T]: the first windows of the prose."""
        return np.stack(self._text("prose").token_ids[:PROSE_TEXTS])

    @cached_property
    def next_token_texts(self) -> list[np.ndarray]:
        """Return the questions and the prompts, scored at their last token."""
        return [ids for name in ("questions", "prompts") for ids in self._text(name).token_ids]

    @cached_property
    def sampled_texts(self) -> list[np.ndarray]:
        """Return the texts that were sampled from the bundled checkpoint; the study has none."""
        has_some = "sampled" in SOURCES[self.setup.text_source]
        return list(self._text("sampled").token_ids) if has_some else []

    def _text(self, name: str) -> TextSet:
        shapes, file = self.checkpoint.architecture, self.checkpoint.tokenizer_file
        return text_set(name, self.setup.text_source, file, CONTEXT, shapes.vocab_size)

    @cached_property
    def references(self) -> dict[str, dict[str, ReferenceDistribution]]:
        """Return "prefill", "decode", "next_token", "sampled" -> reference type -> distribution.

        The logits are those of Hugging Face's own model.
        """
        found: dict[str, dict[str, ReferenceDistribution]] = {}
        texts = ScoredTexts(self.prose, self.next_token_texts, self.sampled_texts)
        for type_name in TYPES:
            logits = reference_logits(self.checkpoint, texts, type_name, self.cache)
            self.provenances[type_name] = logits.provenance
            count = len(logits.next_token)
            parts = {
                "prefill": distribution(self.prose, logits.prose),
                "decode": distribution(
                    self.prose[:, :DECODE_TOKENS], logits.prose[:, :DECODE_TOKENS]
                ),
                "next_token": metrics.reference_distribution(
                    logits.next_token, np.full(count, -1), np.arange(count)
                ),
            }
            if self.sampled_texts:
                parts["sampled"] = distribution(self.sampled_texts, logits.sampled)
            for name, part in parts.items():
                found.setdefault(name, {})[type_name] = part
        return found

    @cached_property
    def second_roll(self) -> "Pipeline":
        """Return what measures a row again in another order of summation, for its noise.

        FP8 rounding is chaotic: another processor sums in another order, and moves single
        tokens. Only what regressions are judged by is compared.
        """
        other = copy.copy(self)
        other.setup = replace(self.setup, summation_order=self.setup.summation_order + 1)
        other.references = {
            name: {STORED_REFERENCE: types[STORED_REFERENCE]}
            for name, types in self.references.items()
        }
        other.next_token_texts = []
        return other

    def load(self) -> None:
        """Load everything that a measurement needs."""
        if self.checkpoint.has_quality:
            _ = self.references

    def calibrate(
        self, text: TextSet, modules: Sequence[str], other_methods: Sequence[str] = ()
    ) -> Scales:
        """Return the calibrated ranges of these modules; the model is made for this alone."""
        # Only a cold run calibrates; importing transformers takes seconds.
        from gptneo_trt import calibrate, reference

        model = reference.torch_model(self.checkpoint, torch.bfloat16)
        return calibrate.calibrate(model, self.checkpoint, text, modules, other_methods)

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
        return Interpreter(network, summation_order=self.setup.summation_order)

    def _kept(self, variant: Variant, logits: np.ndarray) -> np.ndarray | None:
        """Return logits that another executor's are held against, where that says something."""
        return logits if self.setup.keep_logits and not variant.quantized else None

    def _worst(self, logits: np.ndarray, found: Mapping[str, Metrics]) -> tuple[WorstToken, ...]:
        """Return where logits [N, T, V] of the prose are furthest from the bf16 reference."""
        reference = self.references["prefill"].get("bf16")
        if reference is None:  # a second roll is compared with float32 alone
            return ()
        rows = logits.reshape(-1, logits.shape[-1])
        return worst_tokens(reference, rows, found["prose/bf16"].tokens, WORST_TOKENS)

    def measure_prefill(
        self, variant: Variant, scales: Scales | None
    ) -> tuple[Measurement, np.ndarray]:
        """Return the measurement, and the logits [N, 128, V] that decode is held against."""
        executor = self.executor(variant, scales, "prefill")
        architecture = self.checkpoint.architecture

        def run(token_ids: np.ndarray) -> Decoded:
            return decoder.prefill(executor, architecture, token_ids)

        decoded, rows, checked = run(self.prose), {}, {}
        if self.next_token_texts:
            rows["next_token"] = last_rows(
                lambda ids: run(ids).logits, self.next_token_texts, self.widths
            )
            checked["next-token logits"] = rows["next_token"]
        kept = decoded.logits[:, :DECODE_TOKENS]
        non_finite = _first_non_finite(decoded, checked)
        if self.sampled_texts and not non_finite:
            rows["sampled"], non_finite = _scored_logits(run, self.sampled_texts)
        if non_finite:
            return Measurement(non_finite, {}), kept
        found = compared("prose", self.references["prefill"], decoded.logits)
        for name, logits in rows.items():
            found |= compared(name, self.references[name], logits)
        own, worst = self._kept(variant, decoded.logits), self._worst(decoded.logits, found)
        return Measurement(None, found, None, own, self.provenances, worst), kept

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


def _scored_logits(
    run: Callable[[np.ndarray], Decoded], texts: Sequence[np.ndarray]
) -> tuple[np.ndarray, str | None]:
    """Return float32 [M, V] at every position of the texts, and the first that is not finite."""
    rows = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        group = texts[start : start + TEXTS_AT_ONCE]
        decoded = run(padded(group, CONTEXT))
        non_finite = _first_non_finite(decoded, {})
        if non_finite:
            return np.empty(0), f"sampled texts from {start}: {non_finite}"
        text, position, _ = metrics.scored_rows(group, "every")
        rows.append(decoded.logits[text, position])
    return np.concatenate(rows), None


def _first_non_finite(decoded: Decoded, more: Mapping[str, np.ndarray]) -> str | None:
    arrays = {"logits": decoded.logits, "keys": decoded.keys, "values": decoded.values}
    return metrics.first_non_finite(arrays | dict(more))
