"""Stored measurements: what is read back, what is refused, and the paired comparison."""

import json
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gptneo_trt import baselines
from gptneo_trt.baselines import Baseline
from gptneo_trt.errors import BaselineError

KL = "prefill/prose/bf16/kl_nats"
KL_MEAN = "prefill/prose/bf16/kl_mean_nats"
SAMPLE = Baseline(
    key={"checkpoint_sha256": "c0ffee", "texts": {"prose": {"sha256": "aa", "tokens": 4}}},
    provenance={"commit": "4446f63", "versions": {"numpy": "2.4.6"}},
    values={KL_MEAN: 0.0022, "prefill/plan_mib": 313.6},
    tokens={KL: np.array([0.001, 0.002, 0.003, 0.0028], dtype=np.float32)},
)
MEASURED = sorted((Path(__file__).parents[2] / "baselines").glob("cpu/*/*/*.json"))
PUBLISHED = Baseline(
    key={"target": "b200", "version": "11.4.0.106"},
    provenance={"published": "a note"},
    values={KL_MEAN: 0.0022, "prefill/plan_mib": 313.6},
    tokens={},
    rounding={KL_MEAN: 5e-05, "prefill/plan_mib": 0.05},
)
ROUNDING = '"prefill/plan_mib": 0.05,'
name = st.from_regex(r"[a-z0-9_]{1,8}(/[a-z0-9_]{1,8}){0,3}", fullmatch=True)
finite = st.floats(allow_nan=False, allow_infinity=False)
singles = hnp.arrays(
    np.float32,
    st.integers(1, 20),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)
json_leaf = st.one_of(st.text(max_size=8), st.integers(), finite, st.booleans(), st.none())


@pytest.fixture
def folder(tmp_path):
    """Return the folder of one target and model, holding SAMPLE as "fp8_recipe"."""
    folder = tmp_path / "baselines" / "cpu" / "tensorrt_rtx-1.6.1.120" / "gptneo-mini"
    baselines.write(folder, "fp8_recipe", SAMPLE)
    return folder


def edit(folder, change):
    """Rewrite the stored JSON after ``change`` of its text."""
    path = folder / "fp8_recipe.json"
    path.write_text(change(path.read_text()))


def test_round_trip(folder):
    """What was written is read back equal, and the update report is empty."""
    stored = baselines.read(folder, "fp8_recipe")

    assert stored.key == SAMPLE.key
    assert stored.provenance == SAMPLE.provenance
    assert stored.values == SAMPLE.values
    np.testing.assert_array_equal(stored.tokens[KL], SAMPLE.tokens[KL])
    assert baselines.differences(stored, SAMPLE) == []


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(name, json_leaf, min_size=1, max_size=4),
    st.dictionaries(name, finite, min_size=1, max_size=5),
    st.dictionaries(name, singles, max_size=3),
)
def test_any_finite_baseline_round_trips(tmp_path_factory, key, values, tokens):
    """Every JSON key, finite value and finite float32 array survives, bit for bit."""
    folder = tmp_path_factory.mktemp("baselines")

    baselines.write(folder, "row", Baseline(key, {}, values, tokens))
    stored = baselines.read(folder, "row")

    assert baselines.key_differences(stored.key, key) == []
    assert stored.values == values
    assert stored.tokens.keys() == tokens.keys()
    for each, array in tokens.items():
        assert stored.tokens[each].tobytes() == array.tobytes()


def test_unchanged_data_gives_unchanged_files(folder):
    """Writing the same content again, whenever, changes no byte and leaves no other file."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    baselines.write(folder, "fp8_recipe", SAMPLE)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(before) == ["fp8_recipe.json", "fp8_recipe.tokens.npz"]
    with zipfile.ZipFile(folder / "fp8_recipe.tokens.npz") as archive:
        assert {entry.date_time[0] for entry in archive.infolist()} == {1980}


def test_names_are_the_stored_variants(folder, tmp_path):
    """A folder's names are its JSON files; a missing folder has none."""
    baselines.write(folder, "fp16", SAMPLE)

    assert baselines.names(folder) == {"fp16", "fp8_recipe"}
    assert baselines.names(tmp_path / "absent") == set()


