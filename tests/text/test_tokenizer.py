from __future__ import annotations

import hashlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from tests.text.conftest import DEMO, save, word_level
from tokenflow.errors import InvalidRequest, ModelLoadError
from tokenflow.text.detokenizer import Detokenizer
from tokenflow.text.tokenizer import Tokenizer

KINDS = ["demo", "byte_level", "byte_fallback", "metaspace"]
TEXTS = [
    "",
    " ",
    "Q: 93*7=?\nA: ",
    "hi ab cd  abcd hi.",
    " the cat, the\ncat",
    "naïve café 図書館 🙂 👩‍👩‍👧",
    "<think>why</think> ｜note｜ <|im_end|></s><eos>",
    "e\u0301 combining, tabs\tand\x00zero",
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
]


@pytest.fixture(scope="session", params=KINDS)
def pair(request: pytest.FixtureRequest, directories: dict[str, Path]) -> tuple[Tokenizer, Any]:
    """The same tokenizer in ours and in the reference implementation."""
    directory = directories[request.param]
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_texts_are_encoded_as_transformers_encodes_them(
    pair: tuple[Tokenizer, Any], text: str, special: bool
) -> None:
    ours, theirs = pair
    assert ours.encode(text, add_special_tokens=special) == theirs.encode(text, add_special_tokens=special)


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_is_encoded_and_decoded_as_transformers_does(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_are_decoded_as_transformers_decodes_them(
    pair: tuple[Tokenizer, Any], data: st.DataObject
) -> None:
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, len(ours) - 1), max_size=12))
    for skip in (True, False):
        text = ours.decode(ids, skip_special_tokens=skip)
        theirs_text = theirs.decode(ids, skip_special_tokens=skip)
        if "<0xFF>" in ours.tokens and "\ufffd" in text:
            # Byte fallback: theirs loses the whole run of a bad byte (the next test).
            assert "\ufffd" in theirs_text
        else:
            assert text == theirs_text


@given(text=st.text(alphabet="ab the<|>é図🙂\n", max_size=30) | st.sampled_from(TEXTS))
@settings(max_examples=120, deadline=None)
def test_tokens_begin_in_a_text_where_their_texts_add_up_to(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, _ = pair
    for special in (True, False):
        ids, starts = ours.encode(text, special), ours.starts(text, special)
        assert len(starts) == len(ids)
        assert starts == sorted(starts)
        assert all(0 <= start <= len(text) for start in starts)
        if ours.decode(ids) == text:  # which has nothing that the tokenizer lacks or leaves out
            detokenizer = Detokenizer(ours)
            lengths = [len(detokenizer.push([token])) for token in ids]
            assert starts == [sum(lengths[:index]) for index in range(len(ids))]


def test_what_a_tokenizer_lacks_and_what_it_spells_has_a_place_in_the_text() -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    assert tokenizer.starts("図🙂 a🙂") == [0, 0, 1, 2, 3, 4]
    assert tokenizer.starts("a<eos>b", add_special_tokens=False) == [0, 1, 6]


def test_a_token_does_not_begin_in_characters_that_were_made_into_one_before_it(tmp_path: Path) -> None:
    """Or left out; but with the space before a word, which is a part of it that some offsets leave out."""
    backend = Backend(models.WordLevel({"<unk>": 0, "\u00e9": 1, "a": 2}, unk_token="<unk>"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex("."), "isolated")]
    )
    tokenizer = Tokenizer.load(save(tmp_path, backend, {}))
    assert tokenizer.starts("e\u0301a a") == [0, 2, 3]


