"""Cells and measured values -> the tables at the end of a run, and of its reports."""

from collections.abc import Collection, Mapping, Sequence

from gptneo_trt.data import Cell
from gptneo_trt.results import Values
from gptneo_trt.verdicts import UPDATE_IT, Key, coverage

WORST_FIRST = ("failed", "inconclusive", "not measured", "passed")
HEADINGS = (
    "variant", "KL mean", "KL p99", "x floor", "top-1", "perplexity", "detects %", "plan MiB",
    "build s", "verdict",
)  # fmt: skip
LEGEND = (
    "KL in nats a token to the bf16 reference, prefill / decode; p99, x floor (fp16's KL; +-: to "
    "the further one-sided bound), top-1 (+- its standard error over texts) and perplexity: "
    "prefill; detects: minimum detectable effect of the comparison with the stored run, in per "
    "cent of the stored KL to float32, prefill / decode / sampled text in prefill; plan MiB and "
    "build s: prefill / decode"
)
# Cells of ``detects %``: phase and metric.
KL_REGRESSIONS = (
    ("prefill", "regression/kl_mean_nats"),
    ("decode", "regression/kl_mean_nats"),
    ("prefill", "regression/sampled/kl_mean_nats"),
)
ENGINE_HEADINGS = (
    "variant", "x fp16", "us", "fp16 us", "recipe KL", "engine excess %", "KL to interpreter",
    "load s",
)  # fmt: skip
ENGINE_LEGEND = (
    "prefill / decode; x fp16: fp16's device time over the row's, in the same rounds; us, and fp16 "
    "us in these rounds: a replay; recipe KL in nats a token, interpreter to the bf16 reference; "
    "engine excess in per cent of it; KL to interpreter in nats a token, rows without FP8; +-: to "
    "the further end of the 95 % interval"
)
ALTERNATIVE_HEADINGS = ("phase", "instead of the engine", "x fp16's time", "us")
ALTERNATIVES_LEGEND = (
    "x fp16's time: device time a replay over the fp16 engine's in the same rounds, above 1 is "
    "slower; us: a replay, of the fp16 engine in rounds next to itself; weights_read: all weights "
    "read once, at copy bandwidth; step over bare engine: a decode step's time over its engine's "
    "alone"
)
PHASES = ("prefill", "decode")
NOT_MEASURED = "- / -"


def worst_verdict(cells: Sequence[Cell]) -> str:
    """Return the worst verdict among cells; "not measured" when there is none."""
    found = {cell.verdict for cell in cells}
    return next((verdict for verdict in WORST_FIRST if verdict in found), "not measured")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pair(values: Values, name: str, form: str) -> str:
    return " / ".join(_number(values.get(f"{phase}/{name}"), form) for phase in PHASES)


def quality_rows(
    values: Mapping[str, Values],
    cells: Sequence[Cell],
    floor: Values,
    decisions: Mapping[str, str],
) -> list[tuple[str, ...]]:
    """Return the texts under HEADINGS, a row a variant in the order of ``values``.

    Args:
        values: variant -> flat measured values.
        cells: every judged cell.
        floor: flat values of the variant whose KL is 1 x floor.
        decisions: variant -> "shipped" or "studied".
    """
    rows: list[tuple[str, ...]] = []
    for variant, row in values.items():
        own = [cell for cell in cells if cell.variant == variant]
        verdict = worst_verdict(own)
        rows.append(
            (
                variant,
                _pair(row, "prose/bf16/kl_mean_nats", "#.3g"),
                _number(row.get("prefill/prose/bf16/kl_p99_nats"), "#.3g"),
                _floor_ratio(row, floor),
                _top1(row),
                _number(row.get("prefill/prose/bf16/perplexity"), ".2f"),
                _detectable(own),
                _pair(row, "plan_mib", ".2f"),
                _pair(row, "build_s", ".1f"),
                f"{verdict} ({decisions[variant]})" if variant in decisions else verdict,
            )
        )
    return rows


def _floor_ratio(row: Values, floor: Values) -> str:
    """Return the KL over the floor's, with its interval where the ship decision was judged."""
    prefix = "prefill/prose/bf16/"
    own_kl, floor_kl = (each.get(f"{prefix}kl_mean_nats") for each in (row, floor))
    ratio = own_kl / floor_kl if own_kl is not None and floor_kl else None
    ends = (row.get(f"{prefix}floor_ratio_{end}_x") for end in ("lower", "upper"))
    return _interval(".1f", ratio, *ends)


def _top1(row: Values) -> str:
    """Return the top-1 agreement in prefill and its standard error."""
    value, error = (
        row.get(f"prefill/prose/bf16/{name}") for name in ("top1_frac", "top1_stderr_frac")
    )
    return _number(value, ".4f") + ("" if error is None else f"+-{error:.4f}")


def _detectable(cells: Sequence[Cell]) -> str:
    """Return the minimum detectable effects of KL_REGRESSIONS in per cent of the stored KL."""
    found = {
        (cell.phase, cell.metric): 100 * cell.minimum_detectable / cell.baseline
        for cell in cells
        if cell.minimum_detectable is not None and cell.baseline
    }
    return " / ".join(_number(found.get(key), ".1f") for key in KL_REGRESSIONS)


