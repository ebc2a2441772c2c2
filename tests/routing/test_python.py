"""Routes written in Python: what they see, that they decide as rules do, which answers are refused."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenflow.dsl.expr import parse_condition, parse_expression
from tokenflow.errors import ModelLoadError, RouteFailed
from tokenflow.routing.python import TAIL, LogitsOutput, PythonRoute, Result
from tokenflow.routing.rules import compile_rules
from tokenflow.routing.signals import Signals
from tokenflow.wire.messages import PythonSpec, RouteRule

RECIPES = Path(__file__).parents[2] / "recipes"
SLM, LLM = 1, 2

# The listing of the TokenRouter paper (arXiv 2610.12242, section 3).  Its last argument, "...", follows
# arguments by name, which Python does not parse: it stands for fields that the listing leaves out.
LISTING = """\
class RStitchSLM(BaseRouter):
    # self.tau (threshold) and self.peer_idx (LLM subserver index) come from config.

    def route(self, result):
        # Delegate high-entropy tokens to the LLM and keep the rest local.
        probs = result.logits_output.next_token_logits.softmax(dim=-1)
        entropy = -(probs * probs.log()).sum(-1) / math.log(probs.shape[-1])
        destination = torch.zeros_like(entropy, dtype=torch.long)
        destination[entropy > self.tau] = self.peer_idx
        return destination.cpu()

    def send(self, req) -> PeerReq:
        # Discard the just-decoded uncertain token so the LLM regenerates from that position.
        token_ids = req.origin_input_ids + req.output_ids[:-1]
        peer_anchor = req.peer_locs[self.peer_idx] or 0
        return PeerReq(rid=req.rid, token_ids=token_ids[peer_anchor:],
                       loc=len(token_ids), finished=req.finished(), ...)

    # receive falls back to the default (accepting all transmitted tokens).
"""
IMPORTS = "import math\nimport torch\nfrom tokenflow import BaseRouter, PeerReq\n\n"
AS_PRINTED = IMPORTS + LISTING.replace("finished=req.finished(), ...)", "finished=req.finished())")


def signals(logits: Tensor, tau: list[float] | float = 0.03, **more: Any) -> Signals:
    count = len(logits)
    values = torch.tensor(tau if isinstance(tau, list) else [tau] * count)
    given: dict[str, Any] = {
        "positions": torch.arange(count),
        "run_lengths": torch.arange(count) + 1,
        "draws": torch.linspace(0, 0.9, count, dtype=torch.float64),
        "hidden": torch.arange(count * 3.0).view(count, 3),
        "tails": torch.arange(count * TAIL).view(count, TAIL),
    }
    return Signals(logits, logits.argmax(-1), params={"tau": values}, **given | more)


def logits_of_all_entropies(count: int, width: int, seed: int) -> Tensor:
    """Rows from nearly uniform to nearly certain."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-1, 1.5, count)
    return torch.randn(count, width, generator=generator) * scale[:, None]


def by_function(file: Path, name: str, code: int = SLM, models: int = 2) -> PythonRoute:
    return PythonRoute(PythonSpec(str(file), name, "", 0), "slm", code, models, ["tau"])


def by_class(file: Path, name: str, code: int = SLM, peer: int = LLM) -> PythonRoute:
    return PythonRoute(PythonSpec(str(file), "", name, peer), "slm", code, 2, ["tau"])


