"""Every TensorRT name that the library uses exists in every version that it runs on, and what
differs between the flavours stays in one module.

The names are read off the library's source, and looked up in ``fixtures/trt_api.json``. Where a
name alone does not say what it holds, one of the tables below does.
"""

import ast
import json
from pathlib import Path

import pytest

import gptneo_trt
from gptneo_trt.backend import FLAVOURS

ROOT = Path(__file__).parents[2]
API = json.loads((ROOT / "fixtures" / "trt_api.json").read_text())
VERSIONS = sorted(API.keys() - {"source"})
SOURCES = (
    "backend.py",
    "blocks.py",
    "engine.py",
    "inspection.py",
    "interpreter.py",
    "layers.py",
    "masks.py",
    "network.py",
    "operators.py",
    "plan_worker.py",
    "quantizing.py",
    "runtime.py",
    "supported.py",
)
# TensorRT-RTX alone has these; create_config and create_context ask for the flavour first.
GUARDED = {
    ("backend.py", "ComputeCapability", ""),
    ("backend.py", "DynamicShapesKernelSpecializationStrategy", ""),
    ("backend.py", "DynamicShapesKernelSpecializationStrategy", "EAGER"),
    ("backend.py", "IBuilderConfig", "num_compute_capabilities"),
    ("backend.py", "IBuilderConfig", "set_compute_capability"),
    ("backend.py", "IRuntimeCache", "deserialize"),
    ("backend.py", "IRuntimeCache", "serialize"),
    ("backend.py", "IRuntimeConfig", "create_runtime_cache"),
    ("backend.py", "IRuntimeConfig", "dynamic_shapes_kernel_specialization_strategy"),
    ("backend.py", "IRuntimeConfig", "set_runtime_cache"),
}
# Rows of tables that name the flavour they are of.
ROWS = ("KnownFailure", "Target")
THE_MODULE, VALUE, OTHER = "the module", "a value of an enumeration", "not TensorRT's"
MODULE_TEXTS = (
    "backend.trt",
    "graph.backend.trt",
    "network.backend.trt",
    "request.backend.trt",
    "self.backend.trt",
)
EXPRESSIONS = {
    "self.trt": THE_MODULE,
    **dict.fromkeys(MODULE_TEXTS, THE_MODULE),
    "backends.add_attention": "IAttention",
    "create_builder": "Builder",
    "create_runtime": "Runtime",
    "graph.network": "INetworkDefinition",
    "loaded.engine": "ICudaEngine",
    "self._context": "IExecutionContext",
    "self.loaded.engine": "ICudaEngine",
    "network.builder": "Builder",
    "network.definition": "INetworkDefinition",
}
# (file, function or "", variable) -> what it holds, for parameters and loop variables.
VARIABLES = {
    ("", "", "trt"): THE_MODULE,
    ("", "", "layer"): "ILayer",
    ("", "", "builder"): "Builder",
    ("", "", "config"): "IBuilderConfig",
    ("", "", "definition"): "INetworkDefinition",
    ("backend.py", "__init__", "logger"): OTHER,
    ("backend.py", "_logger", "interface"): "ILogger",
    ("backend.py", "add_attention", "network"): "INetworkDefinition",
    ("backend.py", "create_context", "engine"): "ICudaEngine",
    ("backend.py", "kernels_of", "cache"): "IRuntimeCache",
    ("backend.py", "log", "interface"): "ILogger",
    ("backend.py", "log", "severity"): VALUE,
    ("blocks.py", "", "rows"): "ITensor",
    ("blocks.py", "", "tensor"): "ITensor",
    ("inspection.py", "", "types"): "DataType",
    ("inspection.py", "", "source"): "ILayer",
    ("inspection.py", "", "s"): "ILayer",
    ("inspection.py", "", "tensor"): "ITensor",
    ("inspection.py", "_plain", "value"): OTHER,
    ("interpreter.py", "", "t"): "ITensor",
    ("interpreter.py", "_read_step", "tensor"): "ITensor",
    ("layers.py", "", "tensor"): "ITensor",
    ("masks.py", "", "positions"): "ITensor",
    ("network.py", "", "tensor"): "ITensor",
    ("quantizing.py", "_block_shape", "layer"): "IQuantizeLayer",
    ("quantizing.py", "_refuse_unless_quantizing", "tensor"): "ITensor",
    ("quantizing.py", "_spread_of", "layer"): "IQuantizeLayer",
    ("runtime.py", "quantized_modules_of", "layer"): OTHER,
}
# Method or property -> what it gives.
GIVES = {
    "add_activation": "IActivationLayer",
    "add_attention_v2": "IAttention",
    "add_cast": "ICastLayer",
    "add_concatenation": "IConcatenationLayer",
    "add_constant": "IConstantLayer",
    "add_dequantize": "IDequantizeLayer",
    "add_dynamic_quantize": "IDynamicQuantizeLayer",
    "add_elementwise": "IElementWiseLayer",
    "add_gather": "IGatherLayer",
    "add_input": "ITensor",
    "add_matrix_multiply": "IMatrixMultiplyLayer",
    "add_normalization_v2": "INormalizationLayer",
    "add_quantize": "IQuantizeLayer",
    "add_shuffle": "IShuffleLayer",
    "attention": "IAttention",
    "create_builder_config": "IBuilderConfig",
    "create_engine_inspector": "EngineInspector",
    "create_execution_context": "IExecutionContext",
    "create_network": "INetworkDefinition",
    "create_optimization_profile": "IOptimizationProfile",
    "create_runtime_cache": "IRuntimeCache",
    "create_runtime_config": "IRuntimeConfig",
    "deserialize_cuda_engine": "ICudaEngine",
    "dtype": VALUE,
    "get_input": "ITensor",
    "get_layer": "ILayer",
    "get_output": "ITensor",
    "mask": "ITensor",
    "type": VALUE,
    "weights": "Weights",
}


