"""Plans: a damaged plan or side-car means that it is built again; nothing is deserialized."""

import hashlib
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import LONG, QUICK, mutated, mutated_bytes, outcome

from gptneo_trt import plans
from gptneo_trt.json_file import MEMORY_FACTOR
from gptneo_trt.plans import PlanRequest

PLAN = b"ftrt" + bytes(range(256)) * 8
RECORD = {
    "plan": "key.plan",
    "flavour": "tensorrt_rtx",
    "version": "1.6.1.120",
    "capabilities": ["8.9"],
    "gpu": "",
    "sha256": hashlib.sha256(PLAN).hexdigest(),
    "bytes": len(PLAN),
    "build_s": 1.5,
    "log": ["[WARNING] a line"],
}
SIDE_CAR = json.dumps(RECORD, indent=1, sort_keys=True).encode()
BACKEND = SimpleNamespace(flavour="tensorrt_rtx", version="1.6.1.120", builds_for_gpu_at_hand=False)
REQUEST = PlanRequest(BACKEND, None, None, None, "decode", 64, ("8.9",))
PAIRS = st.one_of(
    mutated_bytes(PLAN).map(lambda plan: (plan, SIDE_CAR)),
    mutated(SIDE_CAR, ('["8.9"]', "1.5", "2056")).map(lambda side_car: (PLAN, side_car)),
)


def stored(folder, plan, side_car):
    """Return what is found of a plan and side-car of these bytes."""
    (folder / "key.plan").write_bytes(plan)
    (folder / "key.json").write_bytes(side_car)
    return plans._stored_plan(folder / "key.plan", REQUEST)


def check(folder, plan, side_car):
    """Assert that a pair is not used, with a line why, or is whole and of this plan."""
    size = len(plan) + len(side_car)
    found, why = outcome(lambda: stored(folder, plan, side_car), size, MEMORY_FACTOR)
    if found is None:
        assert len(why) == 1
        return
    said = json.loads(side_car)
    assert hashlib.sha256(plan).hexdigest() == said["sha256"] == found.sha256
    assert (found.build_s, list(found.log)) == (said["build_s"], said["log"])
    assert all(
        said[name] == RECORD[name] for name in ("plan", "flavour", "version", "capabilities")
    )


def test_whole_pair_is_used(tmp_path):
    """The pair that is mutated is one that is used."""
    found, why = stored(tmp_path, PLAN, SIDE_CAR)
    assert (found.sha256, found.build_s, why) == (RECORD["sha256"], 1.5, ())


@QUICK
@given(PAIRS)
def test_mutated_plan(tmp_path_factory, pair):
    """Built again, or the very plan that the side-car says."""
    check(tmp_path_factory.getbasetemp(), *pair)


@pytest.mark.long
@LONG
@given(PAIRS)
def test_many_mutated_plans(tmp_path_factory, pair):
    """The same, more often."""
    check(tmp_path_factory.getbasetemp(), *pair)
