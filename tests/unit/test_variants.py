"""Variants: what each row quantizes, and rows that cannot be."""

from dataclasses import replace

import pytest

from gptneo_trt.errors import VariantError
from gptneo_trt.variant import KINDS, Variant
from gptneo_trt.variants import FLOOR, RECIPE, VARIANTS, is_explored, variant_named

# Row -> what goes wrong, as the message must say it.
REFUSED = {
    "typo": ({"quantized": ("q_porj",)}, r"unknown projections \['q_porj'\]"),
    "other family": ({"quantized": ("fc1",)}, r"unknown projections \['fc1'\]"),
    "head's weight": (
        {"quantized": ("lm_head.weight",)},
        r"unknown projections \['lm_head.weight'",
    ),
    "smoothing": (
        {"quantized": ("c_fc",), "smoothing": "awqq"},
        "smoothing 'awqq', expected one of",
    ),
    "smoothing of nothing": ({"smoothing": "smoothquant"}, "it quantizes nothing"),
    "smoothing beside quantiles": (
        {"quantized": ("c_fc",), "smoothing": "smoothquant", "calibration": "percentile"},
        "smoothquant has the largest values alone, not percentile",
    ),
    "calibration of weights": (
        {"quantized": ("c_fc",), "quantized_activations": False, "calibration": "mse"},
        "its activations are not quantized",
    ),
    "path": ({"quantized": ("mlp.c_fc",)}, r"unknown projections \['mlp.c_fc'\]"),
    "one string": ({"quantized": "q_proj"}, "unknown projections"),
    "two at once": ({"quantized": ("a", "q_proj", "b")}, r"unknown projections \['a', 'b'\]"),
    "compute type": ({"compute_type": "bf16"}, "compute_type 'bf16', expected one of"),
    "dequantize type": (
        {"quantized": ("c_fc",), "dequantize_type": "fp8"},
        "dequantize_type 'fp8', expected one of",
    ),
    "factor 0": (
        {"quantized": ("c_fc",), "activation_scale_factor": 0.0},
        "activation_scale_factor 0.0, expected a positive",
    ),
    "factor nan": (
        {"quantized": ("c_fc",), "activation_scale_factor": float("nan")},
        "activation_scale_factor nan, expected a positive",
    ),
    "factor inf": (
        {"quantized": ("c_fc",), "activation_scale_factor": float("inf")},
        "activation_scale_factor inf, expected a positive",
    ),
    "negative edges": (
        {"quantized": ("c_fc",), "float_edge_layers": -1},
        "float_edge_layers -1, expected 0 or more",
    ),
    "factor of nothing": ({"activation_scale_factor": 1.5}, "it quantizes nothing"),
    "edges of nothing": ({"float_edge_layers": 1}, "it quantizes nothing"),
    "dequantize of nothing": ({"dequantize_type": "fp32"}, "it quantizes nothing"),
}


def test_rows_are_keyed_by_their_name():
    """A row is found under its own name, every name is in use once, and the floor is a row."""
    assert [row.name for row in VARIANTS.values()] == list(VARIANTS)
    assert FLOOR in VARIANTS
    assert VARIANTS[FLOOR].quantized == ()


def test_unknown_name_lists_the_rows():
    """Asking for a row that does not exist lists those that do."""
    with pytest.raises(VariantError, match="no variant 'fp9'; the rows are: fp32, fp16, fp8, "):
        variant_named("fp9")
    assert variant_named("fp8") is VARIANTS["fp8"]


