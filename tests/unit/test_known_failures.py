"""Known failures: which cases a row is about, and what it must not excuse."""

from dataclasses import asdict
from itertools import product

import pytest
from packaging.specifiers import SpecifierSet

from gptneo_trt import known_failures as table
from gptneo_trt.backend import FLAVOURS
from gptneo_trt.errors import BuildError, GptNeoTrtError, RunError
from gptneo_trt.known_failures import (
    KNOWN_FAILURES,
    NO_GPU,
    PUBLISHED,
    STAGE_ERRORS,
    KnownFailure,
    failures_of_target,
    known_failure,
)
from gptneo_trt.network import PHASES
from gptneo_trt.variants import RECIPE, VARIANTS

OUT_PROJ, RTX_9_0, RTX_NO_GPU, INT8_WEIGHTS = KNOWN_FAILURES.values()
FIELDS = {
    "id": "made-up",
    "flavour": "tensorrt",
    "versions": ">=11.4,<11.5",
    "compute_capability": "",
    "projections": ("c_fc",),
    "phase": "",
    "stage": "build",
    "message": "some words",
    "reference": "nowhere",
    "confirmed": "2026-11-30, h200/tensorrt-11.4.0.106",
    "summary": "made up",
}
# Row -> what is wrong with it, and what the message must say.
REFUSED = {
    "flavour": ({"flavour": "openvino"}, r"flavour 'openvino', expected one of \['tensorrt', "),
    "phase": ({"phase": "both"}, r"phase 'both', expected one of \['', 'prefill', 'decode'\]"),
    "stage": ({"stage": "parse"}, r"stage 'parse', expected one of \['build', 'deserialize'"),
    "every stage": ({"stage": ""}, "stage '', expected one of"),
    "projection": ({"projections": ("fc1", "q_proj")}, r"unknown projections \['fc1'\]"),
    "one string": ({"projections": "q_proj"}, "unknown projections"),
    "version": ({"versions": "11.4"}, "versions '11.4', expected for example '>=11.4,<11.5'"),
    "any version": ({"versions": ""}, "versions is empty, expected a text"),
    "capability": ({"compute_capability": "9.0"}, "compute_capability '9.0', expected '==9.0'"),
    "expression": ({"message": "(half"}, r"message '\(half', expected an expression that needs"),
    "any message": ({"message": ".*"}, r"message '\.\*', expected an expression that needs some"),
    "no message": ({"message": " "}, "message is empty, expected a text"),
    "no reference": ({"reference": ""}, "reference is empty, expected a text"),
    "no summary": ({"summary": ""}, "summary is empty, expected a text"),
    "no date": ({"confirmed": "yesterday"}, "confirmed 'yesterday', expected '2026-11-30, h200/"),
    "no target": ({"confirmed": "2026-11-30"}, "confirmed '2026-11-30', expected"),
}
# TensorRT's line of each row, and lines that are about something else.
LINE = {
    OUT_PROJ.id: "[ERROR] Input 0's element type (fp8_e4m3) differs from input 1's element type "
    "(half)",
    RTX_9_0.id: "[ERROR] TensorRT-RTX does not support this compute capability",
    RTX_NO_GPU.id: "[ERROR] IBuilder::buildSerializedNetwork: Error Code 1: Cuda Runtime (In "
    "generateForCurrent at /_src/runtime/core/cudaDeviceProfile.cpp:187)",
    INT8_WEIGHTS.id: "[ERROR] IExecutionContext::enqueueV3: Error Code 1: Myelin "
    "(cudnn_graph_utils.h:429: CHECK(false) failed. cuDNN graph compilation failed: "
    "[cudnn_frontend] Error: No valid execution plans built. for insn:gemm)",
}
OTHER_LINES = (
    "",
    "[ERROR] Input 0's element type (float) differs from input 1's element type (half)",
    "[ERROR] Input 0's element type (fp8_e4m3) is not supported",
    "[ERROR] transformer.h.0.attn: fp8 ScaleMode is illegal\n[ERROR] element type differs: half",
    "[ERROR] IBuilder::buildSerializedNetwork: Error Code 9: Internal Error",
    "[ERROR] IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error",
)


def made_up(**fields):
    """Return a valid row with some fields changed."""
    return KnownFailure(**FIELDS | fields)


def raised(row, line):
    """Return the error that a failure with this line is reported as."""
    error = STAGE_ERRORS[row.stage]
    what = "variant fp8-out_proj, decode, made-up: returned None"
    return error(what, (line,)) if error is BuildError else error(f"{what}\n  TensorRT: {line}")


