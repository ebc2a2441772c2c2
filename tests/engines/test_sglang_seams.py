"""What the sglang engine expects of SGLang, and how it says that something is different."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from tokenflow.engines.sglang.load import server_arguments
from tokenflow.engines.sglang.seams import CALLS, changes_of, check_seams, require_sglang
from tokenflow.errors import UnsupportedModel
from tokenflow.types import ModelConfig


def test_another_version_is_named_with_the_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(UnsupportedModel) as refused:
        require_sglang()
    assert str(refused.value) == (
        "engine 'sglang' needs SGLang 0.5.23, found 0.5.24: pip install 'tokenflow[sglang]'"
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    require_sglang()


def test_metadata_without_a_package_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a removal that failed half-way."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.23")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel) as refused:
        require_sglang()
    assert str(refused.value) == (
        "engine 'sglang' needs SGLang 0.5.23, of which only the metadata is installed: "
        "pip install --force-reinstall --no-deps sglang==0.5.23"
    )


def test_a_package_with_nothing_in_it_is_told_by_a_few_of_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UnsupportedModel) as refused:
        check_seams()
    assert "pip install --force-reinstall --no-deps sglang==0.5.23" in str(refused.value)
    assert str(refused.value).endswith(f"; and {len(CALLS) - 8} more")
    monkeypatch.delitem(sys.modules, "sglang", raising=False)


NO_SUCH = "type object 'Thing' has no attribute 'gone'"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("library")
    exec(
        "def plain(a, b=1): ...\n"
        "def open_ended(a, **rest): ...\n"
        "class Thing:\n"
        "    def __init__(self, size): ...\n"
        "    def method(self, batch, *, mode): ...\n"
        "    member = 3\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "library", module)
    return module


@pytest.mark.parametrize(
    ("name", "given", "changes"),
    [
        ("library:plain", ("a",), []),
        ("library:plain", ("a", "b"), []),
        ("library:plain", ("a", "c"), ["library:plain no longer takes 'c'"]),
        ("library:plain", (), ["library:plain now needs 'a'"]),
        ("library:open_ended", ("a", "anything"), []),
        ("library:Thing", ("size",), []),
        ("library:Thing.method", ("batch", "mode"), []),
        ("library:Thing.method", ("batch",), ["library:Thing.method now needs 'mode'"]),
        ("library:Thing.member", (), []),
        (
            "library:Thing.gone",
            (),
            ["library:Thing.gone is gone (" + NO_SUCH + ")"],
        ),
        ("nowhere:at_all", (), ["nowhere:at_all is gone (No module named 'nowhere')"]),
    ],
)
def test_a_change_is_named(
    library: ModuleType, name: str, given: tuple[str, ...], changes: list[str]
) -> None:
    assert list(changes_of(name, given)) == changes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import no_such_kernels", "No module named 'no_such_kernels'"),
        ("raise ImportError('libcuda.so.1: cannot open\\nand more')", "libcuda.so.1: cannot open"),
        ("raise RuntimeError('no GPU')", "no GPU"),
    ],
)
def test_what_keeps_it_from_being_imported_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    """As on a machine without a GPU, or without its kernels."""
    (tmp_path / "unimportable.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unimportable", raising=False)
    with pytest.raises(UnsupportedModel) as refused:
        list(changes_of("unimportable:thing", ()))
    assert str(refused.value).startswith(f"SGLang cannot be imported here: {why}; it needs a GPU with CUDA")
    assert "\n" not in str(refused.value)


def test_all_changes_are_told_at_once(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tokenflow.engines.sglang.seams.CALLS", {"library:plain": (), "library:Thing": ("length",)}
    )
    with pytest.raises(UnsupportedModel) as refused:
        check_seams()
    assert str(refused.value).startswith("this build of SGLang is not 0.5.23 as released")
    assert str(refused.value).endswith(
        "library:plain now needs 'a'; library:Thing no longer takes 'length'; library:Thing now needs 'size'"
    )


def test_every_argument_that_is_given_is_checked(tmp_path: Path) -> None:
    config = {
        "dtype": "float32",
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = ModelConfig(path=str(tmp_path), max_requests=8)
    for device in ("cpu", "cuda"):
        given = server_arguments(model, device, cuda_graphs=True, load_format="safetensors")
        assert set(given) <= set(CALLS["sglang.srt.server_args:ServerArgs"])
    on_cpu = server_arguments(model, "cpu", cuda_graphs=True, load_format="safetensors")
    assert on_cpu["max_total_tokens"] == 8 * 256
    assert on_cpu["dtype"] == "float32"
    assert on_cpu["disable_cuda_graph"]
