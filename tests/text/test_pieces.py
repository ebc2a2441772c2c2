from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from tokenflow.errors import ModelLoadError
from tokenflow.text.pieces import compile_decoder

SUPPORTED = {
    "byte level": decoders.ByteLevel(),
    "fuse": decoders.Fuse(),
    "metaspace": decoders.Metaspace(),
    "metaspace that keeps the first space": decoders.Metaspace(prepend_scheme="never"),
    "metaspace of another character": decoders.Metaspace(replacement="_"),
    "replace": decoders.Replace("▁", " "),
    "replace, then byte level": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteLevel()]),
    "strip the text": decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 1, 0)]),
    "strip every token": decoders.Sequence([decoders.Strip("▁", 1, 0), decoders.Fuse()]),
    "strip nothing": decoders.Sequence([decoders.Fuse(), decoders.Strip("▁", 0, 0)]),
    "byte fallback": decoders.ByteFallback(),
    "sentencepiece": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
}
TOKEN = st.sampled_from(
    ["▁", "▁a", "b▁c", "▁▁d", "e", "Ġf", "ĠĊ", "Ã©", "ä½ł", "é", "<0x41>", "<0xzz>", "_g", "｜"]
)


def state(decoder: Any) -> dict[str, Any]:
    return dict(json.loads(decoder.__getstate__()))


@pytest.mark.parametrize("name", SUPPORTED)
@given(tokens=st.lists(TOKEN, min_size=1, max_size=6))
@settings(deadline=None)
def test_pieces_add_up_to_what_the_decoder_makes_of_the_whole(name: str, tokens: list[str]) -> None:
    decoder = SUPPORTED[name]
    piece = compile_decoder(state(decoder))
    text = b"".join(piece(token, i == 0) for i, token in enumerate(tokens)).decode(errors="replace")
    assert text == decoder.decode(tokens)


def test_without_a_decoder_tokens_are_joined_by_spaces() -> None:
    piece = compile_decoder(None)
    assert b"".join(piece(token, i == 0) for i, token in enumerate(["a", "b", "c"])) == b"a b c"


@given(data=st.binary())
@settings(deadline=None)
def test_a_byte_level_token_is_its_bytes(data: bytes) -> None:
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in alphabet]
    character = {b: chr(b) for b in alphabet} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    piece = compile_decoder(state(decoders.ByteLevel()))
    assert piece("".join(character[b] for b in data), False) == data


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 2, 0),
        decoders.Strip(" ", 0, 1),
        decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]),
    ],
)
def test_other_decoders_are_refused_by_what_they_are(decoder: Any) -> None:
    kind = type(decoder).__name__.replace("Sequence", "WordPiece")
    with pytest.raises(ModelLoadError, match=rf"not supported: .*'{kind}'.*; supported are ByteFallback, "):
        compile_decoder(state(decoder))