class Scan(ast.NodeVisitor):
    """Collect (class, member) of one file, and what it cannot tell.

    Attributes:
        used: (class, "") for a class of the module, (class, member) otherwise; -> line.
        unknown: a line an attribute of something that no table names.
    """

    def __init__(self, file_name: str, source: str) -> None:
        self.file_name = file_name
        self.used: dict[tuple[str, str], int] = {}
        self.unknown: list[str] = []
        self.function = ""
        self.held: dict[str, str] = {}
        self.visit(ast.parse(source))

    def table(self, name):
        """Return what the tables say that a variable holds, or None."""
        for file_name, function in (
            (self.file_name, self.function),
            (self.file_name, ""),
            ("", ""),
        ):
            if (file_name, function, name) in VARIABLES:
                return VARIABLES[file_name, function, name]
        return None

    def holds(self, node):
        """Return the class that an expression gives, THE_MODULE, VALUE, or OTHER."""
        if ast.unparse(node) in EXPRESSIONS:
            return EXPRESSIONS[ast.unparse(node)]
        if isinstance(node, ast.Name):
            return self.held.get(node.id) or self.table(node.id) or OTHER
        if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            return OTHER
        if isinstance(node, ast.Attribute):
            base = self.holds(node.value)
            if base == THE_MODULE:
                return node.attr
            return OTHER if base == OTHER else GIVES.get(node.attr, VALUE)
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "graph.named":
                return "ITensor"
            return self.holds(node.func)
        if isinstance(node, ast.IfExp):
            return self.holds(node.body)
        return OTHER

    def visit_FunctionDef(self, node):
        """Enter a function: what is annotated as something else is not TensorRT's."""
        outer = self.held, self.function
        self.held, self.function = dict(self.held), node.name
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            annotation = ast.unparse(argument.annotation) if argument.annotation else ""
            known = self.table(argument.arg)
            if annotation == "ModuleType":
                self.held[argument.arg] = THE_MODULE
            elif annotation == "Any" and known is None:
                self.held[argument.arg] = "?"
            elif annotation == "Any":
                self.held[argument.arg] = known
            else:
                self.held[argument.arg] = OTHER
        self.generic_visit(node)
        self.held, self.function = outer

    def visit_Lambda(self, node):
        """Enter a lambda: all of them take what PyTorch computes with."""
        outer = self.held
        self.held = outer | {argument.arg: OTHER for argument in node.args.args}
        self.generic_visit(node)
        self.held = outer

    def visit_Assign(self, node):
        """Follow ``name = expression``, ``a, b = c, d`` and ``layer.__class__ = trt.I...``."""
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for to, value in pairs:
                if isinstance(to, ast.Name):
                    self.held[to.id] = self.holds(value)
                elif isinstance(to, ast.Attribute) and to.attr == "__class__":
                    self.held[ast.unparse(to.value)] = self.holds(value)

    def visit_Attribute(self, node):
        """Note an attribute of something of TensorRT's."""
        self.generic_visit(node)
        base = self.holds(node.value)
        where = f"{self.file_name}:{node.lineno}: {ast.unparse(node)}"
        if node.attr.startswith("__") or base == OTHER:
            return
        if base == "?":
            self.unknown.append(f"{where}: what is {ast.unparse(node.value)}? add it to VARIABLES")
        elif base == VALUE:
            if node.attr != "name":
                self.unknown.append(f"{where}: what does it give? add it to GIVES")
        else:
            key = (node.attr, "") if base == THE_MODULE else (base, node.attr)
            self.used.setdefault(key, node.lineno)

    def visit_Call(self, node):
        """Note the operation names that ``add_elementwise`` looks up by getattr."""
        self.generic_visit(node)
        called = ast.unparse(node.func).rpartition(".")[2]
        if called == "add_elementwise" and isinstance(node.args[-1], ast.Constant):
            self.used.setdefault(("ElementWiseOperation", node.args[-1].value), node.lineno)

    def visit_Compare(self, node):
        """Note the layer types that ``layer.type.name`` is compared with."""
        self.generic_visit(node)
        if ast.unparse(node.left).endswith(".type.name"):
            for other in node.comparators:
                if isinstance(other, ast.Constant):
                    self.used.setdefault(("LayerType", other.value), node.lineno)

    def visit_AnnAssign(self, node):
        """Note the layer types that have a reader."""
        self.generic_visit(node)
        if ast.unparse(node.target) == "READERS":
            for key in node.value.keys:
                self.used.setdefault(("LayerType", key.value), key.lineno)


