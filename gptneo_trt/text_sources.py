"""Where each text lies and how it is cut, as rows: what ``texts`` reads.

To add a text, add a row to BUNDLED or STUDY. A row without a repository is a file of this
repository; one with a repository is that file at a pinned commit of the hub.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gptneo_trt.errors import CheckpointError


@dataclass(frozen=True)
class TextSource:
    """Describe one row: where a text is and how it is cut.

    Attributes:
        name: "prose", "questions", "prompts", "sampled" or "calibration".
        file: path inside fixtures/text, or inside the repository, with ``*``.
        text: a row of the file -> its text.
        cut: "windows": rows joined, tokenized as one stream and cut into non-overlapping
            windows, the last partial one dropped; "whole": a row is a text, and must fit;
            "truncated": a row is a text, cut to the window.
        repo: data set of the hub, "owner/name"; "" for a bundled file.
        revision: commit of 40 digits.
        rows: the first so many rows, an error if there are fewer; None for all.
        max_tokens: of the joined stream, for "windows"; None for all.
        join: between rows, in the hashed text and in the stream.
    """

    name: str
    file: str
    text: Callable[[Mapping[str, Any]], str]
    cut: str
    repo: str = ""
    revision: str = ""
    rows: int | None = None
    max_tokens: int | None = None
    join: str = "\n\n"


def _string(value: Any) -> str:
    """Return ``value``, which JSON leaves None where a field is missing."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _plain(row: Mapping[str, Any]) -> str:
    return _string(row["text"])


def _paragraph(row: Mapping[str, Any]) -> str:
    return _plain(row).strip()


def _question(row: Mapping[str, Any]) -> str:
    """Return the question and "Answer:", the prompt of ARC in lm-evaluation-harness.

    What is scored is the token that follows; the choices would only make texts longer.
    """
    return f"Question: {_string(row['question'])}\nAnswer:"


def _messages(row: Mapping[str, Any]) -> str:
    """Return the turns of a conversation, a line each, as ModelOpt's calibration does."""
    return "\n".join(_string(message["content"]) for message in row["messages"])


_BUNDLED_ROWS = (
    TextSource("prose", "prose.txt", _paragraph, "windows"),
    TextSource("questions", "questions.jsonl", _question, "whole"),
    TextSource("prompts", "prompts.jsonl", _plain, "whole"),
    TextSource("sampled", "sampled.jsonl", _plain, "truncated", rows=24),
    TextSource("calibration", "calibration.jsonl", _plain, "truncated", rows=192),
)
BUNDLED = {row.name: row for row in _BUNDLED_ROWS}
# What the study used, and no text sampled from its checkpoint; its 8 prompts and the revision and
# split of its calibration data were not published, so the first are ours, and the last must be
# given: see ``text_set``.
_STUDY_ROWS = (
    TextSource(
        "prose",
        "wikitext-2-raw-v1/test-00000-of-00001.parquet",
        _plain,
        "windows",
        repo="Salesforce/wikitext",
        revision="b08601e04326c79dfdd32d625aee71d232d685c3",
        max_tokens=1536,
    ),
    TextSource(
        "questions",
        "ARC-Easy/test-00000-of-00001.parquet",
        _question,
        "whole",
        repo="allenai/ai2_arc",
        revision="210d026faf9955653af8916fad021475a3f00453",
        rows=300,
    ),
    BUNDLED["prompts"],
    TextSource(
        "calibration",
        "data/chat-00000-of-*.parquet",
        _messages,
        "truncated",
        repo="nvidia/Nemotron-Post-Training-Dataset-v1",
        rows=192,
    ),
)
STUDY = {row.name: row for row in _STUDY_ROWS}
SOURCES = {"bundled": BUNDLED, "study": STUDY}


def text_source(name: str, source: str) -> TextSource:
    """Return the row of a text, for example ("prose", "bundled").

    Raises:
        CheckpointError: no such row; the message lists what there is.
    """
    if source not in SOURCES or name not in SOURCES[source]:
        raise CheckpointError(
            f"text {name!r} of {source!r}: expected one of {list(BUNDLED)} of {list(SOURCES)}"
        )
    return SOURCES[source][name]
