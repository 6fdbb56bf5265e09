"""What the readers of layers share: what they return, and how they refuse."""

from collections.abc import Callable
from typing import Any

import torch

from gptneo_trt.errors import RunError

Operation = Callable[..., torch.Tensor]


def refuse_unless(layer: Any, expected: dict[str, tuple[Any, Any]]) -> None:
    """Raise RunError naming every attribute whose obtained value is not the supported one."""
    wrong = sorted(
        f"{name} = {obtained!r} (supported: {wanted!r})"
        for name, (obtained, wanted) in expected.items()
        if obtained != wanted
    )
    if wrong:
        raise RunError(f"layer {layer.name} ({layer.type}): {'; '.join(wrong)}; add it here")
