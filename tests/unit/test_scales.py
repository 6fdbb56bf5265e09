"""Stored scales: what comes back, what is of something else, and what is refused."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_checkpoint

from gptneo_trt.data import Scales
from gptneo_trt.errors import CalibrationError, StorageError
from gptneo_trt.network import activation_scales, smoothing_factors
from gptneo_trt.scales import (
    constant_scales,
    ranges_from_values,
    ranges_sha256,
    read_scales,
    scales_path,
    values_from_ranges,
    write_scales,
)
from gptneo_trt.smoothing import smoothed
from gptneo_trt.variants import VARIANTS, every_module

MODULES = ("transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc")
SAMPLE = Scales(
    activation_amax=dict(zip(MODULES, (3.25, 0.1), strict=True)),
    method="max",
    checkpoint_sha256="c0ffee",
    text_sha256="7e47",
    tokens=10365,
    modelopt_version="0.46.1",
    notes=("transformer.h.1.mlp.c_fc: never saw a value",),
    other_amax={"percentile": dict(zip(MODULES, (3.0, 0.0625), strict=True))},
)
CHECKPOINT = SimpleNamespace(sha256="c0ffee")
TEXT = SimpleNamespace(sha256="7e47", tokens=10365)


@pytest.fixture
def path(tmp_path):
    """Return a file that holds SAMPLE, in a folder that had to be made."""
    path = tmp_path / "scales" / "sample.json"
    write_scales(path, SAMPLE)
    return path


def edit(path, **changes):
    """Change members of the stored JSON; None takes one out."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_round_trip(path):
    """What was written is read back equal, types included."""
    assert read_scales(path, CHECKPOINT, TEXT, MODULES) == SAMPLE


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.floats(min_value=0, exclude_min=True, allow_infinity=False, width=32),
        min_size=1,
    )
)
def test_any_positive_range_survives_a_round_trip(tmp_path_factory, amax):
    """Every float32 range comes back to the bit."""
    path = tmp_path_factory.mktemp("scales") / "any.json"
    factors = {"smoothquant": {name: (value, 1.0) for name, value in amax.items()}}
    scales = replace(SAMPLE, activation_amax=amax, other_amax={"mse-fp8": amax}, smoothing=factors)
    write_scales(path, scales)

    assert read_scales(path, CHECKPOINT, TEXT, tuple(amax)) == scales


def test_same_scales_have_the_same_bytes(path):
    """The order in which modules were calibrated does not show in the file."""
    before = path.read_bytes()
    backwards = dict(reversed(SAMPLE.activation_amax.items()))

    write_scales(path, replace(SAMPLE, activation_amax=backwards))

    assert path.read_bytes() == before


def test_no_file_means_calibrate(tmp_path):
    """A cache without the file is no error."""
    assert read_scales(tmp_path / "none.json", CHECKPOINT, TEXT, MODULES) is None


@pytest.mark.parametrize(
    ("checkpoint", "text", "modules"),
    [
        (SimpleNamespace(sha256="decaf"), TEXT, MODULES),
        (CHECKPOINT, SimpleNamespace(sha256="0ther", tokens=10365), MODULES),
        (CHECKPOINT, SimpleNamespace(sha256="7e47", tokens=10364), MODULES),
        (CHECKPOINT, TEXT, MODULES[:1]),
        (CHECKPOINT, TEXT, (*MODULES, "transformer.h.2.mlp.c_fc")),
        (CHECKPOINT, TEXT, (MODULES[0], "transformer.h.1.mlp.c_proj")),
    ],
    ids=["checkpoint", "text", "tokens", "fewer", "more", "other modules"],
)
def test_scales_of_something_else_mean_calibrate(path, checkpoint, text, modules):
    """Scales of another checkpoint, text or set of projections are not these."""
    assert read_scales(path, checkpoint, text, modules) is None


def test_order_of_modules_does_not_matter(path):
    """The set of projections is what must be equal."""
    assert read_scales(path, CHECKPOINT, TEXT, MODULES[::-1]) == SAMPLE


