"""Find a checkpoint by its source: bundled, a folder, the hub at a commit, or random."""

from pathlib import Path

import numpy as np

from gptneo_trt.architecture import architecture_from_config
from gptneo_trt.data import Architecture, Checkpoint, weights_sha256
from gptneo_trt.errors import CheckpointError
from gptneo_trt.hub import folder_from_hub, unusable
from gptneo_trt.json_file import object_from_file
from gptneo_trt.weights import parameter_shapes, weights_from_folder

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "fixtures" / "gptneo-mini"
# The study's checkpoint and revision (README, "Where it comes from").
STUDY_CHECKPOINT = "EleutherAI/gpt-neo-125m@21def0189f5705e2521767faed922f1f15e7d7db"
HUB_FILES = (
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)
# Name -> layers, hidden size, heads: https://huggingface.co/EleutherAI, config.json of each.
RANDOM_SHAPES = {
    "gpt-neo-125m": (12, 768, 12),
    "gpt-neo-1.3B": (24, 2048, 16),
    "gpt-neo-2.7B": (32, 2560, 20),
}
RANDOM_POSITIONS = 2048  # of each
RANDOM_SEED = 0
# Hugging Face's initializer_range for GPT-Neo.
INITIALIZER_STD = 0.02


def checkpoint_from_source(source: str) -> Checkpoint:
    """Return the checkpoint that ``source`` names.

    Args:
        source: "bundled"; a folder with ``config.json`` and safetensors; "owner/name@commit"
            on the hub, for example STUDY_CHECKPOINT; or "random:" and a name of RANDOM_SHAPES.

    Nothing is unpickled, and no code beside the weights runs. Reading takes at most MEMORY_FACTOR
    of ``json_file`` times the size of the files in JSON and of headers, and 3 times that of the
    tensors.

    Raises:
        CheckpointError: unknown, unpinned, not reachable, incomplete or unsupported.
    """
    if source == "bundled":
        return _checkpoint_from_folder(BUNDLED_FOLDER, source, "")
    if source.startswith("random:"):
        return random_checkpoint(random_architecture(source), RANDOM_SEED, name=source)
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return _checkpoint_from_folder(folder, source, "")
    repo, at, revision = source.partition("@")
    if not at or source.startswith(("/", ".", "~")):
        raise CheckpointError(
            f"checkpoint {source!r}: obtained no such folder and no revision, expected "
            '"bundled", a folder, "random:gpt-neo-125m", or a hub id pinned to a commit; do: '
            f"pin it as owner/name@COMMIT, for example {STUDY_CHECKPOINT}"
        )
    folder = folder_from_hub(repo, revision, HUB_FILES)
    try:
        return _checkpoint_from_folder(folder, repo, revision)
    except CheckpointError as error:  # a download that was cut short, among others
        raise unusable(repo, revision, "model", HUB_FILES, str(error)) from error


def _checkpoint_from_folder(folder: Path, name: str, revision: str) -> Checkpoint:
    """Return the checkpoint in a folder.

    Raises:
        CheckpointError: see ``architecture_from_config`` and ``weights_from_folder``.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(
            f"checkpoint {name!r}: obtained no config.json in {folder}, expected one; pass a "
            "folder as save_pretrained writes it"
        )
    described = object_from_file(config, CheckpointError, "copy the file again")
    architecture = architecture_from_config(described, str(config))
    weights, files, notes = weights_from_folder(folder, architecture)
    tokenizer_file = folder / "tokenizer.json"
    has_tokenizer = tokenizer_file.is_file()
    if not has_tokenizer:
        notes += (f"no {tokenizer_file.name}: texts cannot be tokenized with this checkpoint",)
    return Checkpoint(
        name=name,
        revision=revision,
        architecture=architecture,
        weights=weights,
        sha256=weights_sha256(architecture, weights),
        tokenizer_file=tokenizer_file if has_tokenizer else None,
        files=(config.name, *files, *((tokenizer_file.name,) if has_tokenizer else ())),
        notes=notes,
    )


def random_architecture(source: str) -> Architecture:
    """Return the real shape that ``random:NAME`` says, of RANDOM_SHAPES.

    Raises:
        CheckpointError: no such shape.
    """
    shape = source.removeprefix("random:")
    if shape not in RANDOM_SHAPES:
        expected = ", ".join(f"random:{name}" for name in RANDOM_SHAPES)
        raise CheckpointError(f"checkpoint {source!r}: expected one of {expected}")
    num_layers, hidden_size, num_heads = RANDOM_SHAPES[shape]
    return Architecture(
        vocab_size=50257,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
        max_positions=RANDOM_POSITIONS,
        window_size=256,
        attention_layers=("global", "local") * (num_layers // 2),
    )


def random_checkpoint(
    architecture: Architecture,
    seed: int,
    std: float = INITIALIZER_STD,
    name: str = "random:seeded",
) -> Checkpoint:
    """Return a checkpoint with GPT-Neo's initialisation: the shape is real, the text is not.

    Embeddings and linear weights are normal with mean 0 and deviation ``std``, biases 0,
    LayerNorm weights 1; float32, drawn with ``numpy.random.default_rng(seed)`` in the order
    of ``parameter_shapes``.
    """
    generator = np.random.default_rng(seed)
    weights = {}
    for parameter, shape in parameter_shapes(architecture).items():
        if len(shape) == 2:
            weights[parameter] = generator.standard_normal(shape, dtype=np.float32)
            weights[parameter] *= np.float32(std)
        else:
            weights[parameter] = np.full(shape, parameter.endswith(".weight"), np.float32)
    return Checkpoint(
        name=name,
        revision="",
        architecture=architecture,
        weights=weights,
        sha256=weights_sha256(architecture, weights),
        notes=(f"seeded random weights: seed {seed}, standard deviation {std}",),
    )
