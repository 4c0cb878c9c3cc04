"""Documents that share a run of n words with an evaluation item: contamination as GPT-3's authors looked for it
(Brown et al. 2020, appendix C). Words are compared without case and punctuation, however Unicode writes their letters
(combining accents, ligatures of PDFs), by 64-bit hashes of n of them.
"""

from __future__ import annotations

import functools
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import islice
from typing import Any

import numpy as np
from pydantic import Field

from lt2.config import Config, ConfigError
from lt2_platform.storage import Storage

FOLDER = "evaluated"
WORD = re.compile(r"[^\W_]+")  # of Markdown's _emphasis_ the line is no part
REVISION = 2  # of what counts as a word: datasets half prepared by another begin anew
WORDS_AT_ONCE = 2**20  # a document may have 256 MiB
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Decontaminate(Config):
    """Leave out documents that share a run of `n` words with an item of an evaluation pack.

    tasks: of the pack; empty: all but those made of needles and filler. An item that has no text of n words is not
    found. Of an item every text counts, the passage that a question is about too.
    """

    pack: str = Field(min_length=1)
    tasks: tuple[str, ...] = ()
    n: int = Field(default=13, ge=5, le=100)


@dataclass(frozen=True)
class Overlap:
    """What is looked for.

    Attributes:
        n: words in a row.
        tasks: task -> {"items", "long_enough"}: how many it has, and how many of them can be found.
        hashes: (N,) uint64, sorted: of every n words in a row. owners: (N,) uint16: the place of their task in `tasks`.
    """

    n: int
    tasks: Mapping[str, Mapping[str, int]]
    hashes: np.ndarray
    owners: np.ndarray

    def find(self, text: str) -> tuple[str, str] | None:
        """(task, the words) of the first run of words that `text` shares with an item."""
        if not len(self.hashes):
            return None
        for words in _stretches(text, self.n):
            grams = _grams(words, self.n)
            places = np.minimum(np.searchsorted(self.hashes, grams), len(self.hashes) - 1)
            found = np.flatnonzero(self.hashes[places] == grams)
            if len(found):
                first = int(found[0])
                task = list(self.tasks)[int(self.owners[places[first]])]
                return task, " ".join(words[first : first + self.n])
        return None

    @functools.cached_property
    def sha256(self) -> str:
        return sha256(repr((REVISION, self.n, list(self.tasks))).encode() + self.hashes.tobytes()).hexdigest()

    def record(self) -> dict[str, Any]:
        """As JSON, for a manifest."""
        return {"n": self.n, "file": self.file, "tasks": {name: dict(told) for name, told in self.tasks.items()}}

    @property
    def file(self) -> str:
        """Where it lies in a dataset's folder, by its content: processes keep what they have read."""
        return f"{FOLDER}/{self.sha256[:16]}.npz"

    def write(self, storage: Storage) -> None:
        content = io.BytesIO()
        np.savez(content, n=self.n, tasks=list(self.tasks), hashes=self.hashes, owners=self.owners)
        storage.write_bytes(self.file, content.getvalue())


@functools.lru_cache(maxsize=2)
def read(uri: str) -> Overlap:
    """What `Overlap.write` wrote; it no longer knows its counts."""
    folder, _, name = uri.rpartition("/")
    with np.load(io.BytesIO(Storage(folder).read_bytes(name))) as file:
        tasks = {str(name): {} for name in file["tasks"]}
        return Overlap(int(file["n"]), tasks, file["hashes"], file["owners"])


def overlap(items: Mapping[str, Iterable[Iterable[str]]], n: int) -> Overlap:
    """items: task -> its items -> their texts."""
    tasks: dict[str, dict[str, int]] = {}
    hashes, owners = [np.empty(0, np.uint64)], [np.empty(0, np.uint16)]
    for place, (task, own) in enumerate(items.items()):
        tasks[task] = {"items": 0, "long_enough": 0}
        for texts in own:
            grams = [_grams(words, n) for text in texts for words in _stretches(text, n)]
            tasks[task]["items"] += 1
            tasks[task]["long_enough"] += bool(grams)
            hashes += grams
            owners += [np.full(len(one), place, np.uint16) for one in grams]
    distinct, first = np.unique(np.concatenate(hashes), return_index=True)
    return Overlap(n, tasks, distinct, np.concatenate(owners)[first])


def with_pack(config: Decontaminate) -> Overlap:
    """The items of a pack. Raises ConfigError for what the pack lacks, or where no item has n words in a row."""
    from lt2_platform.evaluate.harness.tasks import packs

    if config.tasks:
        records = packs.require(config.pack, config.tasks)
    else:
        records = packs.worded(packs.read_manifest(config.pack)["tasks"])
    storage = Storage(config.pack)

    def items(task: str) -> Iterator[Iterator[str]]:
        table = packs.read_split(storage, task, records[task], packs.evaluated_split(records[task]))
        return (_texts(row) for batch in table.to_batches(256) for row in batch.to_pylist())

    found = overlap({task: items(task) for task in sorted(records)}, config.n)
    if not len(found.hashes):
        raise ConfigError(
            f"no item of {config.pack} has {config.n} words in a row, so nothing would be found; set a smaller "
            "decontaminate.n, or other tasks"
        )
    return found


def _texts(value: Any) -> Iterator[str]:
    """Every text in a row of any schema."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _stretches(text: str, n: int) -> Iterator[list[str]]:
    """The words of a text in stretches that share n - 1 words with the next, so that each run of n is in one."""
    words = (match[0].lower() for match in WORD.finditer(unicodedata.normalize("NFKC", text)))
    held = list(islice(words, WORDS_AT_ONCE))
    while len(held) >= n:
        yield held
        held = held[len(held) - n + 1 :] + list(islice(words, WORDS_AT_ONCE))


def _grams(words: list[str], n: int) -> np.ndarray:
    """(len(words) - n + 1,) uint64: a hash of every n words in a row."""
    hashed = np.fromiter(map(_hashed, words), np.uint64, len(words))
    grams = np.zeros(len(words) - n + 1, np.uint64)
    for offset in range(n):
        grams = grams * _FACTOR + hashed[offset : offset + len(grams)]
    return grams


@functools.lru_cache(maxsize=2**19)
def _hashed(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest())
