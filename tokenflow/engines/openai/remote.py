"""The model behind an endpoint: its name there, how the endpoint speaks, and what follows some tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from tokenflow.engines.openai.answers import Position, Unreadable, Vocabulary, choices_of, read_choice
from tokenflow.engines.openai.client import Call, CallFailed, Client
from tokenflow.errors import ModelLoadError
from tokenflow.settings import secret
from tokenflow.types import EndpointConfig

_EXTENSIONS = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,
    # Its end-of-sequence tokens come as tokens: what ends a response is decided on this side.
    "ignore_eos": True,
}
_GIVEN_UP = ("abort", "error")
"""How vLLM and SGLang end an answer that something else ended, a shutdown for one."""
_PROBE_TOKENS = 2
_LEAST_LISTED = 2


class Remote:
    """A model behind an endpoint, which is asked for two tokens at once to know how it speaks.

    :param eos: the model's end-of-sequence tokens.
    :param prompt: a token to ask with.
    :ivar context_length: most tokens that it takes; 0 if it does not say.
    :raises ModelLoadError: if the endpoint does not answer as it must, or no key is where it should be.
    """

    def __init__(
        self, endpoint: EndpointConfig, vocabulary: Vocabulary, eos: Sequence[int], prompt: int
    ) -> None:
        self._endpoint = endpoint
        self._vocabulary = vocabulary
        self._eos = eos
        self._client = Client(endpoint, _key(endpoint))
        self._extensions = dict(_EXTENSIONS)
        self.url = self._client.url
        try:
            card = self._card()
            self._model = endpoint.model_id or str(card.get("id", ""))
            longest = card.get("max_model_len")
            self.context_length = longest if isinstance(longest, int) else 0
            self._probe([prompt])
        except BaseException:
            self.close()
            raise

    def ask(self, tokens: Sequence[int], count: int) -> Call:
        """Ask for the greedy continuation of ``tokens``; :raises CallFailed: if no answer comes."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(tokens),
            "max_tokens": count,
            "temperature": 0,
            "stream": True,
            **self._extensions,
        }
        if self._endpoint.top_logprobs:
            body["logprobs"] = self._endpoint.top_logprobs
        return self._client.stream("/completions", body)

    def positions(self, call: Call) -> Iterator[Position]:
        """The positions of an answer.

        An endpoint that ends a response has its model write an end-of-sequence token, whether it shows it or
        not.

        :raises CallFailed: if the answer breaks off.
        :raises Unreadable: if it does not say which tokens it consists of.
        """
        last, most = -1, self._endpoint.top_logprobs + 1
        for event in call:
            for choice in choices_of(event):
                for position in read_choice(choice, self._vocabulary):
                    last = position.token
                    yield Position(last, position.best[:most])
                if choice.get("finish_reason") in _GIVEN_UP:
                    raise CallFailed(f"{self.url} gave up: finish_reason {choice['finish_reason']!r}")
                if choice.get("finish_reason") == "stop" and last not in self._eos:
                    if not self._eos:
                        raise Unreadable("it ended, and the model has no end-of-sequence token")
                    yield Position(self._eos[0], ((self._eos[0], 0.0),))

    def close(self) -> None:
        """Drop the connections that are kept."""
        self._client.close()

    def _card(self) -> dict[str, Any]:
        """What the endpoint says of its model, or of its first one; empty if it does not."""
        wanted = self._endpoint.model_id
        try:
            models = self._client.get("/models").get("data")
        except CallFailed as error:
            if wanted and error.status:
                return {}
            what = "the key (endpoint.api_key_env)" if error.status in (401, 403) else "endpoint.base_url"
            raise ModelLoadError(f"{error}; is {what} right?") from error
        for model in models if isinstance(models, list) else []:
            if isinstance(model, dict) and (not wanted or model.get("id") == wanted):
                return model
        if not wanted:
            raise ModelLoadError(f"{self.url} lists no models: set endpoint.model_id")
        return {}

    def _probe(self, prompt: list[int]) -> None:
        try:
            try:
                found = self._try(prompt)
            except CallFailed as error:
                if error.status not in (400, 422):
                    raise
                # An endpoint that refuses what it does not know is asked for what everyone knows.
                self._extensions.clear()
                found = self._try(prompt)
        except CallFailed as error:
            raise ModelLoadError(str(error)) from error
        except Unreadable as error:
            raise ModelLoadError(f"the answers of {self.url} cannot be read: {error}") from error
        # Tokens with one text between them are listed once, so a few may be missing.
        wanted = min(self._endpoint.top_logprobs, _LEAST_LISTED)
        listed = min((len(place.best) for place in found if place.token not in self._eos), default=wanted)
        if listed < wanted:
            raise ModelLoadError(
                f"{self.url} lists {listed} token(s) per position instead of "
                f"{self._endpoint.top_logprobs}: set endpoint.top_logprobs to {listed}"
            )

    def _try(self, prompt: list[int]) -> list[Position]:
        with closing(self.ask(prompt, _PROBE_TOKENS)) as call:
            found: list[Position] = []
            ended, text = False, ""
            for event in call:
                if len(found) > _PROBE_TOKENS:
                    break  # it does not stop where it is told to, and may never
                for choice in choices_of(event):
                    found += read_choice(choice, self._vocabulary)
                    ended |= choice.get("finish_reason") is not None
                    text += str(choice.get("text") or "")
                    if "content" in (choice.get("logprobs") or {}):
                        # llama-server, which takes ignore_eos to mean that the model must not end at all.
                        self._extensions.pop("ignore_eos", None)
            if not found and not ended:
                raise Unreadable("it has no tokens")
            self._vocabulary.check_text([position.token for position in found], text)
            return found


def _key(endpoint: EndpointConfig) -> str | None:
    if not endpoint.api_key_env:
        return None
    key = secret(endpoint.api_key_env)
    if key is None:
        raise ModelLoadError(f"environment variable {endpoint.api_key_env} is not set (endpoint.api_key_env)")
    if not key.isascii() or not key.isprintable():
        raise ModelLoadError(
            f"environment variable {endpoint.api_key_env} holds a line break or a character that no key has "
            "(endpoint.api_key_env)"
        )
    return key
