"""tokenizer.json: any damaged one is refused, or gives the ids that it says."""

import json

import pytest
from hypothesis import given
from mutations import LONG, QUICK, mutated, outcome
from tokenizers import Tokenizer

from gptneo_trt.errors import CheckpointError
from gptneo_trt.json_file import MEMORY_FACTOR
from gptneo_trt.tokenizer import tokenizer_from_file
from tests.unit.tiny import small_tokenizer

TEXT = "The first line, kept as it is.\n  Numbers 1234 and é, 漢字, 😀\0<|endoftext|> end"
FRAGMENTS = (
    *('{"type": "WordPiece", "vocab": {"a": 0}}', '{"type": "Unigram", "vocab": []}', '"BPE"'),
    '{"strategy": {"Fixed": 1000000000000}, "direction": "Right", "pad_id": 0, "pad_type_id": 0,'
    ' "pad_token": "a", "pad_to_multiple_of": null}',
    '{"max_length": 0, "strategy": "LongestFirst", "stride": 5, "direction": "Right"}',
    '{"type": "Sequence", "normalizers": []}',
    '{"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}',
    '{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": false}',
    '{"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}',
    *('"Ġ t"', '["Ġ", "t"]', '"a b c"', '["Ġ"]', '[""]', '"<|endoftext|>"', "299", "300"),
    "4294967295",
)  # fmt: skip


CONTENT = json.dumps(small_tokenizer(), ensure_ascii=False).encode()
FILES = mutated(CONTENT, FRAGMENTS)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return where the file is."""
    return tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"


def encoded(path):
    """Return (tokenizer, its ids of TEXT)."""
    tokenizer = tokenizer_from_file(path)[0]
    return tokenizer, tokenizer.encode(TEXT, add_special_tokens=False).ids


def check(path, content):
    """Assert that a file is refused, or has the vocabulary and the ids that it says."""
    path.write_bytes(content)
    found = outcome(lambda: encoded(path), len(content), MEMORY_FACTOR)
    if isinstance(found, CheckpointError):
        return
    tokenizer, ids = found
    said = json.loads(content)
    added = {each["content"]: each["id"] for each in said.get("added_tokens", [])}
    assert tokenizer.get_vocab() == said["model"]["vocab"] | added
    assert tokenizer.truncation is None
    assert tokenizer.padding is None
    # The library reads the file itself, but for what decides no id and is not looked at.
    model = {key: said["model"][key] for key in ("vocab", "merges")}
    model |= {"type": "BPE", "ignore_merges": said["model"].get("ignore_merges", False)}
    parts = {"added_tokens": said.get("added_tokens", []), "model": model, "version": "1.0"}
    split = said["pre_tokenizer"] | {"trim_offsets": True}
    library = Tokenizer.from_str(json.dumps(parts | {"pre_tokenizer": split}))
    assert ids == library.encode(TEXT, add_special_tokens=False).ids


@QUICK
@given(FILES)
def test_mutated_tokenizer(path, content):
    """Our error, or the file's own ids."""
    check(path, content)


@pytest.mark.long
@LONG
@given(FILES)
def test_many_mutated_tokenizers(path, content):
    """The same, more often."""
    check(path, content)
