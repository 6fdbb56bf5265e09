"""Read the safetensors files of a folder: exactly the parameters of an architecture.

Nothing is unpickled, guessed or initialised: a parameter is in a file, or it is an error.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from gptneo_trt.data import Architecture
from gptneo_trt.errors import CheckpointError
from gptneo_trt.json_file import object_from_file
from gptneo_trt.stored_tensors import StoredTensor, arrays_in_file, tensors_in_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIX = "transformer."
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
DTYPES = ("BF16", "F16", "F32")
# Causal masks and their fill value, stored by transformers before 4.32.
MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)")
CHUNK = 1 << 22
WHOLE = "copy the whole checkpoint"


def parameter_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return Hugging Face's parameter names -> shapes, linear weights [out, in]."""
    channels, feed_forward = architecture.hidden_size, architecture.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (architecture.vocab_size, channels),
        "transformer.wpe.weight": (architecture.max_positions, channels),
    }
    for layer in range(architecture.num_layers):
        block = f"transformer.h.{layer}"
        shapes |= {f"{block}.ln_1.weight": (channels,), f"{block}.ln_1.bias": (channels,)}
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{block}.attn.attention.{projection}.weight"] = (channels, channels)
        shapes |= {
            f"{block}.attn.attention.out_proj.bias": (channels,),
            f"{block}.ln_2.weight": (channels,),
            f"{block}.ln_2.bias": (channels,),
            f"{block}.mlp.c_fc.weight": (feed_forward, channels),
            f"{block}.mlp.c_fc.bias": (feed_forward,),
            f"{block}.mlp.c_proj.weight": (channels, feed_forward),
            f"{block}.mlp.c_proj.bias": (channels,),
        }
    shapes |= {"transformer.ln_f.weight": (channels,), "transformer.ln_f.bias": (channels,)}
    if not architecture.tied_head:
        shapes[HEAD] = (architecture.vocab_size, channels)
    return shapes


def weights_from_folder(
    folder: Path, architecture: Architecture
) -> tuple[dict[str, np.ndarray], tuple[str, ...], tuple[str, ...]]:
    """Return (parameter name -> float32 or float16 array, files read, notes).

    bfloat16 becomes float32, which holds it exactly. Mask buffers are left out, and names
    without ``transformer.`` get it; both are noted.

    Raises:
        CheckpointError: files or parameters are missing, unknown, misshapen, of another
            type, not finite, or contradict each other.
    """
    stored, notes = _stored_tensors(folder)
    stored, naming_notes = _with_hugging_face_names(stored, folder)
    _check(stored, architecture, folder)
    weights = _arrays(stored, _copy(folder))
    _check_finite(weights, folder)
    head = weights.get(HEAD)
    if architecture.tied_head and head is not None:
        if not np.array_equal(head, weights[EMBEDDING]):
            raise CheckpointError(
                f"{folder}: {HEAD} differs from {EMBEDDING}, expected equal values since "
                "tie_word_embeddings is true; set it to false in config.json, or remove "
                f"{HEAD} from the file"
            )
        del weights[HEAD]
        naming_notes.append(f"left out {HEAD}: tied, and equal to {EMBEDDING}")
    files = tuple(sorted({tensor.file.name for tensor in stored.values()}))
    return weights, files, tuple(notes + naming_notes)


def _stored_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return (name in the file -> tensor, notes); an index, where there is one, decides."""
    if (folder / INDEX_FILE).is_file():
        return _indexed_tensors(folder)
    single = folder / SINGLE_FILE
    if single.is_file():
        others = sorted(path.name for path in folder.glob("*.safetensors") if path != single)
        return tensors_in_file(single, _copy(folder)), [
            f"ignored {name}: there is no index" for name in others
        ]
    found = sorted(path.name for path in folder.iterdir())
    raise CheckpointError(
        f"{folder}: obtained no weights in safetensors ({SINGLE_FILE} or {INDEX_FILE}) among "
        f"{found}, expected some{_pickle_hint(folder)}"
    )


def _pickle_hint(folder: Path) -> str:
    """Return what to do about pickled weights, or nothing where there are none."""
    names = sorted(path.name for path in folder.glob("pytorch_model*"))
    if not names:
        return ""
    convert = (
        "import sys; from transformers import GPTNeoForCausalLM as M; "
        "M.from_pretrained(sys.argv[1], use_safetensors=False).save_pretrained(sys.argv[1])"
    )
    return (
        f"; {names} cannot be used, since unpickling can run code; convert a checkpoint that "
        f"you trust with: {shlex.join(['python', '-c', convert, str(folder)])}"
    )


def _copy(folder: Path) -> str:
    """Return what to do about a damaged file."""
    return f"copy the file again{_pickle_hint(folder)}"


def _indexed_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors that the index names, each from the shard that it names."""
    index = folder / INDEX_FILE
    weight_map = object_from_file(index, CheckpointError, WHOLE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: obtained no weight_map, expected an object; {WHOLE}")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index}: obtained a shard without a name, expected text; {WHOLE}")
    shards = sorted(set(weight_map.values()))
    present = {path.name for path in folder.iterdir() if path.is_file()}
    wrong = [
        f"shard {shard}: obtained no such file, expected it since {INDEX_FILE} names it"
        for shard in shards
        if shard not in present
    ]
    if wrong:
        raise CheckpointError(_listed(folder, wrong, WHOLE))
    headers = {shard: tensors_in_file(folder / shard, _copy(folder)) for shard in shards}
    wrong = [
        f"{name}: obtained nothing in {shard}, expected it since {INDEX_FILE} says so"
        for name, shard in weight_map.items()
        if name not in headers[shard]
    ]
    if wrong:
        raise CheckpointError(_listed(folder, wrong, WHOLE))
    strays = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in shards)
    notes = [f"ignored {name}: {INDEX_FILE} does not name it" for name in strays]
    notes += [
        f"ignored {name} in {shard}: {INDEX_FILE} places it in {weight_map.get(name, 'no file')}"
        for shard, header in headers.items()
        for name in sorted(header)
        if weight_map.get(name) != shard
    ]
    return {name: headers[shard][name] for name, shard in weight_map.items()}, notes


