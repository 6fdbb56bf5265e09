"""Stored measurements <-> ``baselines/<target>/<model>/<variant>.json``; the only writer.

Beside each JSON lies ``<variant>.tokens.npz`` with the values a token, float32, whose SHA-256 the
JSON holds; ``<variant>.tokens.<sha256>.npz`` is there only after a process was killed. Both have
the same bytes whenever their content is the same. Names of values and tokens are flat:
``prefill/prose/bf16/kl_mean_nats``, ``prefill/plan_mib``, ``prefill/prose/bf16/kl_nats``.

A baseline that was not measured here but published elsewhere has the member ``rounding``, no
values a token, and a key of what the publication states and nothing else.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from gptneo_trt.errors import BaselineError
from gptneo_trt.json_file import object_from_file
from gptneo_trt.token_values import RENEW, npz_bytes, raise_all, read_tokens, token_mismatches
from gptneo_trt.whole_file import update_lock, whole_file

SCHEMA = 1
MEMBERS = {"schema": int, "key": dict, "provenance": dict, "values": dict, "tokens_sha256": str}
SHA256 = re.compile(r"[0-9a-f]{64}")
VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
MEASURED_STAYS = "obtained a published one where one is measured; keep that and drop this"


@dataclass(frozen=True, eq=False)
class Baseline:
    """Hold what was measured for one variant on one target, or published, and from what.

    Attributes:
        key: what must be equal before anything is compared (checkpoint, texts, flavour,
            version, GPU, cache rows ...); JSON types, mappings may nest.
        provenance: where the figures come from; JSON types; of it, ``references`` says by type what
            model losses are to, and ``hashes`` what was built.
        values: flat name with its unit -> finite value; at least one.
        tokens: flat name with its unit -> float32 [M], finite; may be empty.
        rounding: of a published one: name of each value -> half a unit of its last published
            digit, finite and positive, in the value's unit; empty for a measured one.
    """

    key: Mapping
    provenance: Mapping
    values: Mapping[str, float]
    tokens: Mapping[str, np.ndarray]
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_published(self) -> bool:
        """Return whether it was published elsewhere and not measured here."""
        return bool(self.rounding)


def names(folder: Path) -> set[str]:
    """Return the variants stored in a folder; none where the folder does not exist."""
    return {path.stem for path in folder.glob("*.json")}


def read(folder: Path, variant: str) -> Baseline:
    """Return a stored baseline, checked whole.

    Reading takes at most MEMORY_FACTOR of ``json_file`` times the size of the JSON, and that of
    ``token_values`` times the size of the token values.

    Args:
        folder: ``baselines/<target>/<model>``.
        variant: row name.

    Raises:
        BaselineError: there is none; JSON that is cut, has a duplicate key, NaN or Infinity,
            another schema or other members; token values that are missing, of another JSON,
            or not finite float32 [M]; a published one whose rounding is not one of each value,
            or that has token values.
    """
    path = folder / f"{variant}.json"
    if not path.is_file():
        raise BaselineError(
            f"no baseline for {_label(folder, variant)}; write one with --update-baselines"
        )
    document = object_from_file(path, BaselineError, RENEW)
    raise_all(f"{path}", _document_mismatches(document))
    sha256 = document["tokens_sha256"]
    tokens_file = _tokens_file(folder, variant, sha256)
    try:
        tokens = read_tokens(tokens_file, sha256)
    except BaselineError:
        if document == object_from_file(path, BaselineError, RENEW) and (
            tokens_file == _tokens_file(folder, variant, sha256)
        ):
            raise
        return read(folder, variant)  # another process has updated it meanwhile
    if "rounding" in document:
        wrong = _rounding_mismatches(document["values"], document["rounding"], tokens)
        raise_all(f"{path}", wrong)
    values, rounding = _floats(document["values"]), _floats(document.get("rounding", {}))
    return Baseline(document["key"], document["provenance"], values, tokens, rounding)


def write(folder: Path, variant: str, baseline: Baseline) -> None:
    """Store a baseline whole or not at all, and touch no other file.

    The rename of the JSON alone makes the new pair the stored one: until then the new token values
    lie beside the old ones under a name with their hash, where ``read`` finds them too. So a
    process killed at any moment leaves the old pair or the new one. A measured one replaces a
    published one, never the other way round.

    Raises:
        BaselineError: a variant name that is no file name; no value; a value or token that is
            not finite in float32; an empty key; a key or provenance that JSON cannot hold; a
            published one whose rounding is not one of each value, that has token values, or in
            whose place a measured one is stored.
        StorageError: a file cannot be written; the old pair is as it was.
    """
    what = f"baseline of {_label(folder, variant)} not written"
    wrong = _content_mismatches(baseline.key, baseline.values, baseline.tokens)
    if baseline.is_published:
        wrong += _rounding_mismatches(baseline.values, baseline.rounding, baseline.tokens)
    if not VARIANT_NAME.fullmatch(variant):
        wrong.append(f"variant: obtained {variant!r}, expected {VARIANT_NAME.pattern}")
    raise_all(what, wrong, "copy its figures again" if baseline.is_published else "measure again")
    replaces = baseline.is_published and variant in names(folder)
    if replaces and not read(folder, variant).is_published:
        raise BaselineError(f"{what}: {MEASURED_STAYS}")
    tokens = npz_bytes(baseline.tokens)
    try:
        sha256 = hashlib.sha256(tokens).hexdigest()
        text = _json_text(baseline, sha256)
    except (TypeError, ValueError) as error:
        raise BaselineError(
            f"{what}: key or provenance: {error}; "
            "use strings, finite numbers, lists and mappings only"
        ) from error
    _write_pair(folder, variant, text, (sha256, tokens))


def _write_pair(folder: Path, variant: str, text: str, tokens: tuple[str, bytes]) -> None:
    """Store a JSON and its token values, of this hash; remove what a killed process left."""
    sha256, content = tokens
    new = _new_tokens_file(folder, variant, sha256)
    with update_lock(folder / variant):
        with whole_file(new) as temporary:
            temporary.write_bytes(content)
        with whole_file(folder / f"{variant}.json") as temporary:
            temporary.write_text(text, encoding="utf-8")
        new.replace(folder / f"{variant}.tokens.npz")
        for abandoned in folder.glob(f"{variant}.tokens.*.npz"):
            abandoned.unlink()


def _new_tokens_file(folder: Path, variant: str, sha256: str) -> Path:
    """Return where token values of this hash lie until the JSON that has it is stored."""
    return folder / f"{variant}.tokens.{sha256}.npz"


def _tokens_file(folder: Path, variant: str, sha256: str) -> Path:
    """Return where the token values of a JSON are: a process may have been killed between."""
    new = _new_tokens_file(folder, variant, sha256)
    return new if SHA256.fullmatch(sha256) and new.exists() else folder / f"{variant}.tokens.npz"


def key_differences(stored: Mapping, current: Mapping, *, published: bool = False) -> list[str]:
    """Return what keeps two keys from being comparable, a sorted line each, with both sides.

    A published baseline is asked only what its key has: the publication states no more.
    """
    old, new = _flat(stored), _flat(current)
    return [
        f"{name}: stored {old.get(name, 'nothing')}, current {new.get(name, 'nothing')}"
        for name in sorted(old if published else old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def differences(old: Baseline, new: Baseline) -> list[str]:
    """Return what an update changes, old -> new, a sorted line each: each part but provenance."""
    old_lines, new_lines = _printed(old), _printed(new)
    lines = []
    for name in sorted(old_lines.keys() | new_lines.keys()):
        before, after = old_lines.get(name, "nothing"), new_lines.get(name, "nothing")
        if before != after:
            ratio = _change(old.values, new.values, name.removeprefix("values/"))
            lines.append(f"{name}: {before} -> {after}{ratio}")
    return lines


def _label(folder: Path, variant: str) -> str:
    """Return ``<target>/<model>/<variant>``: what follows the folder "baselines"."""
    parts = (*folder.parts, variant)
    last = max((index for index, part in enumerate(parts) if part == "baselines"), default=-1)
    return "/".join(parts[last + 1 :]).replace("//", "/")


def _json_text(baseline: Baseline, tokens_sha256: str) -> str:
    """Return the JSON of a baseline; a published one alone has the member "rounding"."""
    document = {
        "schema": SCHEMA,
        "key": baseline.key,
        "provenance": baseline.provenance,
        "values": _floats(baseline.values),
        "tokens_sha256": tokens_sha256,
    }
    if baseline.is_published:
        document["rounding"] = _floats(baseline.rounding)
    return json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _floats(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the same figures as float, which JSON holds exactly."""
    return {name: float(figure) for name, figure in figures.items()}


