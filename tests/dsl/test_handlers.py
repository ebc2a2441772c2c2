"""A recipe's own send and receive: what they are asked, and which answers are refused."""

# ruff: noqa: E501 (messages are asserted whole)

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dsl.test_messages import view
from tokenflow.dsl.handlers import Handler, Handlers, call_receive, call_send, load_handlers
from tokenflow.dsl.ir import BatchingIR, ModelIR, PythonIR, RecipeIR
from tokenflow.dsl.messages import PeerReq, RequestView
from tokenflow.errors import RecipeError, RouteFailed
from tokenflow.types import ModelConfig
from tokenflow.wire.code import import_file

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "code.py"


def handlers(file: Path, **python: str) -> Handlers:
    """Those of model "slm" (code 1), beside "llm" (code 2)."""
    models = tuple(ModelIR(name, code, ModelConfig(path="")) for code, name in enumerate(("slm", "llm"), 1))
    recipe = RecipeIR(
        name="pair",
        entry="slm",
        models=models,
        routes={},
        batching=BatchingIR("auto", {}),
        python={"slm": PythonIR(str(file), **python)},  # type: ignore[arg-type]
    )
    return load_handlers(recipe, "slm")


def function(file: Path, role: str, body: str) -> Handler:
    arguments = "peer_req, req" if role == "receive" else "req"
    body = textwrap.indent(textwrap.dedent(body), "    ")
    file.write_text(f"from tokenflow import PeerReq\n\ndef f({arguments}):\n{body}\n")
    handler = getattr(handlers(file, **{role: "f"}), role)
    assert isinstance(handler, Handler)
    return handler


def sent(file: Path, body: str, request: RequestView | None = None) -> PeerReq:
    return call_send(function(file, "send", body), request or view())


def send_refusal(file: Path, body: str, request: RequestView | None = None) -> str:
    with pytest.raises(RouteFailed) as caught:
        sent(file, body, request)
    head = f"recipe 'pair': send of model 'slm' (f, {file}:3) "
    assert str(caught.value).startswith(head)
    return str(caught.value)[len(head) :]


ARRIVED = PeerReq(7, [4, 5], 5)


def received(file: Path, body: str, final: int = 3) -> int:
    handler = function(file, "receive", body)
    return call_receive(handler, ARRIVED, view(sampled=None), final)


def receive_refusal(file: Path, body: str, final: int = 3) -> str:
    with pytest.raises(RouteFailed) as caught:
        received(file, body, final)
    head = f"recipe 'pair': receive of model 'slm' (f, {file}:3) "
    assert str(caught.value).startswith(head)
    return str(caught.value)[len(head) :]


def test_a_model_without_python_has_no_handlers(file: Path) -> None:
    recipe = RecipeIR("pair", "slm", (), {}, BatchingIR("auto", {}))
    assert load_handlers(recipe, "slm") == Handlers(None, None)
    file.write_text("def f(result): pass\n")
    assert handlers(file, route="f") == Handlers(None, None)


def test_a_message_that_keeps_or_drops_the_token_is_taken(file: Path) -> None:
    assert sent(file, "return req.keep()") == PeerReq(7, [5, 6], 6)
    assert sent(file, "return req.drop_last(score=1)") == PeerReq(7, [5], 5, score=1)
    assert sent(file, "return PeerReq(req.rid, (2, 3, 4, 5, 6), 6, req.finished())").base == 1
    assert sent(file, "return PeerReq(req.rid, [], 5)", view(peer=1)) == PeerReq(7, [], 5)


def test_a_response_that_is_over_is_sent_as_such(file: Path) -> None:
    assert sent(file, "return req.keep()", view(ended=True)).finished
    assert "pass req.finished()" in send_refusal(file, "return PeerReq(7, [6], 6)", view(peer=1, ended=True))


