"""Scales: any damaged file is refused, of something else, or says what was read."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from mutations import LONG, QUICK, mutated, outcome

from gptneo_trt.data import Scales
from gptneo_trt.errors import CalibrationError
from gptneo_trt.json_file import MEMORY_FACTOR
from gptneo_trt.scales import read_scales, write_scales

SAMPLE = Scales(
    activation_amax={"transformer.h.0.mlp.c_fc": 3.25, "transformer.h.1.mlp.c_fc": 0.1},
    method="max",
    checkpoint_sha256="c0ffee",
    text_sha256="7e47",
    tokens=2,
    modelopt_version="0.46.1",
    notes=("transformer.h.1.mlp.c_fc: never saw a value",),
    other_amax={"percentile-99.9": {"transformer.h.0.mlp.c_fc": 3.0}},
)
CHECKPOINT, TEXT = SimpleNamespace(sha256="c0ffee"), SimpleNamespace(sha256="7e47", tokens=2)
CONTENT = json.dumps(vars(SAMPLE), indent=1).encode()
FILES = mutated(CONTENT, ('"c0ffee"', "3.25", "true"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return where the file is."""
    return tmp_path_factory.mktemp("scales") / "sample.json"


def check(path, content):
    """Assert that a file is refused, passed over, or says what was read."""
    path.write_bytes(content)
    modules = tuple(SAMPLE.activation_amax)
    found = outcome(
        lambda: read_scales(path, CHECKPOINT, TEXT, modules), len(content), MEMORY_FACTOR
    )
    if isinstance(found, Scales):
        said = json.loads(content)
        ranges = [said["activation_amax"], *said["other_amax"].values()]
        for each in ranges:
            each.update({module: float(amax) for module, amax in each.items()})
            assert all(0 < amax < float("inf") for amax in each.values())
        assert json.loads(json.dumps(vars(found))) == said
    else:
        assert found is None or isinstance(found, CalibrationError)


def test_sample_is_what_is_written(path):
    """The file that is mutated is one that is read."""
    write_scales(path, SAMPLE)
    assert json.loads(path.read_bytes()) == json.loads(CONTENT)
    path.write_bytes(CONTENT)
    assert read_scales(path, CHECKPOINT, TEXT, tuple(SAMPLE.activation_amax)) == SAMPLE


@QUICK
@given(FILES)
def test_mutated_scales(path, content):
    """Our error, none, or the file's own values."""
    check(path, content)


@pytest.mark.long
@LONG
@given(FILES)
def test_many_mutated_scales(path, content):
    """The same, more often."""
    check(path, content)
