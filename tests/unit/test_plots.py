"""Plots as SVG: what is drawn of which run, and that it can be read."""

import re

import pytest

from tests.unit.stored_results import measured_only, stored_results

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from gptneo_trt import plots
from gptneo_trt.token_profiles import KL_EDGES_NATS

PROFILE = {
    "kl_over_position_nats": [0.001, 0.002],
    "kl_distribution_tokens": [0] * 10 + [5, 7, 0, 2] + [0] * 18,
}


def with_profiles(*rows):
    """Return the stored results with values over tokens of these rows."""
    return stored_results() | {"token_profiles": {row: {"prefill": PROFILE} for row in rows}}


def plot_named(results, name):
    """Return the plot of that name, or None."""
    return next((each for each in plots.plots(results) if each.name == name), None)


def texts(plot):
    """Return what is written in a plot, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", plot.svg)


def drawn(places):
    """Return axes with points and the names that ``_label`` writes."""
    figure = Figure(layout="constrained", figsize=(plots.WIDTH, 3.8))
    axes = figure.add_subplot()
    axes.scatter(*zip(*places.values(), strict=True))
    plots._label(axes, places)
    figure.draw_without_rendering()
    return axes


def drawn_points(places):
    """Return name -> distance of its point from the left, in pixels."""
    axes = drawn(places)
    return {name: axes.transData.transform(place)[0] for name, place in places.items()}


def drawn_labels(places):
    """Return name -> (left, right, bottom, top) in pixels of what ``_label`` writes."""
    axes = drawn(places)
    boxes = {each.get_text(): each.get_window_extent() for each in axes.texts}
    return {name: (box.x0, box.x1, box.y0, box.y1) for name, box in boxes.items()}


def test_a_run_without_figures_has_no_plot():
    """Nothing is drawn of nothing."""
    assert plots.plots(measured_only(stored_results(), set())) == []


@pytest.mark.parametrize(
    "places",
    [
        {"fp8-v_proj": (0.985, 3.21), "fp8-q_proj": (0.99, 3.64), "fp16": (1.0, 1.0)},
        {f"fp8-row-{index}": (1 + index / 1000, 2 + index / 1000) for index in range(8)},
        {"left": (0.5, 1.0), "right": (1.5, 1.0)},
    ],
    ids=["near", "many", "far"],
)
def test_names_of_rows_are_not_on_top_of_each_other(places):
    """Points may be as near as they like."""
    boxes = list(drawn_labels(places).values())
    assert len(boxes) == len(places)
    for index, (left, right, bottom, top) in enumerate(boxes):
        for other_left, other_right, other_bottom, other_top in boxes[index + 1 :]:
            apart = right <= other_left or other_right <= left
            # Boxes have room for ascenders above and descenders below.
            assert apart or top <= other_bottom + 4 or other_top <= bottom + 4


def test_names_that_are_apart_stay_beside_their_points():
    """Only what would overlap moves."""
    boxes = drawn_labels({"left": (0.5, 1.0), "right": (1.5, 1.0)})
    assert boxes["left"][2:] == pytest.approx(boxes["right"][2:], abs=3)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_quality_against_speed_has_the_limit_the_floor_and_units(phase):
    """In both phases; formats apart; the axis in plain figures."""
    found = texts(plot_named(stored_results(), f"speed-{phase}"))
    assert "may ship: at most 2" in found
    assert f"speed-up in {phase}: fp16's time / own" in found
    assert "KL to bf16 / fp16's" in found
    assert {"fp16", "fp32", "fp8"} <= set(found)
    assert {"1", "2", "5", "10"} <= set(found)


def test_rows_of_another_format_and_of_weights_alone_are_told_apart():
    """By what they are, not by how they are named."""
    results = stored_results()
    results["rows"]["fp8-c_fc"]["settings"] |= {"quantized_format": "int8"}
    results["rows"]["fp8-mlp"]["settings"] |= {"quantized_activations": False}
    found = texts(plot_named(results, "speed-decode"))
    assert {"int8", "fp8, weights alone"} <= set(found)


def test_kinds_have_the_limit_and_a_figure_a_bar():
    """A run that stored no limit has the bars alone."""
    results = stored_results()
    assert "may ship: at most 2" in texts(plot_named(results, "kinds"))
    assert {"16.2", "3.2", "c_fc", "out_proj"} <= set(texts(plot_named(results, "kinds")))
    del results["ship_limits"]
    assert not [text for text in texts(plot_named(results, "kinds")) if "ship" in text]


def test_described_rows_are_among_the_lines():
    """A row that a run described itself is what its reader came for."""
    results = with_profiles("fp16", "fp8:quantized=c_fc", "fp8-q_proj")
    cell = next(each for each in results["cells"] if each["variant"] == "fp8")
    results["cells"].append(cell | {"variant": "fp8:quantized=c_fc"})
    for name in ("position", "distribution"):
        found = texts(plot_named(results, name))
        assert {"fp16", "fp8:c_fc"} <= set(found)
        assert "fp8-q_proj" not in found
        assert "other rows are in results.json" in plot_named(results, name).caption


def test_no_two_lines_look_the_same():
    """Colour or stroke differs, and the floor is in the page's own ink."""
    assert len(set(plots.LINES)) == len(plots.LINES) == len(plots.SHOWN)
    assert plots.LINES[0][0] == plots.INK


