"""The class form of a recipe's model: ``route``, ``send`` and ``receive`` as methods of one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from tokenflow.dsl.messages import PeerReq, RequestView
from tokenflow.dsl.wording import did_you_mean

CODES = ("index", "peer_idx")
"""Attributes beside the recipe's parameters."""
_FROZEN = "(frozen)"
"""No name that a parameter could have."""


class BaseRouter:
    """How requests leave and reach one model.

    Subclass it, override :meth:`route` and whatever else differs, and give the class to
    ``recipe.model(..., router=..., peer=...)``.  Objects are made by tokenflow, in the model's worker for
    ``route`` and in the router process for ``send`` and ``receive``, one for each set of parameter values
    in use.  Each has the recipe's parameters as attributes (floats), its own model's destination code as
    ``index`` and that of ``peer`` as ``peer_idx``.  An ``__init__(self)`` may prepare what follows from
    them; after it the object is frozen, since it serves many requests at once.
    """

    index: int
    peer_idx: int

    def route(self, result: Any) -> Any:
        """Where each request of a batch goes after a step.

        :param result: a :class:`tokenflow.routing.python.Result`: what the step gave.
        :return: destination codes, a tensor of integers [B] or a list: 0 to stay, or a model's ``index``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no route(self, result)")

    def send(self, req: RequestView) -> PeerReq:
        """The message to the model where ``req`` goes; by default the sampled token is kept and sent."""
        return req.keep()

    def receive(self, peer_req: PeerReq) -> PeerReq | None:
        """What to take of a message from another model; by default, None, all of it.

        A message that ends earlier takes tokens back, in a recipe that allows it (``rollback``).
        """
        return None

    @classmethod
    def build(cls, *, index: int, peer_idx: int | None = None, params: Mapping[str, float]) -> Self:
        """Make a frozen object with these attributes."""
        router = cls.__new__(cls)
        attributes = vars(router)
        attributes.update(params, index=index)
        if peer_idx is not None:
            attributes["peer_idx"] = peer_idx
        cls.__init__(router)
        attributes[_FROZEN] = True
        return router

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse_if_frozen(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_if_frozen(name)
        super().__delattr__(name)

    def _refuse_if_frozen(self, name: str) -> None:
        if _FROZEN in vars(self):
            raise AttributeError(
                f"cannot change {name!r}: {type(self).__name__} objects are frozen after __init__, because "
                "each serves many requests at once, in two processes"
            )

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__} has no attribute {name!r}"
        if name == "peer_idx":
            message += ': name a model with recipe.model(..., peer="...")'
        elif not name.startswith("_"):
            message += did_you_mean(name, (key for key in vars(self) if key != _FROZEN))
        raise AttributeError(message, name=name, obj=self)
