"""Content of ``results.json`` -> plots as SVG text, in the colours of the page they stand in."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gptneo_trt.claims import measured_rows, speedups
from gptneo_trt.report import PHASES
from gptneo_trt.token_profiles import KL_EDGES_NATS, POSITION_BIN
from gptneo_trt.variant import PROJECTIONS
from gptneo_trt.variants import FLOOR

Results = Mapping[str, Any]  # content of results.json
INK = "#010203"  # becomes the page's own text colour, light or dark
# Okabe and Ito's palette for colour-blind readers: https://jfly.uni-koeln.de/color
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHOWN = (FLOOR, "fp8", "fp8-c_fc", "fp8-attention", "fp8-all", "fp8-v_proj")  # rows of line plots
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gptneo_trt",  # the same file from the same figures
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
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
    """Return a plot of one pair of axes, 7 inches wide."""
    figure = Figure(figsize=(7, height), layout="constrained")
    draw(figure.add_subplot())
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return Plot(name, title, caption, svg[svg.index("<svg") :].replace(INK, "currentColor"))


def _floor_ratios(results: Results, phase: str) -> dict[str, float]:
    """Return row -> KL over fp16's, of rows and phases in which both were measured."""
    name = f"{phase}/prose/bf16/kl_mean_nats"
    floor = results["values"].get(FLOOR, {}).get(name)
    rows = {row: results["values"].get(row, {}).get(name) for row in measured_rows(results)}
    ratios = {row: kl / floor for row, kl in rows.items() if kl is not None and floor}
    return {row: ratio for row, ratio in ratios.items() if math.isfinite(ratio)}


def _quality_against_speed(results: Results, phase: str) -> Plot | None:
    timed, ratios = speedups(results, phase), _floor_ratios(results, phase)
    rows = [row for row in timed if row in ratios]
    limit = results.get("ship_limits", {}).get("floor_ratio_x")
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        x, y = [timed[row][0] for row in rows], [ratios[row] for row in rows]
        axes.scatter([1.0], [1.0], color=INK, marker="s", zorder=3)
        axes.annotate(FLOOR, (1.0, 1.0), xytext=(4, 4), textcoords="offset points")
        axes.scatter(x, y, color=COLOURS[0], zorder=3)
        for row in _front({row: (timed[row][0], ratios[row]) for row in rows}):
            place = timed[row][0], ratios[row]
            axes.annotate(row, place, xytext=(5, 3), textcoords="offset points", fontsize=8)
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        if limit:
            axes.axhspan(axes.get_ylim()[0], limit["value"], color=COLOURS[2], alpha=0.15)
            axes.axhline(limit["value"], color=COLOURS[2], linewidth=1.2)
        axes.set(yscale="log", xlabel=f"{phase}: {FLOOR}'s time / own", ylabel=f"KL / {FLOOR}'s")

    caption = (
        f"To the right of the dotted line a row is faster than {FLOOR} in {phase}; in the shaded "
        "band its KL to the bf16 reference may ship. Named are the rows that no other row beats in "
        "both; the table has all figures."
    )
    return _drawn(f"speed-{phase}", f"Quality against speed, {phase}", caption, draw, 4.2)


def _front(rows: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the rows of which no other is at least as fast with at most the loss."""
    return [
        row
        for row, (ratio, loss) in rows.items()
        if not any(
            other != row and faster >= ratio and lower <= loss
            for other, (faster, lower) in rows.items()
        )
    ]


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
            axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set(ylabel=f"KL / {FLOOR}'s")
        axes.legend()

    caption = f"Each kind alone in FP8, in all layers; the dotted line is the {FLOOR} row."
    return _drawn("kinds", "Loss of each projection kind", caption, draw, 3.2)


def _profiles(results: Results, name: str) -> dict[str, Sequence[float]]:
    """Return row -> a profile in prefill, of the rows that line plots show."""
    profiles = results.get("token_profiles", {})
    found = {row: profiles.get(row, {}).get("prefill", {}).get(name) for row in SHOWN}
    return {row: profile for row, profile in found.items() if profile}


def _kl_over_position(results: Results) -> Plot | None:
    rows = _profiles(results, "kl_over_position_nats")
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for colour, (row, means) in zip(COLOURS, rows.items(), strict=False):
            middles = [POSITION_BIN * (index + 0.5) for index in range(len(means))]
            axes.plot(middles, means, color=colour, marker=".", label=row)
        axes.set(yscale="log", xlabel="position of the token", ylabel="mean KL, nats a token")
        axes.legend(ncols=3, fontsize=8)

    caption = (
        f"Prose, prefill, to the bf16 reference; means over {POSITION_BIN} positions of all texts."
    )
    return _drawn("position", "KL over token position", caption, draw, 3.4)


def _kl_distribution(results: Results) -> Plot | None:
    rows = _profiles(results, "kl_distribution_tokens")
    if not rows:
        return None

    def draw(axes: Axes) -> None:
        for colour, (row, counts) in zip(COLOURS, rows.items(), strict=False):
            axes.stairs(counts, KL_EDGES_NATS, color=colour, label=row, linewidth=1.3)
        axes.set(xscale="log", xlabel="KL of a token, nats", ylabel="tokens")
        axes.legend(fontsize=8)

    caption = "Prose, prefill, to the bf16 reference; four bins a decade, the ends hold the rest."
    return _drawn("distribution", "Distribution of the KL over tokens", caption, draw, 3.2)


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
            places = [place + 0.38 * index - 0.19 for place in range(len(sizes))]
            widths = [pair[index] for pair in sizes.values()]
            axes.barh(places, widths, 0.36, color=COLOURS[index], label=phase)
        axes.set_yticks(range(len(sizes)), list(sizes))
        axes.invert_yaxis()
        axes.set(xlabel="plan, MiB")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)

    return _drawn("plans", "Plan size", "Serialized engines.", draw, 0.8 + 0.26 * len(sizes))
