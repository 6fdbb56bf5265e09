"""Texts: what is hashed, how it is cut, and what is refused."""

import hashlib
import json
import runpy
import time
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gptneo_trt import texts
from gptneo_trt.baselines import key_differences
from gptneo_trt.checkpoint import BUNDLED_FOLDER
from gptneo_trt.errors import CheckpointError
from gptneo_trt.text_sources import BUNDLED, STUDY
from gptneo_trt.texts import text_set, text_set_from_texts, texts_from_source

TOKENIZER_FILE = BUNDLED_FOLDER / "tokenizer.json"
PROMPTS, PROSE, CALIBRATION = (BUNDLED[name] for name in ("prompts", "prose", "calibration"))
EVALUATED = ("prose", "questions", "prompts", "sampled")
LINES = ("The first line , kept @-@ as it is .", "A second <unk> line.", "And the third one.")


@pytest.fixture
def text_folder(tmp_path, monkeypatch):
    """Return an empty folder that stands in for fixtures/text."""
    monkeypatch.setattr(texts, "BUNDLED_FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    """Return an empty hub cache; any network call fails the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("network call"))
    return tmp_path


def cache_parquet(cache, row, rows):
    """Put rows into the hub cache as the parquet file of a row of STUDY."""
    snapshots = cache / ("datasets--" + row.repo.replace("/", "--")) / "snapshots"
    file = snapshots / row.revision / row.file.replace("*", "00001")
    file.parent.mkdir(parents=True)
    Dataset.from_list(rows).to_parquet(file)


def eight_word_runs(items):
    """Return every run of eight words of the texts, lower case, without punctuation."""
    words = [["".join(filter(str.isalnum, w)).lower() for w in item.split()] for item in items]
    return {tuple(w[at : at + 8]) for w in words for at in range(len(w) - 7)}


@pytest.mark.parametrize(
    ("name", "scored"),
    [
        ("prose", "every"),
        ("questions", "last"),
        ("prompts", "last"),
        ("sampled", "every"),
        ("calibration", "every"),
    ],
)
def test_bundled_text(name, scored):
    """Each bundled text loads with its hashes, its scored positions and int32 ids."""
    obtained = text_set(name, "bundled", TOKENIZER_FILE, 256, vocab_size=4096)
    joined = "\n\n".join(texts_from_source(BUNDLED[name]))
    assert (obtained.name, obtained.scored, obtained.window) == (name, scored, 256)
    assert obtained.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    assert obtained.tokenizer_sha256 == hashlib.sha256(TOKENIZER_FILE.read_bytes()).hexdigest()
    assert {ids.dtype for ids in obtained.token_ids} == {np.dtype(np.int32)}
    assert max(map(len, obtained.token_ids)) <= 256
    assert obtained.source.startswith(BUNDLED[name].file)


def test_prose_is_one_stream_in_full_windows():
    """The windows are the joined text's tokens in order; what is dropped is counted."""
    obtained = text_set("prose", "bundled", TOKENIZER_FILE, 100)
    joined = "\n\n".join(texts_from_source(PROSE))
    stream = Tokenizer.from_file(str(TOKENIZER_FILE)).encode(joined).ids
    assert {len(ids) for ids in obtained.token_ids} == {100}
    assert np.concatenate(obtained.token_ids).tolist() == stream[: obtained.tokens]
    assert 0 <= len(stream) - obtained.tokens < 100
    assert f"{len(stream) - obtained.tokens} of {len(stream)} tokens dropped" in obtained.source


def test_prose_file_is_its_paragraphs():
    """Read through datasets, the paragraphs are those of the file, none lost."""
    content = (texts.BUNDLED_FOLDER / "prose.txt").read_text(encoding="utf-8")
    expected = [line for line in content.splitlines() if line]
    assert list(texts_from_source(PROSE)) == expected


def test_questions_are_formatted():
    """A question is its text and "Answer:", as in lm-evaluation-harness."""
    with (texts.BUNDLED_FOLDER / "questions.jsonl").open(encoding="utf-8") as lines:
        first = json.loads(next(lines))
    obtained = texts_from_source(BUNDLED["questions"])[0].split("\n")
    assert obtained == [f"Question: {first['question']}", "Answer:"]


def test_calibration_has_192_prompts():
    """As many prompts as the study calibrated with, each cut to the window."""
    whole = text_set("calibration", "bundled", TOKENIZER_FILE, 512)
    short = text_set("calibration", "bundled", TOKENIZER_FILE, 16)
    assert len(whole.token_ids) == len(short.token_ids) == 192
    assert max(map(len, short.token_ids)) == 16
    pairs = zip(short.token_ids, whole.token_ids, strict=True)
    assert all(np.array_equal(ids, more[: len(ids)]) for ids, more in pairs)


def test_calibration_and_evaluation_share_no_text():
    """No run of eight words is both in the calibration text and in an evaluated text."""
    calibration = eight_word_runs(texts_from_source(CALIBRATION))
    evaluated = (texts_from_source(BUNDLED[name]) for name in EVALUATED)
    runs = set().union(*(eight_word_runs(items) for items in evaluated))
    assert min(len(calibration), len(runs)) > 1000
    assert sorted(calibration & runs) == []


