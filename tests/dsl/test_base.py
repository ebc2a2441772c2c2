"""Objects of a model's class: their attributes, their defaults, and that they stay as they were made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.dsl.test_messages import view
from tokenflow import BaseRouter, PeerReq


class Entropy(BaseRouter):
    limit: float

    def __init__(self) -> None:
        self.limit = self.tau * 10

    def route(self, result: Any) -> list[int]:
        return [self.peer_idx if value > self.limit else 0 for value in result]


def made(**params: float) -> Entropy:
    return Entropy.build(index=1, peer_idx=2, params={"tau": 0.5, **params})


def test_an_object_has_codes_and_parameters_before_it_prepares_itself() -> None:
    router = made(eta=3.0)
    assert (router.index, router.peer_idx, router.tau, router.eta, router.limit) == (1, 2, 0.5, 3.0, 5.0)
    assert router.route([4, 6]) == [0, 2]


def test_an_object_is_frozen_after_it_was_made() -> None:
    router = made()
    message = "cannot change '{}': Entropy objects are frozen after __init__, because each serves many"
    for name in ("tau", "limit", "seen", "_private"):
        with pytest.raises(AttributeError, match=message.format(name)):
            setattr(router, name, 1)
        with pytest.raises(AttributeError, match=message.format(name)):
            delattr(router, name)
    assert router.tau == 0.5


def test_a_parameter_may_have_any_name() -> None:
    router = Entropy.build(index=1, params={"tau": 0.5, "_frozen": 2.0})
    assert router._frozen == 2.0
    with pytest.raises(AttributeError, match="cannot change '_frozen'"):
        router._frozen = 1.0


def test_an_attribute_that_is_missing_is_named_with_what_may_be_meant() -> None:
    with pytest.raises(AttributeError, match=r"^Entropy has no attribute 'tua' \(did you mean \"tau\"\?\)$"):
        _ = made().tua
    with pytest.raises(AttributeError, match=r"^Entropy has no attribute 'zzzzz'$"):
        _ = made().zzzzz


def test_an_object_without_a_peer_says_how_to_name_one() -> None:
    router = Entropy.build(index=1, params={"tau": 1})
    message = "Entropy has no attribute 'peer_idx': name a model with recipe.model(..., peer=\"...\")"
    with pytest.raises(AttributeError) as caught:
        _ = router.peer_idx
    assert str(caught.value) == message


def test_by_default_the_token_is_kept_and_all_is_sent_and_accepted() -> None:
    assert made().send(view()) == PeerReq(7, [5, 6], 6)
    assert made().receive(PeerReq(7, [5, 6], 6)) is None


def test_a_class_without_a_route_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"BaseRouter has no route\(self, result\)"):
        BaseRouter.build(index=1, params={}).route(None)


def test_an_error_while_it_prepares_itself_is_not_hidden() -> None:
    with pytest.raises(AttributeError, match="Entropy has no attribute 'tau'"):
        Entropy.build(index=1, params={})


def test_the_names_that_recipes_import_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tokenflow import BaseRouter, PeerReq, Recipe\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'yaml', 'asyncio', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