def by_rules(condition: str, destination: int) -> Callable[[Signals], list[int]]:
    rules = compile_rules([RouteRule(parse_condition(condition, ["tau"]), destination)], ["tau"])
    return lambda given: [destination if fired == 0 else 0 for fired in rules(given)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "code.py"


def route(file: Path, body: str, **options: int) -> PythonRoute:
    """The route function ``f(result, tau)`` with this body."""
    body = textwrap.indent(textwrap.dedent(body), "    ")
    file.write_text(f"import math\nimport torch\n\ndef f(result, tau):\n{body}\n")
    return by_function(file, "f", **options)


def answer(file: Path, body: str, count: int = 3, **options: int) -> list[int]:
    return route(file, body, **options)(signals(torch.eye(count)), [(0.03,)] * count)


def refusal(file: Path, body: str, count: int = 3) -> str:
    """Why an answer is refused, after "route of model ... (...) "."""
    with pytest.raises(RouteFailed) as caught:
        answer(file, body, count)
    head = f"route of model 'slm' (f, {file}:4) "
    assert str(caught.value).startswith(head)
    return str(caught.value)[len(head) :]


def test_the_listing_differs_from_python_in_its_last_argument_only() -> None:
    with pytest.raises(SyntaxError, match="positional argument follows keyword argument"):
        ast.parse(LISTING)
    ast.parse(AS_PRINTED)
    assert len(IMPORTS + LISTING) - len(AS_PRINTED) == len(", ...")


def test_the_recipe_of_the_paper_has_the_class_as_printed() -> None:
    def listed(source: str) -> dict[str, str]:
        found = next(
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == "RStitchSLM"
        )
        return {node.name: ast.dump(node) for node in found.body if isinstance(node, ast.FunctionDef)}

    assert listed((RECIPES / "r_stitch_classes.py").read_text()) == listed(AS_PRINTED)


@pytest.mark.parametrize("tau", [0.03, 0.3, 0.7])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_three_forms_of_r_stitch_decide_alike(file: Path, tau: float, seed: int) -> None:
    file.write_text(AS_PRINTED)
    logits = logits_of_all_entropies(200, 1000, seed)
    values = [(tau,)] * len(logits)
    away = by_rules("entropy > tau", LLM)(signals(logits, tau))
    assert 0 < away.count(LLM) < 200
    forms = [
        by_class(file, "RStitchSLM"),
        by_class(RECIPES / "r_stitch_classes.py", "RStitchSLM"),
        by_function(RECIPES / "r_stitch.py", "uncertain"),
    ]
    for form in forms:
        assert form(signals(logits, tau), values) == away
    back = by_rules("entropy <= tau", SLM)(signals(logits, tau))
    forms = [
        by_class(RECIPES / "r_stitch_classes.py", "RStitchLLM", code=LLM, peer=SLM),
        by_function(RECIPES / "r_stitch.py", "certain_again", code=LLM),
    ]
    for form in forms:
        assert form(signals(logits, tau), values) == back


def test_the_three_forms_agree_where_every_request_has_its_own_threshold(file: Path) -> None:
    file.write_text(AS_PRINTED)
    logits = logits_of_all_entropies(60, 200, 3)
    tau = [(0.1, 0.4, 0.8)[row % 3] for row in range(60)]
    values = [(value,) for value in tau]
    away = by_rules("entropy > tau", LLM)(signals(logits, tau))
    assert away != by_rules("entropy > tau", LLM)(signals(logits, 0.4))
    assert by_class(file, "RStitchSLM")(signals(logits, tau), values) == away
    assert by_function(RECIPES / "r_stitch.py", "uncertain")(signals(logits, tau), values) == away


@pytest.mark.parametrize("width", [4, 1000, 151_936])
def test_the_printed_entropy_is_finite_and_right_where_probabilities_underflow(width: int) -> None:
    rows = torch.full((6, width), -math.inf)
    rows[0, 1] = 3.0  # certain, the rest impossible
    rows[1, :2] = 5.0  # two halves
    rows[2] = torch.linspace(-1e30, 0, width)
    rows[3, 0], rows[3, 1:] = 200.0, 0.0  # exp(-200) is 0 in float32
    rows[4] = -1000.0  # uniform
    rows[5] = torch.linspace(0, 300, width)
    probs = LogitsOutput(signals(rows), None).next_token_logits.softmax(dim=-1)
    assert (probs > 0).all()
    entropy = -(probs * probs.log()).sum(-1) / math.log(probs.shape[-1])
    exact = torch.softmax(rows.double(), -1)
    expected = -torch.where(exact > 0, exact * exact.log(), 0.0).sum(-1) / math.log(width)
    assert entropy.isfinite().all()
    assert entropy.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    assert entropy.tolist() == pytest.approx(signals(rows).entropy().tolist(), abs=1e-5)


def test_logits_are_raw_float32_and_floored_75_below_the_largest() -> None:
    raw = torch.tensor(
        [[0.0, 10.0, -70.0, -math.inf], [-100.0, -180.0, -175.0, -174.0]], dtype=torch.bfloat16
    )
    shown = Result(signals(raw)).logits_output.next_token_logits
    assert shown.dtype == torch.float32
    assert shown.tolist() == [[0, 10, -65, -65], [-100, -175, -175, raw[1, 3].item()]]


def test_a_result_shows_what_the_signals_are() -> None:
    given = signals(torch.randn(5, 50, generator=torch.Generator().manual_seed(4)), [0.1, 0.2, 0.3, 0.4, 0.5])
    rows = torch.tensor([3, 1])
    for result, chosen in ((Result(given), slice(None)), (Result(given, rows=rows), rows)):
        for name in ("entropy", "entropy_nats", "confidence", "margin", "logprob"):
            assert torch.equal(getattr(result, name)(), getattr(given, name)()[chosen])
        for name in ("position", "run_length", "draw", "tails"):
            assert torch.equal(getattr(result, name), getattr(given, name)[chosen])
        assert torch.equal(result.next_token_ids, given.token[chosen])
        assert torch.equal(result.params["tau"], given.param("tau")[chosen])
        assert torch.equal(result.logits_output.hidden_states, given.hidden[chosen])
        assert torch.equal(result.logits_output.next_token_logits, given.logits()[chosen])


class Doubled:
    """A head that scores twice the first hidden state plus the token."""

    threshold: float | None = 0.25
    calls = 0

    def score(self, hidden: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
        self.calls += 1
        return (2 * hidden[:, 0] + tokens).half()


def test_a_result_scores_heads_once_and_has_their_thresholds() -> None:
    head, given = Doubled(), signals(torch.eye(3))
    result = Result(given, {"own": head}, torch.tensor([2, 0]))
    for _ in range(2):
        assert result.head("own").tolist() == [14.0, 0.0]
    assert (result.head("own").dtype, head.calls, result.threshold("own")) == (torch.float32, 1, 0.25)
    with pytest.raises(LookupError, match=r"no head 'other' here: name it with recipe.model\(..., heads="):
        result.head("other")
    head.threshold = None
    with pytest.raises(LookupError, match="head 'own' comes without a threshold: give one in the recipe"):
        result.threshold("own")


def test_a_route_gets_the_heads_of_its_model(file: Path) -> None:
    file.write_text(
        "import torch\ndef f(result):\n"
        "    return torch.where(result.head('own') > result.threshold('own') * 30, 2, 0)\n"
    )
    spec = PythonSpec(str(file), "f", "", 0)
    routed = PythonRoute(spec, "slm", 1, 2, [], {"own": Doubled()})
    assert routed(signals(torch.eye(3)), [()] * 3) == [0, 0, 2]


DECLARED = {
    "smooth": "momentum(entropy, 0.5)",
    "late": "window(entropy > tau, 2) == 1",
    "parity": "token % 2",
    "odds": "draw * 2",
    "two": "2",
    "ended": "true",
}


def declared(**texts: str) -> dict[str, object]:
    return {name: parse_expression(text, ["tau"], ["own"]) for name, text in texts.items()}


def test_declared_expressions_come_by_name_in_the_type_that_they_compute(file: Path) -> None:
    file.write_text(
        "from tokenflow import BaseRouter\nseen = []\n"
        "def f(result, smooth, tau, **more):\n"
        "    seen.append({'smooth': smooth, 'tau': tau, **more})\n"
        "    return [0] * len(smooth)\n"
        "class R(BaseRouter):\n    def route(self, result):\n"
        "        names = ['smooth', 'late', 'parity', 'odds', 'two', 'ended']\n"
        "        seen.append({name: result.signal(name) for name in names})\n"
        "        return [0] * len(result.next_token_ids)\n"
    )
    state = [[0.5, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    given = signals(torch.tensor([[0.0, 0.0], [0.0, 9.0], [0.0, 0.0]]), [0.5, 0.5, 0.25], state=state)
    spec = PythonSpec(str(file), "f", "", 0, declared(**DECLARED))
    routed = PythonRoute(spec, "slm", SLM, 2, ["tau"])
    assert (routed.tail, routed.memories.width) == (TAIL, 3)
    routed(given, [(0.5,)] * 3)
    kept = routed.memories.kept(given)
    assert kept[0] == [pytest.approx(0.75), 1, 1]
    spec = PythonSpec(str(file), "", "R", LLM, declared(**DECLARED))
    PythonRoute(spec, "slm", SLM, 2, ["tau"])(given, [(0.5,), (0.5,), (0.25,)])
    by_function, *by_class = _seen(routed)
    dtypes = {name: value.dtype for name, value in by_function.items()}
    assert dtypes.pop("tau") == dtypes["smooth"] == torch.float32
    assert (dtypes["late"], dtypes["ended"], dtypes["parity"]) == (torch.bool, torch.bool, torch.int64)
    assert (dtypes["odds"], dtypes["two"]) == (torch.float64, torch.int64)
    assert by_function["smooth"].tolist() == pytest.approx([0.75, 0.0006, 1.0], abs=1e-3)
    assert by_function["late"].tolist() == [True, False, False]
    assert by_function["two"].tolist() == [2, 2, 2]
    # Objects with other parameters see the rows that are theirs.
    for name in DECLARED:
        joined = torch.cat([part[name] for part in by_class])
        assert torch.equal(joined, by_function[name])


def _seen(route: PythonRoute) -> list[dict[str, Tensor]]:
    seen: list[dict[str, Tensor]] = sys.modules[route._route.__module__].seen
    return seen


def test_a_declared_expression_may_ask_heads_and_look_far_back(file: Path) -> None:
    file.write_text("def f(result, doubled, far):\n    return [2 if x else 0 for x in far & (doubled > 8)]\n")
    tree = ("at", (tuple(range(TAIL + 4)),))
    spec = PythonSpec(str(file), "f", "", 0, {**declared(doubled='head("own") * 2'), "far": tree})
    routed = PythonRoute(spec, "slm", 1, 2, [], {"own": Doubled()})
    assert routed.tail == TAIL + 3
    tails = torch.stack([torch.arange(TAIL + 3)] * 3)
    tails[1, 0] = 7
    given = Signals(torch.zeros(3, 40), torch.full((3,), TAIL + 3), tails=tails, hidden=torch.zeros(3, 1))
    assert routed(given, [()] * 3) == [2, 0, 2]
    assert Result(given).tails.shape == (3, TAIL)


def test_a_signal_that_nobody_declared_is_an_error_that_says_how(file: Path) -> None:
    assert refusal(file, "return result.signal('smooth')") == (
        "raised LookupError at line 5: no signal 'smooth' here: declare it with "
        "recipe.model(..., signals={...})"
    )


def test_parameters_come_by_name_one_value_for_each_row(file: Path) -> None:
    file.write_text(
        "def f(result, b, *, a):\n"
        "    assert a.dtype == b.dtype and a.shape == b.shape == (2,)\n"
        "    return (a + 2 * b).long()\n"
        "def g(result, **params):\n"
        "    return [len(params)] * 2\n"
    )
    values = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 1.0]), "result": torch.zeros(2)}
    given = Signals(torch.eye(2), torch.tensor([0, 1]), params=values)
    for name, expected in (("f", [1, 2]), ("g", [2, 2])):
        routed = PythonRoute(PythonSpec(str(file), name, "", 0), "slm", 3, 3, list(values))
        assert routed(given, [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0)]) == expected


