"""The gate's options: a plugin of the root's ``conftest.py``."""

import os
from pathlib import Path

import pytest

from gptneo_trt.backend import FLAVOURS
from gptneo_trt.errors import RunError
from gptneo_trt.variant import TYPES
from tests.gate.selection import refused_names, target_of
from tests.gate.shape import STORED_SHAPE, refuse_shape

ROOT = Path(__file__).parents[2]


def _default_workers() -> int:
    cores = os.cpu_count() or 1
    return min(cores, max(4, min(8, cores // 2)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the gate's options."""
    group = parser.getgroup("gate", "GPT-Neo TensorRT gate")
    group.addoption(
        "--model",
        help='"bundled", a folder, a hub id "owner/name@commit", or "random:gpt-neo-125m" '
        "(build, plan size and speed only); default: the target's",
    )
    group.addoption(
        "--variants",
        default="",
        help='rows to run, comma separated; "all" for the whole matrix; a row can be described, '
        '"fp8:quantized=c_fc+v_proj"; default: the study\'s rows',
    )
    group.addoption(
        "--dequantize",
        choices=TYPES,
        default="fp16",
        help="fp32: run every selected row that quantizes with its Dequantize to float32",
    )
    group.addoption(
        "--tensorrt",
        choices=sorted(FLAVOURS),
        help="flavour that builds and runs; default: the target's",
    )
    group.addoption(
        "--gate-report",
        metavar="DIR",
        type=Path,
        help="write results.json, report.md and report.html into this folder; write "
        "--gate-report=DIR, since pytest takes a separate, existing folder for a place of tests",
    )
    group.addoption(
        "--gate-cache",
        metavar="DIR",
        type=Path,
        default=ROOT / ".cache" / "gate",
        help="folder of plans, weights, scales and reference logits (default: .cache/gate); write "
        "--gate-cache=DIR",
    )
    group.addoption(
        "--workers",
        type=int,
        default=_default_workers(),
        help="processes that interpret networks; 0: in this process (default: one a core, at "
        "most 4, and 8 on a large machine)",
    )
    group.addoption(
        "--summation-order",
        metavar="N",
        type=int,
        default=0,
        help="add the terms of every sum of interpreted networks in the order number N, as another "
        "processor may: measures the noise of a run without a regression (default: 0, natural)",
    )
    group.addoption(
        "--batch",
        metavar="N",
        type=int,
        default=STORED_SHAPE.batch,
        help="texts that go through a network together, for size and speed of random weights "
        f"(default: {STORED_SHAPE.batch})",
    )
    group.addoption(
        "--context",
        metavar="N",
        type=int,
        default=STORED_SHAPE.context,
        help="cache rows in decode and longest text in prefill, for size and speed of random "
        f"weights (default: {STORED_SHAPE.context})",
    )
    group.addoption(
        "--update-baselines",
        action="store_true",
        help="write baselines/ from this run, which then fails: commit, and run again without",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Take what is not said from the target, and refuse what cannot be run."""
    try:
        target = target_of(config)
    except RunError as error:
        raise pytest.UsageError(str(error)) from error
    config.option.model = config.getoption("--model") or target.model
    config.option.tensorrt = config.getoption("--tensorrt") or target.flavour
    order = config.getoption("--summation-order")
    if order < 0:
        raise pytest.UsageError(f"--summation-order: obtained {order}, expected 0 or more")
    if order and config.getoption("--update-baselines"):
        raise pytest.UsageError(
            f"--update-baselines: obtained --summation-order={order}, expected 0: what is stored "
            "is the natural order; leave one of the two options out"
        )
    refuse_shape(config)
    _configure_xdist(config)
    wrong = refused_names(config)
    if wrong:
        raise pytest.UsageError(f"--variants: {'; '.join(wrong)}")


def _configure_xdist(config: pytest.Config) -> None:
    """Let ``pytest -n`` distribute groups, and write no baselines.

    Raises:
        UsageError: baselines are to be written, while pytest-benchmark is off under ``-n``.
    """
    if not config.getoption("numprocesses", None):
        return
    if config.getoption("--update-baselines"):
        raise pytest.UsageError(
            "--update-baselines: obtained -n, expected one process: nothing is timed under "
            "pytest-xdist; leave -n out"
        )
    if config.option.dist == "load":  # what -n means unless --dist says otherwise
        config.option.dist = "loadgroup"
        # The new worker would run what the dead one died of again, and its group with it.
        config.option.maxworkerrestart = config.option.maxworkerrestart or "0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long forms of tests unless ``-m`` names them."""
    if "long" in config.getoption("markexpr").split():
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let one worker of ``pytest -n`` run tests that share fixtures: the gate, else a file."""
    if item.config.getoption("loadgroup", False):
        folder = item.path.parent.name
        group = folder if folder in ("gate", "selftest", "crash") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
