"""Known failures: what is expected to fail, where, and with which message, as rows.

To add one, add a row to KNOWN_FAILURES. A row excuses nothing else: another message, another
stage or a version outside its range is a failure like any other, and a success is one too
("fixed: remove the row").
"""

import re
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from gptneo_trt.backend import FLAVOURS
from gptneo_trt.errors import BuildError, GptNeoTrtError, RunError
from gptneo_trt.network import PHASES
from gptneo_trt.variant import KINDS, Variant
from gptneo_trt.variants import VARIANTS

# Stage -> the error that a failure there is reported as.
STAGE_ERRORS: dict[str, type[GptNeoTrtError]] = {
    "build": BuildError,
    "deserialize": RunError,
    "run": RunError,
}
NO_GPU = "none"
PUBLISHED = "published, not seen by this project"
# Date and target, as provenance has them: "2026-11-30, h200/tensorrt_rtx-1.7.1.116".
CONFIRMATION = r"\d{4}-\d{2}-\d{2}, [^\s/]+/[^\s/]+"


@dataclass(frozen=True)
class KnownFailure:
    """Describe one row: which cases fail, at which stage, and with which message.

    Attributes:
        id: row name and test id.
        flavour: "tensorrt" or "tensorrt_rtx".
        versions: PEP 440 specifier of the flavour's versions, for example ">=11.4,<11.5".
        compute_capability: PEP 440 specifier, for example "==9.0"; NO_GPU: only where there is
            no GPU; "": anywhere.
        projections: it hits rows that multiply one of these in FP8, of KINDS; empty: every row.
        phase: "prefill" or "decode"; "": both.
        stage: a key of STAGE_ERRORS.
        message: regular expression, searched in the error's text.
        reference: URL or text that says why.
        confirmed: date and target on which it was last seen, or PUBLISHED.
        summary: one line for people.
        variants: names of the only rows that it hits; empty: any.

    Raises:
        BuildError: an unknown flavour, projection, row, phase or stage, a specifier or an
            expression that cannot be read, a message that matches any text, an empty field; all of
            them in one message.
    """

    id: str
    flavour: str
    versions: str
    compute_capability: str
    projections: tuple[str, ...]
    phase: str
    stage: str
    message: str
    reference: str
    confirmed: str
    summary: str
    variants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = []
        for field_name, expected in (
            ("flavour", sorted(FLAVOURS)),
            ("phase", ["", *PHASES]),
            ("stage", list(STAGE_ERRORS)),
        ):
            if getattr(self, field_name) not in expected:
                obtained = getattr(self, field_name)
                wrong.append(f"{field_name} {obtained!r}, expected one of {expected}")
        unknown = sorted(set(self.projections) - set(KINDS))
        if unknown:
            wrong.append(f"unknown projections {unknown}, expected some of {list(KINDS)}")
        strangers = sorted(set(self.variants) - set(VARIANTS))
        if strangers:
            wrong.append(f"unknown rows {strangers}, expected some of {list(VARIANTS)}")
        for field_name in ("id", "versions", "message", "reference", "summary"):
            if not getattr(self, field_name).strip():
                wrong.append(f"{field_name} is empty, expected a text")
        if not _is_specifier(self.versions):
            wrong.append(f"versions {self.versions!r}, expected for example '>=11.4,<11.5'")
        if self.compute_capability != NO_GPU and not _is_specifier(self.compute_capability):
            obtained = self.compute_capability
            wrong.append(f"compute_capability {obtained!r}, expected '==9.0', {NO_GPU!r} or ''")
        if not _is_bound(self.message):
            wrong.append(f"message {self.message!r}, expected an expression that needs some text")
        if self.confirmed != PUBLISHED and not re.fullmatch(CONFIRMATION, self.confirmed):
            obtained = self.confirmed
            wrong.append(f"confirmed {obtained!r}, expected '2026-11-30, h200/...' or PUBLISHED")
        if wrong:
            raise BuildError(f"known failure {self.id!r}: " + "; ".join(wrong))

    def concerns(self, flavour: str, version: str) -> bool:
        """Return whether flavour and version are those of the row, whatever the GPU."""
        return flavour == self.flavour and _contains(self.versions, version)

    def hits_target(self, flavour: str, version: str, compute_capability: str | None) -> bool:
        """Return whether flavour, version and GPU are those of the row; None is no GPU.

        Raises:
            BuildError: a version or a compute capability that cannot be read.
        """
        if not self.concerns(flavour, version):
            return False
        if not self.compute_capability:
            return True
        if compute_capability is None or self.compute_capability == NO_GPU:
            return compute_capability is None and self.compute_capability == NO_GPU
        return _contains(self.compute_capability, compute_capability)

    def matches(self, text: str) -> bool:
        """Return whether an error's text is the one that is known."""
        return re.search(self.message, text) is not None

    def hits(self, variant: Variant, phase: str, stage: str) -> bool:
        """Return whether the row is about this variant, phase and stage."""
        if self.variants and variant.name not in self.variants:
            return False
        in_fp8 = variant.is_calibrated and variant.quantized_format == "fp8"
        multiplied = set(variant.quantized) if in_fp8 else set()
        quantizes = not self.projections or bool(multiplied & set(self.projections))
        return quantizes and self.phase in ("", phase) and self.stage == stage