def test_a_bad_byte_of_a_byte_fallback_run_spoils_only_itself(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(directories["byte_fallback"])
    byte = {b: tokenizer.tokens.index(f"<0x{b:02X}>") for b in (0xE7, 0x8C, 0xAB, 0xFF)}
    assert tokenizer.decode([byte[b] for b in (0xE7, 0x8C, 0xAB, 0xFF, 0xE7, 0x8C)]) == "猫\ufffd\ufffd"


def test_facts_agree_with_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert len(ours) == len(theirs)
    assert ours.tokens == theirs.convert_ids_to_tokens(list(range(len(theirs))))
    assert ours.bos_id == theirs.bos_token_id
    assert theirs.eos_token_id in ours.eos_ids
    flagged = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == flagged
    assert set(theirs.all_special_ids) <= ours.special_ids


@pytest.mark.parametrize("kind", ["demo", "byte_level", "byte_fallback"])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_rendered_as_transformers_renders_them(
    directories: dict[str, Path], kind: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    ours = Tokenizer.load(directories[kind])
    theirs = AutoTokenizer.from_pretrained(directories[kind])
    expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    ids = ours.render(messages, {"add_generation_prompt": prompt})
    assert ids == expected
    if ours.bos_id is not None:
        assert ids.count(ours.bos_id) == 1


def test_eos_ids_are_the_union_of_tokenizer_generation_config_and_model_config(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(directories["byte_level"])
    assert {tokenizer.tokens[i] for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    save(
        tmp_path,
        word_level(["<unk>", "a", "b", "c", "d", "e"]),
        {"eos_token": "b"},
        generation_config={"eos_token_id": [3, 4]},
        config={"eos_token_id": 5},
    )
    assert Tokenizer.load(tmp_path).eos_ids == (2, 3, 4, 5)
    assert Tokenizer.load(directories["demo"]).eos_ids == (2,)


def test_the_fingerprint_is_the_digest_of_the_tokenizer_file(directories: dict[str, Path]) -> None:
    for directory in directories.values():
        expected = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
        assert Tokenizer.load(directory).fingerprint == expected
    assert Tokenizer.load(DEMO / "large").fingerprint == Tokenizer.load(DEMO / "small").fingerprint


def test_tokens_that_only_the_config_knows_are_added_with_their_flags(tmp_path: Path) -> None:
    added = {
        "4": {"content": "<|end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False},
        "5": {"content": "<tool>", "special": False, "lstrip": False, "rstrip": False, "normalized": False},
    }
    save(
        tmp_path,
        word_level(["<unk>", "a", "b", "c"]),
        {"added_tokens_decoder": added, "eos_token": "<|end|>", "pad_token": "<pad>"},
        special_tokens_map={"eos_token": "c"},
    )
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(ours) == len(theirs) == 7
    assert ours.tokens[4:] == ["<|end|>", "<tool>", "<pad>"]
    assert ours.special_ids == {4, 6}
    assert ours.eos_ids == (theirs.eos_token_id,) == (4,)
    assert ours.decode([1, 4, 5, 6]) == theirs.decode([1, 4, 5, 6], skip_special_tokens=True) == "a<tool>"


def test_settings_of_a_training_run_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    backend = word_level(["<unk>", "a"])
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.add_tokens([AddedToken("b", normalized=False)])
    assert Tokenizer.load(save(tmp_path, backend, {})).encode("bbb") == [2, 2, 2]


def test_an_id_that_the_vocabulary_leaves_out_adds_nothing(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 5}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer.load(save(tmp_path, backend, {}))
    assert len(tokenizer) == 6
    assert tokenizer.decode([1, 3, 5]) == "ab"


@pytest.mark.parametrize("token_id", [-1, 100])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    with pytest.raises(ValueError, match=f"^token id {token_id} is outside the vocabulary of 100 ids$"):
        tokenizer.decode([5, token_id])


def test_a_lone_surrogate_is_an_invalid_request() -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    with pytest.raises(InvalidRequest, match=r"character 2 is the lone surrogate '\\ud83d'") as caught:
        tokenizer.encode("ab\ud83d")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.render([{"role": "user", "content": "\udc00"}])


def test_a_model_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json.*convert it"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", "[]", "should hold a JSON object, not list"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", '{"eos_token": 5}', "special or added tokens are not written as"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {}}}', "special or added tokens are not"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "chat_template should be a string or a list"),
        ("generation_config.json", "nope", "is not JSON"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    save(tmp_path, word_level(["<unk>"]), {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=f"{name}.*{message}"):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_is_not_a_sum_over_tokens_is_refused(tmp_path: Path) -> None:
    backend = word_level(["<unk>"])
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match=r"decoder has a part that is not supported: .*WordPiece"):
        Tokenizer.load(save(tmp_path, backend, {}))


def test_loading_and_using_a_tokenizer_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import tokenflow.text.tokenizer as t, tokenflow.text.transcript, tokenflow.text.vocabulary\n"
        "lazy = {'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "k = t.Tokenizer.load(Path(sys.argv[1]))\n"
        "k.render([{'role': 'user', 'content': 'a'}])\n"
        "print(sorted(lazy), sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(DEMO / "small")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] []\n"


def test_special_tokens_in_the_config_may_be_objects(tmp_path: Path) -> None:
    token = {"__type": "AddedToken", "content": "b", "lstrip": False, "rstrip": False, "normalized": True}
    directory = save(tmp_path, word_level(["<unk>", "a", "b"]), {"eos_token": token, "bos_token": None})
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_ids == {2}
    assert tokenizer.bos_id is None


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer.load(DEMO / "small")
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoded = pool.submit(tokenizer.encode, "12+30=42. " * 50_000)
        while not encoded.done():
            turns += 1
    assert len(encoded.result()) >= 100_000
    # Had the encoder kept the interpreter's lock, this thread would have had a handful.
    assert turns > 10_000
