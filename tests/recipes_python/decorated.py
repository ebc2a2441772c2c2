"""The demo's recipes with decorated functions: each says what the YAML file of its name says."""

import torch

from tokenflow import Recipe

DEMO = "../../recipes/demo"
SLM, MID, LLM = 1, 2, 3
"""Codes in a recipe of three models."""
LARGE = 2
"""Code of the large model in a recipe of two."""
ANSWER = torch.tensor([38, 83, 88, 92, 74, 87, 31, 5])  # "Answer: "
SPACE, EQUALS = 5, 34


def pair(name, slm, llm, *, small="small", verify=False, signals=None, **data):
    """A recipe over two demo models from what decorates each: its route, and its send if it has one.

    ``signals`` are those of each model.
    """
    recipe, signals = Recipe(name, **{"entry": "slm", **data}), signals or {}
    config = {"dtype": "float32"}
    heads = list(data.get("heads", ()))
    models = [
        recipe.model("slm", f"{DEMO}/{small}", heads=heads, signals=signals.get("slm"), **config),
        recipe.model("llm", f"{DEMO}/large", verify=verify, signals=signals.get("llm"), **config),
    ]
    return decorated(recipe, models, [slm, llm])


def trio(name, slm, mid, llm, **data):
    """A recipe over three demo models."""
    recipe = Recipe(name, **data)
    folders = {"slm": "small", "mid": "mid", "llm": "large"}
    models = [recipe.model(model, f"{DEMO}/{path}", dtype="float32") for model, path in folders.items()]
    return decorated(recipe, models, [slm, mid, llm])


def decorated(recipe, models, functions):
    for model, (route, *send) in zip(models, functions, strict=True):
        if route is not None:
            model.route(route)
        for function in send:
            model.send(function)
    return recipe


def drop(req):
    """The peer writes the position of the sampled token."""
    return req.drop_last()


def back(result):
    return torch.full_like(result.position, SLM)


def back_after_n(result, n):
    return torch.where(result.run_length >= n, SLM, 0)


def uncertain(result, tau):
    return torch.where(result.entropy() > tau, LARGE, 0)


def certain(result, tau):
    return torch.where(result.entropy() <= tau, SLM, 0)


def divergent(result):
    return torch.where(result.head("divergence") >= result.threshold("divergence"), LARGE, 0)


def doubted(result, tau):
    return torch.where(result.head("confidence") < tau, LARGE, 0)


def deferred(result, eta):
    return torch.where(result.head("defer") > eta, LARGE, 0)


def drawn(result):
    return torch.where(result.draw < 0.5, SLM, torch.where(result.draw < 0.8, MID, LLM))


def unlikely(result, t):
    return torch.where(result.confidence() < t, LARGE, 0)


def close(result, t):
    return torch.where(result.margin() < t, LARGE, 0)


def uncertain_in_nats(result, h):
    return torch.where(result.entropy_nats() >= h, LARGE, 0)


def by_chance(result, q):
    return torch.where(result.draw < q, LARGE, 0)


def ends_in(result, ids):
    """Whether the output with the sampled token ends in these ids."""
    written = torch.cat((result.tails, result.next_token_ids[:, None]), 1)
    return (written[:, -len(ids) :] == ids).all(1)


def answer_begun(result):
    return torch.where(ends_in(result, ANSWER), SLM, 0)


def uncertain_step(result, h):
    last = result.tails[:, -1]
    at_start = (last < 0) | (last == SPACE)
    wanted = (at_start & (result.entropy_nats() >= h)) | ends_in(result, ANSWER)
    return torch.where(wanted, LARGE, 0)


def step_over(result, answering, at_end):
    over = at_end | (result.run_length >= 24)
    return torch.where(over & (answering == 0), SLM, 0)


def too_few_certain(result, certain, low, high):
    return torch.where((certain <= low) | (asked_before(result) & (certain <= high)), LARGE, 0)


def uncertain_of_late(result, mean, h):
    now = torch.where(asked_before(result), mean, result.entropy_nats())
    return torch.where(now >= h, LARGE, 0)


def asked_before(result):
    """Whether the large model wrote the token before: a run of one token after the first."""
    return (result.run_length == 1) & (result.position > 0)