def absent(scan, version):
    """Return a line a used name that a version does not have, guarded ones left out."""
    classes = API[version]
    return [
        f"{scan.file_name}:{line}: {class_name}{'.' * bool(member)}{member} is not in {version}"
        for (class_name, member), line in sorted(scan.used.items())
        if (scan.file_name, class_name, member) not in GUARDED
        and (class_name not in classes or (member and member not in classes[class_name]))
    ]


@pytest.fixture(scope="module")
def scans():
    """Return file name -> Scan of the library's source."""
    folder = Path(gptneo_trt.__file__).parent
    return {name: Scan(name, (folder / name).read_text()) for name in SOURCES}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_exists(scans, version):
    """What the library calls, sets and reads is in this version, or guarded by flavour."""
    assert [line for scan in scans.values() for line in absent(scan, version)] == []


def test_the_scan_knows_every_object(scans):
    """No attribute of a TensorRT object is left out because the scan cannot tell its class."""
    assert [line for scan in scans.values() for line in scan.unknown] == []


def test_no_other_module_holds_the_tensorrt_module():
    """The scanned files are all that touch TensorRT."""
    folder = Path(gptneo_trt.__file__).parent
    others = [path for path in folder.glob("*.py") if path.name not in SOURCES]

    assert others
    assert [path.name for path in others if ".trt" in path.read_text()] == []


