"""A model's tokenizer, as its Hugging Face directory describes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenflow.errors import ContextTooLong, InvalidRequest, ModelLoadError
from tokenflow.text.chat import ChatTemplate
from tokenflow.text.pieces import compile_decoder

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as Backend

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_SCOUTED = 16
"""Characters per token that fits: of a longer text the beginning tells whether it is far too long."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class Tokenizer:
    """Text to token ids and back; immutable, and safe to share between threads.

    :ivar tokens: the token of every id; ``None`` for an id that the vocabulary leaves out.
    :ivar special_ids: ids of special tokens, which never show in a text.
    :ivar bos_id: the token that begins every sequence, if the model has one.
    :ivar eos_ids: all ids that end a response: of the tokenizer, the generation config and the model config.
    :ivar fingerprint: SHA-256 of ``tokenizer.json``.
    :ivar chat_template: what :meth:`render` writes conversations with.
    :ivar config: tokenizer_config.json as it is.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        fingerprint: str,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        chat_template: ChatTemplate,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        # The state of a decoder is its entry in tokenizer.json; to_str() would write the vocabulary as well.
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None
        try:
            self._spell = compile_decoder(decoder)
        except ModelLoadError as error:
            raise ModelLoadError(f"{name}: {error}") from None
        self._backend = backend
        self.chat_template = chat_template
        self.config = config or {}
        self._pieces: dict[int, bytes] = {}
        self.name = name
        self.fingerprint = fingerprint
        self.special_tokens = dict(special_tokens)
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.bos_id = self._id_of("bos_token")
        eos_id = self._id_of("eos_token")
        self.eos_ids = tuple(sorted({*eos_ids, *([] if eos_id is None else [eos_id])}))

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer files of a model directory.

        The named special tokens and ``added_tokens_decoder`` of tokenizer_config.json (without the latter,
        special_tokens_map.json) are added to tokenizer.json's own, as ``transformers`` does.

        :raises ModelLoadError: if tokenizer.json is missing, or a file is not what its name says.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{directory} has no tokenizer.json, which holds the vocabulary; if the model comes with "
                "another tokenizer file, convert it: transformers.AutoTokenizer.from_pretrained(DIRECTORY)"
                ".save_pretrained(DIRECTORY)"
            )
        data = path.read_bytes()
        config = _read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(directory / "special_tokens_map.json")
        backend = _backend(path, data)
        try:
            special_tokens = {key: _content(config[key]) for key in _NAMED if config.get(key) is not None}
            extra = [_content(token) for key in _EXTRA for token in _listed(config.get(key))]
            _add_tokens(backend, config.get("added_tokens_decoder", {}), [*special_tokens.values(), *extra])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(
                f"{directory / 'tokenizer_config.json'}: the special or added tokens are not written as "
                f"strings or objects with content and flags: {error!r}"
            ) from error
        return cls(
            backend,
            name=str(directory),
            fingerprint=hashlib.sha256(data).hexdigest(),
            special_tokens=special_tokens,
            eos_ids=[
                *_ids(_read_json(directory / "generation_config.json").get("eos_token_id")),
                *_ids(_read_json(directory / "config.json").get("eos_token_id")),
            ],
            chat_template=ChatTemplate.load(directory, config.get("chat_template")),
            config=config,
        )

    def __len__(self) -> int:
        """The highest id plus one, added tokens included: ids from here on mean nothing."""
        return len(self.tokens)

    @cached_property
    def tokens(self) -> list[str | None]:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = token
        return tokens

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it are recognised.

        :param add_special_tokens: put what the model expects around a text (usually: BOS before it).
        :param most: refuse a text of more tokens before they are listed, which would hold every thread up.
        :raises ContextTooLong: if it has more.
        :raises InvalidRequest: if the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the prompt is not valid text: character {error.start} is the lone surrogate "
                f"{text[error.start]!r}",
                "prompt",
            ) from None
        if most is not None and len(text) > _SCOUTED * most:
            # Each token costs a few hundred bytes until they are listed.  Where a text is cut, its last word
            # may become other tokens: far too many are too many all the same.
            begin = self._encode(text[: _SCOUTED * most], add_special_tokens)
            if len(begin) > 2 * most:
                check_length(len(begin), most, "has more than")
        encoding = self._encode(text, add_special_tokens)
        check_length(len(encoding), most)
        return encoding.ids

    def starts(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Where in ``text``, in characters, each token of :meth:`encode` begins.

        Tokens that share a character begin with it.  One that is not written in the text, such as a BOS that
        was added, begins where those before it end.
        """
        starts, end = [], 0
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        for begin, after in encoding.offsets:
            # Some tokenizers leave the space before a word out of its offsets.
            starts.append(end if after == 0 or text[end:begin].isspace() else begin)
            end = max(end, after)
        return starts

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        # A batch of one: only batches let other threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the model's answer.

        The template writes every special token itself, so none are added.

        :param messages: mappings with at least ``role`` and ``content``.
        :param variables: more for the template: ``tools``, ``enable_thinking``, ``add_generation_prompt`` ...
            With ``continue_final_message`` the text ends where the last message ends, for the model to go on
            with it.
        :param most: as for :meth:`encode`.
        :raises InvalidRequest: if the model has no chat template, or it refuses the messages.
        """
        text = self.chat_template.render(messages, variables or {}, self.special_tokens)
        return self.encode(text, add_special_tokens=False, most=most)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        :raises ValueError: for an id outside the vocabulary.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in ids if token_id not in skipped]
        return b"".join(self.piece(i, first=n == 0) for n, i in enumerate(shown)).decode(errors="replace")

    def piece(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes that a token adds to a text, of which it is the first token or a later one.

        :raises ValueError: for an id outside the vocabulary.
        """
        if not first and (known := self._pieces.get(token_id)) is not None:
            return known
        if not 0 <= token_id < len(self):
            raise ValueError(f"token id {token_id} is outside the vocabulary of {len(self)} ids")
        token = self.tokens[token_id]
        piece = b"" if token is None else self._spell(token, first)
        if not first:
            self._pieces[token_id] = piece
        return piece

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def check_length(tokens: int, most: int | None, has: str = "has") -> None:
    """A prompt of so many tokens fits; :raises ContextTooLong: if not."""
    if most is not None and tokens > most:
        raise ContextTooLong(
            f"the prompt {has} {tokens} tokens, but the recipe's smallest context or KV cache holds {most}",
            "prompt",
        )