def test_B04_missing_baseline_is_named_and_not_created(tmp_path):
    """Reading names target, model, variant and remedy, and never writes."""
    folder = tmp_path / "baselines" / "NVIDIA-B200" / "tensorrt-11.4" / "gpt-neo-125m"

    with pytest.raises(BaselineError) as caught:
        baselines.read(folder, "fp16")

    assert str(caught.value) == (
        "no baseline for NVIDIA-B200/tensorrt-11.4/gpt-neo-125m/fp16; "
        "write one with --update-baselines"
    )
    assert list(tmp_path.iterdir()) == []


def test_B04_truncated_json_is_named_with_line_and_column(folder):
    """JSON cut at 200 bytes is corrupt at a named line and column of a named file."""
    edit(folder, lambda text: text[:200])

    with pytest.raises(BaselineError, match=r"fp8_recipe\.json: line \d+, column \d+: not JSON"):
        baselines.read(folder, "fp8_recipe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"commit"', '"key": 1, "key"'), r"duplicate keys \['key'\]"),
        (lambda text: text.replace('"schema": 1', '"schema": 2'), "schema: obtained 2, expected 1"),
        (lambda text: text.replace('"schema": 1', '"scheme": 1'), "schema: obtained None"),
        (lambda text: text.replace("0.0022", "NaN"), "obtained NaN, expected a finite number"),
        (lambda text: text.replace("0.0022", "-Infinity"), "obtained -Infinity"),
        (lambda text: text.replace("0.0022", "1e999"), "obtained 1e999, expected a finite number"),
        (lambda text: text.replace("0.0022", "true"), f"values/{KL_MEAN}: obtained True"),
        (lambda text: text.replace("0.0022", "9" * 400), "obtained an integer of 400 digits"),
        (lambda text: text.replace('"provenance"', '"origin"'), r"unknown \['origin'\].*prov"),
        (lambda text: text.replace('"provenance": {', '"provenance": {"hashes": 5,'), "no objects"),
        (
            lambda text: text.replace(
                '"provenance": {', '"provenance": {"references": {"bf16": 5},'
            ),
            "provenance: obtained hashes or references that are no objects, expected objects",
        ),
        (lambda text: "[]", "obtained a list, expected a JSON object"),
    ],
    ids=[
        "duplicate key",
        "unknown schema",
        "no schema",
        "NaN",
        "-Infinity",
        "overflow",
        "bool",
        "huge int",
        "unknown member",
        "hashes",
        "references",
        "no object",
    ],
)
def test_B04_corrupt_json_is_refused(folder, change, message):
    """Duplicate keys, another schema, NaN and wrong members are errors that name the file."""
    edit(folder, change)

    with pytest.raises(BaselineError, match=rf"fp8_recipe\.json: .*{message}"):
        baselines.read(folder, "fp8_recipe")


@pytest.mark.parametrize(
    ("two", "message"),
    [
        ('"gpu": "B200", "gpu": "B300",', r"line \d+, column \d+.*duplicate keys \['gpu'\]"),
        ('"B200": {"kl": 1}, "B300": {"kl": 2},', r"unknown \['B200', 'B300'\]"),
        ('"values": {"B200": {"kl": 1}, "B300": {"kl": 2}},', r"duplicate keys \['values'\]"),
    ],
    ids=["key twice", "two members", "values twice"],
)
def test_B04_two_gpus_in_one_file(folder, two, message):
    """A file is of one target: a second one in it is refused, never chosen from."""
    edit(folder, lambda text: text.replace('"provenance"', two + '"provenance"', 1))

    with pytest.raises(BaselineError, match=rf"fp8_recipe\.json: .*{message}"):
        baselines.read(folder, "fp8_recipe")