def test_a_row_can_be_described():
    """A row and settings: another row, of that name, which is not in the table."""
    name = "fp8:quantized=lm_head+c_fc:activation_scale_factor=1.5:quantized_activations=True"

    row = variant_named(name)

    assert row == replace(
        VARIANTS["fp8"],
        name=name,
        summary=row.summary,
        quantized=("lm_head", "c_fc"),
        activation_scale_factor=1.5,
    )
    assert row.quantized_modules(1) == ("transformer.h.0.mlp.c_fc", "lm_head")
    assert is_explored(name)
    assert not is_explored("fp8")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("smoothness=1", r"setting 'smoothness=1', expected one of \['quantized', "),
        ("name=fp16", "setting 'name=fp16', expected one of"),
        ("quantized", "unknown projections"),
        ("float_edge_layers=one", "setting 'float_edge_layers=one', expected a int"),
        ("activation_scale_factor=", "setting 'activation_scale_factor=', expected a float"),
        ("quantized_activations=no", "setting 'quantized_activations=no', expected a bool"),
        ("quantized_format=fp4", "quantized_format 'fp4', expected one of"),
    ],
)
def test_a_description_that_is_none_is_refused(setting, expected):
    """What is misspelt is named; nothing is guessed."""
    with pytest.raises(VariantError, match=f"variant 'fp8:{setting}': .*{expected}"):
        variant_named(f"fp8:{setting}")
    with pytest.raises(VariantError, match="no variant 'fp9'; the rows are: "):
        variant_named(f"fp9:{setting}")


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_C03_refused_rows_name_the_reason(fields, message):
    """A row that names what does not exist, or cannot have an effect, is an error of its own."""
    with pytest.raises(VariantError, match=f"variant 'made-up': .*{message}"):
        Variant("made-up", "", **fields)


def test_C03_unknown_projections_list_the_valid_ones():
    """The message of an unknown projection lists every projection that there is."""
    with pytest.raises(VariantError) as caught:
        Variant("made-up", "", ("fc1",))
    assert str(list(KINDS)) in str(caught.value)


def test_C03_every_mismatch_is_in_one_message():
    """Four mistakes in one row are reported together."""
    with pytest.raises(VariantError) as caught:
        Variant("fp8", "", ("fc1",), "bf16", "fp8", activation_scale_factor=-1)
    parts = ("unknown projections", "compute_type", "dequantize_type", "activation_scale_factor")
    assert [part for part in parts if part in str(caught.value)] == list(parts)


def test_C03_a_row_called_fp8_quantizes_something():
    """A row that quantizes nothing cannot be called FP8; under another name it is a float row."""
    with pytest.raises(VariantError, match=r"'fp8-nothing': it quantizes nothing; name some of"):
        Variant("fp8-nothing", "", ())
    assert Variant("nothing", "", ()).quantized_modules(12) == ()


def test_C03_duplicates_collapse():
    """A projection named twice is quantized once, and the row equals the one that says it once."""
    twice = Variant("fp8-q", "", ("q_proj", "q_proj"))
    assert twice == Variant("fp8-q", "", ("q_proj",))
    assert twice.quantized_modules(1) == ("transformer.h.0.attn.attention.q_proj",)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("c_proj", "mlp.c_proj"), ("out_proj", "attn.attention.out_proj")],
)
def test_C03_modules_are_paths_of_hugging_face(kind, path):
    """``c_proj`` means the MLP's, ``out_proj`` the attention's, once a layer, in order."""
    expected = tuple(f"transformer.h.{layer}.{path}" for layer in range(3))
    assert Variant("fp8-one", "", (kind,)).quantized_modules(3) == expected


def test_C03_the_recipe_is_60_projections_of_12_layers():
    """The study's recipe is q, k, v, c_fc and c_proj of all 12 layers, and nothing else."""
    modules = VARIANTS["fp8"].quantized_modules(12)
    assert len(modules) == len(set(modules)) == 60
    assert {module.rpartition(".")[2] for module in modules} == set(RECIPE)


def test_C03_edge_layers_stay_out():
    """One layer kept at each end leaves the inner ones; too many leave nothing and are refused."""
    row = VARIANTS["fp8-edges-fp16"]
    assert {module.split(".")[2] for module in row.quantized_modules(4)} == {"1", "2"}
    with pytest.raises(VariantError, match=r"'fp8-edges-fp16': nothing is left .* in 2 layers"):
        row.quantized_modules(2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quantized": ()}, "fp16"),
        ({"quantized": (), "compute_type": "fp32"}, "fp32"),
        ({}, "fp8"),
        ({"quantized_activations": False}, "fp8"),
        ({"quantized_format": "int8"}, "int8"),
        ({"quantized_format": "nvfp4", "weight_scales": "block"}, "nvfp4"),
        (
            {
                "quantized_format": "nvfp4",
                "weight_scales": "block",
                "quantized_activations": False,
            },
            "nvfp4",
        ),
    ],
    ids=str,
)
def test_N08_the_number_format_is_the_narrowest_in_a_plan(fields, expected):
    """A GPU without a format runs no plan that holds it, weights alone included."""
    row = Variant("made-up", "", **{"quantized": RECIPE} | fields)
    assert row.number_format == expected