def divergent_of_late(result, mean):
    return torch.where(mean >= result.threshold("divergence"), LARGE, 0)


def called(result):
    return torch.where(result.next_token_ids == EQUALS, LARGE, 0)


def drafted(result):
    return torch.where(result.run_length >= 4, LARGE, 0)


def above_slm(result, low, high):
    entropy = result.entropy()
    return torch.where(entropy > high, LLM, torch.where(entropy > low, MID, SLM))


def around_mid(result, low, high):
    entropy = result.entropy()
    return torch.where(entropy > high, LLM, torch.where(entropy <= low, SLM, MID))


def below_llm(result, low, high):
    entropy = result.entropy()
    return torch.where(entropy <= low, SLM, torch.where(entropy <= high, MID, LLM))


def drop_upwards(req):
    return req.drop_last() if req.peer == LLM else req.keep()


def logu(result):
    """R2R's strategy "immediate": aleatoric uncertainty by the ten largest raw logits as evidence."""
    evidence = result.logits_output.next_token_logits.topk(10).values.clamp_min(0).double()
    total = evidence.sum(-1, keepdim=True)
    terms = evidence / total * (torch.digamma(evidence + 1) - torch.digamma(total + 1))
    return torch.where(-terms.sum(-1) >= 2.15, LARGE, 0)


r_stitch = pair("r-stitch", [uncertain, drop], [certain], params={"tau": 0.03})
r2r = pair(
    "r2r",
    [divergent, drop],
    [back],
    heads={"divergence": {"kind": "r2r", "path": f"{DEMO}/heads/r2r/default_router.pt"}},
)
citer = pair(
    "citer",
    [doubted, drop],
    [back],
    params={"tau": 0.99586},
    heads={"confidence": {"kind": "citer", "path": f"{DEMO}/heads/citer/citer_mlp.pth"}},
)
co_llm = pair(
    "co-llm",
    [deferred, drop],
    [back],
    small="heads/collm_small",
    params={"eta": 0.04519},
    heads={"defer": {"kind": "co_llm"}},
)
me = trio("me", [drawn], [drawn], [drawn], draw={"slm": 0.5, "mid": 0.3, "llm": 0.2})
max_prob = pair("max-prob", [unlikely, drop], [back_after_n], params={"t": 0.97, "n": 1})
margin = pair("margin", [close, drop], [back_after_n], params={"t": 0.95, "n": 1})
entropy = pair("entropy", [uncertain_in_nats, drop], [back_after_n], params={"h": 0.15, "n": 1})
random = pair("random", [by_chance, drop], [back], params={"q": 0.2})
think_answer = pair("think-answer", [None], [answer_begun], entry="llm")
step_boundary = pair(
    "step-boundary",
    [uncertain_step, drop],
    [step_over],
    params={"h": 0.1},
    signals={"llm": {"answering": 'momentum(at("Answer: "), 0.999)', "at_end": 'at(" ")'}},
)
tag_call = pair("tag-call", [called], [back_after_n], params={"n": 2}, budgets={"llm": {"max_tokens": 30}})
speculative = pair("speculative", [drafted], [back], verify=True, rollback=4)
cascade = trio(
    "cascade",
    [above_slm, drop],
    [around_mid, drop_upwards],
    [below_llm],
    entry="slm",
    params={"low": 0.03, "high": 0.1},
)
immediate = pair("immediate", [logu, drop], [back])
momentum = pair(
    "momentum",
    [too_few_certain, drop],
    [back],
    params={"h": 0.15, "low": 0.35, "high": 0.75},
    signals={"slm": {"certain": "momentum(entropy_nats < h, 0.7)"}},
)
rolling = pair(
    "rolling",
    [uncertain_of_late, drop],
    [back],
    params={"h": 0.15},
    signals={"slm": {"mean": "window(entropy_nats, 3)"}},
)
neural_rolling = pair(
    "neural-rolling",
    [divergent_of_late, drop],
    [back],
    heads={"divergence": {"kind": "r2r", "path": f"{DEMO}/heads/r2r/default_router.pt"}},
    signals={"slm": {"mean": 'window(head("divergence"), 3)'}},
)