NO_MESSAGE = "return req.keep(), req.drop_last() or a PeerReq of your own"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", f"returned nothing: {NO_MESSAGE}"),
        ("return [1]", f"returned a list: {NO_MESSAGE}"),
        ("return req", f"returned a RequestView: {NO_MESSAGE}"),
        ("return PeerReq(8, [5, 6], 6)", "returned a message of request 8 for request 7: pass req.rid"),
        ("return PeerReq(7, [5, 6], 7)", "returned token id 5 for index 5 of the request, which holds 6: a message cannot change tokens"),
        ("return PeerReq(7, [6, 6], 7)", "returned loc 7: the request has 6 tokens, so 6 keeps the sampled token and 5 drops it"),
        ("return PeerReq(7, [4], 4)", "returned loc 4: the request has 6 tokens, so 6 keeps the sampled token and 5 drops it"),
        ("return PeerReq(7, [5], 5.0)", "returned loc 5.0: a length is a whole number"),
        ("return PeerReq(7, [5], True)", "returned loc true: a length is a whole number"),
        ("return PeerReq(7, [5], None)", "returned loc nothing: a length is a whole number"),
        ("return PeerReq(7, None, 5)", "returned token_ids nothing: a list of token ids is needed"),
        ("return PeerReq(7, {5}, 5)", "returned token_ids a set: a list of token ids is needed"),
        ("return PeerReq(7, [5.0], 5)", "returned 5.0 as token 0: token ids are whole numbers"),
        ("return PeerReq(7, [4, None], 5)", "returned nothing as token 1: token ids are whole numbers"),
        ("return PeerReq(7, [9, 5], 5)", "returned token id 9 for index 3 of the request, which holds 4: a message cannot change tokens"),
        ("return PeerReq(7, [5, 9], 6)", "returned token id 9 for index 5 of the request, which holds 6: a message cannot change tokens"),
        ("return PeerReq(7, [6], 6)", "returned tokens from index 5, but the peer has seen only 4: send all after those"),
        ("return PeerReq(7, [], 5)", "returned tokens from index 5, but the peer has seen only 4: send all after those"),
        ("return PeerReq(7, [1] * 7, 6)", "returned 7 tokens with loc 6, which would begin before the request"),
        ("return PeerReq(7, [], -1)", "returned 0 tokens with loc -1, which would begin before the request"),
        ("return PeerReq(7, [5, 6], 6, True)", "returned finished=True: pass req.finished(); the peers of a response that ends are told by the runtime"),
        ("\nreturn req.output_ids[99]", "raised IndexError at line 5: list index out of range"),
        ("raise ValueError", "raised ValueError at line 4"),
        ("return req.peer_loc", "raised AttributeError at line 4: 'RequestView' object has no attribute 'peer_loc'"),
        ("req.rid = 3", "raised FrozenInstanceError at line 4: cannot assign to field 'rid'"),
    ],
)  # fmt: skip
def test_a_message_that_is_wrong_fails_the_request(file: Path, body: str, message: str) -> None:
    assert send_refusal(file, body) == message


def test_the_error_of_a_function_is_the_cause(file: Path) -> None:
    with pytest.raises(RouteFailed) as caught:
        sent(file, "raise KeyError('x')")
    assert isinstance(caught.value.__cause__, KeyError)


