"""What one token adds to a text, as bytes.

A ``tokenizers`` decoder turns a whole list of tokens into text at once.  The decoders of language models
are sums over their tokens, though: each token stands for fixed bytes, save that the first one may lose a
leading space.  Compiled to that form, decoding costs a lookup per token and can be done as tokens arrive.

One difference is intended: ``ByteFallback`` replaces every byte of a run by U+FFFD when any of them is
invalid, so one bad byte takes back characters that were complete.  Here only the invalid bytes are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tokenflow.errors import ModelLoadError

Piece = str | bytes
"""A token on its way through the decoder: text, or bytes once it need not be whole characters."""

Stage = Callable[[Piece, bool], Piece]
"""One decoder: the piece so far and whether it is the first of the text, to the next form of the piece."""

SUPPORTED = ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def compile_decoder(decoder: Mapping[str, Any] | None) -> Callable[[str, bool], bytes]:
    """Make the function from a token (and whether it comes first) to the bytes it adds to a text.

    :param decoder: the ``decoder`` entry of a tokenizer.json; ``None`` joins tokens by spaces.
    :raises ModelLoadError: for a decoder that is not a sum over its tokens, or not known.
    """
    stages = [_join_by_spaces] if decoder is None else _stages(decoder)

    def piece(token: str, first: bool) -> bytes:
        value: Piece = token
        for stage in stages:
            value = stage(value, first)
        return value.encode() if isinstance(value, str) else value

    return piece


def _stages(decoder: Mapping[str, Any]) -> list[Stage]:
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    stages: list[Stage] = []
    fused = False
    for part in parts:
        match part:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteLevel"}:
                stages.append(_byte_level)
                fused = True
            case {"type": "ByteFallback"}:
                stages.append(_byte_fallback)
            case {"type": "Metaspace", "replacement": str(mark), **options}:
                stages.append(_metaspace(mark, options.get("prepend_scheme", "always") == "never"))
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                stages.append(_replace(old, new))
            case {"type": "Strip", "content": str(content), "start": 0 | 1 as start, "stop": 0}:
                stages.append(_strip(content * start, first_only=fused))
            case _:
                raise ModelLoadError(
                    f"the tokenizer's decoder has a part that is not supported: {part!r}; "
                    f"supported are {', '.join(SUPPORTED)} (Replace of a plain string, Strip of at most "
                    "one character at the start)"
                )
    return stages


def _join_by_spaces(piece: Piece, first: bool) -> Piece:
    return piece if first or isinstance(piece, bytes) else " " + piece


def _byte_level(piece: Piece, first: bool) -> Piece:
    if isinstance(piece, bytes):
        return piece
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in piece])
    except KeyError:  # an added token, written as it is
        return piece


def _byte_fallback(piece: Piece, first: bool) -> Piece:
    if isinstance(piece, str) and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece


def _metaspace(mark: str, keep_first: bool) -> Stage:
    def stage(piece: Piece, first: bool) -> Piece:
        if isinstance(piece, bytes):
            return piece
        return piece.replace(mark, "" if first and not keep_first else " ")

    return stage


def _replace(old: str, new: str) -> Stage:
    def stage(piece: Piece, first: bool) -> Piece:
        return piece if isinstance(piece, bytes) else piece.replace(old, new)

    return stage


def _strip(prefix: str, *, first_only: bool) -> Stage:
    def stage(piece: Piece, first: bool) -> Piece:
        if first_only and not first:
            return piece
        return piece.removeprefix(prefix.encode()) if isinstance(piece, bytes) else piece.removeprefix(prefix)

    return stage


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are the characters from U+0100 on
    (Radford et al. 2019, GPT-2's byte-level BPE).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