def _document_mismatches(document: Mapping[str, Any]) -> list[str]:
    """Return what keeps parsed JSON from being a baseline of this schema."""
    if type(document.get("schema")) is not int or document["schema"] != SCHEMA:
        return [f"schema: obtained {document.get('schema')!r}, expected {SCHEMA}"]
    members = MEMBERS | ({"rounding": dict} if "rounding" in document else {})
    wrong = [
        f"{name}: obtained {type(document.get(name)).__name__}, expected {kind.__name__}"
        for name, kind in members.items()
        if type(document.get(name)) is not kind
    ]
    unknown = sorted(document.keys() - members.keys())
    if unknown:
        wrong.append(f"members: obtained unknown {unknown}, expected {sorted(MEMBERS)}")
    wrong = wrong or _provenance_mismatches(document["provenance"])
    return wrong or _content_mismatches(document["key"], document["values"], {})


def _provenance_mismatches(provenance: Mapping[str, Any]) -> list[str]:
    """Return what is not as its readers take it: hashes by name, references by type and name."""
    hashes, references = (provenance.get(name, {}) for name in ("hashes", "references"))
    inner = [hashes, references, *(references.values() if isinstance(references, dict) else ())]
    if all(isinstance(each, dict) for each in inner):
        return []
    return ["provenance: obtained hashes or references that are no objects, expected objects"]