def _is_specifier(text: str) -> bool:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        return False
    return True


def _is_bound(expression: str) -> bool:
    """Return whether ``expression`` can be read, and does not match the empty text."""
    try:
        return re.search(expression, "") is None
    except re.error:
        return False


def _contains(specifier: str, version: str) -> bool:
    """Return whether ``version`` is in the range; an early build of a release counts as one."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion as error:
        raise BuildError(
            f"known failures: version {version!r}, expected one such as '11.4.0.106' or '9.0'"
        ) from error


_ROWS = (
    KnownFailure(
        id="tensorrt-11.4-fp8-out_proj",
        flavour="tensorrt",
        versions=">=11.4,<11.5",
        compute_capability="",
        projections=("out_proj",),
        phase="",
        stage="build",
        # Its words in one line, in any order: the sentence may change between builds.
        message=r"(?im)^(?=.*\belement types?\b)(?=.*\bdiffer)(?=.*\bfp8)(?=.*\bhalf\b)",
        reference="https://github.com/NVIDIA/TensorRT-Model-Connect/pull/2105",
        confirmed=PUBLISHED,
        summary="Quantize after the fused attention: element types of two inputs differ",
    ),
    KnownFailure(
        id="tensorrt_rtx-1.7-cc9.0",
        flavour="tensorrt_rtx",
        versions=">=1.7,<1.8",
        compute_capability="==9.0",
        projections=(),
        phase="",
        stage="deserialize",
        message="does not support this compute capability",
        # 9.0 is not in it, nor was it for 1.5, which runs plans there as 1.6 does.
        reference="https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/getting-started/"
        "support-matrix.html",
        confirmed="2026-11-30, h200/tensorrt_rtx-1.7.1.116",
        summary="builds without a GPU, refuses to load the plan on compute capability 9.0",
    ),
    KnownFailure(
        id="tensorrt_rtx-1.4-fp8-no-gpu",
        flavour="tensorrt_rtx",
        versions=">=1.4,<1.5",
        compute_capability=NO_GPU,
        projections=KINDS,
        phase="",
        stage="build",
        message="Error Code 1: Cuda Runtime",
        # It says that no GPU is needed to build.
        reference="https://docs.nvidia.com/deeplearning/tensorrt-rtx/latest/inference-library/"
        "cpu-engines.html",
        confirmed="2026-11-30, cpu/tensorrt_rtx-1.4.0.76",
        summary="asks the CUDA runtime for a device while it builds an FP8 network",
    ),
    KnownFailure(
        id="tensorrt_rtx-1.6-int8-weights-run",
        flavour="tensorrt_rtx",
        versions=">=1.6,<1.7",
        compute_capability="==9.0",
        projections=(),
        phase="prefill",
        stage="run",
        message="cuDNN graph compilation failed: .*No valid execution plans built",
        reference='docs/gpu.md, "INT8 weights": each kind alone runs, all together do not; with '
        "Dequantize to float32 they do",
        confirmed="2026-12-02, h200/tensorrt_rtx-1.6.1.120",
        summary="INT8 weights of all kinds load, but no kernel is found for one of the products",
        variants=("int8-weights",),
    ),
)
KNOWN_FAILURES = {row.id: row for row in _ROWS}


def failures_of_target(
    flavour: str, version: str, compute_capability: str | None
) -> list[KnownFailure]:
    """Return the rows of a target, whatever the variant; None is no GPU.

    Raises:
        BuildError: a version or a compute capability that cannot be read.
    """
    return [
        row
        for row in KNOWN_FAILURES.values()
        if row.hits_target(flavour, version, compute_capability)
    ]


def known_failure(
    flavour: str,
    version: str,
    compute_capability: str | None,
    variant: Variant,
    phase: str,
    stage: str,
) -> KnownFailure | None:
    """Return the row that a case is expected to fail with, or None: it is expected to work.

    Args:
        flavour: "tensorrt" or "tensorrt_rtx".
        version: of the flavour, as the module says.
        compute_capability: for example "9.0"; None where there is no GPU.
        variant: the row of VARIANTS.
        phase: "prefill" or "decode".
        stage: a key of STAGE_ERRORS.

    Raises:
        BuildError: a version or a compute capability that cannot be read.
    """
    rows = failures_of_target(flavour, version, compute_capability)
    return next((row for row in rows if row.hits(variant, phase, stage)), None)