@pytest.mark.parametrize("join", ["", "\n", "\n\n"])
def test_D01_the_join_is_part_of_the_hash(join):
    """The same lines joined otherwise are another text: hash and join are both recorded."""
    row = replace(PROSE, join=join)
    obtained = text_set_from_texts(row, LINES, TOKENIZER_FILE, 4)
    assert obtained.sha256 == hashlib.sha256(join.join(LINES).encode()).hexdigest()
    assert obtained.key()["join"] == join


def test_D01_nothing_is_normalised():
    """Texts that differ only in " @-@ " and "<unk>" have different hashes."""
    plain = [line.replace(" @-@ ", "-").replace("<unk>", "unknown") for line in LINES]
    sets = [text_set_from_texts(PROSE, lines, TOKENIZER_FILE, 4) for lines in (LINES, plain)]
    assert sets[0].key() != sets[1].key()
    assert sets[0].sha256 != sets[1].sha256


@pytest.mark.parametrize(
    ("lines", "join"),
    [
        ([line.replace(" @-@ ", "-") for line in LINES], "\n\n"),
        ([line.replace("<unk>", "unknown") for line in LINES], "\n\n"),
        (LINES, "\n"),
        (LINES, ""),
    ],
    ids=["hyphen", "unknown word", "newline", "no join"],
)
def test_D01_a_baseline_of_another_text_is_refused(lines, join):
    """What the key of a stored run says of its text differs, and both hashes are shown."""
    sets = [
        text_set_from_texts(replace(PROSE, join=each), texts, TOKENIZER_FILE, 4)
        for texts, each in ((LINES, "\n\n"), (lines, join))
    ]
    stored, current = ({"texts": {"prose": each.key()}} for each in sets)

    wrong = key_differences(stored, current)

    hashes = f'stored "{sets[0].sha256}", current "{sets[1].sha256}"'
    assert f"texts/prose/sha256: {hashes}" in wrong
    assert {"text", "sha256", "join", "tokenizer_sha256", "tokens"} <= sets[0].key().keys()


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5), st.integers(1, 9))
def test_windows_never_overlap_or_reorder(lines, window):
    """For any text: full windows only, and together a prefix of the tokenized stream."""
    stream = Tokenizer.from_file(str(TOKENIZER_FILE)).encode("\n\n".join(lines)).ids
    cut = texts._cut([np.asarray(stream, np.int32)], PROSE, min(window, len(stream)))
    assert len({len(ids) for ids in cut}) == 1
    assert np.concatenate(cut).tolist() == stream[: sum(map(len, cut))]


@pytest.mark.parametrize("row", [PROMPTS, PROSE, CALIBRATION], ids=lambda row: row.name)
@pytest.mark.parametrize("lines", [(), ("",), ("", "")])
def test_C02_no_tokens(row, lines):
    """(c, d) No text, or only empty ones, is an error that says 0 tokens."""
    with pytest.raises(CheckpointError, match="obtained 0 tokens"):
        text_set_from_texts(replace(row, join=""), lines, TOKENIZER_FILE, 8)


@pytest.mark.parametrize(
    ("row", "lines", "settings", "message"),
    [
        (PROMPTS, ["ok", ""], {}, r"\{2: 0\} tokens by row, expected at least 1"),
        (CALIBRATION, ["two words", "a"], {}, r"\{2: 1\} tokens by row, expected at least 2"),
        (PROMPTS, ["a", "b " * 20], {}, r"\{2: [24]\d\} tokens by row, expected at most 8"),
        (PROSE, ["a b"], {}, r"\d tokens, expected at least one window of 8"),
        (PROMPTS, ["transaction"], {"vocab_size": 100}, r"token id \d+, expected less than.* 100"),
    ],
)
def test_texts_that_cannot_be_scored(row, lines, settings, message):
    """Too short, too long or out of the vocabulary: an error naming the rows."""
    with pytest.raises(CheckpointError, match=message):
        text_set_from_texts(row, lines, TOKENIZER_FILE, 8, **settings)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "p-1", "text": "fine"}\n{"id": "p-2", "te', "row 1 .*expected a row as _plain"),
        ('{"id": "p-1", "text": "fine"}\n{"id": "p-2"}\n', "row 2 of prompts.jsonl.*is no text"),
        ("", "0 tokens"),
        (None, "obtained no file for prompts.jsonl"),
    ],
)
def test_malformed_file(text_folder, content, message):
    """A missing, empty, cut or incomplete file is named, with the row."""
    if content is not None:
        (text_folder / "prompts.jsonl").write_text(content)
    with pytest.raises(CheckpointError, match=f"text 'prompts'.*{message}"):
        text_set("prompts", "bundled", TOKENIZER_FILE, 8)


def test_fewer_rows_than_the_row_says(text_folder):
    """A calibration file with fewer than 192 prompts is an error with both numbers."""
    (text_folder / "calibration.jsonl").write_text('{"text": "one two"}\n' * 3)
    with pytest.raises(CheckpointError, match=r"obtained 3 rows.*expected 192"):
        texts_from_source(CALIBRATION)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_tokenizer_that_cannot_be_used(tmp_path, content):
    """No tokenizer, or one that is not a tokenizer.json, is a CheckpointError."""
    file = tmp_path / "tokenizer.json" if content is not None else None
    if file:
        file.write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer.*expected"):
        text_set("prompts", "bundled", file, 8)