def cases():
    """Yield (target, (variant, phase, stage)) on both sides of every bound of every row."""
    bounds = {
        specifier.version
        for row in KNOWN_FAILURES.values()
        for specifier in SpecifierSet(row.versions)
    }
    versions = sorted(bounds | {f"{bound}.0.1" for bound in bounds})
    capabilities = (None, "8.9", "9.0", "10.0", "10.3", "12.0")
    for target in product(FLAVOURS, versions, capabilities):
        for case in product(VARIANTS.values(), PHASES, STAGE_ERRORS):
            yield target, case


def overlaps():
    """Return the ids of rows that are about one and the same case."""
    found = set()
    for target, case in cases():
        ids = [row.id for row in failures_of_target(*target) if row.hits(*case)]
        if len(ids) > 1:
            found.add(tuple(ids))
    return found


def test_rows_are_keyed_by_their_id():
    """A row is found under its own id, and no id is in use twice."""
    assert [row.id for row in KNOWN_FAILURES.values()] == list(KNOWN_FAILURES)
    assert len(KNOWN_FAILURES) == len(table._ROWS)


def test_every_stage_has_an_error_of_the_library():
    """A build fails as BuildError; an engine that does not load or run fails as RunError."""
    errors = [STAGE_ERRORS[stage] for stage in ("build", "deserialize", "run")]
    assert errors == [BuildError, RunError, RunError]
    assert all(issubclass(error, GptNeoTrtError) for error in STAGE_ERRORS.values())


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_rows_name_the_reason(fields, message):
    """A row that names what does not exist, or would excuse anything, is an error."""
    with pytest.raises(BuildError, match=f"known failure 'made-up': .*{message}"):
        made_up(**fields)


def test_every_mismatch_is_in_one_message():
    """Four mistakes in one row are reported together."""
    with pytest.raises(BuildError) as caught:
        made_up(flavour="a", projections=("b",), message="(", confirmed="")
    parts = ("flavour 'a'", "projections ['b']", "message '('", "confirmed ''")
    assert [part for part in parts if part in str(caught.value)] == list(parts)


def test_a_row_may_be_published_and_not_seen():
    """A failure that others reported says so where the date would be."""
    assert made_up(confirmed=PUBLISHED).confirmed == OUT_PROJ.confirmed == PUBLISHED


def test_no_two_rows_are_about_the_same_case():
    """A case has one expected message at most."""
    assert overlaps() == set()


def test_two_rows_about_the_same_case_are_found(monkeypatch):
    """A wider row beside one of the table is seen by the test above."""
    wider = asdict(OUT_PROJ) | {"id": "wider", "versions": ">=11.3,<12", "projections": RECIPE}
    monkeypatch.setitem(KNOWN_FAILURES, "wider", KnownFailure(**wider))
    assert overlaps() == {(OUT_PROJ.id, "wider")}


@pytest.mark.parametrize("row", KNOWN_FAILURES.values(), ids=KNOWN_FAILURES)
def test_every_row_is_about_something(row):
    """Each row is found for some case, and for none outside its flavour, versions and stage."""
    found = [(target, case) for target, case in cases() if known_failure(*target, *case) is row]
    assert found
    assert {target[0] for target, _ in found} == {row.flavour}
    assert {case[2] for _, case in found} == {row.stage}
    assert {case[1] for _, case in found} == ({row.phase} if row.phase else set(PHASES))
    assert all(SpecifierSet(row.versions).contains(target[1]) for target, _ in found)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("11.1.0.106", False),
        ("11.3.99", False),
        ("11.4", True),
        ("11.4.0.106", True),
        ("11.4.1rc1", True),
        ("11.4.0.106+cuda13", True),
        ("11.5", False),
        ("11.10.0.1", False),
        ("11.40", False),
        ("12.0", False),
    ],
)
def test_versions_compare_as_versions(version, known):
    """The range is 11.4 and its builds, early ones too; 11.10 and 11.40 are newer, not within."""
    found = known_failure("tensorrt", version, "10.0", VARIANTS["fp8-out_proj"], "decode", "build")
    assert found is (OUT_PROJ if known else None)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("9.0", [RTX_9_0]), ("8.9", []), ("9.1", []), ("12.0", []), (None, [])],
)
def test_capability_is_matched_as_a_version(capability, expected):
    """TensorRT-RTX 1.7 fails on 9.0, on no other GPU, and not without one."""
    assert failures_of_target("tensorrt_rtx", "1.7.1.116", capability) == expected