def _content_mismatches(key: Mapping, values: Mapping, tokens: Mapping) -> list[str]:
    """Return an empty key, values that are not finite numbers, tokens not finite in float32."""
    wrong = [
        f"values/{name}: obtained {value!r}, expected a finite number"
        for name, value in values.items()
        if not _is_finite_number(value)
    ]
    wrong += [
        f"{name}: obtained none, expected at least 1"
        for name, content in (("key", key), ("values", values))
        if not content
    ]
    return wrong + token_mismatches(tokens)


def _rounding_mismatches(values: Mapping, rounding: Mapping, tokens: Mapping) -> list[str]:
    """Return what a published baseline lacks: a rounding of each value, and no token values."""
    wrong = [
        f"rounding/{name}: obtained {rounding.get(name)!r}, expected a finite number above 0"
        for name in values
        if not (_is_finite_number(rounding.get(name)) and float(rounding[name]) > 0)
    ]
    wrong += [
        f"rounding/{name}: obtained one without a value, expected one of each value"
        for name in rounding.keys() - values.keys()
    ]
    if tokens:
        wrong.append(f"tokens: obtained {sorted(tokens)}, expected none of a published one")
    return wrong


def _is_finite_number(value: Any) -> bool:
    """Return whether a value is a number that a float holds; a bool and NaN are not."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and bool(abs(value) <= sys.float_info.max)


def _flat(nested: Mapping, prefix: str = "") -> dict[str, str]:
    """Return ``outer/inner`` -> JSON text of every leaf; an empty mapping is a leaf."""
    flat: dict[str, str] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, sort_keys=True, default=str)
    return flat


def _printed(baseline: Baseline) -> dict[str, str]:
    """Return every part of a baseline that an update can change, as text."""
    printed = {f"key/{name}": text for name, text in _flat(baseline.key).items()}
    printed |= {f"values/{name}": repr(each) for name, each in _floats(baseline.values).items()}
    rounded = _floats(baseline.rounding)
    printed |= {f"rounding/{name}": f"+-{each!r}" for name, each in rounded.items()}
    for name, array in baseline.tokens.items():
        content = np.ascontiguousarray(array, dtype=np.float32)
        digest = hashlib.sha256(content.tobytes()).hexdigest()[:12]
        printed[f"tokens/{name}"] = f"{content.size} values (sha256 {digest})"
    return printed


def _change(old: Mapping[str, float], new: Mapping[str, float], name: str) -> str:
    """Return " (+1.5 %)" where both sides have the value and the old one is not 0."""
    if not old.get(name) or name not in new:
        return ""
    return f" ({100 * (new[name] / old[name] - 1):+.2f} %)"
