"""What travels between the stages: frozen dataclasses over numpy arrays, and their identity.

Axes: N texts, T tokens, V vocabulary, C channels, H heads, D head width, F feed-forward.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Architecture:
    """Hold what the GPT-Neo graph needs of a ``config.json``.

    Attributes:
        vocab_size: V.
        hidden_size: C.
        num_heads: H.
        intermediate_size: F.
        max_positions: rows of the position table.
        window_size: a local layer's query at i sees keys j with 0 <= i - j < window_size.
        attention_layers: one of "global" or "local" a layer.
        activation: Hugging Face's name, "gelu_new", "gelu" or "relu".
        layer_norm_epsilon: added to the variance.
        tied_head: whether the head is ``transformer.wte.weight``.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    window_size: int
    attention_layers: tuple[str, ...]
    activation: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tied_head: bool = True

    @property
    def num_layers(self) -> int:
        """Return the number of transformer blocks."""
        return len(self.attention_layers)

    @property
    def head_width(self) -> int:
        """Return D, channels a head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class Checkpoint:
    """Hold a configuration, its weights and where the tokenizer is.

    Attributes:
        name: as asked for: "bundled", a hub id, a folder, or "random:gpt-neo-125m".
        revision: commit of the hub, or "" where there is none.
        architecture: shapes and switches.
        weights: Hugging Face parameter name -> float32 or float16 array. Linear weights are
            [out, in] as stored by PyTorch. ``lm_head.weight`` is present only when untied.
        sha256: over architecture and weights (names, types, shapes, bytes).
        tokenizer_file: ``tokenizer.json``, or None for a random checkpoint.
        files: names of the files that were read, for the report.
        notes: what the loader left out or renamed, a line each.
    """

    name: str
    revision: str
    architecture: Architecture
    weights: Mapping[str, np.ndarray]
    sha256: str
    tokenizer_file: Path | None = None
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_quality(self) -> bool:
        """Return whether logits mean anything: not for seeded random weights."""
        return not self.name.startswith("random:")

    @property
    def parameters(self) -> int:
        """Return how many there are; a tied head counts once."""
        return sum(array.size for array in self.weights.values())


@dataclass(frozen=True)
class TextSet:
    """Hold tokenized texts, with what a comparison of two runs must agree on.

    Attributes:
        name: "prose", "questions", "prompts", "sampled" or "calibration".
        source: bundled file name, or hub id, configuration and split.
        token_ids: N arrays, int32 [T] each.
        scored: "every" position, or the "last" one only.
        sha256: of the joined raw text, UTF-8.
        join: how rows were joined into the hashed text, for example ``"\\n\\n"``.
        tokenizer_sha256: of ``tokenizer.json``.
        window: tokens a text at most.
    """

    name: str
    source: str
    token_ids: tuple[np.ndarray, ...]
    scored: str
    sha256: str
    join: str
    tokenizer_sha256: str
    window: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens over all texts."""
        return sum(len(ids) for ids in self.token_ids)

    @property
    def token_ids_sha256(self) -> str:
        """Return the SHA-256 over the lengths and the int32 ids of all texts, in order."""
        digest = hashlib.sha256()
        for ids in self.token_ids:
            digest.update(np.int64(len(ids)).tobytes() + ids.astype("<i4").tobytes())
        return digest.hexdigest()

    def key(self) -> dict[str, str | int]:
        """Return what must be equal before two results on this text are compared."""
        return {
            "text": self.name,
            "sha256": self.sha256,
            "join": self.join,
            "tokenizer_sha256": self.tokenizer_sha256,
            "window": self.window,
            "texts": len(self.token_ids),
            "tokens": self.tokens,
            "token_ids_sha256": self.token_ids_sha256,
        }


CONSTANT = "constant"  # method of Scales that nobody calibrated