@pytest.mark.parametrize("name", [name for name, row in VARIANTS.items() if row.is_calibrated])
def test_constant_ranges_serve_every_row(name):
    """Random weights have nothing to calibrate, whatever a row's calibration is called."""
    checkpoint, row = tiny_checkpoint(), VARIANTS[name]
    scales = constant_scales(checkpoint, every_module(8))

    obtained = activation_scales(row, scales, 8)

    assert set(obtained) == set(row.quantized_modules(8))
    if row.smoothing:
        same = smoothed(checkpoint, smoothing_factors(row, scales)).weights
        assert all(np.array_equal(same[name], checkpoint.weights[name]) for name in same)


@pytest.mark.parametrize("factor", [0, -1, "x", None, float("inf")])
def test_factors_that_are_none_are_named(path, factor):
    """A factor that would zero or flip a channel is no factor."""
    content = json.loads(path.read_text())
    content["smoothing"] = {"smoothquant": {"transformer.h.0.ln_1": [1.0, factor]}}
    path.write_text(json.dumps(content))

    with pytest.raises(CalibrationError, match=r"smoothing/smoothquant: obtained|Infinity"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        '"scales"',
        "{}",
        '{"activation_amax": 3, "notes": []}',
        '{"activation_amax": {"a": "x"}, "notes": []}',
        '{"activation_amax": {"a": null}, "notes": []}',
        '{"activation_amax": {}, "notes": null}',
        '{"activation_amax": {}, "notes": []}',
        "\ufffd\ufffe",
    ],
)
def test_malformed_file_is_named(path, content):
    """What is no scales file is refused with its path and what to do about it."""
    path.write_text(content, encoding="utf-16")
    with pytest.raises(CalibrationError, match=r"sample\.json: .*; delete it"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)

    path.write_text(content, encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"sample\.json: .*; delete it"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


@pytest.mark.parametrize("size", [1, 40, 200])
def test_cut_file_is_named(path, size):
    """A file that was cut short is refused, not read in part."""
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(CalibrationError, match=r"sample\.json: .*not JSON"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


@pytest.mark.parametrize("member", [*vars(SAMPLE), "unknown"])
def test_missing_or_unknown_member_is_refused(path, member):
    """Only a default may be left out: a reader of another version's file says so."""
    edit(path, **{member: "surplus" if member == "unknown" else None})

    with pytest.raises(CalibrationError, match=member):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


@pytest.mark.parametrize("token", ["0", "-0.0", "-3.5"])
def test_range_that_is_no_range_is_refused(path, token):
    """Zero and negative ranges name their projection."""
    path.write_text(path.read_text().replace("0.1,", f"{token},").replace("0.1\n", f"{token}\n"))

    with pytest.raises(CalibrationError, match=rf"sample\.json: ranges of \['{MODULES[1]}'\]"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_range_that_is_not_finite_is_refused(path, token):
    """NaN and infinite ranges are refused with their place."""
    path.write_text(path.read_text().replace("0.1,", f"{token},").replace("0.1\n", f"{token}\n"))

    with pytest.raises(CalibrationError, match=rf"json: line 4, .* {token}, expected a finite"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"percentile": 3}, "other_amax/percentile: obtained 3, expected numbers"),
        ({"percentile": {MODULES[0]: "3"}}, "other_amax/percentile: obtained .*expected numbers"),
        ([], r"other_amax: obtained \[\], expected dict"),
        (
            {"percentile": dict(zip(MODULES, (3.0, 0.0), strict=True))},
            rf"ranges of \['{MODULES[1]}",
        ),
    ],
    ids=["a number", "a text", "a list", "zero"],
)
def test_ranges_of_another_method_are_checked_too(path, other, message):
    """What a row with another calibration is built from is a positive number as well."""
    edit(path, other_amax=other)

    with pytest.raises(CalibrationError, match=message):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


