"""Texts and tokenizers whose ids show where in a text they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvcal.text.token_windows import token_windows
from kvcal_artifacts.errors import TextError


def byte_tokenizer(bos: bool) -> Any:
    """One token a byte, ids 2 to 257, so that a test can see through the windows; BOS is 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


START = 0x4E00  # a block of 20,000 letters


class Characters:
    """A tokenizer with a token a character, its code point: ids then say where in the text they come from."""

    def __init__(self, bos: bool) -> None:
        self.bos = bos
        self.bos_token_id = 0

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        texts = [text] if isinstance(text, str) else text
        start = [0] if self.bos and add_special_tokens else []
        ids = [[*start, *map(ord, piece)] for piece in texts]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}


WITH_BOS, PLAIN = byte_tokenizer(True), byte_tokenizer(False)


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def numbered(count: int) -> str:
    """Lines of eight characters, each different."""
    return "".join(f"{i:06d}\n" for i in range(count))


def refused(text: str, **options: Any) -> str:
    """The one line with which windows of a text are refused."""
    with pytest.raises(TextError) as caught:
        token_windows(WITH_BOS, text, **{"windows": 2, "length": 8, **options})
    message = str(caught.value)
    assert "\n" not in message
    return message
