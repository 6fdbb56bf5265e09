"""Blame: a comparison that did not pass says what changed against the stored run."""

from dataclasses import replace

import pytest

from gptneo_trt import baselines
from gptneo_trt.baselines import Baseline
from gptneo_trt.data import Cell
from gptneo_trt.errors import BuildError
from gptneo_trt.network import PHASES
from gptneo_trt.scales import values_from_ranges
from gptneo_trt.variants import VARIANTS
from tests.gate.blame import changes, with_changes
from tests.gate.run import GateRun

KEY = {"checkpoint_sha256": "c0ffee", "flavour": "tensorrt_rtx", "version": "1.6.1.120"}
HASHES = {
    "scales": "5ca1e5",
    "prefill/network": "a",
    "prefill/plan": "b",
    "decode/network": "c",
    "decode/plan": "d",
}
RANGES = {"transformer.h.2.mlp.c_fc": 3.0, "transformer.h.2.mlp.c_proj": 8.0}
STORED = Baseline(
    KEY, {"hashes": HASHES}, {"prefill/plan_mib": 9.0} | values_from_ranges(RANGES), {}
)
ALL_THE_SAME = (
    "weights: the same; scales: the same; network: the same; TensorRT: the same; plan: the same"
)
CELL = Cell("fp8", "prefill", "regression/kl_mean_nats", 0.1, None, 0.05, "failed", "worse")


def rehashed(**changed):
    """Return the stored run with other hashes; "_" stands for "/", None for one that is lacking."""
    named = {name.replace("_", "/"): sha256 for name, sha256 in changed.items()}
    hashes = {name: sha256 for name, sha256 in (HASHES | named).items() if sha256}
    return replace(STORED, provenance={"hashes": hashes})


def part_of(sentence, name):
    """Return what a sentence says of one part."""
    return dict(part.split(": ", 1) for part in sentence.split("; "))[name]


# The sentence


@pytest.mark.parametrize("phases", [("prefill",), ("decode",), PHASES], ids="+".join)
def test_nothing_changed(phases):
    """All five are named, so that nobody has to know what a key holds."""
    assert changes(STORED, STORED, phases) == ALL_THE_SAME


@pytest.mark.parametrize(
    ("part", "current"),
    [
        ("weights", replace(STORED, key=KEY | {"checkpoint_sha256": "bad"})),
        ("TensorRT", replace(STORED, key=KEY | {"version": "1.7"})),
        ("TensorRT", replace(STORED, key=KEY | {"flavour": "tensorrt"})),
        ("scales", rehashed(scales="other")),
        ("network", rehashed(prefill_network="other")),
        ("plan", rehashed(prefill_plan="other")),
    ],
)
def test_what_changed_is_named_and_nothing_else(part, current):
    """One part at a time, whatever else is in the baseline."""
    found = changes(STORED, current, ("prefill",))

    assert found == ALL_THE_SAME.replace(f"{part}: the same", f"{part}: changed")


def test_another_phase_is_not_blamed():
    """A cell of prefill is of prefill's network and plan; one of both phases of either."""
    current = rehashed(decode_network="other", decode_plan="other")

    assert changes(STORED, current, ("prefill",)) == ALL_THE_SAME
    assert part_of(changes(STORED, current, PHASES), "network") == "changed"


def test_changed_ranges_are_named_furthest_first():
    """Who calibrated 16 times too large reads so, and not only that a hash differs."""
    ranges = {"transformer.h.2.mlp.c_fc": 48.0, "transformer.h.2.mlp.c_proj": 4.0}
    current = replace(rehashed(scales="other"), values=values_from_ranges(ranges))

    assert part_of(changes(STORED, current, ("prefill",)), "scales") == (
        "changed (transformer.h.2.mlp.c_fc x 16, transformer.h.2.mlp.c_proj x 0.5)"
    )


def test_many_changed_ranges_are_counted():
    """Three are named."""
    before = {f"h.{layer}": 1.0 for layer in range(6)}
    after = dict.fromkeys(before, 2.0)
    stored = replace(STORED, values=values_from_ranges(before))
    current = replace(rehashed(scales="other"), values=values_from_ranges(after))

    found = part_of(changes(stored, current, PHASES), "scales")

    assert found == "changed (h.0 x 2, h.1 x 2, h.2 x 2, 3 more)"