@pytest.mark.parametrize(
    ("file_name", "used"),
    [
        ("layers.py", ("INormalizationLayer", "epsilon")),
        ("layers.py", ("IShuffleLayer", "reshape_dims")),
        ("layers.py", ("IShuffleLayer", "second_transpose")),
        ("layers.py", ("IAttention", "mask")),
        ("layers.py", ("IAttention", "decomposable")),
        ("layers.py", ("INetworkDefinition", "add_matrix_multiply")),
        ("layers.py", ("ElementWiseOperation", "SUM")),
        ("layers.py", ("ActivationType", "GELU_TANH")),
        ("network.py", ("INetworkDefinition", "add_input")),
        ("layers.py", ("IConcatenationLayer", "axis")),
        ("masks.py", ("ElementWiseOperation", "AND")),
        ("backend.py", ("Builder", "")),
        ("blocks.py", ("INetworkDefinition", "add_dynamic_quantize")),
        ("blocks.py", ("IDynamicQuantizeLayer", "set_input")),
        ("blocks.py", ("IDequantizeLayer", "axis")),
        ("quantizing.py", ("IDynamicQuantizeLayer", "block_size")),
        ("quantizing.py", ("IQuantizeLayer", "block_shape")),
        ("quantizing.py", ("Weights", "size")),
        ("operators.py", ("IAttention", "causal_kind")),
        ("operators.py", ("INormalizationLayer", "is_v2")),
        ("operators.py", ("INormalizationLayer", "num_groups")),
        ("operators.py", ("IShuffleLayer", "zero_is_placeholder")),
        ("quantizing.py", ("IQuantizeLayer", "axis")),
        ("operators.py", ("LayerType", "ATTENTION_OUTPUT")),
        ("operators.py", ("AttentionIOForm", "PADDED_BHND")),
        ("plan_worker.py", ("IOptimizationProfile", "set_shape")),
        ("plan_worker.py", ("Builder", "build_serialized_network")),
        ("inspection.py", ("LayerType", "QUANTIZE")),
        ("inspection.py", ("DataType", "FP8")),
        ("interpreter.py", ("INetworkDefinition", "num_outputs")),
        ("interpreter.py", ("ITensor", "dtype")),
        ("backend.py", ("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")),
        ("backend.py", ("INetworkDefinition", "add_attention_v2")),
        ("backend.py", ("INetworkDefinition", "add_attention")),
        ("backend.py", ("ICudaEngine", "create_execution_context")),
        ("backend.py", ("ICudaEngine", "create_runtime_config")),
        ("runtime.py", ("Runtime", "deserialize_cuda_engine")),
        ("runtime.py", ("ICudaEngine", "create_engine_inspector")),
        ("runtime.py", ("EngineInspector", "get_engine_information")),
        ("runtime.py", ("LayerInformationFormat", "JSON")),
        ("engine.py", ("TensorIOMode", "INPUT")),
        ("engine.py", ("ICudaEngine", "num_io_tensors")),
        ("engine.py", ("ICudaEngine", "get_tensor_mode")),
        ("engine.py", ("IExecutionContext", "set_input_shape")),
        ("engine.py", ("IExecutionContext", "set_tensor_address")),
        ("engine.py", ("IExecutionContext", "execute_async_v3")),
    ],
    ids=lambda value: value if isinstance(value, str) else ".".join(filter(None, value)),
)
def test_the_scan_finds_what_is_known_to_be_used(scans, file_name, used):
    """The scan sees calls, enumerations, properties that are set and properties that are read."""
    assert used in scans[file_name].used


