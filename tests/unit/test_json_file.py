"""JSON that anybody may have written: what is read, and that everything else is one error."""

import json
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptneo_trt.errors import BaselineError, CheckpointError
from gptneo_trt.json_file import (
    MAX_BYTES,
    MAX_DEPTH,
    MEMORY_FACTOR,
    object_from_bytes,
    object_from_file,
)

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**64), 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


def read(text):
    """Return the object in a text."""
    return object_from_bytes(text.encode(), "a.json", CheckpointError, "copy it")


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_any_object_is_read_as_it_was_written(value, indent, ascii_only):
    """Spelled with escapes or without, on one line or many."""
    assert read(json.dumps(value, indent=indent, ensure_ascii=ascii_only)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.json: line 1, column 1: not JSON: .*, expected a JSON object; copy it"),
        ('{"a": 1,\n "b": }', "line 2, column 7: not JSON: Expecting value"),
        ("[1]", "a.json: obtained a list, expected a JSON object; copy it"),
        ("null", "obtained a NoneType"),
        ('{"a": 1,\n "a": 2}', r"line 1, column 2 or line 2, column 2: .*duplicate keys \['a'\]"),
        ('{"é": 1, "\\u00e9": 1}', r"line 1, column 2: .*duplicate keys \['é'\]"),
        ('{"a": NaN}', "line 1, column 7: obtained NaN, expected a finite number; copy it"),
        ('{"a": [-Infinity]}', "line 1, column 8: obtained -Infinity"),
        ('{"a":\n1e999}', "line 2, column 1: obtained 1e999"),
        ('{"a": ' + "9" * 5000 + "}", "obtained an integer of 5000 digits, expected at most 40"),
        ('{"a": "\\ud800"}', r"half a surrogate pair in .*ud800.*, expected whole characters"),
        ('{"\\ud800": 1}', "half a surrogate pair"),
        ("\ufeff{}", "not JSON: Unexpected UTF-8 BOM"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    """The file, the place, what was there and what to do."""
    with pytest.raises(CheckpointError, match=message):
        read(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(depth, start, end):
    """One level more than allowed is refused, whether Python's own limit is met or not."""
    inner = "1" if start != "[" else ""
    with pytest.raises(CheckpointError, match="nested too deeply, expected at most 32 levels"):
        read('{"a":' + start * (depth - 1) + inner + end * (depth - 1) + "}")


def test_the_greatest_depth_is_read():
    """As many levels as allowed, the object itself among them."""
    assert read('{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")


def test_bytes_that_are_no_text():
    """Not UTF-8 is the caller's error, not a UnicodeDecodeError."""
    with pytest.raises(BaselineError, match="can't decode byte 0xff in position 2"):
        object_from_bytes(b'{"\xff', "a.json", BaselineError, "copy it")


def test_size_is_bounded(tmp_path):
    """A file that is too large is not parsed."""
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)

    with pytest.raises(CheckpointError, match=f"more than {MAX_BYTES} bytes of JSON"):
        object_from_file(path, CheckpointError, "copy it")


def test_what_is_no_file(tmp_path):
    """Nothing, a folder, and a device that never ends are refused alike."""
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "zero.json"):
        if path.name == "zero.json":
            path.symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match="obtained no file, expected a JSON object"):
            object_from_file(path, CheckpointError, "copy it")


@pytest.mark.parametrize(
    "unit", ["[]", "{}", '{"":0}', "[[[[[]]]]]", "1.5", '"é"', '"😀"', '{"a":{}}', "null"]
)
def test_memory_is_bounded(unit):
    """The objects of the worst files take no more than the stated factor."""
    content = ('{"a":[' + f"{unit}," * (30_000 // len(unit)) + "0]}").encode()
    tracemalloc.start()
    object_from_bytes(content, "a.json", CheckpointError, "copy it")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY_FACTOR * len(content)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("9" * 10**6, "line 1, column 6: obtained an integer of 1000000 digits"),
        ("9" * 10**6 + ".0", "line 1, column 6: obtained 9{60}, expected a finite number"),
        ("1e" + "9" * 10**6, "line 1, column 6: obtained 1e9{58}, expected a finite number"),
        (
            '{"' + "k" * 10**6 + '":1,"' + "k" * 10**6 + '":2}',
            r"column 7 or .* keys \['k+\.\.\.k+'",
        ),
    ],
    ids=["integer", "float", "exponent", "key"],
)
def test_long_tokens_take_no_time_and_short_messages(inner, message):
    """A token of a million characters is named by its beginning, within seconds."""
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match=message) as caught:
        read(f'{{"a":{inner}}}')
    assert time.perf_counter() - started < 10
    assert len(str(caught.value)) < 200


def test_many_keys_twice_take_no_time():
    """Every key stands twice, and all of them are found at once."""
    keys = ",".join(f'"{number}":0' for number in range(30_000))
    with pytest.raises(CheckpointError, match="duplicate keys"):
        read(f"{{{keys},{keys}}}")
