"""The operators: FP8 rounding value by value, and every attribute that is not supported."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import e4m3_values, round_to_e4m3

from gptneo_trt import nvfp4
from gptneo_trt.backend import create_network, log_collector
from gptneo_trt.errors import RunError
from gptneo_trt.number_formats import to_fp4, to_fp8, to_int4
from gptneo_trt.operators import READERS, read_layer, read_outputs, rounding
from gptneo_trt.quantizing import read_packed

# Case C-06: obtained -> expected.
FP8_VALUES = {
    448.0: 448.0,
    464.0: 448.0,
    465.0: 448.0,
    500.0: 448.0,
    -1000.0: -448.0,
    float("inf"): 448.0,
    2.0**-9: 2.0**-9,
    2.0**-10: 0.0,
    2.0**-11: 0.0,
    3 * 2.0**-10: 2.0**-8,
}


def fp8(values):
    """Return what the interpreter makes of float32 values, as float64."""
    return to_fp8(torch.tensor(values, dtype=torch.float32)).double().numpy()


@pytest.mark.parametrize(("value", "expected"), FP8_VALUES.items(), ids=map(str, FP8_VALUES))
def test_C06_rounding_saturates(value, expected):
    """Values beyond 448 become 448 with their sign; half of the smallest one becomes 0."""
    assert fp8(value) == expected


def test_C06_bytes_of_finite_values():
    """The case's values have these bytes, none of them NaN's (0x7F, 0xFF), on every torch."""
    values = [448, 464, 465, 500, -1000, 2.0**-9, 2.0**-11]
    stored = to_fp8(torch.tensor(values)).to(torch.float8_e4m3fn).view(torch.uint8)
    assert stored.tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x01, 0x00]


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_C06_a_scale_that_was_rounded_down_makes_no_nan(amax):
    """The largest value over a scale just too small is beyond 448, and stays at 448."""
    scale = np.nextafter(np.float32(amax) / np.float32(448), np.float32(0))
    divided = np.float32(amax) / scale
    assert divided > 448
    assert fp8([divided, -divided]).tolist() == [448, -448]


def test_C06_nan_stays_nan():
    """A NaN is not hidden by the saturation."""
    assert np.isnan(fp8(float("nan")))


def test_C06_every_value_is_kept():
    """All 256 bytes decode to the specification's values, and rounding keeps each of them."""
    decoded = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    table = np.append(e4m3_values(), np.nan)
    np.testing.assert_array_equal(decoded, np.concatenate([table, -table]))
    np.testing.assert_array_equal(fp8(decoded), decoded)


@pytest.mark.parametrize("sign", [1, -1])
def test_C06_ties_go_to_the_even_byte(sign):
    """Every midpoint goes to the neighbour with an even byte, its float32 neighbours nearest."""
    table = e4m3_values()
    middle = ((table[:-1] + table[1:]) / 2).astype(np.float32)
    even = np.where(np.arange(len(middle)) % 2 == 0, table[:-1], table[1:])
    below, above = (np.nextafter(middle, np.float32(end)) for end in (0, 1000))
    for values, expected in ((middle, even), (below, table[:-1]), (above, table[1:])):
        np.testing.assert_array_equal(fp8(sign * values), sign * expected)


def test_C06_agrees_with_the_specification():
    """On 100,000 float32 of every size, rounding is that of the specification's own table."""
    generator = np.random.default_rng(0)
    size = np.exp2(generator.uniform(-14, 12, 100_000))
    values = (size * generator.choice([-1, 1], 100_000)).astype(np.float32)
    np.testing.assert_array_equal(fp8(values), round_to_e4m3(values))


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_C06_rounding_is_idempotent_and_monotone(left, right):
    """Rounding twice is rounding once, and never swaps the order of two values."""
    low, high = sorted((left, right))
    obtained = fp8([low, high])
    np.testing.assert_array_equal(fp8(obtained), obtained)
    assert obtained[0] <= obtained[1]


ROUNDED = {"HALF": 1 + 2.0**-10, "BF16": 1 + 2.0**-7, "FP8": 1.125}


