"""The batch and the context of a run: what its networks are built for, and what it times.

A loss depends on neither, so baselines, and the limits that were measured, are of STORED_SHAPE
alone. At another shape a run judges what needs no stored run: that plans build and how large they
are, that engines give finite values, the same ones again, and how fast they are.
"""

from typing import NamedTuple

import pytest

from gptneo_trt.checkpoint import RANDOM_POSITIONS
from tests.gate.measurer import CONTEXT

LEAST_CONTEXT = 64  # a stretch of timed steps, and a text that is longer than the next one, fit


class Shape(NamedTuple):
    """Hold how many texts go through a network together, and how long they may be.

    Attributes:
        batch: texts.
        context: cache rows in decode, largest T in prefill.
    """

    batch: int
    context: int

    @property
    def is_stored(self) -> bool:
        """Return whether baselines are of this shape."""
        return self == STORED_SHAPE

    def options(self) -> list[str]:
        """Return the options that ask for it; none for what is the default."""
        pairs = zip(self._fields, self, STORED_SHAPE, strict=True)
        return [f"--{name}={own}" for name, own, stored in pairs if own != stored]

    def title(self) -> str:
        """Return what follows the name of a model; "" where baselines are of this shape."""
        return "" if self.is_stored else f", batch {self.batch}, context {self.context}"


STORED_SHAPE = Shape(1, CONTEXT)


def shape_of(config: pytest.Config) -> Shape:
    """Return the shape that ``--batch`` and ``--context`` ask for."""
    return Shape(config.getoption("--batch"), config.getoption("--context"))


def refuse_shape(config: pytest.Config) -> None:
    """Refuse a shape that this run cannot have.

    Raises:
        UsageError: no text, a context that no network or no check has, a model whose losses are
            judged, or baselines that are to be written.
    """
    shape, model = shape_of(config), str(config.getoption("--model"))
    asked = " ".join(shape.options())
    if shape.batch < 1:
        raise pytest.UsageError(f"--batch: obtained {shape.batch}, expected 1 or more")
    if not LEAST_CONTEXT <= shape.context <= RANDOM_POSITIONS:
        raise pytest.UsageError(
            f"--context: obtained {shape.context}, expected {LEAST_CONTEXT} to {RANDOM_POSITIONS}, "
            "the positions of GPT-Neo"
        )
    if asked and not model.startswith("random:"):
        raise pytest.UsageError(
            f"--model: obtained {model} with {asked}, expected random weights: a loss depends on "
            "neither batch nor context; leave these out, or use --model=random:gpt-neo-125m"
        )
    if asked and config.getoption("--update-baselines"):
        raise pytest.UsageError(
            f"--update-baselines: obtained {asked}, expected neither: what is stored is of batch "
            f"{STORED_SHAPE.batch} and context {STORED_SHAPE.context}; leave one of the options out"
        )
