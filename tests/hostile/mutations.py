"""Files that were damaged, or written to do damage, and what reading one may do."""

import copy
import json
import time
import tracemalloc

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gptneo_trt.errors import GptNeoTrtError

# Of the processor: a busy machine is no hang.
SECONDS = 10
# Beside what is in proportion to the file.
SPARE_BYTES = 4 << 20
_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
QUICK = settings(max_examples=250, derandomize=True, database=None, **_SETTINGS)
LONG = settings(max_examples=5000, database=None, **_SETTINGS)

# What may stand for any value, as it is spelled in the file.
FRAGMENTS = (
    *("null", "true", "false", "{}", "[]", '""', '"x"', '"1"', '"\\u0000"', '"\\ud800"'),
    *("0", "1", "-1", "2", "0.5", "1.0", "-0.0", "1e-400", "1e30", "1e999", "NaN", "-Infinity"),
    *(str(2**31), str(2**63), str(2**64), str(10**12), str(10**38), "9" * 5000),
    *("-" + "9" * 400, '"' + "x" * 20000 + '"', "[[" * 10, "[" * 3000 + "]" * 3000),
    *('{"a":' * 3000 + "0" + "}" * 3000, '{"a": 1}', '["a", "b"]', "[0, 1]", "[1, 2, 3]"),
    *('[["global"], 1000000000]', '[[["global"], 1000000000]]', '"../x"', "\udc80", '"\udcff"'),
    '{"type": "Split", "pattern": {"Regex": "(a+)+$"}}',
)  # fmt: skip


def outcome(load, size, factor):
    """Return what ``load`` returns, or our error; anything else that it raises fails the test.

    Peak memory that Python sees is at most ``factor`` times ``size`` and SPARE_BYTES.
    """
    tracemalloc.start()
    started = time.process_time()
    try:
        found = load()
    except GptNeoTrtError as error:
        found = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - started < SECONDS
    assert peak <= factor * size + SPARE_BYTES, (peak, size)
    assert len(str(found).encode()) <= factor * size + SPARE_BYTES
    return found


# What is done to a part of a file -> what replaces it, of the part and a number from 1 to 255.
_CHANGES = {
    "flip": lambda part, number: bytes([part[0] ^ number]) + part[1:] if part else b"",
    "take out": lambda part, number: b"",
    "repeat": lambda part, number: part * (1 + number % 50),
    "zero": lambda part, number: bytes(len(part)),
    "fill": lambda part, number: b"\xff" * len(part),
    "put in": lambda part, number: number.to_bytes(1 + number % 8, "little") + part,
    "other byte": lambda part, number: bytes([number]) + part[1:],
}


@st.composite
def mutated_bytes(draw, content):
    """Draw the bytes after one to four of _CHANGES, or of a cut of all that follows."""
    for _ in range(draw(st.integers(1, 4))):
        change = draw(st.sampled_from(["cut", *_CHANGES]))
        start = draw(st.integers(0, max(0, len(content) - 1)))
        if change == "cut":
            content = content[:start]
            continue
        end = start + draw(st.integers(1, 64))
        part = _CHANGES[change](content[start:end], draw(st.integers(1, 255)))
        content = content[:start] + part + content[end:]
    return content


@st.composite
def mutated_json(draw, document, fragments=()):
    """Draw the bytes of a JSON document after one to three changes of its structure.

    A value is replaced by one of FRAGMENTS or ``fragments`` or by another value of the document,
    a member is left out, added or there twice, a key is renamed to one of them.
    """
    document, spelled = copy.deepcopy(document), {}

    def placeholder(text):
        name = f"@{len(spelled)}@"
        spelled[json.dumps(name)] = text
        return name

    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        container, key = draw(st.sampled_from(places))
        change = draw(st.sampled_from(["replace", "replace", "swap", "drop", "twice", "add"]))
        fragment = draw(st.sampled_from((*FRAGMENTS, *fragments)))
        if change == "swap":
            other, name = draw(st.sampled_from(places))
            container[key] = copy.deepcopy(other[name])
        elif change == "drop":
            del container[key]
        elif change == "twice" and isinstance(container, dict):
            container[placeholder(json.dumps(key))] = copy.deepcopy(container[key])
        elif change == "add" and isinstance(container, dict):
            name = fragment if fragment.startswith('"') and fragment.endswith('"') else '"new"'
            container[placeholder(name)] = placeholder(fragment)
        elif change == "add":
            container.append(placeholder(fragment))
        else:
            container[key] = placeholder(fragment)
        if not document:
            break
    text = json.dumps(document, ensure_ascii=False)
    for name, spelling in spelled.items():
        text = text.replace(name, spelling)
    return text.encode("utf-8", "surrogateescape")


def _places(value):
    """Yield (container, key or index) of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield value, key
        if isinstance(each, dict | list):
            yield from _places(each)


def mutated(content, fragments=()):
    """Return a strategy of a JSON file's bytes: damaged anywhere, or changed in structure."""
    return mutated_bytes(content) | mutated_json(json.loads(content), fragments)