def test_B04_values_of_two_gpus(folder):
    """A value is a number: one of each GPU is none."""
    edit(folder, lambda text: text.replace("0.0022", '{"B200": 0.0022, "B300": 0.0023}'))

    with pytest.raises(BaselineError, match=f"values/{KL_MEAN}: obtained .*expected a finite numb"):
        baselines.read(folder, "fp8_recipe")


def test_B04_bytes_that_are_not_text(folder):
    """A JSON file of other bytes is a BaselineError, not a UnicodeDecodeError."""
    (folder / "fp8_recipe.json").write_bytes(b'{"\xff')

    with pytest.raises(BaselineError, match="can't decode byte 0xff in position 2"):
        baselines.read(folder, "fp8_recipe")


def test_B04_token_values_of_another_json(folder):
    """Missing token values, and those of another or half-finished update, are refused."""
    path = folder / "fp8_recipe.tokens.npz"
    baselines.write(folder, "other", replace(SAMPLE, tokens={}))

    os.replace(folder / "other.tokens.npz", path)
    with pytest.raises(BaselineError, match=r"tokens\.npz: of another JSON, or an update was cut"):
        baselines.read(folder, "fp8_recipe")
    path.unlink()
    with pytest.raises(BaselineError, match=r"tokens\.npz: obtained no file, expected sha256"):
        baselines.read(folder, "fp8_recipe")


def test_B04_killed_while_writing_keeps_the_old_values(folder, monkeypatch):
    """A process that dies before the rename leaves the old pair and no temporary file."""

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        baselines.write(folder, "fp8_recipe", replace(SAMPLE, values={KL_MEAN: 1.0}, tokens={}))

    assert len(list(folder.iterdir())) == 2
    assert baselines.differences(SAMPLE, baselines.read(folder, "fp8_recipe")) == []


@pytest.mark.parametrize(("renames", "is_new"), [(0, False), (1, False), (2, True), (3, True)])
def test_B04_killed_between_the_files_leaves_the_old_pair_or_the_new(
    folder, monkeypatch, renames, is_new
):
    """The rename of the JSON is what counts: before it the old pair is read, after it the new."""
    replaced, done = os.replace, []

    def until_killed(source, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        replaced(source, target)

    new = replace(SAMPLE, tokens={"prefill/kl_nats": np.float32([1, 2])})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", until_killed)
        with suppress(KeyboardInterrupt):
            baselines.write(folder, "fp8_recipe", new)
    found = baselines.read(folder, "fp8_recipe")
    assert found.tokens.keys() == (new if is_new else SAMPLE).tokens.keys()
    baselines.write(folder, "fp8_recipe", SAMPLE)
    assert {path.name for path in folder.iterdir()} == {"fp8_recipe.json", "fp8_recipe.tokens.npz"}


def test_B04_token_values_of_another_json_are_refused(folder):
    """A JSON whose hash is that of no file is an update that lost a part."""
    tokens = folder / "fp8_recipe.tokens.npz"
    tokens.write_bytes(tokens.read_bytes() + b"more")
    with pytest.raises(BaselineError, match="an update was cut short"):
        baselines.read(folder, "fp8_recipe")


@pytest.mark.parametrize("setting", ["0", "false"])
def test_B04_the_environment_updates_nothing(folder, monkeypatch, setting):
    """UPDATE=0 and UPDATE=false mean nothing to the library: reading leaves files alone."""
    monkeypatch.setenv("UPDATE", setting)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    baselines.read(folder, "fp8_recipe")

    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_B04_writing_keeps_all_other_entries(folder):
    """Another variant and another GPU keep their files when one variant is written."""
    elsewhere = folder.parents[2] / "NVIDIA-B300" / "tensorrt-11.4" / "gptneo-mini"
    baselines.write(elsewhere, "fp8_recipe", SAMPLE)

    baselines.write(folder, "fp16", replace(SAMPLE, values={KL_MEAN: 0.1}))

    for place in (folder, elsewhere):
        assert baselines.differences(SAMPLE, baselines.read(place, "fp8_recipe")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": {KL_MEAN: np.nan}}, f"values/{KL_MEAN}: obtained nan"),
        ({"values": {KL_MEAN: np.inf}}, f"values/{KL_MEAN}: obtained inf"),
        ({"values": {KL_MEAN: None}}, f"values/{KL_MEAN}: obtained None"),
        ({"values": {}}, "values: obtained none, expected at least 1"),
        ({"key": {}}, "key: obtained none, expected at least 1"),
        ({"key": {"a": np.nan}}, "key or provenance: Out of range float"),
        ({"provenance": {"a": object()}}, "key or provenance: Object of type object"),
        ({"tokens": {KL: [0, np.nan]}}, f"tokens/{KL}: .* 1 non-finite"),
        ({"tokens": {KL: [1e39]}}, f"tokens/{KL}: .* 1 non-finite"),
        ({"tokens": {KL: []}}, rf"tokens/{KL}: obtained shape \(0,\)"),
    ],
    ids=lambda argument: str(argument)[:40] if isinstance(argument, dict) else "",
)
def test_B01_non_finite_or_empty_is_never_stored(folder, change, message):
    """Writing refuses NaN, infinity and nothing, and the stored pair stays."""
    with pytest.raises(BaselineError, match=f"gptneo-mini/fp8_recipe not written: .*{message}"):
        baselines.write(folder, "fp8_recipe", replace(SAMPLE, **change))

    assert baselines.differences(SAMPLE, baselines.read(folder, "fp8_recipe")) == []


