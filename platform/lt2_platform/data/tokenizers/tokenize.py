"""Three tokenizers behind one small interface: bytes, a Hugging Face tokenizer.json, Llama-3's tiktoken ranks.

Text is always ordinary text: `<|end_of_text|>` inside a document is encoded as those characters, never as the special.
Only the markers of a chat template ask for specials, by `special_id`.
"""

from __future__ import annotations

import base64
import binascii
import copy
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lt2.config import ConfigError
from lt2_platform.json_values import sha256_of
from lt2_platform.storage import Storage, absolute, filesystem

SETTINGS = "tokenizer_config.json"  # beside a tokenizer.json
LLAMA3_RANKS = 128_000
# From Meta's llama3/llama/tokenizer.py: the split pattern, the 256 special tokens and the longest run.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS = (
    ["<|begin_of_text|>", "<|end_of_text|>"]
    + [f"<|reserved_special_token_{i}|>" for i in range(4)]
    + ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    + [f"<|reserved_special_token_{i}|>" for i in range(5, 251)]
)
_LONG_RUN = re.compile(r"\s{1,25000}|\S{1,25000}")


class Tokenizer(Protocol):
    """What the rest of LT2 asks of a tokenizer.

    Texts begin with `bos_id`, if it is there; `prefix_id` is what stands for no text at all, or None for EOS. `sha256`
    identifies it, for a tokenizer.json by the file's bytes; `vocabulary` is a hash of what its ids mean, equal for a
    tokenizer.json and for the folder of transformers that has it.
    """

    name: str
    sha256: str
    vocab_size: int
    eos_id: int
    pad_id: int

    @property
    def vocabulary(self) -> str: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def prefix_id(self) -> int | None: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, (n,) uint32, without BOS or EOS."""
        ...

    def special_id(self, name: str) -> int | None:
        """The id of the special token spelled `name`, if there is one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; specials are left out, broken UTF-8 becomes U+FFFD."""
        ...


def encode(tokenizer: Tokenizer, text: str, *, bos: bool = True) -> list[int]:
    """Ids of one text as a prompt: BOS first if the tokenizer has one and `bos` is set, no EOS."""
    ids = tokenizer.encode_batch([text])[0].tolist()
    return [tokenizer.bos_id, *ids] if bos and tokenizer.bos_id is not None else ids


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """The manifest's record of a tokenizer."""
    return {key: getattr(tokenizer, key) for key in ("name", "sha256", "vocab_size", "bos_id", "eos_id", "pad_id")}


