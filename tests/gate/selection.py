"""What a run is about: its target, its rows, and which of their failures are known."""

from pathlib import Path

import pytest

from gptneo_trt.backend import Backend, backend_named
from gptneo_trt.errors import BuildError
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
from gptneo_trt.variants import FLOOR, VARIANTS
from tests.gate.limits import rows_of

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
    """Return the rows to run, in the order of VARIANTS.

    The floor is judged whenever another row quantizes something: FP8 hides faults of the graph
    that fp16 shows, such as a local window one too narrow. It is stored only where it is named.
    """
    asked = [name.strip() for name in config.getoption("--variants").split(",") if name.strip()]
    asked = asked or list(rows_of(config.getoption("--model")))
    quantized = any(name in VARIANTS and VARIANTS[name].quantized for name in asked)
    if quantized and not config.getoption("--update-baselines"):
        asked.append(FLOOR)
    return [name for name in VARIANTS if name in asked] + [
        name for name in asked if name not in VARIANTS
    ]


def unsupported_here(config: pytest.Config, variant: str) -> str | None:
    """Return why this run's GPU cannot run a row whatever TensorRT does; None where it can."""
    gpu = gpu_of(config) if target_of(config).needs_gpu else None
    if gpu is None:
        return None
    why = format_mismatch(VARIANTS[variant].number_format, gpu.compute_capability)
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
    backend = backend_of(config)
    if backend is None or not _any_concerns(backend):
        return None
    capability = _compute_capability(config)
    return known_failure(
        backend.flavour, backend.version, capability, VARIANTS[variant], phase, stage
    )


def _any_concerns(backend: Backend) -> bool:
    """Return whether this TensorRT has a known failure on any GPU: only then is one looked for."""
    rows = KNOWN_FAILURES.values()
    return any(row.concerns(backend.flavour, backend.version) for row in rows)


def _compute_capability(config: pytest.Config) -> str | None:
    gpu = gpu_of(config)
    return gpu.compute_capability if gpu else None
