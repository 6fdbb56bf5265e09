"""One seeded fault, as a row: what is wrong, how it gets in, and which gate cell must turn red."""

from dataclasses import dataclass

from tests.selftest.seeds import Seed

# What is at fault.
KINDS = (
    "weights", "scales", "network", "cache", "plan", "runtime", "text", "metrics", "baseline",
    "reference", "timing",
)  # fmt: skip
# Which part of the gate runs with the fault: see ``bench.py``, on a GPU ``engine_bench.py``.
THROUGH = (
    "losses", "sampled losses", "new losses", "new references", "networks", "plans", "stored",
)  # fmt: skip
THROUGH_ENGINES = ("engine plans", "engine runs")
BOTH = ("prefill", "decode")


@dataclass(frozen=True)
class Fault:
    """Describe one fault.

    Attributes:
        name: test id.
        kind: of KINDS.
        breaks: what is wrong then.
        seed: puts it in.
        cell: metric that must turn red in every phase of ``phases``.
        reason: regular expression that this cell's reason matches from its beginning.
        variant: row that is judged.
        phases: measured with the fault; the other phase is the control's.
        verdict: of the cell.
        through: what of the gate runs with the fault, of THROUGH or THROUGH_ENGINES.
    """

    name: str
    kind: str
    breaks: str
    seed: Seed
    cell: str
    reason: str
    variant: str = "fp16"
    phases: tuple[str, ...] = ("prefill",)
    verdict: str = "failed"
    through: str = "losses"

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """Return (phase, metric) of every cell that must turn red."""
        return tuple((phase, self.cell) for phase in self.phases)