def test_one_object_serves_all_requests_with_the_same_parameters(file: Path) -> None:
    file.write_text(
        "from tokenflow import BaseRouter\nmade = []\n"
        "class R(BaseRouter):\n"
        "    def __init__(self):\n        made.append((self.tau, self.index, self.peer_idx))\n"
        "    def route(self, result):\n"
        "        assert (result.params['tau'] == self.tau).all()\n"
        "        return [2 if self.tau > 0.5 else 0] * len(result.next_token_ids)\n"
    )
    routed = by_class(file, "R")
    tau = [0.25, 0.75, 0.25, 0.75, 0.5]
    for _ in range(2):
        assert routed(signals(torch.eye(5), tau), [(value,) for value in tau]) == [0, 2, 0, 2, 0]
    assert sys.modules[routed._build((0.5,)).__module__].made == [(0.25, 1, 2), (0.75, 1, 2), (0.5, 1, 2)]


def test_an_object_without_a_peer_is_made_without_one(file: Path) -> None:
    file.write_text(
        "from tokenflow import BaseRouter\n"
        "class R(BaseRouter):\n    def route(self, result):\n        return [self.peer_idx]\n"
    )
    with pytest.raises(RouteFailed, match="raised AttributeError at line 4: R has no attribute 'peer_idx'"):
        by_class(file, "R", peer=0)(signals(torch.eye(1)), [(0.03,)])


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit", "GeneratorExit", "RecursionError"])
def test_whatever_a_route_raises_fails_that_batch_only(file: Path, kind: str) -> None:
    file.write_text(
        "from tokenflow import BaseRouter\n"
        f"class R(BaseRouter):\n    def route(self, result):\n        raise {kind}\n"
    )
    with pytest.raises(RouteFailed, match=f"raised {kind} at line 4"):
        by_class(file, "R")(signals(torch.eye(1)), [(0.03,)])