def vocabulary_sha256(ids: Mapping[str, int]) -> str:
    """Hash of a vocabulary, token -> id."""
    return sha256_of(sorted(ids.items()))


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer called `spec`: "byte", or a local path or s3:// URI of a *.json or *.tiktoken file.

    Raises ConfigError for anything else, for a missing file and for one that does not parse.
    """
    return _loaded("byte" if spec == "byte" else absolute(spec), spec)


def load_recorded(record: dict[str, Any], storage: Storage | None = None) -> Tokenizer:
    """The tokenizer that a dataset or checkpoint at `storage` has a record of: the "file" in it, or bytes.

    Its texts begin with BOS if they did when that was made. Without `storage`, "file" is a full path.
    """
    file = record.get("file")
    tokenizer = load_tokenizer("byte" if not file else storage.join(file) if storage else file)
    if not isinstance(tokenizer, HubTokenizer):
        return tokenizer
    return tokenizer.beginning(record.get("bos_id", tokenizer.bos_id))


def tokenizer_files(spec: str) -> dict[str, bytes]:
    """What a dataset or checkpoint keeps of a tokenizer, by path: its file, first, and its settings if they lie beside
    it; nothing of "byte"."""
    if spec == "byte":
        return {}
    folder, _, name = absolute(spec).rpartition("/")
    storage = Storage(folder or "/")
    names = [name, *([SETTINGS] if storage.exists(SETTINGS) else [])]
    return {f"tokenizer/{each}": storage.read_bytes(each) for each in names}


def change_since(spec: str, record: dict[str, Any]) -> str:
    """How the file is now other than `describe` said of it, its name aside; "" if it is not. Raises as `load_tokenizer`
    does."""
    tokenizer = _load(absolute(spec), spec)  # afresh, whatever this process has loaded before
    now = describe(tokenizer)
    changed = {key for key in now if key != "name" and now[key] != record[key]}
    if changed == {"bos_id"} and now["bos_id"] is None and record["bos_id"] == tokenizer.prefix_id:
        return "now begins no text with BOS, as in transformers"  # older LT2 began every text with it
    return "has other content" if changed else ""


@functools.lru_cache(maxsize=4)  # a worker process reads a tokenizer once, not once per unit
def _loaded(location: str, spec: str) -> Tokenizer:
    return _load(location, spec)


def _load(location: str, spec: str) -> Tokenizer:
    if location == "byte":
        return ByteTokenizer()
    if filesystem(location).isdir(location):
        raise ConfigError(f"tokenizer {spec} is a folder; give the tokenizer.json or *.tiktoken file in it")
    if not location.endswith((".tiktoken", ".json")):
        meta = " (Llama 3's tokenizer.model is one: copy or link it under such a name)" * location.endswith(".model")
        raise ConfigError(
            f"unknown tokenizer '{spec}'; use byte, or a path to a tokenizer.json or a *.tiktoken file{meta}"
        )
    content, name = _read(location, spec), location.rsplit("/", 1)[-1]
    if location.endswith(".tiktoken"):
        return _llama3(name, content)
    return HubTokenizer(name, content, _settings_beside(location), spec)


@functools.lru_cache(maxsize=2)  # building it takes a third of a second, and every dataset has its own copy of the file
def _llama3(name: str, content: bytes) -> Tokenizer:
    return Llama3Tokenizer(name, content)


def _read(location: str, spec: str) -> bytes:
    fs = filesystem(location)
    if not fs.exists(location):
        raise ConfigError(
            f"tokenizer file {spec} does not exist; use byte, or a path to a tokenizer.json or *.tiktoken"
        )
    return fs.cat_file(location)


def _settings_beside(location: str) -> dict[str, Any]:
    beside = location.rsplit("/", 1)[0] + "/" + SETTINGS
    fs = filesystem(beside)
    if not fs.exists(beside):
        return {}
    try:
        settings = json.loads(fs.cat_file(beside))
        tokens = [settings.get(f"{kind}_token") for kind in ("bos", "eos", "pad")]
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{beside}, beside the tokenizer, is not a JSON object ({error}); fix or remove it"
        ) from error
    if not all(token is None or isinstance(token, str | dict) for token in tokens):
        raise ConfigError(f"{beside}, beside the tokenizer: bos_token, eos_token and pad_token are each a text or null")
    return settings


class ByteTokenizer:
    """One token per UTF-8 byte, then bos 256, eos 257, pad 258."""

    name = "byte"
    sha256 = hashlib.sha256(b"lt2 byte tokenizer 1: 256 bytes, bos 256, eos 257, pad 258").hexdigest()
    vocabulary = sha256
    vocab_size, bos_id, prefix_id, eos_id, pad_id = 259, 256, 256, 257, 258

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]

    def special_id(self, name: str) -> int | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class Llama3Tokenizer:
    """Llama 3's byte-pair encoding: 128,000 ranks, then 256 specials (bos 128000, eos 128001)."""

    def __init__(self, name: str, content: bytes):
        import tiktoken

        ranks = _parse_ranks(content, name)
        specials = {token: LLAMA3_RANKS + index for index, token in enumerate(LLAMA3_SPECIALS)}
        self.name = name
        self.sha256 = hashlib.sha256(b"".join(base64.b64encode(token) + b"\n" for token in ranks)).hexdigest()
        self.vocab_size = LLAMA3_RANKS + len(specials)
        self.bos_id = self.prefix_id = specials["<|begin_of_text|>"]
        self.eos_id = specials["<|end_of_text|>"]
        self.pad_id = self.eos_id
        self.ranks, self.specials = ranks, specials
        self._encoding = tiktoken.Encoding(
            name,
            pat_str=LLAMA3_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=specials,
            explicit_n_vocab=self.vocab_size,
        )

    @property
    def vocabulary(self) -> str:
        from lt2_platform.data.tokenizers.tokenizer_json import llama3_vocabulary

        return vocabulary_sha256(llama3_vocabulary(self))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:
            # The regex engine's stack is too small for a run of a million spaces; Meta's code splits such runs.
            parts = [self._encoding.encode_to_numpy(part, disallowed_special=()) for part in _LONG_RUN.findall(text)]
            return np.concatenate(parts)

    def special_id(self, name: str) -> int | None:
        return self.specials.get(name)

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([i for i in ids if i < LLAMA3_RANKS])


