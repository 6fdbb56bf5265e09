"""The search over sets of projections: what it predicts, proposes and says of measured sets."""

import copy
import re
from itertools import product

import pytest

from gptneo_trt import search as module
from gptneo_trt.errors import MetricError, VariantError
from gptneo_trt.report import PHASES
from gptneo_trt.search import report, row_of, search
from gptneo_trt.variant import PROJECTIONS
from gptneo_trt.variants import VARIANTS, variant_named
from gptneo_trt.verdicts import WITHIN
from tests.unit.stored_results import FILE, measured_only, stored_results, with_cell

ALONE = [f"fp8-{kind}" for kind in PROJECTIONS]
SEVERAL = "fp8:quantized=k_proj+v_proj:float_edge_layers=1"


@pytest.fixture(scope="module")
def run():
    """Return a real run on an H200, of all rows of the study."""
    return stored_results()


def measured_as(run, name, like, loss_x, speed_x):
    """Return a run in which a described row has the cells of another, and this place."""
    part = copy.deepcopy(measured_only(run, ["fp16", like]))
    for cell in part["cells"]:
        cell["variant"] = name if cell["variant"] == like else cell["variant"]
    part["values"][name] = part["values"].pop(like)
    for phase in PHASES:
        part["values"][name] |= {
            f"{phase}/prose/bf16/floor_ratio_x": loss_x,
            f"{phase}/speedup_x": speed_x,
            f"{phase}/speedup_lower_x": speed_x - 0.01,
            f"{phase}/speedup_upper_x": speed_x + 0.01,
        }
    return part


def place(run, name, phase):
    """Return loss and speed of a row as the run has them."""
    row = run["values"][name]
    return row[f"{phase}/prose/bf16/floor_ratio_x"], row[f"{phase}/speedup_x"]


def test_kinds_add_up_in_loss_and_in_time(run):
    """Two kinds cost what each adds to fp16, in its KL and in its time."""
    for phase in PHASES:
        (loss_k, speed_k), (loss_v, speed_v) = (
            place(run, name, phase) for name in ("fp8-k_proj", "fp8-v_proj")
        )
        name = row_of(VARIANTS["fp8"], ("k_proj", "v_proj"), 0)
        guess = search([run]).predicted[name][phase]
        assert guess.loss_x == pytest.approx(loss_k + loss_v - 1)
        assert 1 / guess.speed_x == pytest.approx(1 / speed_k + 1 / speed_v - 1)


def test_layers_that_stay_in_fp16_add_nothing(run):
    """With 1 of 6 layers at each end in fp16, a kind adds two thirds of itself."""
    for phase in PHASES:
        loss, speed = place(run, "fp8-c_fc", phase)
        guess = search([run]).predicted["fp8:quantized=c_fc:float_edge_layers=1"][phase]
        assert guess.loss_x - 1 == pytest.approx((loss - 1) * 2 / 3)
        assert 1 / guess.speed_x - 1 == pytest.approx((1 / speed - 1) * 2 / 3)


def test_the_head_is_in_no_layer(run):
    """It adds all of itself at any number of edges, and alone it is one set."""
    with_head = measured_as(run, "fp8-lm_head", "fp8-c_fc", 5.0, 0.9)
    found = search([run, with_head])
    alone = [name for name, row in found.sets.items() if row.quantized == ("lm_head",)]
    assert alone == ["fp8-lm_head"]
    both = "fp8:quantized=c_fc+lm_head:float_edge_layers=2"
    without = found.predicted["fp8:quantized=c_fc:float_edge_layers=2"]
    for phase in PHASES:
        assert found.predicted[both][phase].loss_x == pytest.approx(without[phase].loss_x + 4)


def test_kinds_that_take_time_off_cannot_take_off_all_of_it(run):
    """A sum below nothing is still a time."""
    runs = [measured_as(run, name, "fp8-c_fc", 2.0, 3.0) for name in ALONE]
    for where in search(runs).predicted.values():
        assert all(place.speed_x > 0 for place in where.values())


