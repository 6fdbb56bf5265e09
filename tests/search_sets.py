"""Search the sets of projections on a GPU: ``python -m tests.search_sets --target h200``.

Runs the gate for the rows of one kind each and the row itself, predicts every set from them, runs
the gate for the sets on the front of quality and speed, and prints what was found, which is also
``DIR/search.md``. ``--from FILE`` starts from the ``results.json`` of an earlier run on this GPU.
What follows ``--`` is handed to pytest. The exit status is 0 where both runs were green.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gptneo_trt.errors import MetricError, VariantError
from gptneo_trt.results import read_results
from gptneo_trt.search import AT_MOST, BASE, report, rows_of_one_kind, search
from gptneo_trt.targets import TARGETS
from gptneo_trt.variants import FLOOR, variant_named
from tests.measure_gate import gate_command


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    gpus = sorted(name for name, target in TARGETS.items() if target.needs_gpu)
    parser = argparse.ArgumentParser(prog="python -m tests.search_sets")
    parser.add_argument("--target", choices=gpus, required=True)
    parser.add_argument("--base", default=BASE, help=f"row whose sets are searched ({BASE})")
    parser.add_argument("--at-most", type=int, default=AT_MOST, help="sets to measure a phase")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE", help="results.json")
    parser.add_argument("--report", type=Path, metavar="DIR", default=Path("gate-report"))
    parser.add_argument("pytest", nargs="*", help="after --: options of pytest")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, names: Sequence[str], folder: Path) -> int:
    """Run the gate for some rows, with its report in a folder; return the exit status."""
    rows = ",".join([FLOOR, *names])
    command = gate_command(options.target, f"--variants={rows}", f"--gate-report={folder}")
    return subprocess.run([*command, *options.pytest], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Measure, predict, measure what was proposed, and say what came out."""
    options, status = _parsed(arguments), 0
    alone, front = (options.report / name / "results.json" for name in ("alone", "front"))
    try:
        base = variant_named(options.base)
        if options.earlier:
            alone = options.earlier
        else:
            names = [*rows_of_one_kind(base).values(), base.name]
            status = _run(options, names, alone.parent)
        runs = [read_results(alone)]
        proposed = search(runs, options.base).proposals(options.at_most)
        if proposed:
            status = max(status, _run(options, proposed, front.parent))
            runs.append(read_results(front))
        text = "\n".join(report(search(runs, options.base)))
    except (MetricError, VariantError, OSError, ValueError) as error:
        print(f"search_sets: {error}", file=sys.stderr)
        return max(status, 1)
    options.report.mkdir(parents=True, exist_ok=True)
    (options.report / "search.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