def test_updates_at_the_same_time_are_one_after_the_other(tmp_path):
    """Three writers and readers of one row: every read gives one whole pair, also at the end."""

    def sample(number):
        tokens = {KL: np.full(3, number, np.float32)}
        return replace(SAMPLE, values={KL_MEAN: float(number)}, tokens=tokens)

    def work(first):
        for number in range(first, first + 15):
            baselines.write(tmp_path, "row", sample(number))
            found = baselines.read(tmp_path, "row")
            assert set(found.tokens[KL]) == {found.values[KL_MEAN]}

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work, first) for first in (100, 200, 300)]:
            done.result()
    assert {path.name for path in tmp_path.iterdir()} == {"row.json", "row.tokens.npz"}


def test_a_variant_must_be_a_file_name(folder):
    """A name that would leave the folder is refused."""
    with pytest.raises(BaselineError, match=r"variant: obtained '\.\./fp16'"):
        baselines.write(folder, "../fp16", SAMPLE)


def test_D01_another_text_is_shown_with_both_hashes():
    """A key that differs gives a line a difference, sorted, with both sides."""
    other = {"checkpoint_sha256": "c0ffee", "texts": {"prose": {"sha256": "bb", "join": "\n"}}}

    assert baselines.key_differences(SAMPLE.key, other) == [
        r'texts/prose/join: stored nothing, current "\n"',
        'texts/prose/sha256: stored "aa", current "bb"',
        "texts/prose/tokens: stored 4, current nothing",
    ]
    assert baselines.key_differences(SAMPLE.key, dict(SAMPLE.key)) == []


def test_differences_show_old_and_new():
    """The update report has old -> new of key, tokens and values; equal parts are left out."""
    new = Baseline(
        key=SAMPLE.key | {"gpu": "H200"},
        provenance={"commit": "other"},
        values={KL_MEAN: 0.0033, "prefill/plan_mib": 313.6, "decode/plan_mib": 1},
        tokens={KL: SAMPLE.tokens[KL][:2]},
    )

    lines = baselines.differences(SAMPLE, new)

    assert lines[0] == 'key/gpu: nothing -> "H200"'
    assert lines[1].startswith(f"tokens/{KL}: 4 values (sha256 ")
    assert lines[2:] == [
        "values/decode/plan_mib: nothing -> 1.0",
        f"values/{KL_MEAN}: 0.0022 -> 0.0033 (+50.00 %)",
    ]


# Published, not measured


