"""Values a token <-> ``<variant>.tokens.npz``, whose SHA-256 the JSON beside it holds."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gptneo_trt.errors import BaselineError

RENEW = "write it again with --update-baselines"


def read_tokens(path: Path, sha256: str) -> dict[str, np.ndarray]:
    """Return the token values beside a JSON that holds this hash of them.

    Raises:
        BaselineError: there are none, of another hash, or not finite float32 [M].
    """
    if not path.is_file():
        raise BaselineError(f"{path}: obtained no file, expected sha256 {sha256}; {RENEW}")
    content = path.read_bytes()
    obtained = hashlib.sha256(content).hexdigest()
    if obtained != sha256:
        raise BaselineError(
            f"{path}: of another JSON, or an update was cut short: obtained sha256 {obtained}, "
            f"expected {sha256}; {RENEW}"
        )
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            tokens = {name: archive[name] for name in archive.files}
    except (EOFError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise BaselineError(f"{path}: not token values: {error}; {RENEW}") from error
    wrong = [
        f"tokens/{name}: obtained {array.dtype}, expected float32"
        for name, array in tokens.items()
        if array.dtype != np.float32
    ]
    raise_all(f"{path}", wrong or token_mismatches(tokens))
    return tokens


def npz_bytes(tokens: Mapping[str, np.ndarray]) -> bytes:
    """Return an npz of float32 arrays, sorted, without the time of writing."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(tokens):
            member = io.BytesIO()
            array = np.ascontiguousarray(tokens[name], dtype=np.float32)
            np.lib.format.write_array(member, array, allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, member.getvalue(), zipfile.ZIP_DEFLATED, 6)
    return buffer.getvalue()


def token_mismatches(tokens: Mapping) -> list[str]:
    """Return which arrays are not [M] of values that are finite in float32."""
    wrong = []
    for name, array in tokens.items():
        with np.errstate(over="ignore"):
            single = np.asarray(array, dtype=np.float32)
        bad = single.size - int(np.isfinite(single).sum())
        if single.ndim != 1 or single.size == 0 or bad:
            wrong.append(
                f"tokens/{name}: obtained shape {single.shape} with {bad} non-finite values, "
                "expected finite float32 [M], M >= 1"
            )
    return wrong


def raise_all(what: str, wrong: list[str], remedy: str = RENEW) -> None:
    """Raise BaselineError with every mismatch, sorted; return when there is none."""
    if wrong:
        raise BaselineError("; ".join((f"{what}: {sorted(wrong)[0]}", *sorted(wrong)[1:], remedy)))
