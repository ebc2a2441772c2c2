"""Packed matrices give what plain ones give."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines.test_torch_model import assert_equal_to_transformers
from tests.engines.tiny import make_model
from tokenflow.engines.torch.linear import Linear, packs, pieces

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGE, SMALL = (1536, 512), (24, 16)


def matrix(shape: tuple[int, int], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_is_product(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Off by rounding at most, which grows with the sum of the terms' sizes."""
    assert y.shape == (len(x), len(weight))
    exact = x.double() @ weight.double().t() + bias.double()
    size = x.double().abs() @ weight.double().abs().t() + bias.double().abs()
    assert ((y.double() - exact).abs() <= 4 * torch.finfo(y.dtype).eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=["large", "small"])
def test_a_product_is_that_of_the_matrix(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    weight, offset = matrix(shape, dtype), torch.zeros(shape[0], dtype=dtype)
    if bias:
        offset = matrix((1, shape[0]), dtype, seed=2)[0]
    linear = Linear(weight, offset if bias else None)
    with torch.inference_mode():
        for rows in (0, 1, 2, 7, 33, 100):
            x = matrix((rows, shape[1]), dtype, seed=3)
            assert_is_product(linear(x), x, weight, offset)


@pytest.mark.parametrize("view", ["columns", "every other column", "transposed"])
def test_the_rows_may_be_views_of_another_tensor(view: str) -> None:
    weight = matrix(LARGE, torch.float32)
    x = {
        "columns": matrix((8, 2 * LARGE[1]), torch.float32, seed=2)[:, : LARGE[1]],
        "every other column": matrix((8, 2 * LARGE[1]), torch.float32, seed=2)[:, ::2],
        "transposed": matrix((LARGE[1], 8), torch.float32, seed=2).t(),
    }[view]
    with torch.inference_mode():
        assert_is_product(Linear(weight)(x), x, weight, torch.zeros(LARGE[0]))


def test_products_have_few_numbers_of_rows_whatever_is_asked() -> None:
    cut = {rows: pieces(rows) for rows in range(3000)}
    assert all(sum(cut[rows]) == rows for rows in cut)
    assert {piece for some in cut.values() for piece in some} == {*range(1, 32), 32, 64, 128, 256}
    assert max(map(len, cut.values())) <= 3000 / 256 + 4


MANY_LENGTHS = """
import random, resource, torch
from pathlib import Path
from tokenflow.engines.torch.linear import Linear

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

torch.set_num_threads(1)
dice, linear = random.Random(1), Linear(torch.randn(1536, 256))
with torch.inference_mode():
    x = torch.randn(300, 256)
    for rows in (300, 32, 8, 1):
        linear(x[:rows])
    before = held()
    for _ in range(600):
        linear(x[: dice.randrange(1, 300)])
    print(held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory in use is read from /proc")
def test_prefills_of_all_lengths_do_not_fill_the_memory() -> None:
    """One kernel with working memory for each length took 160 MiB here."""
    done = subprocess.run([sys.executable, "-c", MANY_LENGTHS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 60


def test_large_matrices_are_packed_where_onednn_has_kernels() -> None:
    small, large, cpu = math.prod(SMALL), math.prod(LARGE), torch.device("cpu")
    assert not packs(small, torch.float32, cpu)
    assert not packs(large, torch.float32, torch.device("cuda", 1))
    assert packs(large, torch.float32, cpu) == torch.backends.mkldnn.is_available()
    assert packs(large, torch.bfloat16, cpu) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert packs(large, torch.float16, cpu) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_a_model_with_packed_matrices_computes_what_transformers_computes(tmp_path: Path) -> None:
    path = make_model(tmp_path, hidden_size=512, intermediate_size=512, head_dim=64, num_attention_heads=8)
    assert_equal_to_transformers(path)