@pytest.mark.parametrize(("name", "expected"), ROUNDED.items(), ids=ROUNDED)
def test_rounding_is_to_the_declared_type(backend, name, expected):
    """A value just above the midpoint to the next one of a type is rounded up to it."""
    round_to = rounding(backend.trt, getattr(backend.trt.DataType, name))
    midpoint = torch.tensor((1 + expected) / 2)
    assert round_to(torch.nextafter(midpoint, torch.tensor(2.0))) == expected
    assert round_to(midpoint) == 1


@pytest.mark.parametrize("name", ["FLOAT", "INT32", "INT64", "BOOL"])
def test_exact_types_are_not_rounded(backend, name):
    """float32, integers and booleans are held exactly."""
    assert rounding(backend.trt, getattr(backend.trt.DataType, name)) is None


@pytest.mark.parametrize("name", ["UINT8", "E8M0"])
def test_unknown_types_are_refused(backend, name):
    """A type that is not known is an error that names it."""
    with pytest.raises(RunError, match=f"tensor type DataType.{name}: the interpreter does not"):
        rounding(backend.trt, getattr(backend.trt.DataType, name))


@pytest.fixture
def kit(backend):
    """Return an empty network, with typed inputs to build on."""
    trt = backend.trt
    log = log_collector(trt)
    builder = trt.Builder(log.logger)
    network = create_network(backend, builder)
    types = trt.DataType
    return SimpleNamespace(
        trt=trt,
        network=network,
        x=network.add_input("x", types.FLOAT, (2, 4)),
        y=network.add_input("y", types.FLOAT, (4, 3)),
        row=network.add_input("row", types.FLOAT, (4,)),
        heads=network.add_input("heads", types.FLOAT, (1, 2, 3, 4)),
        ids=network.add_input("ids", types.INT32, (2,)),
        mask=network.add_input("mask", types.BOOL, (1, 1, 3, 3)),
        scale=network.add_input("scale", types.FLOAT, ()),
        scales=network.add_input("scales", types.FLOAT, (4,)),
        alive=(log, builder),
    )


def gather(kit, axis):
    """Add a gather of the columns or rows of x."""
    return kit.network.add_gather(kit.x, kit.ids, axis)


def gather_elements(kit):
    """Add a gather that picks one value a place."""
    ids = kit.network.add_input("places", kit.trt.DataType.INT32, (2, 4))
    return kit.network.add_gather_v2(kit.x, ids, kit.trt.GatherMode.ELEMENT)


def shuffle(kit, **attributes):
    """Add a reshape to [4, 2] with attributes of its own."""
    layer = kit.network.add_shuffle(kit.x)
    layer.reshape_dims = (4, 2)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def dynamic_shuffle(kit):
    """Add a reshape whose shape is a tensor."""
    layer = kit.network.add_shuffle(kit.x)
    layer.set_input(1, kit.network.add_input("shape", kit.trt.DataType.INT64, (2,)))
    return layer


def attention(kit, causal="NONE", norm="SOFTMAX", mask=None):
    """Add the first of the two layers that an attention consists of."""
    trt, network = kit.trt, kit.network
    operation = getattr(trt.AttentionNormalizationOp, norm)
    kind = getattr(trt.CausalMaskKind, causal)
    added = network.add_attention_v2(kit.heads, kit.heads, kit.heads, operation, kind)
    if mask is not None:
        added.mask = mask
    kinds = {network.get_layer(i).type.name: i for i in range(network.num_layers)}
    return network.get_layer(kinds["ATTENTION_INPUT"])


def float_mask(kit):
    """Add an attention whose mask is added to the scores."""
    mask = kit.network.add_input("bias", kit.trt.DataType.FLOAT, (1, 1, 3, 3))
    return attention(kit, mask=mask)


def dequantize_uint8(kit):
    """Add a Dequantize of values that are of no quantized format."""
    tensor = kit.network.add_input("uint8", kit.trt.DataType.UINT8, (2, 4))
    return kit.network.add_dequantize(tensor, kit.scale, kit.trt.DataType.FLOAT)


def block_quantize(kit, shape, axis, block_shape=()):
    """Add a Quantize of x to INT4, with scales of a shape."""
    scales = kit.network.add_input("block_scales", kit.trt.DataType.FLOAT, shape)
    layer = kit.network.add_quantize(kit.x, scales, kit.trt.DataType.INT4)
    layer.axis = axis
    if block_shape:
        layer.block_shape = block_shape
    return layer


