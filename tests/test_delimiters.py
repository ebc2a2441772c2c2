"""Texts of rules as token ids, over tokenizers that write the same text with one id or with several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.text.conftest import byte_fallback, metaspace, save
from tokenflow.delimiters import resolve_texts
from tokenflow.dsl.expr import parse_condition, parse_expression
from tokenflow.dsl.ir import BatchingIR, ModelIR, Notes, PythonIR, RecipeIR, RuleIR
from tokenflow.errors import RecipeError
from tokenflow.members import load_members
from tokenflow.text.tokenizer import Tokenizer
from tokenflow.types import ModelConfig

DEMO = Path(__file__).parents[1] / "recipes" / "demo"
MERGES = ["\n \n", "\n\n \n", ". \n\n", ". \n", "a b", "ab c", "< /", "</ x", "</x >"]


def recipe_of(*conditions: str) -> RecipeIR:
    rules = tuple(RuleIR(parse_condition(text), "llm", "keep", text) for text in conditions)
    members = tuple(ModelIR(n, c, ModelConfig(path=str(DEMO / d))) for c, (n, d) in enumerate(PAIR, start=1))
    notes = Notes({(): ("x.yaml", 1, 1), ("routes", "slm", 0): ("x.yaml", 7, 5)})
    return RecipeIR("x", "slm", members, {"slm": rules, "llm": ()}, BatchingIR("fixed", {}), notes=notes)


PAIR = (("slm", "small"), ("llm", "large"))


def resolved(tokenizer: Tokenizer, condition: str) -> object:
    """The sequences that a condition looks for, spelled out."""
    (rule,) = resolve_texts(recipe_of(condition), tokenizer).routes["slm"]
    sequences: Iterable[Iterable[int]] = rule.when[1]  # type: ignore[assignment]
    return [[tokenizer.tokens[i] for i in sequence] for sequence in sequences]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO / "small")


@pytest.fixture(scope="module")
def bytes_(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with the merges above, and added tokens that are special and that are not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple("".join(_shown(c) for c in part) for part in merge.split(" ")) for merge in MERGES]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    backend = Backend(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([AddedToken("<call>", normalized=False)])
    return Tokenizer.load(save(tmp_path_factory.mktemp("bytes"), backend, {"eos_token": "<|end|>"}))


def _shown(character: str) -> str:
    return {"\n": "Ċ"}.get(character, character)


def test_a_text_of_one_character_is_one_id_of_a_character_tokenizer(demo: Tokenizer) -> None:
    assert resolved(demo, r'at("\n")') == [["\n"]]
    assert resolved(demo, r'follows("\n")') == [["\n"]]


@pytest.mark.parametrize(
    ("condition", "ids"), [(r'at("\n\n")', ["\n", "\n"]), ('follows("</call>")', list("</call>"))]
)
def test_a_longer_text_is_the_ids_that_spell_it(demo: Tokenizer, condition: str, ids: list[str]) -> None:
    assert resolved(demo, condition) == [ids]


def test_at_takes_every_id_that_contains_the_text(bytes_: Tokenizer) -> None:
    assert resolved(bytes_, r'at("\n\n")') == [["ĊĊ"], ["ĊĊĊ"], [".ĊĊ"]]
    assert resolved(bytes_, r'at("\n")') == [["Ċ"], ["ĊĊ"], ["ĊĊĊ"], [".ĊĊ"], [".Ċ"]]
    assert resolved(bytes_, 'at("b")') == [["b"], ["ab"], ["abc"]]


def test_follows_takes_every_id_that_ends_in_the_text(bytes_: Tokenizer) -> None:
    assert resolved(bytes_, 'follows("b")') == [["b"], ["ab"]]
    assert resolved(bytes_, r'follows(".\n")') == [[".Ċ"]]


def test_a_text_of_several_ids_is_looked_for_both_ways(bytes_: Tokenizer) -> None:
    assert resolved(bytes_, 'at("</xx>")') == [["</x", "x", ">"]]
    assert resolved(bytes_, r'at(".\n\n\n")') == [[".", "ĊĊĊ"]]
    assert resolved(bytes_, 'at("é")') == [["Ã", "©"]]
    assert resolved(bytes_, 'at("call>")') == [["<call>"], ["c", "a", "l", "l", ">"]]


def test_special_tokens_count_only_where_they_are_named(bytes_: Tokenizer) -> None:
    assert resolved(bytes_, 'at("<|end|>")') == [["<|end|>"]]
    assert resolved(bytes_, 'at("end")') == [["e", "n", "d"]]
    assert resolved(bytes_, r'at("<|end|>\n")') == [["<|end|>", "Ċ"]]
    assert resolved(bytes_, 'at("<call>")') == [["<call>"]]


def test_a_space_that_a_tokenizer_puts_before_a_text_is_not_looked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_fallback(tmp_path))
    assert tokenizer.tokens[tokenizer.encode("\n\n", add_special_tokens=False)[0]] == "▁"
    assert resolved(tokenizer, r'at("\n\n")') == [["\n", "\n"]]
    assert resolved(tokenizer, 'at("b")') == [["<0x62>"], ["b"], ["▁ab"]]
    assert resolved(tokenizer, 'follows("é")') == [["<0xC3>", "<0xA9>"]]


def test_only_texts_change(demo: Tokenizer) -> None:
    recipe = recipe_of(r'entropy > 0.5 and not (at("x") or window(follows("ab"), 3) > 0.5)', "token == 3")
    first, second = resolve_texts(recipe, demo).routes["slm"]
    x, a, b = (demo.encode(letter, add_special_tokens=False)[0] for letter in "xab")
    assert first.when == (
        "and",
        (">", ("signal", "entropy"), ("number", 0.5)),
        (
            "not",
            (
                "or",
                ("at", ((x,),)),
                (">", ("window", ("bool", ("follows", ((a, b),))), 3), ("number", 0.5)),
            ),
        ),
    )
    assert second == recipe.routes["slm"][1]
    assert first.text == recipe.routes["slm"][0].text
    assert resolve_texts(resolve_texts(recipe, demo), demo) == resolve_texts(recipe, demo)


def test_expressions_that_a_route_reads_have_texts_too(demo: Tokenizer) -> None:
    def declared(text: str) -> RecipeIR:
        python = {"llm": PythonIR("x.py", route="f", signals={"ended": parse_expression(text)})}
        return replace(recipe_of("entropy > 0.5"), python=python)

    (x,) = demo.encode("x", add_special_tokens=False)
    signals = resolve_texts(declared('window(at("x"), 3)'), demo).python["llm"].signals
    assert signals == {"ended": ("window", ("bool", ("at", ((x,),))), 3)}
    with pytest.raises(RecipeError) as caught:
        resolve_texts(declared('at("é")'), demo)
    assert str(caught.value.problems[0]) == (
        'x.yaml:1:1: error: models.llm.signals.ended: no token ids spell "é": the output can never reach it'
    )


def test_the_end_of_a_step_is_token_ids_too(bytes_: Tokenizer) -> None:
    recipe = replace(recipe_of("entropy > 0.5"), rollback=8, rollback_to=("at", "b"))
    ids = {name: i for i, name in enumerate(bytes_.tokens)}
    assert resolve_texts(recipe, bytes_).rollback_to == ("at", tuple((ids[x],) for x in ("b", "ab", "abc")))
    with pytest.raises(RecipeError, match="rollback_to: no token ids spell"):
        resolve_texts(replace(recipe, rollback_to=("at", "猫")), Tokenizer.load(DEMO / "small"))


def test_a_recipe_without_texts_is_left_as_it_is(demo: Tokenizer) -> None:
    recipe = recipe_of("entropy > 0.5")
    assert resolve_texts(recipe, demo) is recipe


def test_texts_that_no_ids_spell_are_refused_together(demo: Tokenizer) -> None:
    recipe = recipe_of('at("é") and at("x") and follows("é")', 'at("x")', 'entropy > 1 or at("x猫")')
    with pytest.raises(RecipeError) as caught:
        resolve_texts(recipe, demo)
    assert [str(problem) for problem in caught.value.problems] == [
        'x.yaml:7:5: error: routes.slm[0]: no token ids spell "é": the output can never reach it',
        'x.yaml:1:1: error: routes.slm[2]: no token ids spell "x猫": the output can never reach it',
    ]


def test_an_unknown_token_spells_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(metaspace(tmp_path))
    with pytest.raises(RecipeError, match="no token ids spell"):
        resolve_texts(recipe_of('at("Σ")'), tokenizer)
    assert resolved(tokenizer, 'at("cat")') == [["▁cat"]]


def test_loading_the_members_of_a_recipe_resolves_its_texts() -> None:
    recipe = load_members(recipe_of(r'at("\n\n")')).recipe
    assert recipe.routes["slm"][0].when == ("at", ((4, 4),))


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab\n.<>/x", min_size=1, max_size=6), before=st.text("ab\n.", max_size=4))
def test_whatever_is_spelled_ends_in_the_text(bytes_: Tokenizer, text: str, before: str) -> None:
    """An output whose last ids are one of the sequences has just reached the text, and no other text has."""
    recipe = RecipeIR(
        "x",
        "slm",
        recipe_of().models,
        {"slm": (RuleIR(("at", text), "llm", "keep", ""), RuleIR(("follows", text), "llm", "keep", ""))},
        BatchingIR("fixed", {}),
    )
    at, follows = (rule.when[1] for rule in resolve_texts(recipe, bytes_).routes["slm"])
    context = bytes_.encode(before)
    for sequence in at:  # type: ignore[attr-defined]
        assert text in bytes_.decode([*context, *sequence])
        assert len(sequence) == 1 or bytes_.decode(sequence).endswith(text)
    for sequence in follows:  # type: ignore[attr-defined]
        assert bytes_.decode([*context, *sequence]).endswith(text)
    # Alone, a text is always found.
    ids = bytes_.encode(text)
    assert any(tuple(ids[-len(sequence) :]) == sequence for sequence in at)  # type: ignore[attr-defined]
    assert any(tuple(ids[-len(sequence) :]) == sequence for sequence in follows)  # type: ignore[attr-defined]
