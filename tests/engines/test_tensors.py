"""What lies in safetensors files is read from their headers; a broken file is named with what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engines.tiny import make_model
from tokenflow.engines.tensors import INDEX, StoredTensor, require_fit, stored_tensors
from tokenflow.errors import ModelLoadError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, file)
    return file


def test_a_header_describes_every_tensor(file: Path) -> None:
    assert stored_tensors(file.parent) == {
        "a": StoredTensor("model.safetensors", "F32", (2, 3), 24),
        "b": StoredTensor("model.safetensors", "BF16", (4,), 8),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data[:-1],
            "is cut off: its header describes {} bytes, and it has {}; download it again",
        ),
        (lambda data: data + b"x", "is damaged: its header describes {} bytes, and it has {}; download it"),
        (lambda data: data[:40], "has no safetensors header; it is cut off, damaged or of another kind"),
        (lambda data: b"", "has no safetensors header"),
        (lambda data: b"<html>not found</html>", "has no safetensors header"),
        (lambda data: data.replace(b'"shape"', b'"shade"'), "is damaged: its header does not describe a"),
        (lambda data: data.replace(b'"shape":[2,3]', b'"shape":[2,x]'), "has no safetensors header"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(file: Path, change: object, message: str) -> None:
    whole = file.read_bytes()
    file.write_bytes(change(whole))  # type: ignore[operator]
    with pytest.raises(ModelLoadError) as refused:
        stored_tensors(file.parent)
    assert str(refused.value).startswith(f"{file}: {message.format(len(whole), file.stat().st_size)}")
    assert "\n" not in str(refused.value)


def test_an_index_says_which_files_are_read_and_must_be_right(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", shard="8KB")
    whole = stored_tensors(path)
    save_file({"other": torch.zeros(1)}, path / "left-over.safetensors")
    assert stored_tensors(path) == whole
    assert len({tensor.file for tensor in whole.values()}) > 1
    index = path / INDEX
    placed = json.loads(index.read_text())
    placed["weight_map"]["nothing.weight"] = "left-over.safetensors"
    index.write_text(json.dumps(placed))
    with pytest.raises(
        ModelLoadError, match=r"nothing\.weight is said to be in left-over\.safetensors, which"
    ):
        stored_tensors(path)
    (path / "left-over.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"left-over\.safetensors: not found, and .*index\.json names it"
    ):
        stored_tensors(path)
    index.write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(ModelLoadError, match="cannot be read as a weight index"):
        stored_tensors(path)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    stored = {"a": ("x.safetensors", (2,)), "b": ("y.safetensors", (3,)), "old": ("x.safetensors", (1,))}
    require_fit(tmp_path, stored, {"a": (2,), "b": (3,)}, ignored="old".__eq__)
    with pytest.raises(ModelLoadError) as refused:
        require_fit(tmp_path, stored, {"a": (4,), "c": (1,), "b": (3,)})
    assert str(refused.value) == (
        f"{tmp_path}: tensors do not fit config.json: 1 missing: c; 1 not used by the model: old; "
        "1 of another shape: a in x.safetensors is [2] and should be [4]"
    )
