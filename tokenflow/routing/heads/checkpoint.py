"""Files of router heads: nothing but plain data is ever read, and every tensor is checked before use."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenflow.errors import ModelLoadError, ModelNotFound

_REFUSED = re.compile(r"GLOBAL (\S+)")
_SHOWN = 8
_MARKS = {
    "r2r": frozenset({"model_type", "state_dict"}),
    "citer": frozenset({"mlp.0.weight", "linear.weight"}),
}
"""Keys by which a checkpoint is known."""
_NAMES = {"r2r": "an R2R", "citer": "a CITER"}


def read(path: Path) -> dict[str, Any]:
    """The dictionary in a ``torch.save`` file, on the CPU.

    :raises ModelNotFound: if there is no such file.
    :raises ModelLoadError: if it holds anything but plain data: code in it is never run.
    """
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own, the unpickler's and the zip reader's have no base in common
        refused = _REFUSED.search(str(error))
        what = f"it asks for {refused[1]}" if refused else "it is damaged or of another kind"
        raise ModelLoadError(
            f"{path}: cannot be read as a checkpoint of plain tensors, numbers and text: {what}"
        ) from error
    if not isinstance(saved, dict):
        raise ModelLoadError(f"{path}: must hold a dictionary, got {type(saved).__name__}")
    return saved


def stored_threshold(value: object, where: str) -> float | None:
    """A threshold as a checkpoint stores it; ``where`` says where it stands.

    :raises ModelLoadError: if it is neither a finite number nor ``None``.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelLoadError(f"{where} must be a finite number, got {value!r}")
    return float(value)


def require_kind(saved: Mapping[str, Any], declared: str, where: Path) -> None:
    """Refuse a file that is another kind of head than its recipe says.

    :raises ModelLoadError: if what is in it is the mark of another kind.
    """
    found = next((kind for kind, marks in _MARKS.items() if marks <= saved.keys()), declared)
    if found != declared:
        raise ModelLoadError(
            f"{where}: this file is {_NAMES[found]} head; declared kind: {declared} (did you mean {found}?)"
        )


class Tensors:
    """The tensors of one head by name.

    :param where: the file they come from.
    :raises ModelLoadError: if anything in ``raw`` is no tensor under a name.
    """

    def __init__(self, raw: object, where: Path) -> None:
        if not isinstance(raw, Mapping):
            raise ModelLoadError(f"{where}: tensors must be in a dictionary, got {type(raw).__name__}")
        self._where = where
        self._tensors: dict[str, Tensor] = {}
        for name, value in raw.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise ModelLoadError(f"{where}: {name!r} should be a tensor, got {type(value).__name__}")
            self._tensors[name] = value.detach()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> tuple[str, ...]:
        """Every name, in the order of the file."""
        return tuple(self._tensors)

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a matrix; :raises ModelLoadError: if it is missing or no matrix."""
        if name not in self._tensors:
            raise ModelLoadError(f"{self._where}: missing tensor {name}")
        shape = tuple(self._tensors[name].shape)
        if len(shape) != 2:
            raise ModelLoadError(f"{self._where}: {name} is {list(shape)} and should be a matrix")
        return shape

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Require exactly these tensors; :raises ModelLoadError: naming all that do not fit."""
        missing = [name for name in shapes if name not in self._tensors]
        extra = [name for name in self._tensors if name not in shapes]
        wrong = [
            f"{name} is {list(self._tensors[name].shape)} and should be {list(shape)}"
            for name, shape in shapes.items()
            if name in self._tensors and self._tensors[name].shape != shape
        ]
        problems = [
            f"{what}: {', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''}"
            for what, found in (("missing", missing), ("unexpected", extra), ("of another shape", wrong))
            if found
        ]
        if problems:
            raise ModelLoadError(f"{self._where}: tensors {'; '.join(problems)}")

    def __getitem__(self, name: str) -> Tensor:
        """The tensor in float64, to be folded into others without loss.

        :raises ModelLoadError: if it is not of finite real numbers.
        """
        return self.stored(name).double()

    def stored(self, name: str) -> Tensor:
        """The tensor as it is; :raises ModelLoadError: if it is not of finite real numbers."""
        tensor = self._tensors[name]
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise ModelLoadError(f"{self._where}: {name} must hold finite real numbers ({tensor.dtype})")
        return tensor
