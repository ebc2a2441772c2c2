"""Chat templates: a conversation to the text that the model was trained on.

Templates come with model files, so they are untrusted code: they run in Jinja's immutable sandbox and see
plain JSON data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from tokenflow.errors import InvalidRequest, ModelLoadError

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """The chat templates of one model, by name; most have only ``default``.

    :param model: whose they are, for messages.
    :ivar sources: the templates as they are written.
    """

    def __init__(self, model: str, sources: Mapping[str, str]) -> None:
        self._model = model
        self.sources = dict(sources)

    @classmethod
    def load(cls, directory: Path, configured: Any) -> ChatTemplate:
        """Take the templates from files, else from tokenizer_config.json.

        :param configured: the ``chat_template`` entry: a string, a list of named templates, or ``None``.
        :raises ModelLoadError: if that entry is something else.
        """
        sources = {}
        if (default := directory / "chat_template.jinja").is_file():
            sources["default"] = default.read_text(encoding="utf-8")
        for path in sorted(directory.glob("additional_chat_templates/*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
        if not sources:
            try:
                sources = _named(configured)
            except (TypeError, KeyError) as error:
                raise ModelLoadError(
                    f"{directory / 'tokenizer_config.json'}: chat_template should be a string or a list of "
                    "objects with a name and a template"
                ) from error
        return cls(str(directory), sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """The text of a conversation; ``tools`` among the variables selects the template made for them, and
        ``continue_final_message`` leaves the last message open.

        :param special_tokens: variables that the template always has; others of their names come first.
        :raises InvalidRequest: without a template, for what is not plain data, for messages without a role,
            or if the template refuses something; it blames the ``messages``, or the variables
            (``template``) if they are taken without those.
        """
        source = self._select(variables.get("tools") is not None)
        plain = _plain("messages", messages, "messages")
        if not plain or not all(isinstance(message, dict) and "role" in message for message in plain):
            raise InvalidRequest("messages must be a non-empty list of objects with a role", "messages")
        conversation = [{k: v for k, v in message.items() if v is not None} for message in plain]
        more = {name: _plain(name, value, "template") for name, value in variables.items()}
        going_on = bool(more.pop("continue_final_message", False))
        if going_on and more.get("add_generation_prompt"):
            raise InvalidRequest(
                "continue_final_message goes on with the last message, add_generation_prompt begins another: "
                "choose one of them",
                "continue_final_message",
            )
        usual = {"add_generation_prompt": not going_on, **special_tokens, "messages": conversation}
        try:
            text = _compile(source).render({**usual, **more, "messages": conversation})
        except Exception as error:  # the template's own mistakes surface as any type
            raise self._refused(error, blames_variables=bool(more) and _takes(source, usual)) from error
        return _open_end(text, conversation[-1].get("content")) if going_on else text

    def _select(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" in self.sources:
            return self.sources["default"]
        if self.sources:
            raise InvalidRequest(
                f"{self._model} has no default chat template, only {', '.join(sorted(self.sources))}; "
                "save the one to use as chat_template.jinja in the model's directory",
                "messages",
            )
        raise InvalidRequest(
            f"{self._model} has no chat template, so it cannot take messages; give the prompt as text, or "
            "save a template as chat_template.jinja in the model's directory",
            "messages",
        )

    def _refused(self, error: Exception, *, blames_variables: bool) -> InvalidRequest:
        from jinja2 import TemplateError

        known = error.message if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        what, param = ("variables", "template") if blames_variables else ("messages", "messages")
        reason = known or type(error).__name__
        return InvalidRequest(
            f"the chat template of {self._model} does not accept these {what}: {reason}", param
        )


def _takes(source: str, variables: Mapping[str, Any]) -> bool:
    """Whether a template writes something of these variables."""
    try:
        _compile(source).render(variables)
    except Exception:  # as above
        return False
    return True


def _open_end(text: str, last: Any) -> str:
    """A conversation up to the end of its last message, whose white space its template may have cut."""
    for form in (last, last.strip()) if isinstance(last, str) else ():
        if (start := text.rfind(form)) >= 0:
            return text[: start + len(form)]
    raise InvalidRequest(
        "continue_final_message: the chat template does not write the last message as it is",
        "continue_final_message",
    )


def _named(configured: Any) -> dict[str, str]:
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {"default": configured}
    return {str(entry["name"]): str(entry["template"]) for entry in configured}


def _plain(name: str, value: Any, param: str) -> Any:
    """A copy made of JSON types alone, so that a template can reach no method of a caller's object."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} must be plain JSON data: {error}", param) from None


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as the authors of chat templates expect it (``apply_chat_template`` of ``transformers``)."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the model's own words for training; here it is only its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