def test_every_set_is_there_once(run):
    """63 sets of six kinds, at 0, 1 and 2 of 6 layers at each end; each name gives its set."""
    sets = search([run]).sets
    assert len(sets) == 63 * 3
    assert len({(frozenset(row.quantized), row.float_edge_layers) for row in sets.values()}) == 189
    assert all(variant_named(name) == row for name, row in sets.items())


@pytest.mark.parametrize(
    ("base", "kinds", "edges", "name"),
    [
        ("fp8", ("v_proj", "k_proj", "q_proj"), 0, "fp8-qkv"),
        ("fp8", ("c_fc",), 0, "fp8-c_fc"),
        ("fp8", ("q_proj", "k_proj", "v_proj", "c_fc", "c_proj"), 1, "fp8-edges-fp16"),
        ("fp8", ("k_proj", "v_proj"), 1, SEVERAL),
        ("int8-channel", ("c_fc",), 0, "int8-channel:quantized=c_fc"),
        ("int8-channel", ("q_proj", "k_proj", "v_proj", "c_fc", "c_proj"), 0, "int8-channel"),
        ("fp8-edges-fp16", ("c_fc",), 0, "fp8-c_fc"),
        ("fp8-dequantize-fp32", ("c_fc",), 0, "fp8-dequantize-fp32:quantized=c_fc"),
    ],
)
def test_a_set_that_is_a_row_has_its_name(base, kinds, edges, name):
    """Another is described by the row that it is of; both build what was asked for."""
    assert row_of(VARIANTS[base], kinds, edges) == name
    built = variant_named(name)
    assert (set(built.quantized), built.float_edge_layers) == (set(kinds), edges)
    assert built.quantized_format == VARIANTS[base].quantized_format


@pytest.mark.parametrize("phase", PHASES)
def test_front_is_what_nothing_beats(run, phase):
    """Whatever is on it is beaten by no set in both; whatever is not, by one that is on it."""
    found = search([run])
    places = {name: where[phase] for name, where in found.predicted.items()}
    front = found.front(phase)
    assert front

    def beats(one, other):
        return one.loss_x <= other.loss_x and one.speed_x >= other.speed_x

    for name, own in places.items():
        beaten_by = [each for each in front if each != name and beats(places[each], own)]
        assert bool(beaten_by) == (name not in front)


def test_proposals_are_of_both_fronts_and_were_not_measured(run):
    """Each is on a front; what was measured is not built again; what was proposed is all."""
    found = search([run])
    fronts = {name for phase in PHASES for name in found.front(phase)}
    assert set(found.proposals(99)) == fronts - set(found.measured)
    assert "fp8-k_proj" in fronts & set(found.measured)


def test_fewer_proposals_are_spread_over_a_front(run):
    """The ends of each front are there, and nothing between."""
    found = search([run])
    fronts = [
        [name for name in found.front(phase) if name not in found.measured] for phase in PHASES
    ]
    assert max(len(front) for front in fronts) > 2
    assert set(found.proposals(2)) == {front[end] for front in fronts for end in (0, -1)}
    assert found.proposals(0) == []


def test_predictions_are_near_what_was_measured(run):
    """On a real run every set of several kinds is within 10 % of its prediction in KL and time."""
    found = search([run])
    guessed = [name for name in found.measured if found.is_guessed(name)]
    assert len(guessed) >= 10
    for name, phase in product(guessed, PHASES):
        guess, own = found.predicted[name][phase], found.measured[name][phase]
        assert guess.loss_x == pytest.approx(own.loss_x, rel=0.1)
        assert guess.speed_x == pytest.approx(own.speed_x, rel=0.1)


def lines(*runs, base="fp8"):
    """Return the report's lines that are no table."""
    return [line for line in report(search(runs, base)) if line and not line.startswith("|")]


