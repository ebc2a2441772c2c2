"""The character tokenizer that all demo models share, and what completes a saved model to a checkpoint.

100 ids: pad, bos, eos and unk, newline, then printable ASCII.  The models' logits are 128 wide; the ids
beyond the tokenizer are never trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipes.demo.tasks import prompt_text

PAD, BOS, EOS, UNK = range(4)
PIECES = ("<pad>", "<bos>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127)))
IDS = {piece: index for index, piece in enumerate(PIECES)}
LOGITS_WIDTH = 128
CONTEXT_LENGTH = 1024
MAX_NEW_TOKENS = 400
ROPE_THETA = 10000.0

# The models were trained on single questions: only the last user message is rendered, with what follows it.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(u=0) -%}"
    "{%- for m in messages -%}"
    "{%- if m['role'] == 'user' -%}{%- set ns.u = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{{- bos_token + 'Q: ' + messages[ns.u]['content'] + '\n' -}}"
    "{%- for m in messages[ns.u + 1:] -%}{{- 'A: ' + m['content'] -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'A: ' -}}{%- endif -%}"
)


def encode(text: str) -> list[int]:
    """One id per character, without special tokens."""
    return [IDS.get(char, UNK) for char in text]


def decode(ids: Iterable[int]) -> str:
    """Text of the ids; special tokens and ids beyond the tokenizer have none."""
    return "".join(PIECES[index] for index in ids if UNK < index < len(PIECES))


def prompt_ids(question: str) -> list[int]:
    """A question as the models expect it."""
    return [BOS, *encode(prompt_text(question))]


def answer_ids(answer: str) -> list[int]:
    """A worked answer with its end."""
    return [*encode(answer), EOS]


def transformers_tokenizer(special_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The same tokenizer for transformers; ``special_tokens`` get the next free ids."""
    core = Tokenizer(models.WordLevel(dict(IDS), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=CONTEXT_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    if special_tokens:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_checkpoint(model: Qwen3ForCausalLM, directory: Path, special_tokens: Sequence[str] = ()) -> None:
    """Write a model with its tokenizer.

    Transformers 5 moved a few keys; they are written in their old places too, for readers made before that.
    """
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=False, max_new_tokens=MAX_NEW_TOKENS
    )
    model.save_pretrained(directory)
    transformers_tokenizer(special_tokens).save_pretrained(directory)
    amend_json(directory / "config.json", {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"})
    amend_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE},
        remove=("backend",),
    )
    (directory / "model.safetensors").chmod(0o644)


def amend_json(path: Path, changes: dict[str, object], remove: Sequence[str] = ()) -> None:
    """Set some keys of a JSON file and remove others."""
    merged = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in merged.items() if key not in remove}, indent=2))