def _parse_ranks(content: bytes, spec: str) -> dict[bytes, int]:
    """token -> rank in rank order. Some copies of the file list the 256 specials after the ranks; they are dropped."""
    try:
        pairs = [line.split() for line in content.splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"tokenizer file {spec} is not a tiktoken ranks file ({error}); download it again") from error
    ranks = {token: rank for token, rank in ranks.items() if rank < LLAMA3_RANKS}
    if len(ranks) != LLAMA3_RANKS or set(ranks.values()) != set(range(LLAMA3_RANKS)):
        raise ConfigError(
            f"tokenizer file {spec} has {len(ranks):,} ranks, Llama 3 has {LLAMA3_RANKS:,}; "
            "give that model's tokenizer.json instead"
        )
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


class HubTokenizer:
    """A `tokenizers` file; BOS and EOS come from tokenizer_config.json beside it, else from their usual names.

    Texts of a model of others begin with BOS (`bos_id`) only where transformers would begin them so: with a BOS that it
    was not trained with, a model answers otherwise. `prefix_id` is BOS in any case.
    """

    _BOS = ("<|begin_of_text|>", "<s>", "<bos>", "[CLS]")
    _EOS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<|im_end|>", "[SEP]")
    _PAD = ("<pad>", "<|pad|>", "[PAD]")

    def __init__(self, name: str, content: bytes, settings: dict[str, Any], spec: str):
        # Parallelism belongs to Ray: threads started inside every task would fight for the same cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except ValueError as error:
            raise ConfigError(f"tokenizer file {spec} is not a tokenizer.json ({error}); export it again") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._specials = {token.content: index for index, token in added.items() if token.special}
        self.name = name
        self.sha256 = hashlib.sha256(content).hexdigest()
        # Not their number: ids may have gaps, and a model has a row for each up to the largest.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        bos, eos = self._id(settings, "bos", self._BOS, spec), self._id(settings, "eos", self._EOS, spec)
        if eos is None:
            raise ConfigError(
                f"tokenizer {spec} names no end-of-text token; put a tokenizer_config.json with eos_token beside it"
            )
        self.prefix_id, self.eos_id = bos, eos
        self.bos_id = bos if self._begins(bos, settings) else None
        pad = self._id(settings, "pad", self._PAD, spec)
        self.pad_id = eos if pad is None else pad

    @property
    def vocabulary(self) -> str:
        return vocabulary_sha256(self._tokenizer.get_vocab(with_added_tokens=True))

    def _id(self, settings: dict[str, Any], kind: str, usual: Sequence[str], spec: str) -> int | None:
        named = settings.get(f"{kind}_token")
        token = named.get("content") if isinstance(named, dict) else named
        found = (self._tokenizer.token_to_id(name) for name in ((token,) if token else usual))
        index = next((index for index in found if index is not None), None)
        if token and index is None and kind != "pad":  # nothing is padded in training
            raise ConfigError(
                f"tokenizer {spec} has no token {token!r}, which tokenizer_config.json beside it names as {kind}_token"
            )
        return index

    def _begins(self, bos: int | None, settings: dict[str, Any]) -> bool:
        # One that transformers saved begins texts as its file says, whatever `add_bos_token` does; of others we say so.
        return "tokenizer_class" not in settings or self._tokenizer.encode("a").ids[:1] == [bos]

    def beginning(self, bos_id: int | None) -> HubTokenizer:
        """The same tokenizer, with texts that begin with `bos_id`, or with nothing."""
        if bos_id == self.bos_id:
            return self
        other = copy.copy(self)
        other.bos_id = bos_id
        return other

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def special_id(self, name: str) -> int | None:
        return self._specials.get(name)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)
