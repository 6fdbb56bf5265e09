"""Write the baselines that were published, not measured: ``python -m tests.write_published``.

The one source of ``baselines/b200`` and ``baselines/b300`` until their rows are measured. A row
that ``--update-baselines`` has measured leaves PUBLISHED; a measured file is never overwritten.
"""

import sys
from decimal import Decimal
from pathlib import Path

from gptneo_trt import baselines
from gptneo_trt.baselines import Baseline
from gptneo_trt.checkpoint import STUDY_CHECKPOINT

ROOT = Path(__file__).parents[1]
MODEL, _, REVISION = STUDY_CHECKPOINT.partition("@")
CONTEXT = 256  # rows of the KV cache, and the longest prefill
FLAVOUR = "tensorrt"

NAMES = (
    "decode/prose/bf16/kl_mean_nats",
    "decode/prose/bf16/perplexity",
    "decode/plan_mib",
    "decode/speedup_x",
    "prefill/speedup_x",
)
# Target, version, variant -> a figure a name, with the digits that were printed. The floor has no
# speed-up: it is what the others are compared with.
PUBLISHED = {
    ("b200", "11.4.0.106", "fp16"): ("0.0022", "58.52", "313.6"),
    ("b200", "11.4.0.106", "fp8"): ("0.0832", "64.06", "239.5", "1.10", "1.14"),
    ("b300", "11.4.0.106", "fp16"): ("0.0023", "58.57", "313.6"),
    ("b300", "11.4.0.106", "fp8"): ("0.0844", "64.44", "239.5", "1.10", "1.12"),
    ("b300", "11.1.0.106", "fp16"): ("0.0024", "58.57", "313.6"),
    ("b300", "11.1.0.106", "fp8"): ("0.0858", "63.65", "239.5", "1.14", "1.12"),
}
REFERENCE_PERPLEXITY = "58.55"  # given once, for all machines
PROVENANCE = {
    "published": "NVIDIA TensorRT-Model-Connect pull request 2105",
    "url": "https://github.com/NVIDIA/TensorRT-Model-Connect/pull/2105",
    "reference": "Hugging Face GPTNeoForCausalLM in bf16",
    "text": "wikitext-2 test split, 1536 tokens",
    "note": "speedup_x is fp16 time over FP8 time; KL, perplexity and plan size are given without "
    "a phase, the reference's perplexity once for all machines; the code was never published",
}


def half_unit(text: str) -> float:
    """Return half a unit of the last digit of a printed number: 0.005 for "1.10"."""
    exponent = Decimal(text).as_tuple().exponent
    if not isinstance(exponent, int):
        raise ValueError(f"rounding of {text!r}: obtained no digits, expected a finite number")
    return float(Decimal(5).scaleb(exponent - 1))


def figures(target: str, version: str, variant: str) -> dict[str, str]:
    """Return flat name -> the number as printed, of one row of PUBLISHED."""
    row = PUBLISHED[target, version, variant]
    found = dict(zip(NAMES, row, strict=False))
    return found | {"decode/prose/bf16/reference_perplexity": REFERENCE_PERPLEXITY}


def published_baseline(target: str, version: str, variant: str) -> Baseline:
    """Return the baseline of one row of PUBLISHED."""
    printed = figures(target, version, variant)
    key = {
        "context": CONTEXT,
        "flavour": FLAVOUR,
        "model": MODEL,
        "revision": REVISION,
        "target": target,
        "version": version,
    }
    values = {name: float(text) for name, text in printed.items()}
    rounding = {name: half_unit(text) for name, text in printed.items()}
    return Baseline(key, PROVENANCE, values, {}, rounding)


def folder_of(root: Path, target: str, version: str) -> Path:
    """Return ``baselines/<target>/<flavour>-<version>/<model>`` under ``root``."""
    return root / "baselines" / target / f"{FLAVOUR}-{version}" / MODEL.replace("/", "--")


def write_published(root: Path) -> list[Path]:
    """Write every row of PUBLISHED under ``root/baselines``; return the JSON files.

    Raises:
        BaselineError: a row is measured by now; take it out of PUBLISHED.
    """
    written = []
    for target, version, variant in PUBLISHED:
        folder = folder_of(root, target, version)
        baselines.write(folder, variant, published_baseline(target, version, variant))
        written.append(folder / f"{variant}.json")
    return written


if __name__ == "__main__":
    for path in write_published(ROOT):
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
