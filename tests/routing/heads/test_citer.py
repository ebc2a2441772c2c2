"""CITER's router against the published network, its batch norm kept apart there and folded here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.routing.heads.published import CiterNet, features, saved, scrambled
from tokenflow.errors import ModelLoadError
from tokenflow.routing.heads import CiterHead, Head, load_head
from tokenflow.routing.heads.citer import shapes

HIDDEN = 24


def load(path: Path, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Head:
    return load_head(
        "citer", path, embeddings=torch.empty(0, 0), hidden_size=hidden, device="cpu", dtype=dtype
    )


def checkpoint(**changes: Any) -> dict[str, Any]:
    return {**scrambled(CiterNet(HIDDEN)).state_dict(), **changes}


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_the_folded_batch_norm_scores_as_the_published_one_does(tmp_path: Path, rows: int) -> None:
    made = scrambled(CiterNet(HIDDEN))
    head = load(saved(tmp_path / "mlp_iter_0.1.pth", made.state_dict()))
    inputs = features(rows, HIDDEN)
    scores = head.score(*inputs)
    assert scores.shape == (rows,)
    assert scores.dtype == torch.float32
    with torch.no_grad():
        expected = made(inputs[0])
    assert rows < 64 or expected.std() > 0.05
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


def test_a_head_in_bfloat16_scores_nearly_the_same_in_float32(tmp_path: Path) -> None:
    file = saved(tmp_path / "mlp.pth", checkpoint())
    inputs = features(64, HIDDEN)
    narrow = load(file, dtype=torch.bfloat16)
    scores = narrow.score(*inputs)
    assert isinstance(narrow, CiterHead)
    assert narrow.up.dtype == torch.bfloat16
    assert scores.dtype == torch.float32
    assert (scores - load(file).score(*inputs)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("hidden", "parameters"),
    [
        (896, 3_218_433),
        (1024, 4_202_497),
        (1536, 9_449_473),
        (2048, 16_793_601),
        (4096, 67_141_633),
    ],
)
def test_published_sizes_have_the_published_numbers_of_parameters(hidden: int, parameters: int) -> None:
    with torch.device("meta"):
        made = CiterNet(hidden)
    assert shapes(hidden) == {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    trained = {name for name, _ in made.named_parameters()}
    assert sum(math.prod(shape) for name, shape in shapes(hidden).items() if name in trained) == parameters


def test_the_format_has_no_threshold(tmp_path: Path) -> None:
    assert load(saved(tmp_path / "mlp.pth", checkpoint())).threshold is None


def test_a_directory_gives_its_only_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"found none"):
        load(tmp_path)
    saved(tmp_path / "mlp_iter_0.2.pth", checkpoint())
    assert load(tmp_path).comparison == "<"
    saved(tmp_path / "mlp_iter_0.1.pth", checkpoint())
    with pytest.raises(ModelLoadError, match=r"found mlp_iter_0\.1\.pth, mlp_iter_0\.2\.pth"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.0.weight",
        "mlp.1.bias",
        "mlp.1.running_mean",
        "mlp.1.num_batches_tracked",
        "mlp.4.bias",
        "linear.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = checkpoint()
    del tensors[name]
    with pytest.raises(ModelLoadError, match="missing") as error:
        load(saved(tmp_path / "mlp.pth", tensors))
    assert str(error.value).endswith(f" {name}")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("module.mlp.0.weight", torch.ones(1), r"unexpected: module\.mlp\.0\.weight"),
        ("mlp.1.running_var", torch.ones(3), r"mlp\.1\.running_var is \[3\] and should be \[48\]"),
        ("linear.weight", torch.ones(2, HIDDEN), r"linear\.weight is \[2, 24\] and should be \[1, 24\]"),
        ("mlp.1.running_var", torch.full((48,), -1.0), r"mlp\.1\.running_var must not be negative"),
        ("mlp.4.weight", torch.full((24, 48), math.inf), r"mlp\.4\.weight must hold finite real numbers"),
        ("mlp.4.weight", 1.0, r"'mlp\.4\.weight' should be a tensor, got float"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, name: str, value: Tensor | float, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(saved(tmp_path / "mlp.pth", checkpoint(**{name: value})))


def test_a_model_of_another_hidden_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"hidden size 24 .*linear\.weight.* this model's is 48"):
        load(saved(tmp_path / "mlp.pth", checkpoint()), hidden=48)