def dynamic_quantize(kit, axis=1, block_size=16, to="FP4", scales="FP8"):
    """Add a DynamicQuantize of wide rows, to NVFP4 unless said otherwise."""
    types = kit.trt.DataType
    rows = kit.network.add_input("rows", types.FLOAT, (32, 32))
    layer = kit.network.add_dynamic_quantize(
        rows, axis, block_size, getattr(types, to), getattr(types, scales)
    )
    layer.set_input(1, kit.scale)
    return layer


def dynamic_quantize_in_squares(kit):
    """Add a DynamicQuantize with blocks of two axes."""
    types = kit.trt.DataType
    rows = kit.network.add_input("rows", types.FLOAT, (32, 32))
    return kit.network.add_dynamic_quantize_v2(rows, (16, 16), types.FP4, types.FP8)


def packed_constant(kit, name, size):
    """Add a constant of FP4 or INT4, 2 a byte, and return it and its bytes."""
    packed = np.arange(size // 2, dtype=np.uint8)
    kit.alive += (packed,)
    weights = kit.trt.Weights(getattr(kit.trt.DataType, name), packed.ctypes.data, size)
    kit.network.add_constant((size,), weights)
    return kit.network.get_layer(kit.network.num_layers - 1), packed


def normalization(kit, axes=2, **attributes):
    """Add a normalization of x, the older kind where ``groups`` is given."""
    layer = kit.network.add_normalization_v2(kit.x, kit.x, kit.x, axes)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def vector_product(kit):
    """Add the product of a matrix and a vector."""
    operation = kit.trt.MatrixOperation
    return kit.network.add_matrix_multiply(kit.x, operation.NONE, kit.row, operation.VECTOR)


# What is built -> what the error says. All of these change the result and have no reader.
UNSUPPORTED = {
    "softmax": (lambda k: k.network.add_softmax(k.x), "type SOFTMAX has no reader"),
    "reduce": (
        lambda k: k.network.add_reduce(k.x, k.trt.ReduceOperation.SUM, 1, False),
        "type REDUCE has no reader",
    ),
    "unary": (
        lambda k: k.network.add_unary(k.x, k.trt.UnaryOperation.NEG),
        "type UNARY has no reader",
    ),
    "gather axis 1": (lambda k: gather(k, 1), r"obtained \(1, |num_elementwise_dims = \(1, "),
    "gather elements": (gather_elements, "ELEMENT"),
    "elementwise DIV": (
        lambda k: k.network.add_elementwise(k.x, k.x, k.trt.ElementWiseOperation.DIV),
        "elementwise ElementWiseOperation.DIV is unknown",
    ),
    "sigmoid": (
        lambda k: k.network.add_activation(k.x, k.trt.ActivationType.SIGMOID),
        "SIGMOID",
    ),
    "elu": (
        lambda k: k.network.add_activation(k.x, k.trt.ActivationType.ELU),
        "ELU",
    ),
    "cast to integers": (
        lambda k: k.network.add_cast(k.x, k.trt.DataType.INT32),
        "cast with DataType.INT32 is unknown",
    ),
    "cast of integers": (
        lambda k: k.network.add_cast(k.ids, k.trt.DataType.FLOAT),
        "cast with DataType.INT32 is unknown",
    ),
    "matrix by vector": (vector_product, "VECTOR is unknown"),
    "shuffle without placeholder": (
        lambda k: shuffle(k, zero_is_placeholder=False),
        r"zero_is_placeholder = False \(supported: True\)",
    ),
    "shuffle that only transposes": (
        lambda k: k.network.add_shuffle(k.x),
        r"reshapes = False \(supported: True\)",
    ),
    "shuffle to a tensor's shape": (dynamic_shuffle, r"inputs = 2 \(supported: 1\)"),
    "normalization over rows": (lambda k: normalization(k, axes=1), r"axes = 1 \(supported: 2\)"),
    "causal attention": (lambda k: attention(k, causal="UPPER_LEFT"), "causal_kind = .*UPPER_LEFT"),
    "causal to the last": (
        lambda k: attention(k, causal="LOWER_RIGHT"),
        "causal_kind = .*LOWER_RIGHT",
    ),
    "attention without softmax": (
        lambda k: attention(k, norm="NONE", mask=k.mask),
        "norm_op = .*NONE",
    ),
    "attention without mask": (attention, r"mask = None \(supported"),
    "attention with a bias": (float_mask, "mask = .*FLOAT.*supported"),
    "dequantize from UINT8": (dequantize_uint8, "from a quantized type = False"),
    "blocks of another axis": (
        lambda k: block_quantize(k, (2, 2), 0),
        r"scale \(2, 2\) of data \(2, 4\), axis 0",
    ),
    "blocks that do not divide": (
        lambda k: block_quantize(k, (2, 3), 1),
        r"scale \(2, 3\) of data \(2, 4\), axis 1",
    ),
    "blocks of two axes": (
        lambda k: block_quantize(k, (1, 2), 1),
        r"scale \(1, 2\) of data \(2, 4\), axis 1",
    ),
    "blocks by their shape": (
        lambda k: block_quantize(k, (2, 2), 1, (1, 2)),
        r"block_shape = \(1, 2\) \(supported: \(\)\)",
    ),
    "dynamic blocks of rows": (lambda k: dynamic_quantize(k, axis=0), r"= \(0, 16\)"),
    "dynamic blocks of 32": (
        lambda k: dynamic_quantize(k, block_size=32, to="FP8", scales="E8M0"),
        r"axis, block_size = \(1, 32\) .*; to_type, scale_type = .*FP8.*E8M0",
    ),
    "dynamic blocks of two axes": (dynamic_quantize_in_squares, r"= \(-1, -1\) .*inputs = 1"),
    "packed constant": (lambda k: packed_constant(k, "INT4", 8)[0], "shows no values of .*INT4"),
}


@pytest.mark.parametrize(("build", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_is_refused_by_name(kit, build, message):
    """A layer type or an attribute without a reader is an error with the layer's name."""
    layer = build(kit)
    layer.name = "odd"
    with pytest.raises(RunError, match=rf"layer odd.*({message})"):
        read_layer(layer, kit.trt)


def test_attention_with_two_faults_names_both(kit):
    """All unsupported attributes of a layer are in one message, sorted."""
    layer = attention(kit, norm="NONE", causal="UPPER_LEFT")
    with pytest.raises(RunError, match=r"causal_kind = .*; norm_op = "):
        read_layer(layer, kit.trt)


def test_supported_twins_are_read(kit):
    """The nearest supported layers are read: the refusals above are not of everything."""
    twins = [
        gather(kit, 0),
        shuffle(kit),
        attention(kit, mask=kit.mask),
        kit.network.add_quantize(kit.x, kit.scale, kit.trt.DataType.FP8),
        kit.network.add_cast(kit.x, kit.trt.DataType.HALF),
        normalization(kit),
        block_quantize(kit, (2, 2), 1),
        dynamic_quantize(kit),
    ]
    assert all(callable(read_layer(layer, kit.trt)) for layer in twins)
    assert {layer.type.name for layer in twins} <= set(READERS)


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_go_along_their_axis(kit, axis):
    """One scale a column divides that column; with axis 0 one a row."""
    size = (2, 4)[axis]
    scales = kit.network.add_input("one_each", kit.trt.DataType.FLOAT, (size,))
    layer = kit.network.add_quantize(kit.x, scales, kit.trt.DataType.FP8)
    layer.axis = axis
    x, scale = torch.arange(8.0).reshape(1, 2, 4), torch.arange(1.0, size + 1)
    expected = x / (scale[:, None] if axis == 0 else scale)
    assert torch.equal(read_layer(layer, kit.trt)(x, scale[None]), expected)


def test_block_scales_go_along_their_blocks(kit):
    """Two scales a row: each divides the two values of its block."""
    x, scales = torch.arange(8.0).reshape(1, 2, 4), torch.tensor([[[1.0, 2], [4, 8]]])
    expected = x / torch.tensor([[1.0, 1, 2, 2], [4, 4, 8, 8]])
    assert torch.equal(read_layer(block_quantize(kit, (2, 2), 1), kit.trt)(x, scales), expected)


def test_dynamic_quantize_is_nvfp4(kit):
    """Values and scales are those of ``nvfp4``, which quantizes weights, at the same range."""
    rows = np.random.default_rng(0).normal(0, 1, (32, 32)).astype(np.float32)
    rows[3, 16:] = 0
    expected = nvfp4.quantize("rows", rows)
    quantize = read_outputs(dynamic_quantize(kit), kit.trt)
    arguments = torch.from_numpy(rows)[None], torch.tensor([expected.global_scale])
    values, scales = (operation(*arguments)[0] for operation in quantize)
    np.testing.assert_array_equal(scales, nvfp4.FP8_MAGNITUDES[expected.block_scales])
    codes = nvfp4.from_fp4(nvfp4.unpack(expected.packed))
    np.testing.assert_array_equal(to_fp4(values), codes)


def test_dynamic_quantize_saturates_at_its_range(kit):
    """A block of twice the calibrated range has the largest scale and value, not NaN."""
    values, scales = (
        operation(torch.full((1, 1, 16), 12.0), torch.tensor([1 / 448]))
        for operation in read_outputs(dynamic_quantize(kit), kit.trt)
    )
    assert scales.item() == 448
    assert (to_fp4(values) == 6).all()


def test_packed_constant_is_read_from_its_bytes(kit):
    """FP4 from the bytes that TensorRT was given, the first value in the low bits of each."""
    layer, packed = packed_constant(kit, "FP4", 32)
    obtained = read_packed(layer, kit.trt, packed)()
    assert obtained.shape == (1, 32)
    np.testing.assert_array_equal(obtained[0], nvfp4.from_fp4(nvfp4.unpack(packed)))
    assert obtained[0, 2:4].tolist() == [0.5, 0]  # byte 1


def test_bytes_of_another_constant_are_refused(kit):
    """An array of another size, or of a type that is not read so, is no constant's."""
    layer, packed = packed_constant(kit, "FP4", 32)
    with pytest.raises(RunError, match=r"size = 32 \(supported: 16\)"):
        read_packed(layer, kit.trt, packed[:8])
    layer, packed = packed_constant(kit, "INT4", 32)
    with pytest.raises(RunError, match=r"packed DataType\.INT4 is unknown"):
        read_packed(layer, kit.trt, packed)


@given(st.floats(-100, 100, width=32))
def test_fp4_is_the_nearest_value(value):
    """The interpreter rounds as the codes of weights do, zeros of either sign included."""
    expected = nvfp4.from_fp4(nvfp4.to_fp4(np.float32([value])))
    np.testing.assert_array_equal(to_fp4(torch.tensor([value])), expected)


def test_int4_saturates():
    """From -8 to 7, ties to the even integer."""
    values = torch.tensor([-9.0, -8.4, -0.5, 0.5, 1.5, 7.4, 8.0])
    assert to_int4(values).tolist() == [-8, -8, 0, 0, 2, 7, 7]


def test_shuffle_transposes_before_and_after(kit):
    """A shuffle transposes, then reshapes with 0 as "the same size", then transposes again."""
    layer = kit.network.add_shuffle(kit.heads)
    layer.first_transpose = (0, 2, 1, 3)
    layer.reshape_dims = (0, 0, 4, -1)
    layer.second_transpose = (0, 3, 1, 2)
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    expected = x.permute(0, 2, 1, 3).reshape(1, 3, 4, 2).permute(0, 3, 1, 2)
    assert torch.equal(read_layer(layer, kit.trt)(x[None])[0], expected)


def test_constant_is_the_stored_array(kit):
    """A constant gives its array, integers as integers, with an axis of texts in front."""
    array = np.array([[1, 2], [3, 4]], np.int32)
    layer = kit.network.add_constant((2, 2), kit.trt.Weights(array))
    obtained = read_layer(layer, kit.trt)()
    assert obtained.dtype == torch.int32
    np.testing.assert_array_equal(obtained[0].numpy(), array)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_product_s_rows_do_not_depend_on_their_number(kit, rows):
    """A row of a product with a weight has bitwise the value that it has among many rows."""
    layer = kit.network.add_matrix_multiply(
        kit.x, kit.trt.MatrixOperation.NONE, kit.y, kit.trt.MatrixOperation.NONE
    )
    multiply = read_layer(layer, kit.trt)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, n, 96, generator=generator) for n in (64, 80))
    whole = multiply(left, right.mT)
    assert torch.equal(multiply(left[:, :rows], right.mT), whole[:, :rows])
    single = multiply(left[0, :rows, None], right.mT)
    assert single.shape == (rows, 1, 80)
    assert torch.equal(single[:, 0], whole[0, :rows])
