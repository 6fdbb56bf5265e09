"""What one run of the gate found: cells, values, tokens; and what it is compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gptneo_trt import baselines, token_profiles
from gptneo_trt.backend import Backend
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import (
    Cell,
    Checkpoint,
    Interval,
    Measurement,
    PairedDifference,
    Plan,
    Provenance,
    Speedup,
    TextSet,
    TokenMetrics,
)
from gptneo_trt.errors import BaselineError
from gptneo_trt.paired import paired_difference
from gptneo_trt.scales import values_from_ranges
from gptneo_trt.targets import Gpu, Target
from gptneo_trt.variant import Variant
from gptneo_trt.verdicts import Key, problems
from tests.gate import tolerances
from tests.gate.measurer import CONTEXT, DECODE_TOKENS, PROSE_TEXTS

BASELINE_PREFIX = "regression/"  # metrics that are judged against the stored run
REFERENCE = ("attention", "dtype", "transformers")  # what makes a reference another model
STORED_REFERENCE = "float32"  # bf16's own error differs between processors, float32's does not


def regression_tokens(tokens: TokenMetrics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return metric -> (values a token, larger is worse; text index), float64 and int32 [M]."""
    scored = ~np.isnan(tokens.nll_nats)
    return {
        "kl_mean_nats": (tokens.kl_nats, tokens.text),
        "nll_mean_nats": (tokens.nll_nats[scored], tokens.text[scored]),
        "top1_disagreement_frac": ((~tokens.top1).astype(np.float64), tokens.text),
    }