@pytest.mark.parametrize(
    ("capability", "expected"), [(None, [RTX_NO_GPU]), ("9.0", []), ("12.0", [])]
)
def test_a_row_can_be_about_hosts_without_a_gpu(capability, expected):
    """TensorRT-RTX 1.4 fails where there is no GPU, and nowhere else."""
    assert RTX_NO_GPU.compute_capability == NO_GPU
    assert failures_of_target("tensorrt_rtx", "1.4.0.76", capability) == expected


@pytest.mark.parametrize("capability", [None, "9.0", "10.3"])
def test_no_capability_is_any(capability):
    """A row without a compute capability is about every GPU, and about none."""
    assert failures_of_target("tensorrt", "11.4.0.106", capability) == [OUT_PROJ]


@pytest.mark.parametrize("version", ["1.5.0.114", "1.6.1.120", "1.8", "1.10.0.1"])
def test_versions_that_work_have_no_row(version):
    """The TensorRT-RTX that runs here is expected to work, as is one that nobody has seen."""
    for capability in ("9.0", None):
        found = failures_of_target("tensorrt_rtx", version, capability)
        assert [row for row in found if not row.variants] == []


def test_a_row_may_be_of_one_variant():
    """INT8 weights of all kinds do not run in prefill; INT8 products do."""
    row, variant = INT8_WEIGHTS, VARIANTS["int8-weights"]
    assert row.hits(variant, "prefill", "run")
    assert not row.hits(variant, "decode", "run")
    assert not row.hits(VARIANTS["int8"], "prefill", "run")
    with pytest.raises(BuildError, match=r"unknown rows \['int9'\]"):
        made_up(variants=("int9",))


def test_variants_are_hit_by_what_they_quantize():
    """FP8 ``out_proj`` hits the three rows that have it, whatever their names."""
    hit = {name for name, row in VARIANTS.items() if OUT_PROJ.hits(row, "decode", "build")}
    assert hit == {"fp8-out_proj", "fp8-attention", "fp8-all"}


def test_all_projections_are_every_fp8_row():
    """All kinds are the rows that multiply anything in FP8; none at all is every row."""
    fp8 = {name for name, row in VARIANTS.items() if RTX_NO_GPU.hits(row, "decode", "build")}
    assert fp8 == {
        name
        for name, row in VARIANTS.items()
        if row.is_calibrated and row.quantized_format == "fp8"
    }
    assert fp8
    assert fp8.isdisjoint({"int8", "fp8-weights", "fp16"})
    assert all(RTX_9_0.hits(row, "prefill", "deserialize") for row in VARIANTS.values())


def test_phase_and_stage_must_be_those_of_the_row():
    """A row for decode is not about prefill; a row for building is not about running."""
    row, variant = made_up(phase="decode"), VARIANTS["fp8-c_fc"]
    assert row.hits(variant, "decode", "build")
    assert not row.hits(variant, "prefill", "build")
    assert not row.hits(variant, "decode", "run")


@pytest.mark.parametrize(
    ("version", "capability", "named"), [("unknown", "9.0", "unknown"), ("1.7", "sm90", "sm90")]
)
def test_unreadable_version_is_named(version, capability, named):
    """A version or capability that is none is an error, not a case without known failures."""
    with pytest.raises(BuildError, match=f"version '{named}', expected one such as"):
        failures_of_target("tensorrt_rtx", version, capability)


@pytest.mark.parametrize("row", KNOWN_FAILURES.values(), ids=KNOWN_FAILURES)
def test_message_is_recognised(row):
    """TensorRT's line inside the error of the row's stage is the expected failure."""
    expected = pytest.RaisesExc(STAGE_ERRORS[row.stage], match=row.message)
    assert expected.matches(raised(row, LINE[row.id]))


@pytest.mark.parametrize("row", KNOWN_FAILURES.values(), ids=KNOWN_FAILURES)
def test_another_message_or_error_is_not(row):
    """Every other line is a new failure, and so is the same line in another error."""
    expected = pytest.RaisesExc(STAGE_ERRORS[row.stage], match=row.message)
    others = (*OTHER_LINES, *(line for name, line in LINE.items() if name != row.id))
    assert not [line for line in others if expected.matches(raised(row, line))]
    assert not expected.matches(GptNeoTrtError(LINE[row.id]))
    assert not expected.matches(ValueError(LINE[row.id]))


@pytest.mark.parametrize(
    "line",
    [
        "element type 'half' of input 1 differs from fp8 of input 0",
        "Element types differ: FP8_E4M3 and Half.",
    ],
)
def test_out_proj_is_recognised_by_its_words(line):
    """Punctuation, order and case may change; the words of one line may not."""
    assert pytest.RaisesExc(BuildError, match=OUT_PROJ.message).matches(raised(OUT_PROJ, line))