def test_an_object_cannot_be_changed_by_its_route(file: Path) -> None:
    file.write_text(
        "from tokenflow import BaseRouter\n"
        "class R(BaseRouter):\n    def route(self, result):\n        self.seen = 1\n"
    )
    with pytest.raises(RouteFailed) as caught:
        by_class(file, "R")(signals(torch.eye(1)), [(0.03,)])
    assert str(caught.value) == (
        f"route of model 'slm' (R.route, {file}:3) raised AttributeError at line 4: cannot change 'seen': R "
        "objects are frozen after __init__, because each serves many requests at once, in two processes"
    )


def test_codes_may_be_tensors_of_any_integers_or_lists(file: Path) -> None:
    assert answer(file, "return torch.tensor([0, 2, 1])") == [0, 2, 0]
    assert answer(file, "return torch.tensor([0, 2, 0], dtype=torch.uint8)") == [0, 2, 0]
    assert answer(file, "return torch.where(result.entropy() > tau, 2, 0)") == [2, 2, 2]
    assert answer(file, "return [0, 2, 0]") == answer(file, "return (0, 2, 0)") == [0, 2, 0]


def test_a_models_own_code_means_stay(file: Path) -> None:
    assert answer(file, "return [0, 1, 2]", code=2) == [0, 1, 0]


