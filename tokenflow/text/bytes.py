"""A vocabulary of bytes, for recipes whose models are all simulated and have no tokenizer."""

from __future__ import annotations

from tokenflow.text.chat import ChatTemplate
from tokenflow.text.tokenizer import Tokenizer

_NAME = "simulated"
_END = "<|end|>"
_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """The tokenizer whose id 0 to 255 are the bytes of UTF-8 and whose id 256 ends a response."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(_END, special=True)])
    return Tokenizer(
        backend,
        name=_NAME,
        fingerprint="",
        special_tokens={"eos_token": _END},
        eos_ids=(),
        chat_template=ChatTemplate(_NAME, {"default": _CHAT}),
    )


def _characters() -> list[str]:
    """How byte-level vocabularies write a byte: itself if it is printable, else a character from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    return [stand_ins.get(byte) or chr(byte) for byte in range(256)]