@pytest.fixture
def published_folder(tmp_path):
    """Return a folder of another target, holding PUBLISHED as "fp8_recipe"."""
    folder = tmp_path / "baselines" / "b200" / "tensorrt-11.4.0.106" / "gptneo-mini"
    baselines.write(folder, "fp8_recipe", PUBLISHED)
    return folder


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: "/".join(path.parts[-2:]))
def test_committed_measurements_are_what_is_written(path, tmp_path):
    """Reading and writing a committed file changes no byte of it."""
    stored = baselines.read(path.parent, path.stem)

    baselines.write(tmp_path, path.stem, stored)

    # The hash is one of compressed bytes, which may differ between builds of zlib.
    old, new = (
        [line for line in each.read_text().splitlines() if "tokens_sha256" not in line]
        for each in (path, tmp_path / path.name)
    )
    assert old == new
    assert not stored.is_published
    assert baselines.differences(stored, baselines.read(tmp_path, path.stem)) == []


def test_there_are_committed_measurements():
    """The comparison above is not one of nothing."""
    assert len(MEASURED) >= 24


def test_published_round_trip(published_folder):
    """A published baseline is read back equal, with its rounding, and says what it is."""
    stored = baselines.read(published_folder, "fp8_recipe")

    assert stored.is_published
    assert stored.rounding == PUBLISHED.rounding
    assert stored.tokens == {}
    assert baselines.differences(stored, PUBLISHED) == []


def test_only_a_published_file_has_a_rounding(folder, published_folder):
    """A measured file has the members it always had."""
    measured, published = (
        json.loads((each / "fp8_recipe.json").read_text()) for each in (folder, published_folder)
    )

    assert not baselines.read(folder, "fp8_recipe").is_published
    assert sorted(measured) == sorted(baselines.MEMBERS)
    assert sorted(published) == sorted([*baselines.MEMBERS, "rounding"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "rounding/prefill/plan_mib: obtained None, expected a finite number above 0"),
        ('"prefill/plan_mib": 0,', "rounding/prefill/plan_mib: obtained 0,"),
        ('"prefill/plan_mib": -0.05,', "rounding/prefill/plan_mib: obtained -0.05"),
        ('"prefill/plan_mib": 1e999,', "obtained 1e999, expected a finite number"),
        ('"prefill/plan_mib": NaN,', "obtained NaN, expected a finite number"),
        ('"prefill/plan_mib": true,', "rounding/prefill/plan_mib: obtained True"),
        ('"prefill/plan_mib": "0.05",', "rounding/prefill/plan_mib: obtained '0.05'"),
        (f'"kl": 1, {ROUNDING}', "rounding/kl: obtained one without a value"),
    ],
)
def test_every_published_value_has_one_rounding(published_folder, change, message):
    """A rounding that is missing, of nothing, or no number above 0 is refused on reading."""
    edit(published_folder, lambda text: text.replace(ROUNDING, change))

    with pytest.raises(BaselineError, match=rf"fp8_recipe\.json: .*{message}"):
        baselines.read(published_folder, "fp8_recipe")


@pytest.mark.parametrize(
    ("rounding", "message"),
    [
        (None, "rounding: obtained NoneType, expected dict"),
        ({}, f"rounding/prefill/plan_mib: obtained None.*; rounding/{KL_MEAN}: obtained None"),
    ],
    ids=["null", "empty"],
)
def test_a_measured_file_has_no_empty_rounding(folder, rounding, message):
    """The member is there with content or not at all."""
    document = json.loads((folder / "fp8_recipe.json").read_text())
    edit(folder, lambda _: json.dumps(document | {"rounding": rounding}))

    with pytest.raises(BaselineError, match=rf"fp8_recipe\.json: {message}"):
        baselines.read(folder, "fp8_recipe")


