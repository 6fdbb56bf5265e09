"""What a run is about: its target, its rows, and which of their failures are known."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from gptneo_trt.backend import Backend, backend_named
from gptneo_trt.errors import BuildError, VariantError
from gptneo_trt.known_failures import (
    KNOWN_FAILURES,
    KnownFailure,
    failures_of_target,
    known_failure,
)
from gptneo_trt.targets import (
    Gpu,
    Target,
    format_mismatch,
    gpu_at_hand,
    target_of_expression,
)
from gptneo_trt.variants import FLOOR, VARIANTS, base_of, is_explored, variant_named
from tests.gate.limits import all_rows_of, rows_of

ALL = "all"  # of the rows of a model, with those of the matrix
FP32_DEQUANTIZE = "dequantize_type=fp32"

_GPU = pytest.StashKey[Gpu | None]()
_BACKEND = pytest.StashKey[Backend | None]()


def target_of(config: pytest.Config) -> Target:
    """Return the target that ``-m`` asks for."""
    return target_of_expression(config.getoption("markexpr"))


def model_of(config: pytest.Config) -> str:
    """Return the name of what ``--model`` asks for, without a revision."""
    return str(config.getoption("--model")).partition("@")[0]


def text_source_of(config: pytest.Config) -> str:
    """Return which texts judge what ``--model`` asks for: the study's for one of the hub."""
    model = str(config.getoption("--model"))
    is_of_the_hub = "@" in model and not Path(model).expanduser().is_dir()
    return "study" if is_of_the_hub else "bundled"


def gpu_of(config: pytest.Config) -> Gpu | None:
    """Return the GPU at hand, looked for once a run."""
    if _GPU not in config.stash:
        config.stash[_GPU] = gpu_at_hand()
    return config.stash[_GPU]


def backend_of(config: pytest.Config) -> Backend | None:
    """Return the flavour that builds, loaded once a run; None when it cannot be imported."""
    if _BACKEND not in config.stash:
        try:
            config.stash[_BACKEND] = backend_named(config.getoption("--tensorrt"))
        except BuildError:
            config.stash[_BACKEND] = None
    return config.stash[_BACKEND]


def selected_names(config: pytest.Config) -> list[str]:
    """Return the rows to run, in the order of VARIANTS; those that are described come last.

    The floor is judged whenever another row quantizes something: FP8 hides faults of the graph
    that fp16 shows, such as a local window one too narrow. It is stored only where it is named.
    """
    asked = _asked(config)
    quantized = any(_quantizes(name) for name in asked)
    if quantized and not config.getoption("--update-baselines"):
        asked.append(FLOOR)
    return [name for name in VARIANTS if name in asked] + [
        name for name in dict.fromkeys(asked) if name not in VARIANTS
    ]


def _asked(config: pytest.Config) -> list[str]:
    """Return what --variants and --dequantize ask for."""
    model, asked = config.getoption("--model"), []
    for name in config.getoption("--variants").split(","):
        asked += all_rows_of(model) if name.strip() == ALL else [name.strip()]
    asked = [name for name in asked if name] or list(rows_of(model))
    if config.getoption("--dequantize") == "fp32":
        return [_with_fp32_dequantize(name) for name in asked]
    return asked


def _with_fp32_dequantize(name: str) -> str:
    """Return the row as it is with its Dequantize to float32, where it has one to another type."""
    has_one = _quantizes(name) and variant_named(name).dequantize_type != "fp32"
    return f"{name}:{FP32_DEQUANTIZE}" if has_one else name


def _quantizes(name: str) -> bool:
    """Return whether a row quantizes anything; one that there is not does not."""
    with suppress(VariantError):
        return bool(variant_named(name).quantized)
    return False


def refused_names(config: pytest.Config) -> list[str]:
    """Return a line a selected row that there is not, or that is to be stored and cannot be."""
    selected, wrong = selected_names(config), []
    unknown = sorted(name for name in selected if base_of(name) not in VARIANTS)
    if unknown:
        wrong.append(f"unknown rows {unknown}; the rows are: {', '.join(VARIANTS)}")
    explored = [name for name in selected if is_explored(name) and name not in unknown]
    for name in explored:
        try:
            variant_named(name)
        except VariantError as error:
            wrong.append(str(error))
    if explored and config.getoption("--update-baselines"):
        wrong.append(f"{explored} are no rows of the table, so nothing is stored of them")
    return wrong


def unsupported_here(config: pytest.Config, variant: str) -> str | None:
    """Return why this run's GPU cannot run a row whatever TensorRT does; None where it can."""
    gpu = gpu_of(config) if target_of(config).needs_gpu else None
    if gpu is None:
        return None
    why = format_mismatch(variant_named(variant).number_format, gpu.compute_capability)
    return why and f"{variant}: {why} ({gpu.name})"


def known_failures_here(config: pytest.Config) -> list[KnownFailure]:
    """Return the known failures of this run's TensorRT on this run's GPU."""
    backend = backend_of(config)
    if backend is None or not _any_concerns(backend):
        return []
    return failures_of_target(backend.flavour, backend.version, _compute_capability(config))


def known_failure_of(
    config: pytest.Config, variant: str, phase: str, stage: str
) -> KnownFailure | None:
    """Return the row of KNOWN_FAILURES that a row of this run is expected to fail with."""
    backend, row = backend_of(config), variant_named(variant)
    case = row, phase, stage
    if backend is None or not _any_concerns(backend, lambda known: known.hits(*case)):
        return None
    return known_failure(backend.flavour, backend.version, _compute_capability(config), *case)


def _any_concerns(
    backend: Backend, is_asked: Callable[[KnownFailure], bool] = lambda known: True
) -> bool:
    """Return whether this TensorRT has such a failure on any GPU: only then is one looked for."""
    rows = KNOWN_FAILURES.values()
    return any(row.concerns(backend.flavour, backend.version) and is_asked(row) for row in rows)


def _compute_capability(config: pytest.Config) -> str | None:
    gpu = gpu_of(config)
    return gpu.compute_capability if gpu else None
