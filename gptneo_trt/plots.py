"""Content of ``results.json`` -> plots as SVG text, in the colours of the page they stand in."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from gptneo_trt.decisions import kl_limit, measured_rows
from gptneo_trt.report import PHASES
from gptneo_trt.speeds import speedups, unbeaten
from gptneo_trt.token_profiles import KL_EDGES_NATS, POSITION_BIN
from gptneo_trt.variant import PROJECTIONS
from gptneo_trt.variants import FLOOR, VARIANTS

Results = Mapping[str, Any]  # content of results.json
INK = "#010203"  # becomes the page's own text colour, light or dark
# Okabe and Ito's palette for colour-blind readers: https://jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
MAY_SHIP = COLOURS[2]
WIDTH = 4.6  # inches: little, so that text can be read on a telephone
SMALL = 8  # points
LEGEND_CHARACTERS = 48  # of all columns of a legend
LONGEST = 40  # characters of a name
DESCRIBED = {":quantized=": ":", ":float_edge_layers=": " edges="}  # of a row -> in a plot
# Rows of line plots, the floor in ink; rows that a run described itself follow.
SHOWN = (FLOOR, "fp8", "fp8-c_fc", "fp8-attention", "fp8-v_proj", "int8", "nvfp4")
LINES = ((INK, "-"), *zip(COLOURS, ("-", "--", "-.", "-", "--", ":"), strict=True))
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Plot:
    """Hold one plot.

    Attributes:
        name: for a link to it.
        title: what it shows.
        caption: how to read it, with units.
        svg: the ``<svg>`` element.
    """

    name: str
    title: str
    caption: str
    svg: str


def plots(results: Results) -> list[Plot]:
    """Return the plots of what was measured; one without a figure is left out."""
    makers = (
        *(lambda results, phase=phase: _quality_against_speed(results, phase) for phase in PHASES),
        _loss_of_kinds,
        _kl_over_position,
        _kl_distribution,
        _plan_sizes,
    )
    with matplotlib.rc_context(STYLE):
        found = [make(results) for make in makers]
    return [plot for plot in found if plot]


def _drawn(
    name: str, title: str, caption: str, draw: Callable[[Axes], None], height: float
) -> Plot:
    """Return a plot of one pair of axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    draw(figure.add_subplot())
    file = io.StringIO()
    # The same file from the same figures, and no id of another plot of the page.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg[svg.index("<svg") :])
    return Plot(name, title, caption, svg.replace(INK, "currentColor"))


