"""Routing signals against their formulas in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tokenflow.routing.signals import Signals

INF = math.inf
NAMES = ("entropy", "entropy_nats", "confidence", "margin", "logprob")


def signals(logits: list[list[float]] | Tensor, tokens: list[int] | None = None, **more: Tensor) -> Signals:
    values = torch.tensor(logits) if isinstance(logits, list) else logits
    return Signals(values, torch.tensor(tokens or [0] * len(values)), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logits", "entropy"),
    [
        ([0.0, 0, 0, 0], 1.0),
        ([10.0, 0, 0, 0], 0.001081),
        ([2.0, 1, 0, -1], 0.683503),
        ([5.0, 5, -INF, -INF], 0.5),
        ([1000.0, 0, 0, 0], 0.0),
        ([-1000.0, -1000, -1000, -1000], 1.0),
        ([-1e30, 0, -INF, -INF], 0.0),
    ],
)
def test_normalised_entropy_has_these_values(logits: list[float], entropy: float) -> None:
    assert signals([logits]).entropy().item() == pytest.approx(entropy, abs=1e-6)
    assert signals([logits]).entropy_nats().item() == pytest.approx(entropy * math.log(4), abs=2e-6)


def test_entropy_stays_within_zero_and_one_and_is_never_a_negative_zero() -> None:
    for width in (2, 3, 1000, 151936):
        uniform, certain = torch.zeros(1, width), torch.full((1, width), -INF)
        certain[0, 1] = 3
        assert 0.999999 < signals(uniform).entropy().item() <= 1
        assert math.copysign(1, signals(certain).entropy().item()) == 1
        assert signals(certain).entropy().item() == 0


def expected(logits: Tensor, token: int) -> dict[str, float]:
    p = torch.softmax(logits.double(), -1).tolist()
    nats = -sum(x * math.log(x) for x in p if x > 0)
    first, second = sorted(p)[-1:-3:-1]
    return {
        "entropy": nats / math.log(len(p)),
        "entropy_nats": nats,
        "confidence": first,
        "margin": first - second,
        "logprob": math.log(p[token]) if p[token] else -INF,
    }


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 50.0])
@pytest.mark.parametrize("offset", [0.0, 300.0, -300.0])
def test_signals_follow_their_formulas(scale: float, offset: float) -> None:
    logits = torch.randn(16, 333, generator=torch.Generator().manual_seed(1)) * scale + offset
    logits[:, 7] = -INF
    tokens = list(range(16))
    batch = signals(logits, tokens)
    for row in range(16):
        wanted = expected(logits[row], tokens[row])
        got = {name: getattr(batch, name)()[row].item() for name in NAMES}
        assert got == pytest.approx(wanted, rel=1e-4, abs=2e-6)


def test_excluded_ids_have_no_probability_and_leave_the_normalisation_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0], [1.0, 2.0, 3.0, -9.0]])
    batch = signals(logits, [2, 1], excluded=torch.tensor([3]))
    bare = signals(logits[:, :3], [2, 1])
    for name in ("entropy_nats", "confidence", "margin", "logprob"):
        assert torch.equal(getattr(batch, name)(), getattr(bare, name)())
    assert torch.equal(batch.entropy(), bare.entropy_nats() / math.log(4))
    assert logits[0, 3] == 9


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    for name in NAMES:
        value = getattr(signals(logits), name)()
        assert value.dtype == torch.float32
        assert torch.equal(value, getattr(signals(logits.float()), name)())


@pytest.mark.parametrize("width", [5, 512, 8191])
def test_a_row_does_not_depend_on_its_batch(width: int) -> None:
    logits = torch.randn(9, width, generator=torch.Generator().manual_seed(3)) * 4
    tokens = [i % width for i in range(9)]
    batch = signals(logits, tokens)
    for name in NAMES:
        alone = [getattr(signals(logits[i : i + 1], tokens[i : i + 1]), name)() for i in range(9)]
        assert torch.equal(torch.cat(alone), getattr(batch, name)())


def test_logits_are_left_as_they_are() -> None:
    logits = torch.tensor([[1.0, -INF, 3.0]])
    before = logits.clone()
    batch = signals(logits)
    for name in NAMES:
        getattr(batch, name)()
    assert torch.equal(logits, before)


def test_a_signal_gives_the_same_in_any_order_of_asking() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(4))
    one, other = signals(logits), signals(logits)
    forward = {name: getattr(one, name)() for name in NAMES}
    for name in reversed(NAMES):
        assert torch.equal(getattr(other, name)(), forward[name])


def test_each_signal_is_computed_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("softmax", "log_softmax"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, n=name, f=original: calls.append(n) or f(*args))
    batch = signals([[1.0, 2.0]], positions=torch.tensor([3]), run_lengths=torch.tensor([4]))
    assert (batch.token.item(), batch.position.item(), batch.run_length.item()) == (0, 3, 4)
    assert calls == []
    first = batch.confidence()
    assert calls == ["softmax"]
    for name in (*NAMES, *NAMES):
        getattr(batch, name)()
    # Entropy changes its log-probabilities in place, so those of the sampled token are its own.
    assert calls == ["softmax", "log_softmax", "log_softmax"]
    assert batch.confidence() is first


def test_positions_that_were_left_out_are_missed_when_read() -> None:
    batch = signals([[1.0, 2.0]])
    with pytest.raises(LookupError, match="the positions of the rows were not given"):
        _ = batch.position
    with pytest.raises(LookupError, match="the run lengths of the rows were not given"):
        _ = batch.run_length


def test_the_parameters_are_those_that_were_given() -> None:
    tau = torch.tensor([0.03])
    assert not signals([[1.0, 2.0]]).names
    given = Signals(torch.zeros(1, 2), torch.tensor([0]), params={"tau": tau})
    assert list(given.names) == ["tau"]
    assert given.param("tau") is tau