def _with_hugging_face_names(
    stored: Mapping[str, StoredTensor], folder: Path
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return (parameter name -> tensor, notes): no masks, and the prefix where it lacks."""
    masks = sorted(name for name in stored if MASK.fullmatch(name))
    bare = {
        name: PREFIX + name
        for name in sorted(set(stored) - set(masks))
        if re.match(r"(wte|wpe|ln_f|h\.\d+)\.", name)
    }
    twice = [f"{name} and {full}" for name, full in bare.items() if full in stored]
    if twice:
        wrong = [f"{pair}: obtained both, expected one" for pair in twice]
        raise CheckpointError(_listed(folder, wrong, "remove one of each"))
    renamed = {bare.get(name, name): stored[name] for name in stored if name not in masks}
    notes = [f"left out {name}: a mask of old transformers versions" for name in masks]
    if bare:
        notes.append(f"added {PREFIX!r} to {len(bare)} names such as {next(iter(bare))}")
    return renamed, notes


def _check(stored: Mapping[str, StoredTensor], architecture: Architecture, folder: Path) -> None:
    """Compare names, shapes and types with what the architecture needs.

    Raises:
        CheckpointError: any difference; all of them, sorted.
    """
    wrong = sorted(_differences(stored, architecture))
    if wrong:
        do = f"compare config.json and the weights{_pickle_hint(folder)}"
        raise CheckpointError(_listed(folder, wrong, do))


def _differences(stored: Mapping[str, StoredTensor], architecture: Architecture) -> Iterator[str]:
    if architecture.num_layers > len(stored):
        layers = architecture.num_layers
        yield f"tensors: obtained {len(stored)}, expected 12 a layer of num_layers {layers}"
        return
    expected = parameter_shapes(architecture)
    for name in expected.keys() - stored.keys():
        flag = " (tie_word_embeddings is false)" if name == HEAD else ""
        yield f"{name}: obtained nothing, expected {list(expected[name])}{flag}"
    if architecture.tied_head:
        expected[HEAD] = expected[EMBEDDING]
    for name, tensor in stored.items():
        if name not in expected:
            yield f"{name}: obtained {list(tensor.shape)}, expected no such tensor in GPT-Neo"
        elif tensor.shape != expected[name]:
            of = f" (vocab_size {architecture.vocab_size} in config.json)"
            why = of if name in (EMBEDDING, HEAD) else ""
            yield f"{name}: obtained {list(tensor.shape)}, expected {list(expected[name])}{why}"
        if tensor.dtype not in DTYPES:
            yield f"{name}: obtained type {tensor.dtype}, expected one of {list(DTYPES)}"


def _arrays(stored: Mapping[str, StoredTensor], remedy: str) -> dict[str, np.ndarray]:
    """Return name -> float16 or float32, sorted; each file is opened once."""
    weights: dict[str, np.ndarray] = {}
    for file in {tensor.file for tensor in stored.values()}:
        inside = {name: tensor for name, tensor in stored.items() if tensor.file == file}
        weights |= arrays_in_file(file, inside, remedy)
    return dict(sorted(weights.items()))


def _check_finite(weights: Mapping[str, np.ndarray], folder: Path) -> None:
    """Look at CHUNK values at a time, so that no mask as large as a weight is made.

    Raises:
        CheckpointError: NaN or infinity in some tensors; all of them are named.
    """
    wrong = []
    for name, array in weights.items():
        flat = array.reshape(-1)
        starts = range(0, flat.size, CHUNK)
        bad = sum(int((~np.isfinite(flat[at : at + CHUNK])).sum()) for at in starts)
        if bad:
            wrong.append(f"{name}: obtained {bad} NaN or infinite values, expected finite ones")
    if wrong:
        raise CheckpointError(_listed(folder, wrong, "use a checkpoint that trained to the end"))


def _listed(folder: Path, wrong: list[str], do: str) -> str:
    """Return one message with a line a problem, sorted."""
    lines = "\n".join(f"  {line}" for line in sorted(wrong))
    return f"the weights in {folder} cannot be used:\n{lines}\n  do: {do}"
