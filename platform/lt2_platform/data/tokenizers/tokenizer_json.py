"""A tokenizer of ours as the tokenizer.json that transformers, and most else, reads."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Fast
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from lt2_platform.data.tokenizers.tokenize import LLAMA3_PATTERN, Llama3Tokenizer, load_tokenizer
from lt2_platform.storage import absolute, filesystem


def write_tokenizer_json(spec: str, folder: Path) -> Path:
    """`<folder>/tokenizer.json` of the tokenizer that `load_tokenizer` calls `spec`: a copy, or made of tiktoken ranks.

    Raises ConfigError as `load_tokenizer` does; "byte" has no such file.
    """
    tokenizer, path = load_tokenizer(spec), folder / "tokenizer.json"
    if isinstance(tokenizer, Llama3Tokenizer):
        llama3_as_fast(tokenizer).save(str(path))
    else:
        location = absolute(spec)
        path.write_bytes(filesystem(location).cat_file(location))
    return path


def llama3_as_fast(tokenizer: Llama3Tokenizer) -> Fast:
    """The same ids for the same text, but for runs of a million spaces, which tiktoken cannot take in one piece."""

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return tokenizer.ranks

    return Converter(pattern=LLAMA3_PATTERN, extra_special_tokens=list(tokenizer.specials)).converted()


def llama3_vocabulary(tokenizer: Llama3Tokenizer) -> dict[str, int]:
    """token -> id as the tokenizer.json spells them."""
    spelled = bytes_to_unicode()
    return {
        "".join(spelled[byte] for byte in token): rank for token, rank in tokenizer.ranks.items()
    } | tokenizer.specials
