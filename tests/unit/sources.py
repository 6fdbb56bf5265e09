"""Which modules of the package another one imports: what a key over sources has to hold."""

import ast
from pathlib import Path

import gptneo_trt

FOLDER = Path(gptneo_trt.__file__).parent


def imported_modules(name):
    """Return the files of the package that a module imports, and what those import."""
    found, left = set(), {name}
    while left:
        one = left.pop()
        found.add(one)
        tree = ast.parse((FOLDER / one).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gptneo_trt"):
                names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                files = {f"{each.partition('.')[2]}.py" for each in names}
                left |= {file for file in files if (FOLDER / file).is_file()} - found
    return found
