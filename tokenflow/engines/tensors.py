"""The tensors of a checkpoint, as the headers of its safetensors files describe them; no number is read.

The format: eight bytes say how long the header is, the header is a JSON object with an entry per tensor,
and what it describes fills the rest of the file.  Pickled checkpoints (``pytorch_model.bin``) are never read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tokenflow.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
_SHOWN = 8

Shape = tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor in a file: its element type as the format calls it (``BF16``), shape, and size in bytes."""

    file: str
    dtype: str
    shape: Shape
    size: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of the directory ``path``: of the files that its index names, or of all without an index.

    :raises ModelLoadError: if there are no files, or some are missing, cut off or damaged.
    """
    index = path / INDEX
    placed = read_index(index) if index.is_file() else {}
    files = sorted({path / name for name in placed.values()} or path.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{path}: no safetensors files found; only safetensors weights are read")
    stored = {name: tensor for file in files for name, tensor in _read_header(file)}
    for name, file in placed.items():
        if name not in stored or stored[name].file != file:
            raise ModelLoadError(f"{index}: {name} is said to be in {file}, which does not hold it")
    return stored


def require_fit(
    path: Path,
    stored: Mapping[str, tuple[str, Shape]],
    shapes: Mapping[str, Shape],
    *,
    ignored: Callable[[str], bool] = lambda _: False,
) -> None:
    """Compare stored tensors, each with its file, with those that a model must have.

    :param ignored: whether a tensor that the model does not have may be there all the same.
    :raises ModelLoadError: naming all that are missing, left over, or of another shape.
    """
    missing = [name for name in shapes if name not in stored]
    extra = [name for name in stored if name not in shapes and not ignored(name)]
    wrong = [
        f"{name} in {stored[name][0]} is {list(stored[name][1])} and should be {list(shape)}"
        for name, shape in shapes.items()
        if name in stored and stored[name][1] != shape
    ]
    problems = [
        f"{len(found)} {what}: {', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''}"
        for what, found in (
            ("missing", missing),
            ("not used by the model", extra),
            ("of another shape", wrong),
        )
        if found
    ]
    if problems:
        raise ModelLoadError(f"{path}: tensors do not fit config.json: {'; '.join(problems)}")


def derived(name: str) -> bool:
    """Old checkpoints store the rotary frequencies, which follow from the config."""
    return name.endswith("rotary_emb.inv_freq")


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says; :raises ModelLoadError: if it does not."""
    try:
        placed = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{index}: cannot be read as a weight index: {error!r}") from error
    if not all(isinstance(file, str) for file in placed.values()):
        raise ModelLoadError(f"{index}: cannot be read as a weight index: a file's name must be a text")
    return placed


def _read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            raw = opened.read(min(length, _LONGEST_HEADER))
        size = file.stat().st_size
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: not found, and {INDEX} names it; is the download complete?") from None
    except OSError as error:
        raise ModelLoadError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        header: object = json.loads(raw) if len(raw) == length else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise ModelLoadError(f"{file}: has no safetensors header; it is cut off, damaged or of another kind")
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, stop = map(int, entry["data_offsets"])
            tensor = StoredTensor(
                file.name, str(entry["dtype"]), tuple(map(int, entry["shape"])), stop - start
            )
        except (KeyError, TypeError, ValueError):
            raise ModelLoadError(f"{file}: is damaged: its header does not describe {name}") from None
        end = max(end, stop)
        yield name, tensor
    if (expected := _LENGTH_BYTES + length + end) != size:
        what = "cut off" if size < expected else "damaged"
        raise ModelLoadError(
            f"{file}: is {what}: its header describes {expected} bytes, and it has {size}; download it again"
        )
