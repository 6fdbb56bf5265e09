"""tokenizer.json: GPT-Neo's kind gives the library's own ids, and every other kind is named."""

import json

import pytest
from tiny import small_tokenizer
from tokenizers import Tokenizer

from gptneo_trt.checkpoint import BUNDLED_FOLDER
from gptneo_trt.errors import CheckpointError
from gptneo_trt.tokenizer import tokenizer_from_file

TEXT = "The first line, kept as it is.\n  Numbers 1234 and é, 漢字, 😀\0<|endoftext|> end"


@pytest.fixture
def path(tmp_path):
    """Return where the file is."""
    return tmp_path / "tokenizer.json"


def test_bundled_tokenizer_gives_the_library_s_ids():
    """Leaving out what decides no id changes none."""
    file = BUNDLED_FOLDER / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    text = (BUNDLED_FOLDER.parent / "text" / "prose.txt").read_text("utf-8")

    tokenizer, _ = tokenizer_from_file(file)

    assert tokenizer.encode(text).ids == library.encode(text).ids


def changed(part, **changes):
    """Return the small tokenizer with members of one part, or of the model, changed."""
    said = small_tokenizer()
    if not part:
        return said | changes
    said[part] = said[part] | changes if isinstance(said[part], dict) else changes
    return said


SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (changed("", pre_tokenizer=SPLIT), 'pre_tokenizer: obtained .*Split.*expected type "Byte'),
        (changed("", pre_tokenizer=None), "pre_tokenizer: obtained None"),
        (changed("", normalizer={"type": "NFC"}), "normalizer: obtained {'type': 'NFC'}"),
        (changed("", post_processor={"type": "BertProcessing"}), "post_processor: obtained"),
        (changed("", decoder={"type": "WordPiece"}), "decoder: obtained"),
        (changed("", model=None), "model: obtained None, expected an object"),
        (changed("model", type="Unigram"), "model.type: obtained 'Unigram'"),
        (changed("model", dropout=0.1), "model.dropout: obtained 0.1, expected null"),
        (changed("model", continuing_subword_prefix="##"), "model.continuing_subword_prefix"),
        (changed("model", ignore_merges=1), "model.ignore_merges: obtained 1, expected a bool"),
        (changed("model", vocab={"a": 0}), "no token for 255 bytes, expected all 256"),
        (changed("model", vocab={"a": 1}), "other ids than 0 to 0, expected each once"),
        (changed("model", vocab=[]), r"model.vocab: obtained \[\], expected an object"),
        (changed("model", merges=["a b", "no such"]), "obtained 'a b' at 0, expected two known"),
        (changed("model", merges={}), "model.merges: obtained {}, expected a list"),
        (changed("", added_tokens=3), "added_tokens: obtained 3, expected a list"),
        (changed("", added_tokens=[{"content": "x"}]), "added_tokens 0: obtained id None"),
        (
            changed("", added_tokens=[{"content": "new", "id": 7}]),
            "added_tokens 0: obtained id 7, expected 300",
        ),
        (
            changed("", added_tokens=[{"content": "new", "id": 300}]),
            "added_tokens 0.special: obtained None, expected true or false",
        ),
    ],
)
def test_another_kind_of_tokenizer_is_named(path, said, message):
    """What is not GPT-Neo's is named before the library sees it."""
    path.write_text(json.dumps(said))

    with pytest.raises(CheckpointError, match=rf"(?s)tokenizer\.json is not GPT-Neo's:.*{message}"):
        tokenizer_from_file(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"type": None},
        {"merges": ["Ġ t", "Ġ a"]},
        {"unk_token": "<|endoftext|>", "continuing_subword_prefix": "", "end_of_word_suffix": ""},
    ],
    ids=["no type", "merges as text", "unknown token"],
)
def test_older_files_are_read(path, changes):
    """What older versions of the library wrote gives the library's own ids."""
    said = changed("model", **changes)
    if changes.get("type", "") is None:
        del said["model"]["type"]
    path.write_text(json.dumps(said))

    assert (
        tokenizer_from_file(path)[0].encode(TEXT).ids
        == Tokenizer.from_file(str(path)).encode(TEXT).ids
    )


def test_added_token_beyond_the_vocabulary(path):
    """A token that follows the vocabulary gets the id that the file says."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    pad = {"id": 300, "content": "[PAD]", "special": True} | flags
    path.write_text(json.dumps(changed("", added_tokens=[*small_tokenizer()["added_tokens"], pad])))

    assert tokenizer_from_file(path)[0].encode("[PAD]").ids == [300]