@dataclass(frozen=True)
class Scales:
    """Hold the calibrated activation ranges.

    Attributes:
        activation_amax: module path, for example ``transformer.h.0.mlp.c_fc`` -> largest
            absolute value of its input, float32, finite and positive.
        method: "max", or CONSTANT.
        checkpoint_sha256: of the checkpoint whose activations were seen.
        text_sha256: of the calibration text.
        tokens: calibration tokens seen.
        modelopt_version: version of nvidia-modelopt.
        notes: fallbacks taken, a line each.
        other_amax: another method, for example "percentile" or "mse-fp8" -> module path -> range.
        smoothing: a method of ``smoothing.py`` -> path of a LayerNorm -> factor of each channel.
    """

    activation_amax: Mapping[str, float]
    method: str
    checkpoint_sha256: str
    text_sha256: str
    tokens: int
    modelopt_version: str
    notes: tuple[str, ...] = ()
    other_amax: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    smoothing: Mapping[str, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)

    def ranges(self, method: str) -> Mapping[str, float]:
        """Return module path -> range by a method; none of a method that was not used.

        Constant ranges stand for those of any method.
        """
        if self.method in (CONSTANT, method):
            return self.activation_amax
        return self.other_amax.get(method, {})


@dataclass(frozen=True)
class Plan:
    """Hold a plan on disk.

    Attributes:
        path: the serialized engine.
        plan_mib: its size.
        build_s: seconds that TensorRT took when it was built.
        cached: whether an earlier build was used.
        log: TensorRT's warnings of that build.
        kernels: file of the kernels compiled for the GPU that runs it; None without a GPU.
        sha256: of the file.
    """

    path: Path
    plan_mib: float
    build_s: float
    cached: bool
    log: tuple[str, ...]
    kernels: Path | None = None
    sha256: str = ""


@dataclass(frozen=True)
class Decoded:
    """Hold what a network gave for a set of equally long texts.

    Attributes:
        logits: float32 [N, T, V], before softmax.
        keys: float32 [N, L, H, T, D], the K rows of every layer.
        values: float32 [N, L, H, T, D], the V rows of every layer.
    """

    logits: np.ndarray
    keys: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class ReferenceDistribution:
    """Hold a reference's logits and what comparisons reuse; M positions over all texts.

    The probabilities are float64, 8 bytes a logit: float32 would halve the memory but put an
    error of 6e-8 times sum p |z_ref - z_obt| into each KL, and their sum would not be 1.

    Attributes:
        logits: float32 [M, V], before softmax; the caller's array, not a copy.
        targets: int64 [M], id of the true next token, -1 where the text has none.
        text: int32 [M], index of the text.
        probabilities: float64 [M, V], softmax of the logits.
        cross: float64 [M], sum over V of probabilities * (logits - their maximum).
        log_sum_exp: float64 [M], log sum over V of exp(logits - their maximum), in [0, ln V].
        top: int64 [M], most likely token; the first index wins a tie.
        nll_nats: float64 [M], -log p(target); NaN where there is no target.
    """

    logits: np.ndarray
    targets: np.ndarray
    text: np.ndarray
    probabilities: np.ndarray
    cross: np.ndarray
    log_sum_exp: np.ndarray
    top: np.ndarray
    nll_nats: np.ndarray


@dataclass(frozen=True)
class TokenMetrics:
    """Hold what was measured a token, in scoring order; M scored positions.

    Attributes:
        kl_nats: float64 [M], KL(reference || obtained) over the full vocabulary.
        nll_nats: float64 [M], of the true next token under the obtained logits; NaN where
            the text has no next token.
        reference_nll_nats: float64 [M], the same under the reference.
        top1: bool [M], the same most likely token (the first index wins a tie).
        text: int32 [M], index of the text: the block of the bootstrap.
        tied_top1: bool [M], true also where the two differ only by the order within a tie: the
            obtained top token is among the reference's tied maxima, or the other way round.
    """

    kl_nats: np.ndarray
    nll_nats: np.ndarray
    reference_nll_nats: np.ndarray
    top1: np.ndarray
    text: np.ndarray
    tied_top1: np.ndarray


@dataclass(frozen=True)
class Metrics:
    """Hold the statistics of one variant, phase, text set and reference.

    Attributes:
        values: metric name with its unit -> value, see ``metrics.summarize``.
        tokens: what they were computed from.
    """

    values: Mapping[str, float]
    tokens: TokenMetrics