def test_tokenizer_settings_do_not_cut_or_pad(tmp_path):
    """Truncation and padding stored in tokenizer.json are switched off."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    obtained = text_set("prompts", "bundled", tmp_path / "tokenizer.json", 64)
    expected = text_set("prompts", "bundled", TOKENIZER_FILE, 64)
    assert [i.tolist() for i in obtained.token_ids] == [i.tolist() for i in expected.token_ids]


@pytest.mark.parametrize("name", ["prose", "questions", "calibration"])
def test_D03_offline_names_data_set_and_revision(offline_cache, name):
    """Offline with an empty cache: an error within seconds naming id, revision and remedy."""
    row = replace(STUDY[name], revision=STUDY[name].revision or "a" * 40)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        text_set(name, row, TOKENIZER_FILE, 256)
    words = (row.repo, row.revision, "cached revisions", "none", "hf download --repo-type dataset")
    assert [word for word in words if word not in str(caught.value)] == []
    assert time.monotonic() - started < 5


def test_D03_calibration_of_the_study_needs_a_revision(offline_cache):
    """Its revision was not published, so none is guessed."""
    with pytest.raises(CheckpointError, match="no commit of 40 digits"):
        text_set("calibration", "study", TOKENIZER_FILE, 256)


def test_bundled_text_needs_no_network(offline_cache, monkeypatch):
    """Bundled files are read without any network call, even where nothing says offline."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert [len(texts_from_source(row)) > 0 for row in BUNDLED.values()] == [True] * 5


def test_D03_ids_carry_their_owner():
    """Every data set id has an owner: the legacy id "wikitext" is not used."""
    assert all("/" in row.repo for row in STUDY.values() if row.repo)


def test_D03_cached_wikitext(offline_cache):
    """A cached commit is used offline; rows are joined by a blank line, 1536 tokens kept."""
    rows = [{"text": f" = Heading {n} = \n"} for n in range(600)]
    cache_parquet(offline_cache, STUDY["prose"], rows)
    obtained = text_set("prose", "study", TOKENIZER_FILE, 256)
    assert obtained.tokens == 1536
    joined = "\n\n".join(row["text"] for row in rows)
    assert obtained.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    assert STUDY["prose"].revision in obtained.source


def test_D03_cached_questions(offline_cache):
    """The first 300 questions of ARC are read as its files have them."""
    choices = {"text": ["w", "x", "y", "z"], "label": list("ABCD")}
    rows = [{"question": f"Is it {n}?", "choices": choices} for n in range(310)]
    cache_parquet(offline_cache, STUDY["questions"], rows)
    obtained = texts_from_source(STUDY["questions"])
    assert len(obtained) == 300
    assert obtained[0] == "Question: Is it 0?\nAnswer:"


def test_D03_cached_calibration(offline_cache):
    """A conversation is the text of its turns, a line each."""
    row = replace(STUDY["calibration"], revision="b" * 40, rows=2)
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    cache_parquet(offline_cache, row, [{"messages": turns}] * 3)
    assert texts_from_source(row) == ("Why?\nSo.", "Why?\nSo.")


@pytest.mark.parametrize(("name", "source"), [("poems", "bundled"), ("prose", "elsewhere")])
def test_unknown_text(name, source):
    """An unknown name or source lists what there is."""
    with pytest.raises(CheckpointError, match=r"expected one of .*prose.*bundled.*study"):
        text_set(name, source, TOKENIZER_FILE, 256)


def test_sampled_text_is_24_full_windows():
    """Sampled by the checkpoint in fixtures/sample_text.py: 24 texts of 256 tokens, none padded."""
    obtained = text_set("sampled", "bundled", TOKENIZER_FILE, 256, vocab_size=4096)
    assert [len(ids) for ids in obtained.token_ids] == [256] * 24
    assert len({ids.tobytes() for ids in obtained.token_ids}) == 24
    assert "sampled" not in STUDY


def test_sampled_text_is_drawn_again():
    """The checkpoint gives the stored texts' beginnings again; a last bit may flip a draw."""
    maker = runpy.run_path(str(texts.BUNDLED_FOLDER.parent / "sample_text.py"))
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    drawn = tokenizer.decode_batch(maker["sampled_ids"](tokens=8), skip_special_tokens=False)
    stored = texts_from_source(BUNDLED["sampled"])
    same = [text.startswith(start) for start, text in zip(drawn, stored, strict=True)]
    assert sum(same) >= 22


def test_fixtures_have_their_hashes():
    """SHA256SUMS names every stored file of checkpoint and text, with the hash that it has."""
    folder = texts.BUNDLED_FOLDER.parent
    lines = (line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines())
    expected = {name: digest for digest, name in lines}
    files = [path for part in ("gptneo-mini", "text") for path in (folder / part).iterdir()]
    obtained = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    assert obtained == expected
