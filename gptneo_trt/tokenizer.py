"""Read the ``tokenizer.json`` of GPT-Neo, byte-level BPE, and no other kind of tokenizer.

The file can describe any tokenizer: one that looks for a regular expression without end, pads to
any length or drops merges at random. So it is checked as JSON, and the library is given only what
decides token ids, in its plainest form.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.pre_tokenizers import ByteLevel

from gptneo_trt.errors import CheckpointError
from gptneo_trt.json_file import object_from_bytes

REMEDY = "use the tokenizer.json of a GPT-Neo checkpoint"
# Member -> the types it may have; None where it may be null.
PARTS: Mapping[str, tuple[str | None, ...]] = {
    "normalizer": (None,),
    "pre_tokenizer": ("ByteLevel",),
    "post_processor": (None, "ByteLevel", "TemplateProcessing"),
    "decoder": (None, "ByteLevel"),
}
# Member of the model -> what it may be.
MODEL: Mapping[str, tuple[str | None, ...]] = {
    "type": (None, "BPE"),
    "dropout": (None,),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def tokenizer_from_file(file: Path | None) -> tuple[Tokenizer, str]:
    """Return a tokenizer that neither truncates, pads nor adds tokens, and its file's SHA-256.

    Reading takes at most MEMORY_FACTOR of ``json_file`` times the size of the file.

    Raises:
        CheckpointError: no file, no such JSON, or another kind of tokenizer than GPT-Neo's; the
            message names everything that is other.
    """
    if file is None:
        raise CheckpointError(
            "tokenizer: obtained none, expected a tokenizer.json beside the weights; use a "
            "checkpoint that has one (random checkpoints have no text)"
        )
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"tokenizer {file}: obtained {error}, expected JSON") from error
    parsed = object_from_bytes(content, f"tokenizer {file}", CheckpointError, REMEDY)
    wrong = sorted(_mismatches(parsed))
    if wrong:
        listed = "\n".join(f"  {line}" for line in wrong)
        raise CheckpointError(f"tokenizer {file} is not GPT-Neo's:\n{listed}\n  do: {REMEDY}")
    tokenizer = Tokenizer.from_str(json.dumps(_plain(parsed)))
    return tokenizer, hashlib.sha256(content).hexdigest()


def _plain(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the ids, without post-processor and decoder, truncation and padding.

    Nothing is ever unknown, since every byte has a token; so what is said of that is left out.
    """
    model, pre_tokenizer = parsed["model"], parsed["pre_tokenizer"]
    added = parsed.get("added_tokens", [])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{key: each[key] for key in ("id", "content", *FLAGS)} for each in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": pre_tokenizer["add_prefix_space"],
            "trim_offsets": True,
            "use_regex": pre_tokenizer.get("use_regex", True),
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": model.get("ignore_merges", False),
            "vocab": model["vocab"],
            "merges": [_pair(merge) for merge in model["merges"]],
        },
    }


def _mismatches(parsed: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not GPT-Neo's."""
    for name, allowed in PARTS.items():
        part = parsed.get(name)
        kind = part.get("type", "none") if isinstance(part, dict) else part
        if isinstance(part, str) or kind not in allowed:
            yield f"{name}: obtained {short(part)}, expected type {_listed(allowed)}"
    if isinstance(parsed.get("pre_tokenizer"), dict):
        part = {"use_regex": True} | parsed["pre_tokenizer"]
        yield from _flag_mismatches("pre_tokenizer", part, ("add_prefix_space", "use_regex"))
    model = parsed.get("model")
    if not isinstance(model, dict):
        yield f"model: obtained {short(model)}, expected an object"
        return
    for name, allowed in MODEL.items():
        if model.get(name) not in allowed:
            yield f"model.{name}: obtained {short(model[name])}, expected {_listed(allowed)}"
    if not isinstance(model.get("ignore_merges", False), bool):
        yield f"model.ignore_merges: obtained {short(model['ignore_merges'])}, expected a bool"
    wrong = _vocabulary_mismatch(model.get("vocab"))
    if wrong:
        yield wrong
        return
    yield from _merge_mismatches(model.get("merges"), model["vocab"])
    yield from _added_mismatches(parsed.get("added_tokens", []), model["vocab"])


def _vocabulary_mismatch(vocabulary: Any) -> str:
    """Return what keeps a vocabulary from giving every text ids, "" if nothing does."""
    if not isinstance(vocabulary, dict):
        return f"model.vocab: obtained {short(vocabulary)}, expected an object"
    ids = vocabulary.values()
    if any(type(each) is not int for each in ids) or sorted(ids) != list(range(len(ids))):
        return f"model.vocab: obtained other ids than 0 to {len(ids) - 1}, expected each once"
    missing = sorted(set(ByteLevel.alphabet()) - vocabulary.keys())
    if missing:
        return f"model.vocab: obtained no token for {len(missing)} bytes, expected all 256"
    return ""


def _merge_mismatches(merges: Any, vocabulary: Mapping[str, int]) -> Iterator[str]:
    """Yield the first merge of what is not in the vocabulary."""
    if not isinstance(merges, list):
        yield f"model.merges: obtained {short(merges)}, expected a list"
        return
    for number, merge in enumerate(merges):
        pair = _pair(merge)
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            yield f"model.merges: obtained {short(merge)} at {number}, expected two known tokens"
            return


def _pair(merge: Any) -> Sequence[str]:
    """Return the two tokens of a merge, "a b" or ["a", "b"]; otherwise as many as there are."""
    if isinstance(merge, str):
        return merge.split(" ")
    is_list = isinstance(merge, list) and all(isinstance(token, str) for token in merge)
    return merge if is_list else ()


def _added_mismatches(added: Any, vocabulary: Mapping[str, int]) -> Iterator[str]:
    """Yield the first added token that is malformed, or whose id the library would not give it."""
    if not isinstance(added, list):
        yield f"added_tokens: obtained {short(added)}, expected a list"
        return
    following = len(vocabulary)
    for number, token in enumerate(added):
        name = f"added_tokens {number}"
        content = token.get("content") if isinstance(token, dict) else None
        if not isinstance(content, str) or not content:
            yield f"{name}: obtained {short(token)}, expected an object with content"
            return
        expected = vocabulary.get(content, following)
        if type(token.get("id")) is not int or token["id"] != expected:
            yield f"{name}: obtained id {short(token.get('id'))}, expected {expected}"
            return
        yield from _flag_mismatches(name, token, FLAGS)
        following += content not in vocabulary


def _flag_mismatches(name: str, part: Mapping[str, Any], flags: Sequence[str]) -> Iterator[str]:
    """Yield the flags that are no bool."""
    for flag in flags:
        if not isinstance(part.get(flag), bool):
            yield f"{name}.{flag}: obtained {short(part.get(flag))}, expected true or false"


def _listed(allowed: Sequence[str | None]) -> str:
    return " or ".join("null" if each is None else f'"{each}"' for each in allowed)


def text_from_file(file: Path | None) -> Callable[[Sequence[int]], str]:
    """Return a function token ids -> text; bytes that are no UTF-8 by themselves become U+FFFD.

    Raises:
        CheckpointError: see ``tokenizer_from_file``.
    """
    tokenizer, _ = tokenizer_from_file(file)
    decoder = decoders.ByteLevel()

    def text_of(ids: Sequence[int]) -> str:
        return str(decoder.decode([tokenizer.id_to_token(each) or "" for each in ids]))

    return text_of
