"""Small tokenizers of the three kinds that language models use, as model directories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

DEMO = Path(__file__).parents[2] / "recipes" / "demo"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then some more words follow.",
    "Où est la bibliothèque ? 図書館はどこですか。 도서관이 어디예요?",
    "emoji: 🙂🙂 👩‍👩‍👧 🇫🇷 and math: ∑ x² ≤ √2 · π",
    "def f(x):\n    return x + 1\n\n\nUser: hello\nAssistant: hi",
] * 3

CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('no role ' + m['role']) }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


def save(directory: Path, tokenizer: Tokenizer, tokenizer_config: dict[str, Any], **files: Any) -> Path:
    """Write a model directory's tokenizer files; ``files`` are further JSON files by stem."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config}
    for name, content in {"tokenizer_config": tokenizer_config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def word_level(tokens: Sequence[str]) -> Tokenizer:
    """A tokenizer whose ids are the positions of ``tokens``."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def byte_level(directory: Path) -> Path:
    """Like Qwen's: byte-level BPE, no BOS, some of the added tokens not special, two EOS ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("｜note｜", normalized=False)])
    return save(
        directory,
        tokenizer,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT},
        generation_config={
            "eos_token_id": [tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")]
        },
    )


def byte_fallback(directory: Path) -> Path:
    """Like Llama 2's: SentencePiece BPE with byte fallback, BOS before a text, a leading space to strip."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmno\n.,",
    ]
    merges = [("▁", "a"), ("▁a", "b"), ("c", "d"), ("▁", "cd"), ("▁", "▁"), ("h", "i"), ("▁", "hi")]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *("".join(pair) for pair in merges)])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    # The special tokens are ordinary pieces in tokenizer.json; only the two maps tell.
    return save(
        directory,
        tokenizer,
        {"chat_template": [{"name": "default", "template": LLAMA_CHAT}]},
        special_tokens_map=named,
        config={"eos_token_id": 2},
    )


def metaspace(directory: Path) -> Path:
    """Like T5's: unigram pieces, the first of which loses its space."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁cat", -3.5)]
    pieces += [(character, -4.0) for character in "abcdefghijklmnopqrstuvwxyzé🙂猫.,"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return save(directory, tokenizer, {**named, "extra_special_tokens": ["<extra>"]})


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by kind of tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {"demo": DEMO / "small"} | {kind: build(root / kind) for kind, build in KINDS.items()}