def test_token_values_are_never_published(folder):
    """A measured file does not become a published one by an added rounding."""
    document = json.loads((folder / "fp8_recipe.json").read_text())
    edit(folder, lambda _: json.dumps(document | {"rounding": dict(PUBLISHED.rounding)}))

    with pytest.raises(BaselineError, match=rf"tokens: obtained \['{KL}'\], expected none of a"):
        baselines.read(folder, "fp8_recipe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounding": {KL_MEAN: 5e-05}}, "rounding/prefill/plan_mib: obtained None"),
        ({"rounding": PUBLISHED.rounding | {KL_MEAN: 0.0}}, f"rounding/{KL_MEAN}: obtained 0.0"),
        ({"rounding": PUBLISHED.rounding | {KL_MEAN: np.nan}}, f"rounding/{KL_MEAN}: obtained nan"),
        ({"rounding": PUBLISHED.rounding | {KL: 1.0}}, f"rounding/{KL}: obtained one without"),
        ({"tokens": SAMPLE.tokens}, rf"tokens: obtained \['{KL}'\]"),
        ({"values": {}}, "rounding/prefill/plan_mib: obtained one without"),
    ],
    ids=["missing", "zero", "NaN", "extra", "tokens", "no values"],
)
def test_an_unfit_published_baseline_is_not_written(published_folder, change, message):
    """What would be refused on reading is not written, and the stored pair stays."""
    with pytest.raises(BaselineError, match=f"not written: .*{message}.*; copy its figures again$"):
        baselines.write(published_folder, "fp8_recipe", replace(PUBLISHED, **change))

    stored = baselines.read(published_folder, "fp8_recipe")
    assert baselines.differences(stored, PUBLISHED) == []


def test_published_never_replaces_measured(folder):
    """What was measured stays, byte for byte."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    message = "gptneo-mini/fp8_recipe not written: obtained a published one where one is measured"

    with pytest.raises(BaselineError, match=message):
        baselines.write(folder, "fp8_recipe", PUBLISHED)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_published_never_replaces_what_cannot_be_read(folder):
    """A file that is cut may be a measured one: it stays until somebody looks."""
    edit(folder, lambda text: text[:200])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(BaselineError, match=r"fp8_recipe\.json: line \d+, .*not JSON"):
        baselines.write(folder, "fp8_recipe", PUBLISHED)

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_published_is_corrected_by_published(published_folder):
    """A figure that was copied wrong can be written again."""
    corrected = replace(PUBLISHED, values=PUBLISHED.values | {KL_MEAN: 0.0023})

    baselines.write(published_folder, "fp8_recipe", corrected)

    assert baselines.read(published_folder, "fp8_recipe").values == corrected.values


def test_measured_replaces_published(published_folder):
    """An update takes a published one's place, and its report shows that the rounding goes."""
    old = baselines.read(published_folder, "fp8_recipe")

    baselines.write(published_folder, "fp8_recipe", SAMPLE)

    new = baselines.read(published_folder, "fp8_recipe")
    assert not new.is_published
    assert baselines.differences(SAMPLE, new) == []
    lines = baselines.differences(old, new)
    assert f"rounding/{KL_MEAN}: +-5e-05 -> nothing" in lines
    assert 'key/target: "b200" -> nothing' in lines
    assert any(line.startswith(f"tokens/{KL}: nothing -> 4 values") for line in lines)


def test_a_published_key_is_asked_only_what_it_states():
    """Names that only the run has are let pass; each stated one must be equal and be there."""
    run = PUBLISHED.key | {"texts": {"prose": {"sha256": "aa"}}, "checkpoint_sha256": "c0ffee"}
    other = run | {"version": "11.10.0.1"}
    silent = {name: each for name, each in run.items() if name != "target"}

    assert baselines.key_differences(PUBLISHED.key, run, published=True) == []
    assert len(baselines.key_differences(PUBLISHED.key, run)) == 2
    assert baselines.key_differences(PUBLISHED.key, other, published=True) == [
        'version: stored "11.4.0.106", current "11.10.0.1"'
    ]
    assert baselines.key_differences(PUBLISHED.key, silent, published=True) == [
        'target: stored "b200", current nothing'
    ]