def _backend(path: Path, data: bytes) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_buffer(data)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ModelLoadError(f"{path} is not a tokenizer file: {error}") from error
    # Some are saved with the settings of a training run.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: Backend, added: Mapping[str, Any], special: Iterable[str]) -> None:
    """Add what tokenizer.json leaves out; a token that is in its vocabulary keeps its id."""
    from tokenizers import AddedToken

    known = {token.content: repr(token) for token in backend.get_added_tokens_decoder().values()}
    new: list[AddedToken] = []
    for _, entry in sorted(added.items(), key=lambda item: int(item[0])):
        token = AddedToken(entry["content"], **{flag: entry[flag] for flag in _FLAGS if flag in entry})
        if known.get(token.content) != repr(token):
            known[token.content] = repr(token)
            new.append(token)
    new += [AddedToken(content, special=True) for content in dict.fromkeys(special) if content not in known]
    for token in new:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def _content(token: Any) -> str:
    """A special token is written as a string or as an object with flags."""
    content = token["content"] if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TypeError(f"{token!r} is not a token")
    return content


def _listed(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value or [])


def _ids(value: Any) -> list[int]:
    """``eos_token_id`` is written as a number, a list, or null."""
    if value is None:
        return []
    return [int(token_id) for token_id in (value if isinstance(value, list) else [value])]
