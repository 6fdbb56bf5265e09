"""The list of modules that a reader begins with."""

from pathlib import Path

import gptneo_trt


def test_every_module_has_a_line_and_every_line_a_module():
    """A new module is not left out, and one that is gone is not listed."""
    _, lines, _ = gptneo_trt.__doc__.split("\n\n")
    listed = [line.split()[0] for line in lines.splitlines()]
    files = {path.stem for path in Path(gptneo_trt.__file__).parent.glob("*.py")} - {"__init__"}
    assert sorted(listed) == sorted(files)
