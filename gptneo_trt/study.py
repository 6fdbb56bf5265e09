"""Two results files -> what the study found and what this project measured, side by side.

``python -m gptneo_trt.study BUNDLED RANDOM`` reads the ``results.json`` of a GPU's run on the
bundled checkpoint, and of its run on ``random:gpt-neo-125m``, which has the study's shapes and no
quality. It prints a Markdown table: the study's figure as it published it (README, "Where it comes
from"), both measured ones, and what of the three can be compared.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptneo_trt.claims import decided_and_timed, floor_ratio
from gptneo_trt.decisions import cell_of
from gptneo_trt.report import PHASES
from gptneo_trt.results import read_results
from gptneo_trt.speeds import speedups
from gptneo_trt.variant import PROJECTIONS
from gptneo_trt.variants import FLOOR

Results = Mapping[str, Any]  # content of results.json
Figure = Callable[[Results], str]  # a run -> what it says, NOT_MEASURED where it does not
NOT_MEASURED = "not measured"
RECIPE = "fp8"
KL, RATIO = "prose/bf16/kl_mean_nats", "prose/bf16/floor_ratio_x"
SILENT = "-"  # of random weights, which have no quality
DIRECTION, AS_RATIO, NO, YES, NEW = "direction", "ratio", "no", "yes", "new"
# What the last column says -> what it means.
COMPARABLE = {
    DIRECTION: "whether it is more or less, on another GPU, TensorRT or text",
    AS_RATIO: "each to its own fp16, on other weights and text",
    NO: "other weights and text, or another builder",
    YES: "the same weights in the same types, or the same question",
    NEW: "the study did not measure it",
}


@dataclass(frozen=True)
class Finding:
    """Hold one line of the table.

    Attributes:
        what: is compared.
        study: its figure as published, B200 with TensorRT 11.4, B300 with 11.4, B300 with 11.1.
        figure: reads it from a run.
        comparable: what can be compared, a key of COMPARABLE.
        at_shapes: whether random weights of the study's shapes say something of it.
    """

    what: str
    study: str
    figure: Figure
    comparable: str
    at_shapes: bool = False


def _value(results: Results, variant: str, phase: str, name: str) -> float | None:
    return results["values"].get(variant, {}).get(f"{phase}/{name}")


def _joined(told: Sequence[str], between: str = " / ") -> str:
    """Return figures in one text; of nothing but what was not measured, that once."""
    return NOT_MEASURED if set(told) == {NOT_MEASURED} else between.join(told)


def _figures(form: str, *places: tuple[str, str, str], between: str = " / ") -> Figure:
    """Return what shows the values of some (variant, phase, name), joined."""

    def read(results: Results) -> str:
        found = [_value(results, *place) for place in places]
        told = [NOT_MEASURED if each is None else form.format(each) for each in found]
        return _joined(told, between)

    return read


def _of_two(tell: Callable[[float, float], str], *places: tuple[str, str, str]) -> Figure:
    """Return what tells something of two values, where a run has both."""

    def read(results: Results) -> str:
        one, other = (_value(results, *place) for place in places)
        return NOT_MEASURED if one is None or other is None else tell(one, other)

    return read


def _speed(variant: str) -> Figure:
    """Return what shows fp16's time over a row's, in decode and prefill as the study has them."""

    def read(results: Results) -> str:
        timed = [speedups(results, phase).get(variant) for phase in reversed(PHASES)]
        return _joined([f"{each[0]:.2f}" if each else NOT_MEASURED for each in timed])

    return read


def _ratio(variant: str) -> Figure:
    return _figures("{:.1f} x", (variant, "prefill", RATIO), (variant, "decode", RATIO))


def _alone(results: Results) -> str:
    """Return the least and the most that one kind alone loses in prefill, with their kinds."""
    ratios = {
        kind: ratio
        for kind in PROJECTIONS
        if (ratio := floor_ratio(results, f"{RECIPE}-{kind}")) is not None
    }
    if not ratios:
        return NOT_MEASURED
    least, most = min(ratios, key=lambda k: ratios[k]), max(ratios, key=lambda k: ratios[k])
    return f"{ratios[least]:.1f} ({least}) to {ratios[most]:.1f} x ({most})"


def _out_proj(results: Results) -> str:
    """Return whether the row was built in both phases, and what it lost if anything."""
    name = f"{RECIPE}-out_proj"
    cells = [cell_of(results, name, phase, "build") for phase in PHASES]
    if None in cells:
        return NOT_MEASURED
    built = all(cell is not None and cell["verdict"] == "passed" for cell in cells)
    lost = _ratio(name)(results)
    return ("builds" if built else "does not build") + ("" if lost == NOT_MEASURED else f", {lost}")


def _non_finite(results: Results) -> str:
    """Return how many rows gave nothing but finite numbers, in both phases."""
    rows = [
        [cell_of(results, variant, phase, "non_finite") for phase in PHASES]
        for variant in results["values"]
    ]
    judged = [[each for each in cells if each] for cells in rows if any(cells)]
    if not judged:
        return NOT_MEASURED
    clean = sum(all(each["verdict"] == "passed" for each in cells) for cells in judged)
    return f"none in {clean} of {len(judged)} rows"


def _both(results: Results) -> str:
    """Return which rows are within the ship limits and faster than fp16, a phase each."""
    told = []
    for phase in PHASES:
        judged = decided_and_timed(results, phase)
        both = [name for name, has_both in judged.items() if has_both]
        told += [f"{', '.join(both) or 'none'} of {len(judged)} in {phase}"] if judged else []
    return "; ".join(told) or NOT_MEASURED


FINDINGS = (
    Finding(
        "fp16's time over the FP8 recipe's, decode / prefill of 256",
        "1.10 / 1.14, 1.10 / 1.12, 1.14 / 1.12",
        _speed(RECIPE),
        DIRECTION,
        at_shapes=True,
    ),
    Finding(
        "the same of all but c_proj",
        "1.10 in decode",
        _speed("fp8-no-c_proj"),
        DIRECTION,
        at_shapes=True,
    ),
    Finding(
        "the same of c_fc alone",
        "0.98 to 1.01",
        _speed("fp8-c_fc"),
        DIRECTION,
        at_shapes=True,
    ),
    Finding(
        "decode plan, fp16 -> FP8, MiB",
        "313.6 -> 239.5",
        _figures(
            "{:.1f}",
            (FLOOR, "decode", "plan_mib"),
            (RECIPE, "decode", "plan_mib"),
            between=" -> ",
        ),
        YES,
        at_shapes=True,
    ),
    Finding(
        "KL of fp16 to bf16, nats a token, prefill / decode",
        "0.0022, 0.0023, 0.0024",
        _figures("{:.3g}", (FLOOR, "prefill", KL), (FLOOR, "decode", KL)),
        NO,
    ),
    Finding(
        "KL of the FP8 recipe",
        "0.0832, 0.0844, 0.0858",
        _figures("{:.3g}", (RECIPE, "prefill", KL), (RECIPE, "decode", KL)),
        NO,
    ),
    Finding("the same over fp16's", "about 37 x", _ratio(RECIPE), AS_RATIO),
    Finding(
        "one kind alone, over fp16's",
        "8 to 22 x, with q, k and v together",
        _alone,
        AS_RATIO,
    ),
    Finding("q, k and v together", "within 8 to 22 x", _ratio("fp8-qkv"), AS_RATIO),
    Finding("c_fc alone", "8 x, the best", _ratio("fp8-c_fc"), AS_RATIO),
    Finding(
        "KL at activation scales x 1.5",
        "0.0913, 1.10 x the recipe's",
        _of_two(
            lambda wider, own: f"{wider / own:.2f} x the recipe's",
            (f"{RECIPE}-scales-x1.5", "prefill", KL),
            (RECIPE, "prefill", KL),
        ),
        AS_RATIO,
    ),
    Finding(
        "next-token top-1, less than fp16's",
        "15 points",
        _of_two(
            lambda floor, own: f"{100 * (floor - own):.0f} points",
            (FLOOR, "prefill", "next_token/bf16/top1_frac"),
            (RECIPE, "prefill", "next_token/bf16/top1_frac"),
        ),
        DIRECTION,
    ),
    Finding(
        "perplexity of FP8 over bf16's",
        "1.09 to 1.10",
        _figures("{:.3f}", (RECIPE, "prefill", "prose/bf16/perplexity_ratio")),
        DIRECTION,
    ),
    Finding("non-finite logits, K or V", "none", _non_finite, YES, at_shapes=True),
    Finding(
        "FP8 out_proj",
        "does not build on 11.4, builds on 11.1",
        _out_proj,
        NO,
        at_shapes=True,
    ),
    Finding("within the ship limits and faster", "none", _both, YES),
    *(
        Finding(what, NOT_MEASURED, _ratio(row), NEW)
        for what, row in {
            "q_proj alone": "fp8-q_proj",
            "k_proj alone": "fp8-k_proj",
            "v_proj alone": "fp8-v_proj",
            "FP8, a weight scale a channel": "fp8-channel",
            "FP8, percentile": "fp8-percentile",
            "FP8, SmoothQuant": "fp8-smoothquant",
            "NVFP4": "nvfp4",
        }.items()
    ),
)


def table(bundled: Results, random: Results) -> Iterator[str]:
    """Yield the lines of the Markdown table."""
    yield "| | study | bundled checkpoint | random 125m | comparable |"
    yield "| --- | --- | --- | --- | --- |"
    for each in FINDINGS:
        at_shapes = each.figure(random) if each.at_shapes else SILENT
        yield (
            f"| {each.what} | {each.study} | {each.figure(bundled)} | {at_shapes} | "
            f"{each.comparable} |"
        )
    yield ""
    yield "Comparable: " + "; ".join(f"{name}: {told}" for name, told in COMPARABLE.items()) + "."


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m gptneo_trt.study")
    parser.add_argument("bundled", type=Path, help="results.json of the bundled checkpoint")
    parser.add_argument("random", type=Path, help="results.json of random:gpt-neo-125m")
    options = parser.parse_args(arguments)
    print("\n".join(table(read_results(options.bundled), read_results(options.random))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