def test_nothing_is_faster_and_may_ship(run):
    """Of the real run: said plainly, with how much was measured."""
    told = "\n".join(lines(run))
    assert "Built and measured: 17 of 189 sets; within the ship limits: none;" in told
    assert "prefill: faster than fp16: fp8-k_proj, fp8-qkv; that and within the" in told
    assert "decode: faster than fp16: none; that and within the ship limits: none." in told
    assert "Not measured: 172 sets." in told


def test_a_set_with_both_is_named(run):
    """Once it was built and measured, and in the phase in which it is faster."""
    later = measured_as(run, SEVERAL, "fp8-v_proj", 1.5, 1.1)
    later = with_cell(later, SEVERAL, "both", "ship", obtained=WITHIN)
    later["values"][SEVERAL]["decode/speedup_lower_x"] = 0.99
    told = "\n".join(lines(run, later))
    assert f"18 of 189 sets; within the ship limits: {SEVERAL};" in told
    assert f"that and within the ship limits: {SEVERAL}." in told
    assert "decode: faster than fp16: none;" in told
    table = [line for line in report(search([run, later])) if line.startswith(f"| {SEVERAL} ")]
    assert all("1.50" in line and "within the ship limits" in line for line in table)


@pytest.mark.parametrize("phase", PHASES)
def test_an_inconclusive_time_is_not_faster(run, phase):
    """However far above 1 its interval lies."""
    later = measured_as(run, SEVERAL, "fp8-v_proj", 1.5, 1.1)
    assert phase in search([run, later]).faster[SEVERAL]
    undecided = with_cell(later, SEVERAL, phase, "regression/speedup_x", verdict="inconclusive")
    assert phase not in search([run, undecided]).faster[SEVERAL]


def test_what_is_hoped_for_is_said_to_be_not_measured(run):
    """A set that is predicted within the KL that may ship, and faster: by name, not as a result."""
    cheap = [measured_as(run, name, "fp8-c_fc", 1.2, 1.05) for name in ALONE]
    told = "\n".join(lines(*cheap))
    assert "Predicted to have at most 2 x fp16's KL in both phases" in told
    unknown = told.rpartition("Not measured:")[2]
    assert "fp8:quantized=q_proj:float_edge_layers=1" in unknown
    assert unknown.count("fp8") == module.SHOWN
    assert re.search(r" and \d+ more\.", unknown)
    assert search(cheap).limit == 2.0
    assert "faster in one: none." in "\n".join(lines(run))


def test_a_kind_that_does_not_build_is_in_no_set(run):
    """The others are searched without it."""
    part = measured_only(run, [name for name in VARIANTS if name != "fp8-out_proj"])
    assert len(search([part]).sets) == 31 * 3


def changed(run, **members):
    """Return a run with other members."""
    return copy.deepcopy(run) | members


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"target": "h200/tensorrt_rtx-9"}, "runs of more than one target: h200/"),
        ({"model": {"sha256": "other"}}, "runs of more than one checkpoint: .*other"),
    ],
)
def test_runs_of_other_things_are_refused(run, second, message):
    """They have no fp16 in common."""
    with pytest.raises(MetricError, match=message):
        search([run, changed(run, **second)])


def test_a_run_without_rows_of_one_kind_says_what_to_run(run):
    """The rows that it needs are in the message."""
    with pytest.raises(MetricError, match=r"with --variants int8:quantized=q_proj,int8:quant"):
        search([run], "int8")
    with pytest.raises(VariantError, match="no variant 'fp9'"):
        search([run], "fp9")


def test_command_prints_what_is_next(capsys):
    """--names is an argument of --variants; without it the report; an error has status 2."""
    runs = ["--names", "--at-most", "1", str(FILE)]
    assert module.main(runs) == 0
    names = capsys.readouterr().out.strip().split(",")
    assert names
    assert all(variant_named(name) for name in names)
    assert module.main([str(FILE)]) == 0
    assert "Front of prefill" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        module.main([str(FILE), "--base", "int8"])
    assert ended.value.code == 2
    assert "no row of one kind of int8" in capsys.readouterr().err
