"""What one model says to its peers: the ``send`` and ``receive`` of its rules, or its own in Python."""

from __future__ import annotations

from types import MappingProxyType

from tokenflow.actors.sequence import Sequence
from tokenflow.dsl.handlers import call_receive, call_send, load_handlers
from tokenflow.dsl.ir import ModelIR, RecipeIR
from tokenflow.dsl.messages import PeerReq, RequestView, Tokens, send
from tokenflow.wire.messages import RowDone


class Handoffs:
    """Messages of one model of a recipe."""

    def __init__(self, recipe: RecipeIR, model: ModelIR) -> None:
        self._code = model.code
        self._params = tuple(recipe.params)
        self._models = len(recipe.models)
        self._rules = recipe.routes.get(model.name, ())
        self._handlers = load_handlers(recipe, model.name)

    def send(self, sequence: Sequence, row: RowDone, peer: int) -> PeerReq:
        """The message to ``peer`` about a request that has just got the token of ``row``, not committed yet.

        :raises RouteFailed: if the recipe's own ``send`` fails.
        """
        if self._handlers.send is not None:
            tokens = Tokens(sequence.tokens, len(sequence.tokens))
            return call_send(self._handlers.send, self._view(sequence, peer, tokens, row.token))
        how = self._rules[row.rule].send if row.rule >= 0 else "keep"
        return send(sequence.id, sequence.tokens, row.token, sequence.seen.get(peer, 0), how)

    def send_all(self, sequence: Sequence, peer: int, said: PeerReq | None = None) -> PeerReq:
        """The message that hands a request over as it is, since it may not stay: its last token is kept.

        Which tokens go and where to is not for the recipe to say then; its ``send`` is asked for the rest.

        :param said: what it has said already, of another destination.
        :raises RouteFailed: if the recipe's own ``send`` fails.
        """
        tokens = sequence.tokens
        if said is None and self._handlers.send is not None:
            before = Tokens(tokens, len(tokens) - 1)
            said = call_send(self._handlers.send, self._view(sequence, peer, before, tokens[-1]))
        extra = {} if said is None else said.extra
        return PeerReq(sequence.id, tokens[sequence.seen.get(peer, 0) :], len(tokens), **extra)

    def receive(self, sequence: Sequence, request: PeerReq, peer: int) -> int:
        """How many leading tokens of the request stay, now that ``peer`` has sent it here.

        :raises RouteFailed: if the recipe's own ``receive`` fails, or takes back what is final.
        """
        if self._handlers.receive is None:
            return len(sequence.tokens)
        final = sequence.prompt_tokens + sequence.final
        view = self._view(sequence, peer, Tokens(sequence.tokens, len(sequence.tokens)), None)
        return call_receive(self._handlers.receive, request, view, final)

    def _view(self, sequence: Sequence, peer: int, tokens: Tokens, sampled: int | None) -> RequestView:
        return RequestView(
            rid=sequence.id,
            tokens=tokens,
            prompt_tokens=sequence.prompt_tokens,
            sampled=sampled,
            peer=peer,
            peer_locs=(None, *(sequence.seen.get(code) for code in range(1, self._models + 1))),
            params=MappingProxyType(dict(zip(self._params, sequence.params, strict=True))),
        )
