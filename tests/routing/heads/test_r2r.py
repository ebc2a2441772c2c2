"""R2R's router against the published network, and every way in which a checkpoint may not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.routing.heads.published import VOCAB, R2RNet, features, r2r_checkpoint, saved, scrambled
from tokenflow.errors import ModelLoadError
from tokenflow.routing.heads import Head, R2RHead, load_head
from tokenflow.routing.heads.r2r import FILE_NAMES, BlockSize, Sizes

HIDDEN = 12
WIDTHS = (16, 16, 16)


def net(hidden: int = HIDDEN, widths: Sequence[int] = WIDTHS, seed: int = 0, **more: Any) -> R2RNet:
    return scrambled(R2RNet(hidden, widths, **more), seed)


def load(path: Path, embeddings: Tensor, hidden: int = HIDDEN, **more: Any) -> Head:
    return load_head("r2r", path, embeddings=embeddings, hidden_size=hidden, device="cpu", **more)


def table_of(of: R2RNet) -> Tensor:
    return of.token_embeddings.weight.detach()


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_scores_are_those_of_the_published_network(
    tmp_path: Path, in_file: bool, normalize: bool, rows: int
) -> None:
    made = net(normalize=normalize)
    file = saved(tmp_path / "router.pt", r2r_checkpoint(made, table=in_file))
    # What the file holds goes before what the model has.
    embeddings = torch.zeros_like(table_of(made)) if in_file else table_of(made)
    head = load(file, embeddings)
    hidden, tokens, logits = features(rows, HIDDEN)
    scores = head.score(hidden, tokens, logits)
    assert scores.shape == (rows,)
    assert scores.dtype == torch.float32
    with torch.no_grad():
        expected = made(hidden, tokens, logits)
    assert rows < 64 or expected.std() > 0.05
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    hidden=st.integers(1, 20),
    embedding=st.integers(1, 20),
    widths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    expansion=st.integers(1, 5),
    top=st.integers(1, VOCAB),
    seed=st.integers(0, 1000),
)
def test_dimensions_come_from_the_tensors_whatever_they_are(
    tmp_path_factory: pytest.TempPathFactory,
    hidden: int,
    embedding: int,
    widths: list[int],
    expansion: int,
    top: int,
    seed: int,
) -> None:
    made = net(hidden, widths, seed, embedding=embedding, expansion=expansion, top=top).double()
    checkpoint = r2r_checkpoint(made)
    file = saved(tmp_path_factory.mktemp("r2r") / "router.pt", checkpoint)
    head = load(file, table_of(made), hidden, dtype=torch.float64)
    inputs = features(5, hidden, seed=seed)
    h, tokens, logits = inputs[0].double(), inputs[1], inputs[2].double()
    with torch.no_grad():
        torch.testing.assert_close(head.score(h, tokens, logits), made(h, tokens, logits).float())


@pytest.mark.parametrize("change", ["hidden", "tokens", "logits"])
def test_every_input_counts(tmp_path: Path, change: str) -> None:
    made = net()
    head = load(saved(tmp_path / "router.pt", r2r_checkpoint(made)), table_of(made))
    names = ("hidden", "tokens", "logits")
    given, other = (dict(zip(names, features(8, HIDDEN, seed=seed), strict=True)) for seed in (1, 2))
    different = head.score(**given | {change: other[change]}) != head.score(**given)
    assert different[given["tokens"] != other["tokens"]].all()


def test_the_order_and_the_rest_of_the_logits_do_not_count(tmp_path: Path) -> None:
    made = net(top=10)
    head = load(saved(tmp_path / "router.pt", r2r_checkpoint(made)), table_of(made))
    hidden, tokens, logits = features(4, HIDDEN)
    scores = head.score(hidden, tokens, logits)
    assert torch.equal(head.score(hidden, tokens, logits.flip(-1)), scores)
    least = logits.topk(10).values[:, -1:]
    assert torch.equal(head.score(hidden, tokens, logits.masked_fill(logits < least, -math.inf)), scores)


def test_the_models_own_embedding_is_shared_not_copied(tmp_path: Path) -> None:
    made = net()
    embeddings = table_of(made).bfloat16()
    head = load(saved(tmp_path / "router.pt", r2r_checkpoint(made)), embeddings)
    assert isinstance(head, R2RHead)
    assert head.table.data_ptr() == embeddings.data_ptr()
    hidden, tokens, logits = features(3, HIDDEN)
    with torch.no_grad():
        made.token_embeddings.weight.copy_(embeddings)
        torch.testing.assert_close(
            head.score(hidden, tokens, logits), made(hidden, tokens, logits), rtol=0, atol=1e-5
        )


def test_a_head_in_bfloat16_scores_nearly_the_same_in_float32(tmp_path: Path) -> None:
    made = net()
    file = saved(tmp_path / "router.pt", r2r_checkpoint(made, table=True))
    inputs = features(64, HIDDEN)
    wide, narrow = (load(file, table_of(made), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    scores = narrow.score(*inputs)
    assert isinstance(narrow, R2RHead)
    assert narrow.front.weight.dtype == narrow.table.dtype == torch.bfloat16
    assert scores.dtype == torch.float32
    assert (scores - wide.score(*inputs)).abs().max() < 0.05
    hidden, tokens, logits = inputs
    assert torch.equal(narrow.score(hidden.bfloat16(), tokens, logits), scores)


@pytest.mark.parametrize(
    ("hidden", "parameters"),
    [(1024, 54_677_505), (1536, 56_302_081), (2048, 57_926_657), (2560, 59_551_233)],
)
def test_published_sizes_have_the_published_numbers_of_parameters(hidden: int, parameters: int) -> None:
    shapes = Sizes(hidden, hidden, 100, 1024, (BlockSize(1024, 4096, 1024),) * 6, normalize=False).shapes()
    with torch.device("meta"):
        made = R2RNet(hidden, (1024,) * 6)
    trained = {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}
    del trained["token_embeddings.weight"]
    assert shapes == trained
    assert sum(map(math.prod, shapes.values())) == parameters


@pytest.mark.parametrize(("threshold", "expected"), [(0.40596, 0.40596), (1, 1.0), (None, None)])
def test_the_stored_threshold_is_kept(tmp_path: Path, threshold: object, expected: float | None) -> None:
    made = net()
    file = saved(tmp_path / "router.pt", r2r_checkpoint(made, threshold=threshold))
    assert load(file, table_of(made)).threshold == expected


def test_a_file_with_weights_alone_has_no_threshold(tmp_path: Path) -> None:
    made = net()
    checkpoint = {
        key: value for key, value in r2r_checkpoint(made).items() if key in {"model_type", "state_dict"}
    }
    assert load(saved(tmp_path / "router.pt", checkpoint), table_of(made)).threshold is None


def test_a_directory_gives_its_first_known_file_else_its_first(tmp_path: Path) -> None:
    made = net()

    def threshold_of(directory: Path) -> float | None:
        return load(directory, table_of(made)).threshold

    names = ["b.pt", "a.pt", "a_all.pt", *reversed(FILE_NAMES)]
    for number, name in enumerate(names):
        saved(tmp_path / name, r2r_checkpoint(made, threshold=float(number)))
    for name in (*FILE_NAMES, "a.pt", "a_all.pt", "b.pt"):
        assert threshold_of(tmp_path) == names.index(name)
        (tmp_path / name).unlink()
    with pytest.raises(ModelLoadError, match=r"no R2R checkpoint.*default_router\.pt"):
        threshold_of(tmp_path)


def drop(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(checkpoint: dict[str, Any]) -> None:
        for name in names:
            del checkpoint["state_dict"][name]

    return edit


def put(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: checkpoint["state_dict"].update({name: value})


def say(part: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: checkpoint[part].update({key: value})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("logits_projection.weight"), "missing tensor logits_projection.weight"),
        (drop("combined_projection.bias"), "missing: combined_projection.bias"),
        (drop("backbone.blocks.1.mlp.3.weight"), "missing tensor backbone.blocks.1.mlp.3.weight"),
        (
            drop("backbone.blocks.1.layer_norm.bias", "backbone.output_layer.0.weight"),
            "missing: backbone.blocks.1.layer_norm.bias, backbone.output_layer.0.weight",
        ),
        (put("backbone.blocks.0.gate", torch.ones(3)), "unexpected: backbone.blocks.0.gate"),
        (put("backbone.position_embedding", torch.ones(9, 16)), "unexpected: backbone.position_embedding"),
        (put("layer_norm_token.weight", torch.ones(HIDDEN)), "unexpected: layer_norm_token.weight"),
        (say("init_args", "normalize_input", True), "missing: layer_norm_hidden_states.weight"),
        (put("backbone.blocks.0.mlp.0.bias", torch.ones(63)), "mlp.0.bias is [63] and should be [64]"),
        (
            put("backbone.input_projection.weight", torch.ones(16, 15)),
            "backbone.input_projection.weight is [16, 15] and should be [16, 16]",
        ),
        (
            put("logits_projection.weight", torch.ones(HIDDEN)),
            "logits_projection.weight is [12] and should be",
        ),
        (
            put("token_embeddings.weight", torch.ones(VOCAB + 1, HIDDEN)),
            "token_embeddings.weight is [151, 12] and should be [150, 12]",
        ),
        (
            put("combined_projection.weight", torch.ones(16, 3 * HIDDEN + 1)),
            "token embeddings of width 13 (the columns of combined_projection.weight less 24)",
        ),
        (
            put("logits_projection.weight", torch.ones(HIDDEN, VOCAB + 1)),
            "the 151 largest logits; this model has only 150",
        ),
        (
            put("combined_projection.bias", torch.full((16,), math.nan)),
            "combined_projection.bias must hold fin",
        ),
        (put("combined_projection.bias", torch.ones(16, dtype=torch.int64)), "combined_projection.bias must"),
        (put("combined_projection.bias", [1.0]), "'combined_projection.bias' should be a tensor, got list"),
        (put("backbone.output_layer.1.weight", torch.ones(3, 16)), "3 classes"),
        (say("init_args", "use_position_embedding", True), "position embedding"),
        (say("common_args", "input_type", ["hidden_states", "logits"]), "input_type must be"),
        (say("common_args", "input_type", "logits"), "input_type must be"),
        (say("common_args", "threshold", "0.5"), "common_args.threshold must be a finite number, got '0.5'"),
        (say("common_args", "threshold", math.nan), "common_args.threshold must be a finite number, got nan"),
        (say("common_args", "threshold", True), "common_args.threshold must be a finite number, got True"),
        (lambda c: c.update(model_type="LogitsClassifier"), "'LogitsClassifier' is not supported"),
        (lambda c: c.update(optimizer={}), "not an R2R checkpoint: unexpected optimizer"),
        (lambda c: c.pop("model_type"), "not an R2R checkpoint: missing model_type"),
        (lambda c: c.update(init_args=[1]), "init_args must be a dictionary, got list"),
        (lambda c: c.update(state_dict=[1]), "tensors must be in a dictionary, got list"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    made = net()
    checkpoint = r2r_checkpoint(made)
    edit(checkpoint)
    file = saved(tmp_path / "router.pt", checkpoint)
    with pytest.raises(ModelLoadError) as error:
        load(file, table_of(made))
    assert str(error.value).startswith(str(file))
    assert message in str(error.value)


def test_a_model_of_another_hidden_size_is_refused(tmp_path: Path) -> None:
    made = net()
    file = saved(tmp_path / "router.pt", r2r_checkpoint(made))
    with pytest.raises(
        ModelLoadError, match=r"hidden size 12 .*logits_projection\.weight.* this model's is 24"
    ):
        load(file, torch.ones(VOCAB, 24), hidden=24)
