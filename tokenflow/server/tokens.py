"""POST /tokenize and /detokenize, GET /tokenizer_info: the recipe's tokenizer for those who have none."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response as Answer

from tokenflow.prompts import Prompt
from tokenflow.server.errors import invalid
from tokenflow.server.generation import renamed
from tokenflow.server.reading import read
from tokenflow.server.records import service_of
from tokenflow.server.requests import Detokenize, Tokenize, chat_variables
from tokenflow.server.service import LONG
from tokenflow.server.transport import Json

_NAMES = {"prompt": "messages", "template": "chat_template_kwargs"}
_LARGEST_BODY = 2**20
"""Nobody's context limits what is only to be tokenized."""
_PRIVATE = frozenset(("name_or_path", "_name_or_path", "vocab_file", "tokenizer_file", "merges_file"))


async def tokenize(request: Request) -> Answer:
    """The ids of a text or a conversation."""
    service = service_of(request)
    asked = await read(request, Tokenize, _LARGEST_BODY)
    service.target(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    service.require_serving()
    ids: list[int] = []
    if asked.messages is not None or asked.prompt:
        prompt: Prompt = asked.messages if asked.messages is not None else asked.prompt or ""
        special = asked.add_special_tokens is not False
        with renamed(_NAMES if asked.messages is not None else {}):
            ids = await service.router.encode(
                prompt, add_special_tokens=special, template=chat_variables(asked)
            )
    known = service.router.tokenizer.tokens if asked.return_token_strs else None

    def answer() -> bytes:
        spelled = None if known is None else [known[token] for token in ids]
        counts = {"count": len(ids), "max_model_len": service.longest}
        return msgspec.json.encode({**counts, "tokens": ids, "token_strs": spelled})

    return Json(await service.aside(answer) if len(ids) > LONG else answer())


async def detokenize(request: Request) -> Answer:
    """The text of ids."""
    service = service_of(request)
    asked = await read(request, Detokenize)
    service.target(asked.model)
    service.require_serving()
    try:
        text = await service.decode(asked.tokens, special=True)
    except ValueError:
        most = len(service.router.tokenizer) - 1
        raise invalid(f"tokens must be ids from 0 to {most}", "tokens") from None
    return Json({"prompt": text})


async def tokenizer_info(request: Request) -> Answer:
    """What the tokenizer's files say of it."""
    service = service_of(request)
    service.require_serving()
    tokenizer, chat = service.router.tokenizer, service.router.chat_tokenizer
    config = {key: value for key, value in tokenizer.config.items() if key not in _PRIVATE}
    named = {name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    template = chat.chat_template.sources.get("default")
    return Json({"tokenizer_class": "PreTrainedTokenizerFast", **config, **named, "chat_template": template})
