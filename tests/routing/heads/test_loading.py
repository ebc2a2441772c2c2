"""What all heads share: the table of kinds, the sides of their rules, and that no file runs code."""

from __future__ import annotations

import operator
import pickle
from pathlib import Path

import pytest
import torch

from tests.routing.heads.published import CiterNet, R2RNet, r2r_checkpoint, saved, scrambled
from tokenflow.errors import ModelLoadError, ModelNotFound
from tokenflow.routing.heads import KINDS, Head, load_head

HIDDEN = 8
COMPARE = {">=": operator.ge, ">": operator.gt, "<": operator.lt}


def load(kind: str, path: Path) -> Head:
    return load_head(kind, path, embeddings=torch.ones(120, HIDDEN), hidden_size=HIDDEN, device="cpu")


def a_head(kind: str, folder: Path) -> Head:
    if kind == "co_llm":
        (folder / "config.json").write_text('{"vocab_size": 120, "defer_token_id": 119}')
        return load(kind, folder)
    if kind == "citer":
        return load(kind, saved(folder / "mlp.pth", scrambled(CiterNet(HIDDEN)).state_dict()))
    return load(kind, saved(folder / "router.pt", r2r_checkpoint(scrambled(R2RNet(HIDDEN, (8,), vocab=120)))))


@pytest.mark.parametrize(
    ("kind", "below", "equal", "above"),
    [("r2r", False, True, True), ("citer", True, False, False), ("co_llm", False, False, True)],
)
def test_a_request_leaves_on_the_published_side_of_the_threshold(
    tmp_path: Path, kind: str, below: bool, equal: bool, above: bool
) -> None:
    leaves = COMPARE[a_head(kind, tmp_path).comparison]
    assert [leaves(score, 0.5) for score in (0.4, 0.5, 0.6)] == [below, equal, above]


@pytest.mark.parametrize("kind", KINDS)
def test_only_co_llm_takes_an_id_from_the_vocabulary(tmp_path: Path, kind: str) -> None:
    assert a_head(kind, tmp_path).excluded == ((119,) if kind == "co_llm" else ())


def test_an_unknown_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'rstitch' does not exist; kinds: r2r, citer, co_llm"):
        load("rstitch", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_leads_nowhere_is_not_found(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        load(kind, tmp_path / "nowhere")


class Runs:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.mkdir, (self.mark,)


@pytest.mark.parametrize("kind", ["r2r", "citer"])
@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_code_in_a_file_is_refused_and_never_run(tmp_path: Path, kind: str, form: str) -> None:
    mark, file = tmp_path / "ran", tmp_path / "head.pt"
    checkpoint = {**r2r_checkpoint(scrambled(R2RNet(HIDDEN, (8,)))), "extra": Runs(mark)}
    if form == "pickle":
        file.write_bytes(pickle.dumps({"extra": Runs(mark)}, protocol=2))
    else:
        torch.save(checkpoint, file, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(ModelLoadError, match=r"cannot be read as a checkpoint of plain tensors.*it asks for"):
        load(kind, file)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["r2r", "citer"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04broken"])
def test_a_damaged_file_is_refused(tmp_path: Path, kind: str, content: bytes) -> None:
    file = tmp_path / "head.pt"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"head\.pt: cannot be read .*damaged or of another kind"):
        load(kind, file)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "head.pt", r2r_checkpoint(scrambled(R2RNet(HIDDEN, (8,)))))
    whole = file.read_bytes()
    for length in (len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"head\.pt: cannot be read"):
            load("r2r", file)


@pytest.mark.parametrize("kind", ["r2r", "citer"])
def test_a_file_with_something_else_in_it_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelLoadError, match="must hold a dictionary, got list"):
        load(kind, saved(tmp_path / "head.pt", [torch.ones(1)]))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    citer = saved(tmp_path / "mlp.pth", scrambled(CiterNet(HIDDEN)).state_dict())
    r2r = saved(tmp_path / "router.pt", r2r_checkpoint(scrambled(R2RNet(HIDDEN, (8,)))))
    with pytest.raises(ModelLoadError, match=r"mlp\.pth: this file is a CITER head; declared kind: r2r"):
        load("r2r", citer)
    with pytest.raises(ModelLoadError, match=r"router\.pt: this file is an R2R head; declared kind: citer"):
        load("citer", r2r)