def test_projections_that_came_and_went_are_named():
    """A row that quantizes something else has other ranges."""
    ranges = {"transformer.h.2.mlp.c_fc": 3.0, "transformer.h.3.mlp.c_fc": 1.0}
    current = replace(rehashed(scales="other"), values=values_from_ranges(ranges))

    assert part_of(changes(STORED, current, PHASES), "scales") == (
        "changed (transformer.h.3.mlp.c_fc alone is new, transformer.h.2.mlp.c_proj is gone)"
    )


def test_what_is_not_known_is_not_called_the_same():
    """An older baseline, a published one, and a run of a part of the tests."""
    old = replace(STORED, provenance={})
    published = Baseline({"version": "1.6.1.120"}, {}, {"prefill/plan_mib": 9.0}, {})
    part = rehashed(prefill_plan=None)

    assert changes(old, STORED, ("prefill",)) == (
        "weights: the same; scales: not stored; network: not stored; TensorRT: the same; "
        "plan: not stored"
    )
    assert part_of(changes(published, STORED, PHASES), "weights") == "not stored"
    assert part_of(changes(STORED, part, ("prefill",)), "plan") == "not read in this run"


def test_a_row_that_quantizes_nothing_has_no_scales():
    """There is nothing that could have changed."""
    exact = rehashed(scales=None)

    assert part_of(changes(exact, exact, PHASES), "scales") == "none"


# The cell


@pytest.fixture
def run(tmp_path):
    """Return a run that read everything but the network, with a stored baseline of fp8."""
    folder = tmp_path / "baselines" / "cpu" / "tensorrt_rtx-1.6.1.120" / "bundled"
    baselines.write(folder, "fp8", STORED)
    hashes = {name: sha256 for name, sha256 in HASHES.items() if not name.endswith("network")}
    return GateRun(key=KEY, folder=folder, hashes={"fp8": hashes}, values={"fp8": STORED.values})


@pytest.mark.parametrize("verdict", ["failed", "inconclusive"])
def test_a_comparison_that_did_not_pass_says_what_changed(run, verdict):
    """The network is read then, of the phase of the cell, if no other cell of the row did."""
    asked = []

    def read(variant, phase):
        asked.append((variant, phase))
        run.add_hash(variant.name, f"{phase}/network", "other")

    found = with_changes(replace(CELL, verdict=verdict), run, read)

    assert asked == [(VARIANTS["fp8"], "prefill")]
    assert found.reason == f"worse; {ALL_THE_SAME}".replace("network: the same", "network: changed")
    with_changes(CELL, run, read)
    assert len(asked) == 1


def test_a_comparison_of_both_phases_reads_both_networks(run):
    """Ranges are of no phase."""
    asked = []

    with_changes(replace(CELL, phase="both"), run, lambda variant, phase: asked.append(phase))

    assert asked == list(PHASES)


@pytest.mark.parametrize(
    "cell",
    [replace(CELL, verdict="passed"), replace(CELL, metric="kl_mean_nats")],
    ids=["passed", "limit"],
)
def test_every_other_cell_stays_as_it_is(run, cell):
    """A limit is of no stored run, and what passed needs no blame."""
    assert with_changes(cell, run, None) is cell


def test_a_cell_without_a_baseline_of_this_key_stays_as_it_is(run):
    """Its reason says already what is missing, or what differs."""
    other = replace(run, key=KEY | {"version": "1.7"})

    assert with_changes(CELL, other, None) is CELL
    assert with_changes(replace(CELL, variant="fp16"), run, None).reason == "worse"


def test_a_network_that_cannot_be_built_is_not_read(run):
    """Its own cells fail with TensorRT's words; this one keeps its verdict."""

    def refuse(variant, phase):
        raise BuildError("refused")

    assert part_of(with_changes(CELL, run, refuse).reason.removeprefix("worse; "), "network") == (
        "not read in this run"
    )