NEEDED = "a batch of 3 needs as many whole numbers"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", f"returned None: {NEEDED}, in a tensor or a list"),
        ("return 0", f"returned 0: {NEEDED}, in a tensor or a list"),
        ("return {0: 1}", f"returned {{0: 1}}: {NEEDED}, in a tensor or a list"),
        ("return (code for code in [0, 0, 0])", "returned <generator object"),
        ("return [0, 0]", f"returned a list of 2: {NEEDED}"),
        ("return [0, 0, 0, 0]", f"returned a list of 4: {NEEDED}"),
        ("return [0, None, 0]", f"returned None for row 1: {NEEDED}"),
        ("return [0, 1.0, 0]", f"returned 1.0 for row 1: {NEEDED}"),
        ("return [0, True, 0]", f"returned True for row 1: {NEEDED}"),
        ("return [0, math.nan, 0]", f"returned nan for row 1: {NEEDED}"),
        ("return list(torch.zeros(3).long())", f"returned tensor(0) for row 0: {NEEDED}"),
        ("return [0, 3, 0]", "returned 3 for row 1: destination codes are 0 (stay) to 2"),
        ("return [0, 0, -1]", "returned -1 for row 2: destination codes are 0 (stay) to 2"),
        ("return torch.tensor([9, 0, 0])", "returned 9 for row 0: destination codes are 0 (stay) to 2"),
        ("return torch.zeros(2).long()", f"returned a tensor of shape [2]: {NEEDED}"),
        ("return torch.zeros(3, 1).long()", f"returned a tensor of shape [3, 1]: {NEEDED}"),
        ("return torch.tensor(0)", f"returned a tensor of shape []: {NEEDED}"),
        (
            "return torch.tensor([0.0, math.nan, 0.5])",
            f"returned tensor([0.0000, nan, 0.5000]): {NEEDED}, as from torch.where(condition, index, 0)",
        ),
        (
            "return result.entropy() > 9",
            f"returned tensor([False, False, False]): {NEEDED}, as from torch.where(condition, index, 0)",
        ),
        (
            "return torch.sparse_coo_tensor(size=(3,), dtype=torch.int64, check_invariants=True)",
            "returned a tensor that cannot be listed (torch.int64, torch.sparse_coo, on cpu): a batch of 3",
        ),
        ("return torch.zeros(3, dtype=torch.int64, device='meta')", "returned a tensor that cannot be list"),
        ("return type('Odd', (), {'__repr__': lambda self: 1 / 0})()", "returned Odd: a batch of 3"),
        ("return tau * 1j", "returned tensor([0.+0.0300j, 0."),
        ("\nreturn 1 // 0", "raised ZeroDivisionError at line 6: integer division or modulo by zero"),
        ("raise KeyError('x')", "raised KeyError at line 5: 'x'"),
        ("assert False", "raised AssertionError at line 5"),
        ("return result.entropi()", "raised AttributeError at line 5: 'Result' object has no attribute"),
        ("return torch.zeros(3) @ torch.zeros(4)", "raised RuntimeError at line 5: inconsistent tensor size"),
    ],
)
def test_an_answer_that_is_not_one_code_for_each_row_fails_with_its_value(
    file: Path, body: str, message: str
) -> None:
    assert refusal(file, body).startswith(message)


