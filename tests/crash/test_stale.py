"""What is kept under a name over all that shapes it: another checkpoint, version or commit asks for
another file.
"""

from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest

from gptneo_trt import scales
from gptneo_trt.checkpoint import checkpoint_from_source
from gptneo_trt.plans import build_plan, plan_key
from tests.crash.works import tiny_request, tiny_text, tiny_texts
from tests.gate import references
from tests.unit.sources import imported_modules
from tests.unit.tiny import changed, tiny_checkpoint, write_folder

BIAS = "transformer.ln_f.bias"
# Shapes neither ranges nor reference logits: what travels, how errors read, TensorRT.
SHAPELESS = {"__init__.py", "backend.py", "data.py", "errors.py"}


def other_versions(package):
    """Return ``metadata.version`` where one package has another version."""
    real = metadata.version
    return lambda name: "0.0.0" if name == package else real(name)


def references_key(checkpoint=None, texts=None, type_name="float32"):
    """Return the key of reference logits."""
    checkpoint = checkpoint or tiny_checkpoint()
    return references._key(checkpoint, texts or tiny_texts(), type_name)


def scales_name(folder, checkpoint=None, text=None):
    """Return the name of a file of scales."""
    checkpoint = checkpoint or tiny_checkpoint()
    return scales.scales_path(folder, checkpoint, text or tiny_text()).name


def test_weights_that_changed_under_the_same_path_are_another_checkpoint(tmp_path):
    """A checkpoint's folder whose weights are replaced: plan, scales and references are new."""
    first = tiny_checkpoint()
    second = changed(first, {BIAS: lambda bias: bias + 1})
    found = []
    for weights in (first.weights, second.weights):
        write_folder(tmp_path / "model", weights)
        checkpoint = checkpoint_from_source(str(tmp_path / "model"))
        plan = plan_key(replace(tiny_request(), checkpoint=checkpoint))
        found.append((plan, references_key(checkpoint), scales_name(tmp_path, checkpoint)))
    assert [one == other for one, other in zip(*found, strict=True)] == [False] * 3


def test_a_plan_of_changed_weights_is_built_beside_the_old_one(tmp_path):
    """The second build finds nothing, although name, row and phase are the same."""
    request = tiny_request()
    other = replace(request, checkpoint=changed(request.checkpoint, {BIAS: lambda bias: bias + 1}))
    plans = [build_plan(each, tmp_path) for each in (request, other)]
    assert [plan.cached for plan in plans] == [False, False]
    assert plans[0].path.read_bytes() != plans[1].path.read_bytes()


@pytest.mark.parametrize("package", references.PACKAGES)
def test_references_of_another_version_are_not_used(monkeypatch, package):
    """Another version of what computes them asks for another file."""
    before = references_key()
    monkeypatch.setattr(references.metadata, "version", other_versions(package))
    assert references_key() != before


@pytest.mark.parametrize("changed_source", references.SOURCES, ids=lambda path: path.name)
def test_references_of_an_older_commit_are_not_used(monkeypatch, tmp_path, changed_source):
    """Another source of what computes or pads them asks for another file."""
    before, copies = references_key(), []
    for source in references.SOURCES:
        copies.append(tmp_path / source.name)
        copies[-1].write_bytes(source.read_bytes() + (b"#" if source == changed_source else b""))
    monkeypatch.setattr(references, "SOURCES", tuple(copies))
    assert references_key() != before


@pytest.mark.parametrize(
    "change",
    [
        {"type_name": "bf16"},
        {"texts": replace(tiny_texts(), prose=tiny_texts().prose[:, :4])},
        {"texts": replace(tiny_texts(), sampled=())},
    ],
    ids=["type", "prose", "sampled"],
)
def test_references_of_other_texts_are_not_used(change):
    """Type and every text are in the key."""
    assert references_key(**change) != references_key()


@pytest.mark.parametrize("package", scales.PACKAGES)
def test_scales_of_another_version_are_not_used(monkeypatch, tmp_path, package):
    """Another version of what calibrates, or of the model that is calibrated, is another file."""
    before = scales_name(tmp_path)
    monkeypatch.setattr(scales.metadata, "version", other_versions(package))
    assert scales_name(tmp_path) != before


@pytest.mark.parametrize("name", scales.SOURCES)
def test_scales_of_an_older_commit_are_not_used(monkeypatch, tmp_path, name):
    """Another source of what calibrates, or makes the model, is another file."""
    before = scales_name(tmp_path)
    sources = {source: (scales.FOLDER / source).read_bytes() for source in scales.SOURCES}
    for source, content in sources.items():
        (tmp_path / source).write_bytes(content + (b"#" if source == name else b""))
    monkeypatch.setattr(scales, "FOLDER", tmp_path)
    assert scales_name(tmp_path) != before


def test_every_module_that_shapes_them_is_in_the_names():
    """Whatever calibration and reference import is named in SOURCES, or is of no consequence."""
    references_need = imported_modules("reference.py") - SHAPELESS
    scales_need = imported_modules("calibrate.py") - SHAPELESS | references_need
    assert scales_need == set(scales.SOURCES)
    assert references_need <= {path.name for path in references.SOURCES}


def test_scales_of_other_tokens_are_not_used(tmp_path):
    """The calibration text is in the name."""
    text = replace(tiny_text(), token_ids=(np.arange(7, dtype=np.int32),))
    assert scales_name(tmp_path, text=text) != scales_name(tmp_path)


@pytest.mark.parametrize("field", ["checkpoint_sha256", "text_sha256"])
def test_scales_of_another_checkpoint_are_calibrated_again(tmp_path, field):
    """A file in the right place that says it is of something else is replaced, not used."""
    checkpoint, text, modules = tiny_checkpoint(), tiny_text(), ("transformer.h.0.mlp.c_fc",)
    right = scales.Scales(dict.fromkeys(modules, 2.0), "max", checkpoint.sha256, text.sha256, 8, "")
    path = scales.scales_path(tmp_path, checkpoint, text)
    scales.write_scales(path, replace(right, **{field: "0" * 63 + "1"}))
    found = scales.kept_scales(path, checkpoint, text, modules, lambda: right)
    assert found is right
    again = scales.kept_scales(path, checkpoint, text, modules, lambda: pytest.fail("once more"))
    assert again == right