def regression_values(measured: Measurement) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return what regressions are judged by, as ``regression_tokens``: of each text set there is.

    Metrics of a text set other than the prose begin with its name: "sampled/kl_mean_nats".
    """
    found = {}
    for text_set, metric in tolerances.REGRESSIONS:
        scored = measured.metrics.get(f"{text_set}/{STORED_REFERENCE}")
        if scored:
            name = metric if text_set == "prose" else f"{text_set}/{metric}"
            found[name] = regression_tokens(scored.tokens)[metric]
    return found


@dataclass
class GateRun:
    """Collect what the tests found, for the summary and for the baselines.

    Attributes:
        expected: (variant, phase, metric) of every selected gate test.
        deselected: how many more were collected.
        cells: what was judged, in order.
        values: variant -> flat values, judged or not.
        tokens: variant -> flat values a token.
        checkpoint, provenance, key, folder: of this run; None before a fixture set them.
        written: a line a change of a baseline.
        reports: a line a file of the report.
        told: refusals that were printed in full.
        refusal: why nothing can be measured here, and what to do; "" otherwise.
        known_failures: cells that failed as a row of KNOWN_FAILURES says, a line each.
        timing: what the latencies are the time of; empty where nothing is timed.
        shape: batch and context, where nothing is stored of them; else empty.
        hashes: variant -> "scales", "<phase>/network", "<phase>/plan" -> SHA-256 of what was built.
        references: type -> provenance of the model that losses are to.
        unresolved: variant -> "<phase>/regression/<metric>" -> why its noise is too large to store.
        profiles: variant -> phase -> what a report shows of the values a token.
    """

    expected: set[Key] = field(default_factory=set)
    deselected: int = 0
    cells: list[Cell] = field(default_factory=list)
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    provenance: Provenance | None = None
    key: Mapping[str, object] = field(default_factory=dict)
    folder: Path | None = None
    written: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    refusal: str = ""
    known_failures: list[str] = field(default_factory=list)
    timing: Mapping[str, object] = field(default_factory=dict)
    shape: Mapping[str, int] = field(default_factory=dict)
    references: dict[str, Mapping[str, str]] = field(default_factory=dict)
    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    unresolved: dict[str, dict[str, str]] = field(default_factory=dict)
    profiles: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)

    def portable(self) -> "GateRun":
        """Return what another process needs to report this run: no weights, no values a token."""
        light = replace(self.checkpoint, weights={}) if self.checkpoint else None
        return replace(self, tokens={}, checkpoint=light)

    def add(self, other: "GateRun") -> None:
        """Add what another process of the same run found; each collected the same cells."""
        self.expected |= other.expected
        self.deselected = max(self.deselected, other.deselected)
        self.cells += other.cells
        self.known_failures += other.known_failures
        for own, others in (
            (self.values, other.values),
            (self.hashes, other.hashes),
            (self.profiles, other.profiles),
        ):
            for variant, row in others.items():
                own.setdefault(variant, {}).update(row)
        self.references |= other.references
        self.refusal = self.refusal or other.refusal
        self.checkpoint = self.checkpoint or other.checkpoint
        self.provenance = self.provenance or other.provenance
        self.timing = self.timing or other.timing
        self.shape = self.shape or other.shape

    def has_cell(self, key: Key) -> bool:
        """Return whether a cell of this name was judged."""
        return any((cell.variant, cell.phase, cell.metric) == key for cell in self.cells)

    def fail_passed(self, key: Key, reason: str) -> None:
        """Turn the passed cells of this name into failed ones."""
        self.cells = [
            replace(cell, verdict="failed", reason=reason)
            if (cell.variant, cell.phase, cell.metric) == key and cell.verdict == "passed"
            else cell
            for cell in self.cells
        ]

    def add_plan(self, variant: str, phase: str, plan: Plan) -> None:
        """Keep the figures of a plan, and its hash."""
        row = self.values.setdefault(variant, {})
        row |= {f"{phase}/plan_mib": plan.plan_mib, f"{phase}/build_s": plan.build_s}
        if plan.sha256:
            self.add_hash(variant, f"{phase}/plan", plan.sha256)

    def add_ranges(self, variant: str, ranges: Mapping[str, float]) -> None:
        """Keep the calibrated range of each projection that a row quantizes."""
        self.values.setdefault(variant, {}).update(values_from_ranges(ranges))

    def add_hash(self, variant: str, name: str, sha256: str) -> None:
        """Keep the hash of something that the row was built from, or of what was built."""
        self.hashes.setdefault(variant, {})[name] = sha256

    def add_measurement(self, variant: str, phase: str, measured: Measurement) -> None:
        """Keep the figures of a measurement."""
        row = self.values.setdefault(variant, {})
        tokens = self.tokens.setdefault(variant, {})
        self.references |= measured.references
        for name, found in measured.metrics.items():
            row |= {f"{phase}/{name}/{metric}": value for metric, value in found.values.items()}
        for metric, (values, _) in regression_values(measured).items():
            tokens[f"{phase}/{BASELINE_PREFIX}{metric}"] = values
        if "prose/bf16" in measured.metrics:
            self.add_profile(variant, phase, measured.metrics["prose/bf16"].tokens)
        if measured.agreement:
            row["decode/agreement/kl_mean_nats"] = measured.agreement.values["kl_mean_nats"]

    def add_profile(self, variant: str, phase: str, tokens: TokenMetrics) -> None:
        """Keep the KL of the prose to bf16 over position and texts, and its distribution."""
        self.profiles.setdefault(variant, {}).setdefault(phase, {}).update(
            kl_by_text_nats=token_profiles.kl_by_text(tokens),
            kl_over_position_nats=token_profiles.kl_over_position(tokens),
            kl_distribution_tokens=token_profiles.kl_distribution(tokens),
        )

    def add_noise(
        self, variant: str, phase: str, first: Measurement, second: Measurement, *, is_bound: bool
    ) -> None:
        """Keep how far a second roll of a row, without any regression, is from the first.

        The noise of a metric is the standard error of its paired mean over texts, in its unit.

        Args:
            variant, phase: of both.
            first: what is stored.
            second: the same row, its sums added in another order.
            is_bound: whether the noise of two runs is below this. So it is of an engine next to
                its interpreted network: built again, an engine gives the same bits (measured).
                Else a tolerance that this noise does not let the texts resolve is refused.
        """
        again, measured = regression_values(second), regression_values(first)
        own_kl = float(measured["kl_mean_nats"][0].mean()) if "kl_mean_nats" in measured else 0.0
        for name, (before, text) in measured.items():
            key = f"{phase}/{BASELINE_PREFIX}{name}"
            if name not in again:
                self.unresolved.setdefault(variant, {})[key] = (
                    f"{key}: no noise: second roll: {second.non_finite}"
                )
                continue
            paired = paired_difference(
                before, again[name][0], text, tolerances.CONFIDENCE, tolerances.POWER
            )
            self.add_value(variant, f"{key}/noise", paired.standard_error)
            text_set, _, metric = name.rpartition("/")
            tolerance = tolerances.regression_tolerance(
                text_set or "prose", metric, float(before.mean()), own_kl
            )
            why = tolerances.unresolved(key, paired.minimum_detectable, tolerance)
            if why and not is_bound:
                self.unresolved.setdefault(variant, {})[key] = why

    def add_value(self, variant: str, name: str, value: float) -> None:
        """Keep one figure under its flat name."""
        self.values.setdefault(variant, {})[name] = value

    def add_excess(
        self, variant: str, phase: str, reference: str, recipe_nats: float, paired: PairedDifference
    ) -> None:
        """Keep what the recipe loses, and the engine's excess with its interval."""
        row = self.values.setdefault(variant, {})
        row[f"{phase}/recipe/{reference}/kl_mean_nats"] = recipe_nats
        excess = f"{phase}/excess/{reference}"
        row |= {
            f"{excess}/kl_mean_nats": paired.mean,
            f"{excess}/kl_lower_nats": paired.lower,
            f"{excess}/kl_upper_nats": paired.upper,
        }

    def add_floor_ratio(self, variant: str, phase: str, ratio: Interval) -> None:
        """Keep the loss to bf16 over that of fp16, with its bounds."""
        row, name = self.values.setdefault(variant, {}), f"{phase}/prose/bf16/floor_ratio"
        row |= {
            f"{name}_x": ratio.value,
            f"{name}_lower_x": ratio.lower,
            f"{name}_upper_x": ratio.upper,
        }

    def add_speedup(self, variant: str, phase: str, speedup: Speedup, noise: Speedup) -> None:
        """Keep a time ratio to fp16 with its interval, both latencies, and the A/A run's ratio."""
        row = self.values.setdefault(variant, {})
        row |= {
            f"{phase}/speedup_x": speedup.ratio,
            f"{phase}/speedup_lower_x": speedup.lower,
            f"{phase}/speedup_upper_x": speedup.upper,
            f"{phase}/latency_us": speedup.latency_us,
            f"{phase}/fp16_latency_us": speedup.floor_latency_us,
            f"{phase}/noise_x": noise.ratio,
        }

    def speedup_values(self, variant: str, phase: str) -> dict[str, float]:
        """Return what ``add_speedup`` kept, for pytest-benchmark's own files."""
        names = ("speedup_x", "speedup_lower_x", "speedup_upper_x", "fp16_latency_us", "noise_x")
        row = self.values[variant]
        return {name: row[f"{phase}/{name}"] for name in names}

    def problems(self) -> list[str]:
        """Return everything that keeps this run from being green."""
        return problems(self.expected, self.cells) if self.expected else []