def test_every_wrong_range_is_named(path):
    """All of them at once, sorted."""
    edit(path, activation_amax=dict.fromkeys(MODULES[::-1], 0.0))

    with pytest.raises(CalibrationError, match=f"'{MODULES[0]}', '{MODULES[1]}'"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


def test_what_json_cannot_hold_leaves_the_old_file(path):
    """An array in place of a float is an error before anything is written."""
    before = path.read_bytes()

    with pytest.raises(TypeError, match="float32"):
        write_scales(path, replace(SAMPLE, activation_amax={MODULES[0]: np.float32(1)}))

    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["sample.json"]


def test_range_beyond_a_float_is_refused(path):
    """An integer that no float holds is no range either."""
    edit(path, activation_amax={MODULES[0]: 10**400})

    with pytest.raises(CalibrationError, match=r"sample\.json: .*; delete it"):
        read_scales(path, CHECKPOINT, TEXT, MODULES)


def test_nan_is_never_written(path):
    """C-01: no NaN or infinity gets into a scales file; the old file stays."""
    before = path.read_bytes()

    with pytest.raises(ValueError, match="not JSON compliant"):
        write_scales(path, replace(SAMPLE, activation_amax={MODULES[0]: float("nan")}))

    assert path.read_bytes() == before


def test_write_that_fails_leaves_nothing_beside_the_old_file(path, monkeypatch):
    """A full disk, or a rename that is refused, leaves the old file and no other."""

    def refuse(self, target):
        raise OSError("no space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(type(path), "replace", refuse)
    with pytest.raises(StorageError, match="no space left"):
        write_scales(path, replace(SAMPLE, tokens=1))

    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["sample.json"]


def test_writing_leaves_one_file(path):
    """The temporary name is gone after a write, and after one over an old file."""
    write_scales(path, replace(SAMPLE, tokens=1))

    assert [each.name for each in path.parent.iterdir()] == ["sample.json"]


def test_a_reader_never_sees_half_a_file(path):
    """While another thread writes again and again, every read gives whole scales or the other."""
    many = {f"transformer.h.{i}.mlp.c_fc": 1.0 + i for i in range(300)}
    sample = replace(SAMPLE, activation_amax=many, other_amax={})
    versions = [replace(sample, modelopt_version=version) for version in ("1", "2")]
    write_scales(path, versions[0])
    done = threading.Event()

    def write():
        for index in range(60):
            write_scales(path, versions[index % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert read_scales(path, CHECKPOINT, TEXT, tuple(many)) in versions
    writer.join()


def test_another_modelopt_is_another_file(tmp_path, monkeypatch):
    """A cached calibration is found again by the same ModelOpt only."""
    text = SimpleNamespace(token_ids_sha256="70c5")
    before = scales_path(tmp_path, CHECKPOINT, text)
    assert before == scales_path(tmp_path, CHECKPOINT, text)
    assert before != scales_path(tmp_path, CHECKPOINT, text, ["mse-fp8"])  # has more in it
    monkeypatch.setattr("gptneo_trt.scales.metadata.version", lambda name: "0.99")
    assert scales_path(tmp_path, CHECKPOINT, text) != before


# Ranges in a baseline


@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_constant_ranges_are_those_by_every_method(t0, method):
    """A row of random weights builds whichever calibration it asks for."""
    assert constant_scales(t0, MODULES).ranges(method).keys() == set(MODULES)


def test_hash_of_ranges_is_of_every_bit_and_of_no_order():
    """The smallest change of one range, or another module, is another hash."""
    ranges = {"transformer.h.0.mlp.c_fc": 1.5, "transformer.h.0.mlp.c_proj": 3.0}
    nudged = ranges | {"transformer.h.0.mlp.c_fc": float(np.nextafter(np.float32(1.5), 2))}

    found = ranges_sha256(ranges)

    assert found == ranges_sha256(dict(reversed(ranges.items())))
    assert len({found, ranges_sha256(nudged), ranges_sha256({}), ranges_sha256({"a": 1.5})}) == 4


def test_ranges_are_read_back_from_the_values_of_a_baseline():
    """Other values are not ranges; a baseline from before there were any has none."""
    ranges = {"transformer.h.0.mlp.c_fc": 1.5}
    values = {"prefill/plan_mib": 9.0, **values_from_ranges(ranges)}

    assert values["scales/transformer.h.0.mlp.c_fc/amax"] == 1.5
    assert ranges_from_values(values) == ranges
    assert ranges_from_values({"prefill/plan_mib": 9.0}) == {}
