"""Published baselines: the committed files are the table, and the table is what was printed."""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt import baselines
from gptneo_trt.errors import BaselineError
from gptneo_trt.variants import FLOOR, VARIANTS
from tests import write_published as published
from tests.gate import limits

ROOT = Path(__file__).parents[2]
ROWS = sorted(published.PUBLISHED)
MACHINES = sorted({(target, version) for target, version, _ in ROWS})
MEASURED = ROOT / "baselines/cpu/tensorrt_rtx-1.6.1.120/bundled"
RUN_KEY = {
    "checkpoint_sha256": "c0ffee",
    "context": 256,
    "decode_tokens": 128,
    "flavour": "tensorrt",
    "model": "EleutherAI/gpt-neo-125m",
    "revision": "21def0189f5705e2521767faed922f1f15e7d7db",
    "target": "b200",
    "texts": {"prose": {"sha256": "aa"}},
    "version": "11.4.0.106",
}


def read(target, version, variant):
    """Return a committed baseline."""
    return baselines.read(published.folder_of(ROOT, target, version), variant)


def files(root):
    """Return relative path -> content of every file below the machines of the table."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for machine in MACHINES
        for path in published.folder_of(root, *machine).iterdir()
    }


def test_committed_files_are_what_the_command_writes(tmp_path):
    """Nobody edited one by hand, none is missing or left over; a measured row leaves the table."""
    written = published.write_published(tmp_path)

    assert files(ROOT) == files(tmp_path)
    assert len(files(ROOT)) == 2 * len(ROWS) == 2 * len(written)


def test_nothing_else_is_published():
    """Every other committed baseline was measured."""
    found = {
        (path.parts[-4], path.parts[-3].partition("-")[2], path.stem)
        for path in (ROOT / "baselines").glob("*/*/*/*.json")
        if baselines.read(path.parent, path.stem).is_published
    }

    assert found == set(ROWS)


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_value_and_rounding_are_those_of_the_printed_number(row):
    """Half a unit of the last printed digit, trailing zeros included, and the number itself."""
    stored, printed = read(*row), published.figures(*row)

    assert stored.values == {name: float(text) for name, text in printed.items()}
    assert stored.rounding == {
        name: pytest.approx(0.5 * 10 ** -len(text.partition(".")[2]), rel=1e-12)
        for name, text in printed.items()
    }


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_values_have_the_names_of_measured_ones(row):
    """A run on the machine measures under the same names; the floor has no speed-up."""
    names = set(read(*row).values)
    speed = {"decode/speedup_x", "prefill/speedup_x"} & names

    assert names - speed <= baselines.read(MEASURED, row[2]).values.keys()
    assert names - speed == set(read(*row[:2], FLOOR).values)
    assert len(speed) == (0 if row[2] == FLOOR else 2)


@pytest.mark.parametrize("machine", MACHINES, ids="-".join)
def test_each_machine_has_the_rows_that_are_judged(machine):
    """The published rows can be built, and are those with limits and a decision."""
    rows = {variant for *where, variant in ROWS if tuple(where) == machine}

    assert rows <= VARIANTS.keys()
    assert rows == limits.LIMITS[published.MODEL].keys()
    assert rows == limits.DECISIONS[published.MODEL].keys()


@pytest.mark.parametrize("machine", MACHINES, ids="-".join)
def test_figures_agree_with_what_was_said_about_them(machine):
    """FP8's KL is about 37 times fp16's, its perplexity 9 to 10 % above the reference's."""
    fp16, fp8 = (read(*machine, variant).values for variant in ("fp16", "fp8"))
    kl, perplexity = "decode/prose/bf16/kl_mean_nats", "decode/prose/bf16/perplexity"
    reference = fp8["decode/prose/bf16/reference_perplexity"]

    assert fp8[kl] / fp16[kl] == pytest.approx(37, abs=1.5)
    assert 1.085 < fp8[perplexity] / reference < 1.105
    assert fp16[perplexity] / reference == pytest.approx(1, abs=1e-3)
    assert fp16["decode/plan_mib"] > fp8["decode/plan_mib"]


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_provenance_says_published_and_nothing_that_was_not(row):
    """No commit, command, date or machine of a measurement."""
    provenance = read(*row).provenance

    assert provenance == published.PROVENANCE
    assert provenance["url"].endswith("/pull/2105")
    assert not provenance.keys() & {"commit", "command", "date", "machine", "target", "versions"}


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_key_is_of_the_folder(row):
    """A file that was moved to another machine's folder would not go unnoticed."""
    target, version, _ = row
    run = RUN_KEY | {"target": target, "version": version}

    assert baselines.key_differences(read(*row).key, run, published=True) == []
    assert baselines.key_differences(read(*row).key, run) == [
        'checkpoint_sha256: stored nothing, current "c0ffee"',
        "decode_tokens: stored nothing, current 128",
        'texts/prose/sha256: stored nothing, current "aa"',
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"target": "b300"},
        {"target": "h200"},
        {"version": "11.1.0.106"},
        {"flavour": "tensorrt_rtx"},
        {"model": "EleutherAI/gpt-neo-1.3B"},
        {"revision": "main"},
        {"context": 512},
    ],
    ids=str,
)
def test_another_run_is_not_compared(change):
    """What the publication states must be equal, each name on its own."""
    ((name, value),) = change.items()
    stored = read("b200", "11.4.0.106", "fp8").key

    (line,) = baselines.key_differences(stored, RUN_KEY | change, published=True)

    assert line.startswith(f"{name}: stored ")
    assert line.removesuffix(str(value)).removesuffix(f'"{value}"').endswith("current ")


def test_a_measured_row_is_not_overwritten(tmp_path):
    """The command fails and leaves the file: the row is to leave the table."""
    measured = baselines.read(MEASURED, "fp8")
    folder = published.folder_of(tmp_path, "b300", "11.4.0.106")
    baselines.write(folder, "fp8", measured)

    with pytest.raises(BaselineError, match=r"^baseline of b300/.*/fp8 not written: .*published"):
        published.write_published(tmp_path)

    assert baselines.differences(measured, baselines.read(folder, "fp8")) == []


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_every_row_has_a_figure_a_name(row):
    """None is dropped for want of a name, and only the floor has no speed-up."""
    assert len(published.PUBLISHED[row]) == len(published.NAMES) - 2 * (row[2] == FLOOR)


@pytest.mark.parametrize(
    ("text", "half"),
    [("0.0022", 5e-05), ("58.52", 0.005), ("313.6", 0.05), ("1.10", 0.005), ("37", 0.5)],
)
def test_half_unit(text, half):
    """The exact decimal, as the nearest float; a trailing zero is a digit."""
    assert published.half_unit(text) == half


@given(st.floats(-1e6, 1e6), st.integers(0, 6))
def test_half_unit_covers_whatever_was_rounded(value, digits):
    """Every number that prints as this text is within half a unit of it."""
    text = f"{value:.{digits}f}"

    assert abs(Decimal(value) - Decimal(text)) <= Decimal(repr(published.half_unit(text)))


@pytest.mark.parametrize("text", ["NaN", "Infinity"])
def test_half_unit_of_no_number(text):
    """What has no last digit has no rounding."""
    with pytest.raises(ValueError, match=f"rounding of '{text}': obtained no digits"):
        published.half_unit(text)
