"""Say which GPU is here, and what each target needs: -m expression, GPU -> fits or why not."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import Version

from gptneo_trt import gpu_watch
from gptneo_trt.checkpoint import STUDY_CHECKPOINT
from gptneo_trt.errors import RunError

GIB = 1 << 30
# What a marker expression is made of; a quoted argument of a marker is no name.
EXPRESSION_TOKEN = r"""'[^']*'|"[^"]*"|[()]|[\w:+\-.\[\]\\/]+"""


@dataclass(frozen=True)
class Gpu:
    """Describe the GPU that a run uses.

    Attributes:
        name: NVML's, for example "NVIDIA H200".
        compute_capability: for example "9.0".
        driver: version of the driver.
        uuid: NVML's, "GPU-" and 36 characters.
        memory_gib: all of its memory, used or not.
        settings: clocks and power limit, see ``gpu_watch.settings``; not its identity.
    """

    name: str
    compute_capability: str
    driver: str
    uuid: str
    memory_gib: float
    settings: Mapping[str, float | None] = field(default_factory=dict, compare=False)

    @property
    def title(self) -> str:
        """Return what a message calls it."""
        return f"{self.name} (compute capability {self.compute_capability})"

    @property
    def identity(self) -> str:
        """Return what compiled kernels depend on, see ``PlanRequest.gpu``."""
        return f"{self.name}, driver {self.driver}"


@dataclass(frozen=True)
class Target:
    """Describe one row: what a run on this target needs, and what it takes by default.

    Attributes:
        name: marker, and folder name under baselines/.
        gpu_word: the word of NVML's device name that makes it this GPU; "" needs none.
        flavour: default TensorRT flavour.
        model: default of ``--model``.
        summary: one line for people.
    """

    name: str
    gpu_word: str
    flavour: str
    model: str
    summary: str

    @property
    def needs_gpu(self) -> bool:
        """Return whether engines run on a GPU here."""
        return bool(self.gpu_word)

    def is_of(self, gpu: Gpu) -> bool:
        """Return whether the GPU is this target's: H200 is neither H20 nor GH200."""
        return self.needs_gpu and self.gpu_word in gpu.name.split()


_ROWS = (
    Target("cpu", "", "tensorrt_rtx", "bundled", "the gate on the interpreter, anywhere"),
    Target("h200", "H200", "tensorrt_rtx", "bundled", "the gate on engines, on an NVIDIA H200"),
    Target("b200", "B200", "tensorrt", STUDY_CHECKPOINT, "the study's gate, on an NVIDIA B200"),
    Target("b300", "B300", "tensorrt", STUDY_CHECKPOINT, "the study's gate, on an NVIDIA B300"),
)
TARGETS = {row.name: row for row in _ROWS}
# Number format -> oldest compute capability whose tensor cores multiply it: "Hardware and
# Precision" of TensorRT's support matrix; of INT4, for which TensorRT-RTX 1.6 builds. Other
# formats run everywhere.
NEEDED_CAPABILITIES = {"fp8": "8.9", "int4": "8.0", "nvfp4": "10.0"}


def gpu_at_hand() -> Gpu | None:
    """Return the GPU that a run uses, torch's first, or None: there is none.

    It is asked for by its UUID, so that CUDA_VISIBLE_DEVICES counts although NVML ignores it.

    Raises:
        RunError: torch counts a GPU but cannot open it, or NVML does not know it.
    """
    # Here and not above: a run without a GPU needs neither torch's CUDA nor NVML.
    import torch

    # A torch whose is_available() is true may still see no device.
    if torch.cuda.device_count() == 0:
        return None
    try:
        seen = torch.cuda.get_device_properties(0)
    except RuntimeError as error:
        raise RunError(
            f"GPU 0: torch counts it but cannot open it: {error}; do: compare the driver that "
            f"nvidia-smi shows with torch {torch.__version__}"
        ) from error
    return _gpu_of_uuid(f"GPU-{seen.uuid}", f"{seen.major}.{seen.minor}")


def _gpu_of_uuid(uuid: str, compute_capability: str) -> Gpu | None:
    """Return what NVML says of a GPU; None where NVML itself is absent."""
    try:
        import pynvml
    except ImportError as error:
        raise RunError(f"{uuid}: NVML: {error}; do: pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            return Gpu(
                name=pynvml.nvmlDeviceGetName(handle),
                compute_capability=compute_capability,
                driver=pynvml.nvmlSystemGetDriverVersion(),
                uuid=uuid,
                memory_gib=pynvml.nvmlDeviceGetMemoryInfo(handle).total / GIB,
                settings=gpu_watch.settings(pynvml, uuid, handle),
            )
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        raise RunError(
            f"{uuid}: NVML: {error}; expected a whole GPU that nvidia-smi -L lists; do: choose "
            "one with CUDA_VISIBLE_DEVICES"
        ) from error


def target_of_expression(expression: str) -> Target:
    """Return the target that a pytest ``-m`` expression asks for, cpu when it names none.

    A name after ``not``, alone or in parentheses, is not asked for.

    Raises:
        RunError: it asks for more than one.
    """
    asked = set()
    negated, pending, outer = False, False, []
    for token in re.findall(EXPRESSION_TOKEN, expression):
        if token == "not":
            pending = not pending
            continue
        if token == "(":
            outer.append(negated)
            negated ^= pending
        elif token == ")":
            negated = outer.pop() if outer else False
        elif token in TARGETS and negated == pending:
            asked.add(token)
        pending = False
    if len(asked) > 1:
        raise RunError(
            f"-m {expression!r}: obtained targets {', '.join(sorted(asked))}, expected one a run; "
            "do: run pytest once for each, each on its own host"
        )
    return TARGETS[asked.pop()] if asked else TARGETS["cpu"]


def format_mismatch(number_format: str, compute_capability: str) -> str | None:
    """Return why a GPU cannot multiply a number format, or None: it can.

    Args:
        number_format: of a row, see ``Variant.number_format``.
        compute_capability: for example "8.9".
    """
    needed = NEEDED_CAPABILITIES.get(number_format)
    if needed is None or Version(compute_capability) >= Version(needed):
        return None
    return (
        f"{number_format}: needs compute capability {needed} or newer, "
        f"device has {compute_capability}"
    )


def gpu_mismatch(target: Target, gpu: Gpu | None) -> str | None:
    """Return why a target cannot run on a GPU and what to do, or None: it can."""
    if not target.needs_gpu or (gpu and target.is_of(gpu)):
        return None
    found = gpu.title if gpu else "no GPU"
    others = [row.name for row in TARGETS.values() if gpu and row.is_of(gpu)]
    instead = "".join(f", or `pytest -m {name}` here" for name in others)
    return (
        f"target {target.name}: needed an NVIDIA {target.gpu_word}, found {found}; do: run it on "
        f"a host with an NVIDIA {target.gpu_word}{instead}, or `pytest -m cpu` anywhere"
    )