def test_a_wrong_answer_is_shown_short(file: Path) -> None:
    text = refusal(file, "return torch.rand(300).sort().values", 300)
    assert text.startswith("returned tensor([")
    assert text.index(": a batch of 300") < 100


def test_the_error_of_a_route_is_the_cause(file: Path) -> None:
    with pytest.raises(RouteFailed) as caught:
        answer(file, "raise KeyError('x')")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_method_is_named_with_its_class_and_line(file: Path) -> None:
    file.write_text(
        "from tokenflow import BaseRouter\nclass R(BaseRouter):\n    def route(self, result): pass\n"
    )
    with pytest.raises(RouteFailed) as caught:
        by_class(file, "R")(signals(torch.eye(2)), [(0.1,), (0.2,)])
    assert str(caught.value) == (
        f"route of model 'slm' (R.route, {file}:3) returned None: a batch of 1 needs as many whole "
        "numbers, in a tensor or a list"
    )


def test_a_route_that_cannot_be_imported_names_its_model(file: Path) -> None:
    file.write_text("x = 1\n1 / 0\n")
    for name, message in [
        ("f", f"{file}:2: raised ZeroDivisionError: division by zero"),
        ("g", f"{file}:2: raised ZeroDivisionError"),
    ]:
        with pytest.raises(ModelLoadError) as caught:
            by_function(file, name)
        assert str(caught.value).startswith(f"the route of model 'slm' cannot be imported: {message}")
    file.write_text("x = 1\n")
    with pytest.raises(ModelLoadError, match="has no 'f' at its top level"):
        by_function(file, "f")


def test_a_route_crosses_to_another_process_by_file_and_name(file: Path) -> None:
    logits = logits_of_all_entropies(20, 50, 5)
    file.write_text(
        "import json, sys, torch\n"
        "from tokenflow.routing.python import PythonRoute\n"
        "from tokenflow.routing.signals import Signals\n"
        "from tokenflow.wire.messages import PythonSpec\n"
        "logits = torch.tensor(json.load(sys.stdin))\n"
        "params = {'tau': torch.full((len(logits),), 0.4)}\n"
        "answers = []\n"
        "for route, router, peer in [('uncertain', '', 0), ('', 'RStitchSLM', 2)]:\n"
        "    file = sys.argv[2] if router else sys.argv[1]\n"
        "    routed = PythonRoute(PythonSpec(file, route, router, peer), 'slm', 1, 2, ['tau'])\n"
        "    given = Signals(logits, logits.argmax(-1), params=params)\n"
        "    answers.append(routed(given, [(0.4,)] * len(logits)))\n"
        "print(json.dumps(answers))\n"
    )
    done = subprocess.run(
        [sys.executable, str(file), str(RECIPES / "r_stitch.py"), str(RECIPES / "r_stitch_classes.py")],
        input=json.dumps(logits.tolist()),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = by_rules("entropy > tau", LLM)(signals(logits, 0.4))
    assert json.loads(done.stdout) == [expected, expected]
