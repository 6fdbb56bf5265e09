"""Errors of the library, one a stage; every message names the thing and the remedy.

GptNeoTrtError
├── CheckpointError    a checkpoint, a tokenizer or a text cannot be used
├── VariantError       a row quantizes nothing, or names what does not exist
├── CalibrationError   a scale is missing, not finite or not positive
├── BuildError         TensorRT refused, crashed or hung while building a plan
├── RunError           a network or an engine cannot be evaluated
├── MetricError        arrays that cannot be compared
└── BaselineError      a stored measurement is missing, corrupt or of something else
"""


class GptNeoTrtError(Exception):
    """Base of every error that the library raises on purpose."""


class CheckpointError(GptNeoTrtError):
    """A checkpoint, a tokenizer or a text is missing, malformed or unsupported."""


class VariantError(GptNeoTrtError):
    """A variant row quantizes nothing, or names an unknown projection, layer or type."""


class CalibrationError(GptNeoTrtError):
    """Calibration produced no scale, or one that is not finite and positive."""


class _LoggedError(GptNeoTrtError):
    """An error that TensorRT has said something about.

    Attributes:
        message: what failed, without TensorRT's lines.
        log: TensorRT's own warning and error lines, in order.
    """

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join((message, *(f"  TensorRT: {line}" for line in log))))
        self.message, self.log = message, log


class BuildError(_LoggedError):
    """TensorRT refused a network or a plan."""


class CrashError(_LoggedError):
    """A child process died, hung, or ran out of memory or disk; never a known failure.

    It is no BuildError, since its last lines may hold whatever a refusal says too.
    """


class StorageError(GptNeoTrtError):
    """A file cannot be written: the disk is full, or it may not be written there."""


class RunError(GptNeoTrtError):
    """A network or an engine cannot be evaluated with these inputs."""


class MetricError(GptNeoTrtError):
    """Logits, tokens or values that cannot be compared."""


class BaselineError(GptNeoTrtError):
    """A stored baseline is missing, corrupt, or belongs to something else."""