@dataclass(frozen=True)
class WorstToken:
    """Hold one position at which a variant is far from the reference.

    Attributes:
        text: index of the text in its set.
        position: of the token after which both predict.
        kl_nats: KL(reference || obtained) there.
        target: id of the true next token, -1 where the text has none.
        expected: the reference's most likely tokens, (id, probability) each, falling.
        obtained: the variant's.
    """

    text: int
    position: int
    kl_nats: float
    target: int
    expected: tuple[tuple[int, float], ...]
    obtained: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PairedDifference:
    """Hold current minus stored, averaged over the same positions.

    Attributes:
        mean: of the differences over positions.
        lower: one-sided lower bound of the mean at ``confidence``.
        upper: one-sided upper bound of the mean at ``confidence``.
        standard_error: of the mean, with texts as the independent units.
        minimum_detectable: true difference that is found with the power asked of
            ``paired.paired_difference``.
        confidence: of each bound.
        texts: number of blocks.
        positions: number of differences.
    """

    mean: float
    lower: float
    upper: float
    standard_error: float
    minimum_detectable: float
    confidence: float
    texts: int
    positions: int


@dataclass(frozen=True)
class Interval:
    """Hold a figure and its one-sided bounds.

    Attributes:
        value: the figure.
        lower: one-sided lower bound at ``confidence``.
        upper: one-sided upper bound at ``confidence``.
        confidence: of each bound.
    """

    value: float
    lower: float
    upper: float
    confidence: float


@dataclass(frozen=True)
class Speedup:
    """Hold how one executor's time compares with the floor's, over paired rounds.

    Attributes:
        ratio: floor time / own time, median of the ratios of single rounds; above 1: own is faster.
        lower: lower end of the two-sided interval of the ratio at ``confidence``.
        upper: its upper end.
        confidence: of the interval, both ends together.
        latency_us: own time a replay, median over rounds.
        floor_latency_us: the floor's, median over rounds.
        rounds: number of ratios.
        replays: in one stretch; a round has two stretches of each.
    """

    ratio: float
    lower: float
    upper: float
    confidence: float
    latency_us: float
    floor_latency_us: float
    rounds: int
    replays: int


@dataclass(frozen=True)
class Measurement:
    """Hold what one variant gave in one phase.

    Attributes:
        non_finite: the first NaN or infinity in logits, K or V, or None.
        metrics: "prose/bf16", "prose/float32", "next_token/bf16" ... -> Metrics: text set and
            type of the reference. Empty when something was not finite.
        agreement: of decode with prefill on the same tokens; None in prefill.
        logits: float32 [N, T, V] of the prose, kept for rows that are compared with another
            executor token by token; None otherwise.
        references: type -> provenance of the model that it was compared with.
        worst: the positions of the prose with the largest KL to bf16, falling.
    """

    non_finite: str | None
    metrics: Mapping[str, Metrics]
    agreement: Metrics | None = None
    logits: np.ndarray | None = None
    references: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    worst: tuple[WorstToken, ...] = ()


@dataclass(frozen=True)
class Cell:
    """Hold one judged figure of the report.

    Attributes:
        variant: row name.
        phase: "prefill", "decode" or "both".
        metric: name with unit, for example "kl_mean_nats".
        obtained: what was measured, None when it was not.
        limit: the bound used, None where there is none.
        baseline: the stored value, None where there is none.
        verdict: "passed", "failed", "inconclusive" or "not measured".
        reason: one sentence.
        minimum_detectable: smallest true worsening that this comparison finds with the power of
            ``tests/gate/tolerances.py``, in the metric's unit; None where nothing is estimated.
    """

    variant: str
    phase: str
    metric: str
    obtained: float | str | None
    limit: float | str | None
    baseline: float | None
    verdict: str
    reason: str
    minimum_detectable: float | None = None


@dataclass(frozen=True)
class Provenance:
    """Hold where, when and from what a figure comes.

    Attributes:
        target: for example "cpu/tensorrt_rtx-1.6.1.120".
        commit: of this repository, with "-dirty" when files differ from it.
        date: UTC, ISO 8601.
        command: as typed.
        versions: package -> version.
        machine: processor, cores and threads, or the GPU.
        gpu: name, compute capability, driver, clocks in MHz and power limit in W of the GPU that
            ran the engines; None where it does not tell; empty where none ran any.
    """

    target: str
    commit: str
    date: str
    command: str
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: str = ""
    gpu: Mapping[str, str | float | None] = field(default_factory=dict)


def weights_sha256(architecture: Architecture, weights: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 over architecture and weights, see ``arrays_sha256``."""
    return arrays_sha256(weights, json.dumps(asdict(architecture), sort_keys=True).encode())


def arrays_sha256(arrays: Mapping[str, np.ndarray], before: bytes = b"") -> str:
    """Return the SHA-256 over ``before`` and arrays: names sorted, types, shapes, bytes."""
    digest = hashlib.sha256(before)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
