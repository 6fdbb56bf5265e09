"""A child process with little memory: ``python -m tests.hostile.bounded FOLDER < NAMES``.

Memory that libraries take for themselves is not seen by tracemalloc, so here a limit of the
operating system holds while each file is read; what a file asks for beyond it would be a
MemoryError, or the end of the process.
"""

import json
import resource
import sys
from hashlib import sha256
from pathlib import Path

from gptneo_trt.checkpoint import BUNDLED_FOLDER, checkpoint_from_source
from gptneo_trt.errors import GptNeoTrtError
from gptneo_trt.texts import text_set
from gptneo_trt.token_values import read_tokens

SPARE_BYTES = 64 << 20


def read(path):
    """Read a file by its suffix."""
    if path.suffix == ".tokenizer":
        return text_set("prompts", "bundled", path, 256)
    if path.suffix == ".npz":
        return read_tokens(path, sha256(path.read_bytes()).hexdigest())
    return checkpoint_from_source(str(path))


def limit(size):
    """Allow ``size`` more bytes of address space than are taken now."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + size, resource.RLIM_INFINITY))


def main(folder, names, factor=64):
    """Read each file under its own limit; print name -> what came of it."""
    checkpoint_from_source("bundled")
    text_set("prompts", "bundled", BUNDLED_FOLDER / "tokenizer.json", 256)
    found = {}
    for name in names:
        path = folder / name
        files = path.iterdir() if path.is_dir() else [path]
        limit(factor * sum(file.stat().st_size for file in files) + SPARE_BYTES)
        try:
            found[name] = type(read(path)).__name__
        except GptNeoTrtError as error:
            found[name] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
