"""Read a JSON object that anybody may have written, within bounds: file -> dict.

Beyond what JSON asks, every key stands once in its object, every number is finite, no string has
half a surrogate pair, and size, depth and digits are bounded, so that no caller meets a
RecursionError, an OverflowError or a UnicodeEncodeError later. Reading takes at most
MEMORY_FACTOR times the size of the file.
"""

import json
import math
import os
import re
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from gptneo_trt.errors import GptNeoTrtError

# The tokenizer.json of GPT-Neo has 3.4 MB, and is the largest.
MAX_BYTES = 32 << 20
# Lists and objects inside each other; a tokenizer.json has 4.
MAX_DEPTH = 32
# Enough for 128 bits.
MAX_DIGITS = 40
# Of a key or a number in a message; a pattern of millions of characters takes minutes to compile.
SHOWN = 60
# Of peak memory to bytes read: measured 42 for short lists inside short lists.
MEMORY_FACTOR = 64


def object_from_file(path: Path, error: type[GptNeoTrtError], remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: of the file; named in messages.
        error: the class that is raised.
        remedy: what to do about it, the end of every message.

    Raises:
        GptNeoTrtError: of the class ``error``: no regular file, or not readable, or see
            ``object_from_bytes``.
    """
    if not path.is_file():
        raise error(f"{path}: obtained no file, expected a JSON object; {remedy}")
    try:
        with path.open("rb") as stream:
            # Python makes room for all that is asked for.
            size = os.fstat(stream.fileno()).st_size
            content = stream.read(min(size, MAX_BYTES) + 1)
    except OSError as reason:
        raise error(f"{path}: obtained {reason}, expected a JSON object; {remedy}") from reason
    return object_from_bytes(content, str(path), error, remedy)


def object_from_bytes(
    content: bytes, what: str, error: type[GptNeoTrtError], remedy: str
) -> dict[str, Any]:
    """Return the object in the bytes of a JSON file.

    Args:
        content: UTF-8, at most MAX_BYTES.
        what: names the bytes in messages.
        error: the class that is raised.
        remedy: what to do about it, the end of every message.

    Raises:
        GptNeoTrtError: of the class ``error``: too large or too deep, not UTF-8, malformed (with
            line and column), a key twice, a number that is not finite or has too many digits,
            half a surrogate pair, or no object.
    """
    try:
        value = _parsed(content)
    except json.JSONDecodeError as reason:
        place = f"line {reason.lineno}, column {reason.colno}"
        message = f"{what}: {place}: not JSON: {reason.msg}, expected a JSON object; {remedy}"
        raise error(message) from reason
    except RecursionError as reason:
        raise error(f"{what}: {_too_deep()}; {remedy}") from reason
    except ValueError as reason:
        raise error(f"{what}: {reason}; {remedy}") from reason
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"{what}: obtained a {kind}, expected a JSON object; {remedy}")
    return value


def _parsed(content: bytes) -> Any:
    """Return the value of JSON.

    Raises:
        ValueError: see ``object_from_bytes``.
        RecursionError: deeper than Python's own limit.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"obtained more than {MAX_BYTES} bytes of JSON, expected at most as many")
    text = content.decode()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counted = Counter(key for key, _ in pairs)
            twice = sorted(key for key, count in counted.items() if count > 1)
            where = _places(text, json.dumps(twice[0], ensure_ascii=False))
            raise ValueError(
                f"{where}obtained duplicate keys {reprlib.repr(twice)}, expected each key once"
            )
        return found

    def finite(token: str) -> float:
        number = float(token)
        if not math.isfinite(number):
            where = _places(text, token)
            raise ValueError(f"{where}obtained {token[:SHOWN]}, expected a finite number")
        return number

    def whole(token: str) -> int:
        if len(token) > MAX_DIGITS:
            where = _places(text, token)
            raise ValueError(
                f"{where}obtained an integer of {len(token)} digits, expected at most {MAX_DIGITS}"
            )
        return int(token)

    value = json.loads(
        text, object_pairs_hook=unique, parse_float=finite, parse_int=whole, parse_constant=finite
    )
    _check_inside(value)
    return value


def _places(text: str, token: str) -> str:
    """Return "line 3, column 7: " of the first places where a token stands, "" for none.

    Of a long token only the beginning is looked for.
    """
    end = r'(?![\w."])' if len(token) <= SHOWN else ""
    whole = re.compile(rf'(?<![\w."+-]){re.escape(token[:SHOWN])}{end}')
    starts = [match.start() for _, match in zip(range(3), whole.finditer(text), strict=False)]
    places = [
        f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"
        for at in starts
    ]
    return f"{' or '.join(places)}: " if places else ""


def _check_inside(value: Any) -> None:
    """Check depth and strings, a level at a time, so that no depth is too much for this.

    Raises:
        ValueError: deeper than MAX_DEPTH, or half a surrogate pair in a key or a string.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_too_deep())
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        for each in inner:
            if isinstance(each, str):
                _check_text(each)
        level = [each for each in inner if isinstance(each, dict | list)]


def _check_text(text: str) -> None:
    """Check that a text can be encoded.

    Raises:
        ValueError: half a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"obtained half a surrogate pair in {text[max(0, error.start - 20) :][:40]!a}, "
            "expected whole characters"
        ) from error


def _too_deep() -> str:
    return f"obtained lists or objects nested too deeply, expected at most {MAX_DEPTH} levels"