def _legend_above(axes: Axes) -> None:
    """Put the legend where no line can run through it, and make room for all of its lines."""
    labels = axes.get_legend_handles_labels()[1]
    columns = max(1, min(3, LEGEND_CHARACTERS // max(map(len, labels), default=1)))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0)
    figure = cast(Figure, axes.figure)
    lines = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + (lines - 1) * 1.5 * SMALL / 72)


def _short(row: str) -> str:
    """Return a row's name as plots have room for it: what is described without its fields."""
    for field, told in DESCRIBED.items():
        row = row.replace(field, told)
    return row if len(row) <= LONGEST else f"{row[: LONGEST - 3]}..."


def _plain_log(axis: Axis) -> None:
    """Write 1, 2, 5, 10 on a logarithmic axis, not powers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_limit(axes: Axes, results: Results) -> None:
    """Draw what KL over the floor's may ship, where the run stored it."""
    limit = kl_limit(results)
    if not limit:
        return
    axes.set_ylim(axes.get_ylim())  # as it is now: the band reaches to the end of the axis
    axes.axhspan(axes.get_ylim()[0], limit["value"], color=MAY_SHIP, alpha=0.15, lw=0, zorder=0)
    told = f"may ship: {limit['direction']} {limit['value']:g}"
    axes.axhline(limit["value"], color=MAY_SHIP, linewidth=1.2, zorder=0.5, label=told)


def _floor_ratios(results: Results, phase: str) -> dict[str, float]:
    """Return row -> KL over fp16's, of rows and phases in which both were measured."""
    name = f"{phase}/prose/bf16/kl_mean_nats"
    floor = results["values"].get(FLOOR, {}).get(name)
    rows = {row: results["values"].get(row, {}).get(name) for row in measured_rows(results)}
    ratios = {row: kl / floor for row, kl in rows.items() if kl is not None and floor}
    return {row: ratio for row, ratio in ratios.items() if math.isfinite(ratio)}


def _format_of(results: Results, row: str) -> str:
    """Return the format that a row quantizes to, or in which it computes without one."""
    settings = results.get("rows", {}).get(row, {}).get("settings", {})
    name = settings.get("quantized_format" if settings.get("quantized") else "compute_type", "row")
    return str(name) + ("" if settings.get("quantized_activations", True) else ", weights alone")


def _quality_against_speed(results: Results, phase: str) -> Plot | None:
    ratios = _floor_ratios(results, phase)
    places = {
        row: (timed, ratios[row])
        for row, (timed, _, _) in speedups(results, phase).items()
        if row in ratios
    }
    if not places:
        return None

    def draw(axes: Axes) -> None:
        groups: dict[str, list[tuple[float, float]]] = {}
        for row, place in places.items():
            groups.setdefault(_format_of(results, row), []).append(place)
        axes.scatter([1.0], [1.0], 36, color=INK, marker="*", zorder=3)
        for index, (group, members) in enumerate(groups.items()):
            style: Any = {"color": COLOURS[index % 6], "marker": MARKERS[index % 6], "label": group}
            x, y = zip(*members, strict=True)
            axes.scatter(x, y, 22, zorder=3, **style)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set(yscale="log", ylabel=f"KL to bf16 / {FLOOR}'s")
        axes.set(xlabel=f"speed-up in {phase}: {FLOOR}'s time / own")
        axes.margins(x=0.14, y=0.1)
        _draw_limit(axes, results)
        _plain_log(axes.yaxis)
        _legend_above(axes)
        best = unbeaten({row: (loss, timed) for row, (timed, loss) in places.items()})
        _label(axes, {row: places[row] for row in best} | {FLOOR: (1.0, 1.0)})

    caption = (
        f"To the right of the dotted line a row is faster than {FLOOR} in {phase}; in the shaded "
        "band its KL may ship (top-1 and perplexity have limits of their own). Named are the rows "
        "that no other row beats in both; the tables have all figures."
    )
    return _drawn(f"speed-{phase}", f"Quality against speed, {phase}", caption, draw, 3.8)


def _label(axes: Axes, places: Mapping[str, tuple[float, float]]) -> None:
    """Write the names beside their points, from the lowest up, none on top of another."""
    figure = cast(Figure, axes.figure)
    figure.draw_without_rendering()  # now it is known how large the axes are
    end = axes.bbox.x1 * 72 / figure.dpi
    taken: list[tuple[float, float, float]] = []  # left, right and middle, in points
    for row, place in sorted(places.items(), key=lambda each: each[1][1]):
        left, point = axes.transData.transform(place) * 72 / figure.dpi
        name = _short(row)
        width, height, side = 0.65 * SMALL * len(name), point, 1
        if left + width > end:  # no room on the right
            left, side = left - width, -1
        for other_left, other_right, other in taken:
            beside = left < other_right and other_left < left + width
            if beside and abs(height - other) < SMALL + 1:
                height = other + SMALL + 1
        taken.append((left, left + width, height))
        axes.annotate(
            name,
            place,
            (6 * side, height - point),
            textcoords="offset points",
            va="center",
            ha="left" if side > 0 else "right",
            size=SMALL,
        )


def _loss_of_kinds(results: Results) -> Plot | None:
    ratios = {phase: _floor_ratios(results, phase) for phase in PHASES}
    kinds = [kind for kind in PROJECTIONS if all(f"fp8-{kind}" in ratios[p] for p in PHASES)]
    if not kinds:
        return None

    def draw(axes: Axes) -> None:
        for index, phase in enumerate(PHASES):
            heights = [ratios[phase][f"fp8-{kind}"] for kind in kinds]
            places = [place + 0.38 * index - 0.19 for place in range(len(kinds))]
            bars = axes.bar(places, heights, 0.36, color=COLOURS[index], label=phase)
            axes.bar_label(bars, fmt="%.1f", fontsize=SMALL - 1, padding=1)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        _draw_limit(axes, results)
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set(ylabel=f"KL to bf16 / {FLOOR}'s")
        _legend_above(axes)

    caption = f"Each kind alone in FP8, in all layers; the dotted line is the {FLOOR} row."
    return _drawn("kinds", "Loss of each projection kind", caption, draw, 3.0)


def _profiles(results: Results, name: str) -> dict[str, Sequence[float]]:
    """Return row -> a profile in prefill, of the rows that line plots show."""
    profiles = results.get("token_profiles", {})
    described = [row for row in measured_rows(results) if row not in VARIANTS]
    found = {
        row: profiles.get(row, {}).get("prefill", {}).get(name) for row in (*SHOWN, *described)
    }
    shown = [(row, profile) for row, profile in found.items() if profile]
    return dict(shown[: len(LINES)])


def _kl_over_position(results: Results) -> Plot | None:
    rows = _profiles(results, "kl_over_position_nats")
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for (colour, line), (row, means) in zip(LINES, rows.items(), strict=False):
            middles = [POSITION_BIN * (index + 0.5) for index in range(len(means))]
            axes.plot(middles, means, line, color=colour, marker=".", label=_short(row))
        axes.set(yscale="log", xlabel="position of the token", ylabel="mean KL, nats a token")
        _plain_log(axes.yaxis)
        _legend_above(axes)

    caption = (
        f"Prose, prefill, to the bf16 reference; means over {POSITION_BIN} positions of all "
        f"texts{_others(results)}."
    )
    return _drawn("position", "KL over token position", caption, draw, 3.4)


def _others(results: Results) -> str:
    return ". The other rows are in results.json" if len(results["values"]) > len(LINES) else ""


def _kl_distribution(results: Results) -> Plot | None:
    rows = _profiles(results, "kl_distribution_tokens")
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for (colour, line), (row, counts) in zip(LINES, rows.items(), strict=False):
            axes.stairs(
                counts, KL_EDGES_NATS, color=colour, ls=line, label=_short(row), linewidth=1.3
            )
        axes.set(xscale="log", xlabel="KL of a token, nats", ylabel="tokens")
        axes.set_xlim(_ends(rows))
        _legend_above(axes)

    caption = (
        "Prose, prefill, to the bf16 reference; four bins a decade, the first and the last hold "
        f"what is beyond{_others(results)}."
    )
    return _drawn("distribution", "Distribution of the KL over tokens", caption, draw, 3.2)


def _ends(rows: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the edges, nats, between which rows have tokens."""
    used = np.flatnonzero(np.sum(list(rows.values()), axis=0))
    first, last = (used[0], used[-1]) if used.size else (0, -2)
    return KL_EDGES_NATS[first], KL_EDGES_NATS[last + 1]


def _plan_sizes(results: Results) -> Plot | None:
    sizes = {
        row: [results["values"].get(row, {}).get(f"{phase}/plan_mib") for phase in PHASES]
        for row in measured_rows(results)
    }
    sizes = {row: pair for row, pair in sizes.items() if None not in pair}
    if not sizes:
        return None

    def draw(axes: Axes) -> None:
        for index, phase in enumerate(PHASES):
            widths = [pair[index] for pair in sizes.values()]
            style: Any = {"color": COLOURS[index], "marker": MARKERS[index], "label": phase}
            axes.scatter(widths, range(len(sizes)), 18, zorder=3, **style)
        axes.set_yticks(range(len(sizes)), [_short(row) for row in sizes], fontsize=SMALL)
        axes.set_ylim(len(sizes) - 0.5, -0.5)
        axes.grid(axis="y", color=INK, alpha=0.15, linewidth=0.6)
        axes.tick_params(axis="y", length=0)
        axes.set(xlabel="plan, MiB")
        _legend_above(axes)

    caption = "Serialized engines, weights and kernels; the axis does not begin at 0."
    return _drawn("plans", "Plan size", caption, draw, 0.9 + 0.165 * len(sizes))
