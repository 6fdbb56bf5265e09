"""Which rows a run is about."""

import pytest

from gptneo_trt.variants import VARIANTS


def selected_names(config: pytest.Config) -> list[str]:
    """Return the rows to run, in the order of VARIANTS."""
    asked = [name.strip() for name in config.getoption("--variants").split(",") if name.strip()]
    return [name for name in VARIANTS if name in asked] + [
        name for name in asked if name not in VARIANTS
    ] or list(VARIANTS)