def test_guarded_names_are_used_and_are_of_tensorrt_rtx_alone(scans):
    """A name is guarded only where it is used, and only when TensorRT lacks and RTX has it."""
    for file_name, class_name, member in GUARDED:
        has = {v for v in VERSIONS if class_name in API[v]}
        if member:
            has = {version for version in has if member in API[version][class_name]}
        assert (class_name, member) in scans[file_name].used
        assert has == {version for version in VERSIONS if version.startswith("tensorrt_rtx-")}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("graph.network.add_attention_v3(tensor)", "INetworkDefinition.add_attention_v3"),
        ("types = graph.backend.trt.DataType; types.FP9", "DataType.FP9"),
        ("trt.IShuffleLayerV2", "IShuffleLayerV2"),
        ("trt.INothing.SOME", "INothing"),
        ("graph.network.add_shuffle(tensor).reshape_shape", "IShuffleLayer.reshape_shape"),
        ("layer.__class__ = trt.IGatherLayer; layer.axes", "IGatherLayer.axes"),
        ("made = graph.network.add_shuffle(tensor); made.axis = 1", "IShuffleLayer.axis"),
        ("graph.named(layer, 'a').stride", "ITensor.stride"),
        ("add_elementwise(graph, 'a', tensor, tensor, 'ADD')", "ElementWiseOperation.ADD"),
        ("layer.type.name == 'MATMUL'", "LayerType.MATMUL"),
        ("trt.ComputeCapability", "ComputeCapability"),
    ],
)
def test_a_made_up_name_is_reported(line, name):
    """A name that TensorRT 11.4 does not have, or that is guarded elsewhere, is named."""
    source = f"def add(graph: Graph, trt: ModuleType, layer: Any, tensor: Any):\n    {line}\n"

    found = absent(Scan("layers.py", source), "tensorrt-11.4.0.106")

    assert f"layers.py:2: {name} is not in tensorrt-11.4.0.106" in found


@pytest.mark.parametrize(
    ("line", "remedy"),
    [("thing.axis", "add it to VARIABLES"), ("layer.metadata.size", "add it to GIVES")],
)
def test_an_object_of_unknown_class_is_reported(line, remedy):
    """What no table explains is an error of the scan, not something to pass over."""
    scan = Scan("layers.py", f"def add(layer: Any, thing: Any):\n    {line}\n")

    assert [remedy in each for each in scan.unknown] == [True]


def flavours_decided_on(source):
    """Return the lines that hold a flavour's name, but for rows and top-level tuples of names."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    rows = [call for call in calls if ast.unparse(call.func) in ROWS]
    data = [value for row in rows for value in (*row.args, *(k.value for k in row.keywords))]
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    data += [name for each in lists if isinstance(each, ast.Tuple) for name in each.elts]
    names = [node for node in nodes if isinstance(node, ast.Constant) and node.value in FLAVOURS]
    return sorted(node.lineno for node in names if node not in data)


def test_flavours_are_told_apart_in_one_module():
    """Only backend.py holds the name of a flavour other than as data, so only it can decide."""
    paths = Path(gptneo_trt.__file__).parent.glob("*.py")

    found = {path.name: flavours_decided_on(path.read_text()) for path in paths}

    assert found.pop("backend.py")
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "known = backend.flavour == 'tensorrt'",
        "known = backend.flavour in ('openvino', 'tensorrt_rtx')",
        "known = {'tensorrt': 1}[backend.flavour]",
        "known = backend.target.startswith('tensorrt_rtx')",
        "row = Target('h200', 'H200', 'tensorrt' if full else 'tensorrt_rtx')",
    ],
)
def test_a_decision_by_flavour_is_found(line):
    """Comparing, looking up and choosing by a flavour's name are seen; data are not."""
    data = "PACKAGES = ('tensorrt', 'torch')\nrow = Target('h200', 'H200', 'tensorrt_rtx')\n"
    assert flavours_decided_on(data) == []
    assert set(flavours_decided_on(data + line)) == {3}


def test_the_table_is_the_installed_version(backend):
    """The stored names are those of the module at hand; another version needs a row of its own."""
    assert backend.target in VERSIONS

    missing = [
        f"{class_name}.{member}"
        for class_name, members in API[backend.target].items()
        for member in members
        if not hasattr(getattr(backend.trt, class_name, None), member)
    ]

    assert missing == []