def baseline_key(
    target: Target,
    backend: Backend,
    gpu: Gpu | None,
    checkpoint: Checkpoint,
    texts: Mapping[str, TextSet],
) -> dict[str, object]:
    """Return what must be equal before a stored run is compared with this one.

    On a GPU it has the names that a publication states too: it knows no hash of a checkpoint.
    """
    key: dict[str, object] = {
        "checkpoint_sha256": checkpoint.sha256,
        "context": CONTEXT,
        "decode_tokens": DECODE_TOKENS,
        "flavour": backend.flavour,
        "gpu": gpu.name if gpu else "cpu",
        "prose_texts": PROSE_TEXTS,
        "texts": {name: text.key() for name, text in texts.items()},
        "version": backend.version,
    }
    if target.needs_gpu:
        key |= {
            "model": "a folder" if Path(checkpoint.name).is_dir() else checkpoint.name,
            "revision": checkpoint.revision,
            "target": target.name,
        }
    return key


def _reference_differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return where losses of two runs are to other models; types that one lacks are not asked."""
    old, new = (
        {
            f"reference {type_name}": {name: run[type_name].get(name) for name in REFERENCE}
            for type_name in stored.keys() & current.keys()
        }
        for run in (stored, current)
    )
    return baselines.key_differences(old, new)


def stored_baseline(run: GateRun, variant: Variant) -> Baseline:
    """Return the baseline of this very checkpoint, texts and target.

    Raises:
        BaselineError: there is none, or its key or reference differs; both sides of each
            difference are named.
    """
    found = baselines.read(run.folder, variant.name)
    wrong = baselines.key_differences(found.key, run.key, published=found.is_published)
    wrong += _reference_differences(found.provenance.get("references", {}), run.references)
    if wrong:
        raise BaselineError(
            f"baseline of {variant.name} is of something else: {'; '.join(wrong)}; compare "
            "like with like, or write it again with --update-baselines"
        )
    return found