def improvements(cells: Sequence[Cell]) -> list[str]:
    """Return a line a cell that is better than its baseline beyond noise, in order."""
    return [
        f"{cell.variant}/{cell.phase}/{cell.metric}: {cell.reason}"
        for cell in cells
        if cell.verdict == "passed" and UPDATE_IT in cell.reason
    ]


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the headings and a line a row, columns as wide as their longest text; [] of none."""
    if not rows:
        return []
    lines = [headings, *rows]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    return [
        "".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _interval(form: str, value: float | None, lower: float | None, upper: float | None) -> str:
    """Return "value+-its distance to the further end"; the value alone without an interval."""
    if value is None or lower is None or upper is None:
        return _number(value, form)
    return f"{value:{form}}+-{max(upper - value, value - lower):{form}}"


def _speedup(row: Values, phase: str) -> str:
    names = ("speedup_x", "speedup_lower_x", "speedup_upper_x")
    return _interval(".3f", *(row.get(f"{phase}/{name}") for name in names))


def _excess(row: Values, phase: str) -> str:
    """Return the engine excess in per cent of the recipe loss; "-" of a recipe without loss."""
    recipe = row.get(f"{phase}/recipe/bf16/kl_mean_nats")
    if not recipe:
        return "-"
    names = ("kl_mean_nats", "kl_lower_nats", "kl_upper_nats")
    nats = (row.get(f"{phase}/excess/bf16/{name}") for name in names)
    return _interval("z.1f", *(None if each is None else 100 * each / recipe for each in nats))


def engine_rows(values: Mapping[str, Values]) -> list[tuple[str, ...]]:
    """Return the texts under ENGINE_HEADINGS, a row a variant; [] where no engine ran.

    Args:
        values: variant -> flat measured values.
    """
    rows: list[tuple[str, ...]] = [
        (
            variant,
            " / ".join(_speedup(row, phase) for phase in PHASES),
            _pair(row, "latency_us", ".1f"),
            _pair(row, "fp16_latency_us", ".1f"),
            _pair(row, "recipe/bf16/kl_mean_nats", "#.3g"),
            " / ".join(_excess(row, phase) for phase in PHASES),
            _pair(row, "direct/kl_mean_nats", "#.2g"),
            _pair(row, "load_s", ".1f"),
        )
        for variant, row in values.items()
    ]
    if all(text == NOT_MEASURED for row in rows for text in row[1:]):
        return []
    return rows


def alternatives(floor: Values, phase: str) -> dict[str, float]:
    """Return what was timed instead of fp16's engine -> its time over that, the fastest first."""
    prefix = f"{phase}/alternative/"
    times = sorted(
        (value, name.removeprefix(prefix).removesuffix("_x"))
        for name, value in floor.items()
        if name.startswith(prefix) and name.endswith("_x")
    )
    return {name: value for value, name in times}


def alternative_rows(floor: Values) -> list[tuple[str, ...]]:
    """Return the texts under ALTERNATIVE_HEADINGS: fp16's engine, then the fastest first a phase.

    Args:
        floor: flat values of fp16, whose engine they were timed against.
    """
    rows: list[tuple[str, ...]] = []
    for phase in PHASES:
        times = alternatives(floor, phase)
        if times:
            own_us = _number(floor.get(f"{phase}/latency_us"), ".1f")
            rows.append((phase, "fp16 engine", "1.00", own_us))
        for name, value in times.items():
            other_us = _number(floor.get(f"{phase}/alternative/{name}_us"), ".1f")
            rows.append((phase, name, f"{value:.2f}", other_us))
        overhead = floor.get(f"{phase}/step_overhead_x")
        if overhead is not None:
            rows.append((phase, "step over bare engine", f"{overhead:.3f}", "-"))
    return rows


def table(
    values: Mapping[str, Values],
    cells: Sequence[Cell],
    floor: Values,
    decisions: Mapping[str, str],
) -> list[str]:
    """Return ``quality_rows`` as aligned lines."""
    return _aligned(HEADINGS, quality_rows(values, cells, floor, decisions))


def engine_table(values: Mapping[str, Values]) -> list[str]:
    """Return ``engine_rows`` as aligned lines."""
    return _aligned(ENGINE_HEADINGS, engine_rows(values))


def alternatives_table(floor: Values) -> list[str]:
    """Return ``alternative_rows`` as aligned lines."""
    return _aligned(ALTERNATIVE_HEADINGS, alternative_rows(floor))


def tables(
    values: Mapping[str, Values],
    cells: Sequence[Cell],
    floor: Values,
    decisions: Mapping[str, str],
) -> list[str]:
    """Return ``table``, then the tables of engines that have a row; a legend below each.

    Arguments are those of ``quality_rows``.
    """
    lines = [*table(values, cells, floor, decisions), LEGEND]
    for own, legend in (
        (engine_table(values), ENGINE_LEGEND),
        (alternatives_table(floor), ALTERNATIVES_LEGEND),
    ):
        if own:
            lines += ["", *own, legend]
    return lines


def coverage_line(expected: Collection[Key], cells: Sequence[Cell]) -> str:
    """Return "measured M of N cells", and which are missing."""
    measured, missing = coverage(expected, cells)
    line = f"measured {len(measured)} of {len(expected)} cells"
    if missing:
        names = ["/".join(key) for key in sorted(missing)]
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        line += f"; not measured: {shown}"
    return line
