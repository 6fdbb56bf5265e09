"""Values a token <-> ``<variant>.tokens.npz``, whose SHA-256 the JSON beside it holds."""

import hashlib
import io
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from gptneo_trt.errors import BaselineError

RENEW = "write it again with --update-baselines"
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
UTF8_NAME = 0x800
# Of an npy file of one dimension.
HEADER_BYTES = 128
# Stored values take 1.4 times their packed size; a constant column packs to a hundredth.
UNPACKED_FACTOR, UNPACKED_BYTES = 16, 1 << 20
# Of peak memory to the size of the file: the bytes as read, unpacked, and twice as an array.
MEMORY_FACTOR = 64
# What zipfile raises for bytes that are no archive, or a damaged one.
_NO_ARCHIVE = (
    EOFError,
    NotImplementedError,
    OSError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


def read_tokens(path: Path, sha256: str) -> dict[str, np.ndarray]:
    """Return the token values beside a JSON that holds this hash of them.

    Reading takes at most MEMORY_FACTOR times the size of the file, and 4 MiB.

    Raises:
        BaselineError: there are none, of another hash, not as ``npz_bytes`` writes them, or not
            finite float32 [M].
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
        tokens = _arrays(content)
    except _NO_ARCHIVE as error:
        raise BaselineError(f"{path}: not token values: {error}; {RENEW}") from error
    raise_all(f"{path}", token_mismatches(tokens))
    return tokens


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    """Return name -> float32 [M] of an npz.

    What an entry says of itself is checked before it is unpacked, and no header of an array is
    interpreted: it is the one that ``npz_bytes`` writes for the bytes that follow it, or refused.

    Raises:
        ValueError: not as ``npz_bytes`` writes it; or any other of _NO_ARCHIVE.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        unpacked = sum(entry.file_size for entry in entries)
        most = max(UNPACKED_BYTES, UNPACKED_FACTOR * len(content))
        if unpacked > most:
            raise ValueError(f"obtained {unpacked} bytes unpacked, expected at most {most}")
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        if "" in names or len(set(names)) < len(names):
            raise ValueError("obtained an array without a name or twice, expected each once")
        arrays = {}
        for name, entry in zip(names, entries, strict=True):
            # Encrypted and patched entries have other flags; lzma and bzip2 another type.
            if entry.compress_type not in COMPRESSIONS or entry.flag_bits & ~UTF8_NAME:
                raise ValueError(f"obtained {entry!r}, expected a plain or deflated array")
            arrays[name] = _array(name, archive.read(entry))
        return arrays


def _array(name: str, member: bytes) -> np.ndarray:
    """Return float32 [M] of the bytes of an npy file.

    Raises:
        ValueError: not the bytes that ``npz_bytes`` writes for any such array.
    """
    values = len(member[HEADER_BYTES:]) // 4
    array = np.frombuffer(member, "<f4", values, min(HEADER_BYTES, len(member)))
    expected = _npy_bytes(array)
    if member != expected:
        obtained, wanted = (
            each[10:HEADER_BYTES].partition(b"\n")[0].strip() for each in (member, expected)
        )
        raise ValueError(f"tokens/{name}: obtained {obtained!r}, expected float32 {wanted!r}")
    return array.astype(np.float32)


def _npy_bytes(array: np.ndarray) -> bytes:
    """Return an array of float32 as an npy file."""
    member = io.BytesIO()
    np.lib.format.write_array(member, array, allow_pickle=False)
    return member.getvalue()


def npz_bytes(tokens: Mapping[str, np.ndarray]) -> bytes:
    """Return an npz of float32 arrays, sorted, without the time of writing."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(tokens):
            array = np.ascontiguousarray(tokens[name], dtype="<f4")
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, _npy_bytes(array), zipfile.ZIP_DEFLATED, 6)
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