@given(st.data())
def test_a_message_is_taken_if_and_only_if_it_is_what_the_peer_lacks(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    sampled = data.draw(st.integers(0, 3))
    anchor = data.draw(st.none() | st.integers(0, len(tokens)))
    request = view(tokens=tokens, prompt_tokens=1, sampled=sampled, peer_locs=[None, None, anchor])
    loc = data.draw(st.integers(0, len(tokens) + 2))
    ids = data.draw(st.lists(st.integers(0, 3), max_size=8))
    if data.draw(st.booleans()):
        ids = [*tokens, sampled][data.draw(st.integers(0, len(tokens))) : loc]
    whole = [*tokens, sampled]
    base = loc - len(ids)
    right = loc in (len(whole) - 1, len(whole)) and 0 <= base <= (anchor or 0) and whole[base:loc] == ids
    message = PeerReq(7, ids, loc)
    handler = Handler(lambda req: message, "send", "")
    if right:
        assert call_send(handler, request) is message
    else:
        with pytest.raises(RouteFailed):
            call_send(handler, request)


def test_a_receiver_accepts_all_or_takes_back(file: Path) -> None:
    assert received(file, "return None") == received(file, "return peer_req") == 5
    assert received(file, "return PeerReq(req.rid, [4], 4)") == 4
    assert received(file, "return PeerReq(req.rid, [], 3)") == 3
    assert received(file, "assert (peer_req.token_ids, req.output_ids) == ([4, 5], [4, 5])") == 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 4", "returned 4: return None to accept all tokens, or a PeerReq"),
        ("return PeerReq(8, [4], 4)", "returned a message of request 8 for request 7: pass req.rid"),
        ("return PeerReq(7, [4, 9], 5)", "returned token id 9 for index 4 of the request, which holds 5: a message cannot change tokens"),
        ("return PeerReq(7, [4, 5, 6], 6)", "returned loc 6: the request has only 5 tokens"),
        ("return PeerReq(7, [3], 3)", 'takes back all but 3 tokens, of which 4 are final: a recipe declares with "rollback" how many tokens stay tentative'),
        ("return peer_req.score", "raised AttributeError at line 4: this PeerReq has no field 'score'"),
    ],
)  # fmt: skip
def test_a_receiver_that_is_wrong_fails_the_request(file: Path, body: str, message: str) -> None:
    assert receive_refusal(file, body, final=4) == message


CLASS = """\
from tokenflow import BaseRouter, PeerReq
made = []

class Base(BaseRouter):
    def route(self, result):
        return []

class Both(Base):
    def __init__(self):
        made.append(self.tau)

    def send(self, req):
        assert (req.params["tau"], self.index, self.peer_idx) == (self.tau, 1, 2)
        return req.keep(tau=self.tau)

    def receive(self, peer_req):
        return None if self.tau > 0.5 else PeerReq(7, [4], 4)

class Frozen(Base):
    def send(self, req):
        self.last = req
"""


def test_methods_that_a_class_does_not_override_are_the_defaults(file: Path) -> None:
    file.write_text(CLASS)
    assert handlers(file, router="Base", peer="llm") == Handlers(None, None)
    assert handlers(file, router="Frozen", peer="llm").receive is None


def test_methods_belong_to_one_object_for_each_set_of_parameters(file: Path) -> None:
    file.write_text(CLASS)
    both = handlers(file, router="Both", peer="llm")
    assert both.send is not None and both.receive is not None
    for _ in range(2):
        for tau, length in ((0.25, 4), (0.75, 5)):
            assert call_send(both.send, view(params={"tau": tau})).tau == tau
            arrived = view(sampled=None, params={"tau": tau})
            assert call_receive(both.receive, ARRIVED, arrived, 3) == length
    assert import_file(str(file)).made == [0.25, 0.75]


def test_a_method_is_named_with_its_class_and_line(file: Path) -> None:
    file.write_text(CLASS)
    send = handlers(file, router="Frozen", peer="llm").send
    assert send is not None
    with pytest.raises(RouteFailed) as caught:
        call_send(send, view())
    assert str(caught.value) == (
        f"recipe 'pair': send of model 'slm' (Frozen.send, {file}:20) raised AttributeError at line 21: cannot "
        "change 'last': Frozen objects are frozen after __init__, because each serves many requests at once, in two processes"
    )


def test_the_class_of_the_paper_sends_all_but_the_uncertain_token() -> None:
    paper = {"file": RECIPES / "r_stitch_classes.py", "peer": "llm"}
    slm: Any = handlers(**paper, router="RStitchSLM").send
    llm: Any = handlers(**paper, router="RStitchLLM").send
    for locs in ([None, None, None], [None, 5, 4]):
        request = view(peer_locs=locs, params={"tau": 0.03})
        assert call_send(slm, request) == request.drop_last()
        assert call_send(llm, request) == request.keep()
    assert handlers(**paper, router="RStitchSLM").receive is None


def test_a_file_that_is_gone_is_a_problem_of_the_recipe(file: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        handlers(file, send="f")
    assert str(caught.value.problems[0]) == (
        f"{file}: error: models.slm: cannot be read: No such file or directory"
    )