def test_the_distribution_begins_and_ends_where_there_are_tokens():
    """Empty decades push what there is together."""
    counts = PROFILE["kl_distribution_tokens"]
    assert plots._ends({"fp16": counts}) == (KL_EDGES_NATS[10], KL_EDGES_NATS[14])
    later = [0] * 31 + [1]
    assert plots._ends({"fp16": counts, "fp8": later}) == (KL_EDGES_NATS[10], KL_EDGES_NATS[32])
    assert plots._ends({"fp16": [0] * 32}) == (KL_EDGES_NATS[0], KL_EDGES_NATS[-1])


def test_every_row_has_a_line_of_its_own_in_the_plan_sizes():
    """As high as its name, however many there are."""
    plot = plot_named(stored_results(), "plans")
    rows = [name for name, row in stored_results()["values"].items() if "decode/plan_mib" in row]
    assert set(rows) <= set(texts(plot))
    height = float(re.search(r'height="([\d.]+)pt"', plot.svg)[1])
    assert height / len(rows) > plots.SMALL + 2


LONG = [
    f"int8-smoothquant:quantized={kinds}:float_edge_layers=1"
    for kinds in ("q_proj", "k_proj+v_proj", "q_proj+k_proj+v_proj+out_proj+c_fc+c_proj+lm_head")
]


def described(names):
    """Return a run whose only rows beside fp16 have these names."""
    run = with_profiles("fp16", *names)
    for row in [name for name in run["values"] if name != "fp16"]:
        run["values"].pop(row)
    run["cells"] = [cell for cell in run["cells"] if cell["variant"] == "fp16"]
    like = stored_results()
    for place, name in enumerate(names):
        run["values"][name] = like["values"]["fp8-c_fc"] | {"prefill/speedup_x": 0.9 + place / 10}
        run["cells"] += [
            cell | {"variant": name} for cell in like["cells"] if cell["variant"] == "fp8-c_fc"
        ]
    return run


@pytest.mark.filterwarnings("error")
def test_long_names_leave_room_for_the_axes():
    """All plots are drawn, and a name has at most so many characters in any of them."""
    drawn = plots.plots(described(LONG))
    assert [plot.name for plot in drawn] == [
        "speed-prefill", "speed-decode", "position", "distribution", "plans",
    ]  # fmt: skip
    for plot in drawn[2:]:
        written = [text for text in texts(plot) if text.startswith("int8-smoothquant:")]
        assert len(set(written)) == len(LONG)
        assert max(map(len, written)) == plots.LONGEST
        assert "int8-smoothquant:q_proj edges=1" in written


def test_a_legend_of_many_lines_makes_the_plot_higher():
    """Its lines take nothing from the axes."""

    def height(names):
        svg = plot_named(described(names), "position").svg
        return float(re.search(r'height="([\d.]+)pt"', svg)[1])

    lines = len(LONG) + 1  # one a row, fp16's too; short names stand side by side in two
    assert height(LONG) - height(["a", "b", "c"]) >= (lines - 2) * plots.SMALL


def test_a_name_without_room_on_the_right_stands_on_the_left():
    """It ends before its point; one with room begins behind it."""
    right = "a row whose name is as long as this"
    places = {"left": (0.5, 1.0), right: (1.5, 2.0)}
    labels = drawn_labels(places)
    assert labels[right][1] < drawn_points(places)[right]
    assert labels["left"][0] > drawn_points(places)["left"]
