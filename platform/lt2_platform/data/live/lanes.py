"""Tokenising while training: the order of the tokens, and how to go on in it from anywhere.

The corpus is cut into units (`listing.plan_units`). Lane j of G supplies entry j of every global batch of G sequences:
the endless stream of the documents of its units, cut into rows. Unit number k of a source, counted through all epochs,
is the (k mod n)-th of epoch k // n's shuffle of its n units, and belongs to lane k mod G; documents stay in file order.
So the order depends on (seed, listing, G) alone. Where a lane stands is a cursor of three integers. A row's length is
only known once it is made, so cursors are kept in the checkpoint; with them any number of workers goes on exactly.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lt2.config import ConfigError
from lt2_platform.data import overlap
from lt2_platform.data.pack import join_framed, learned, pack
from lt2_platform.data.sources.configs import FileSource
from lt2_platform.data.sources.documents import Document, Fault
from lt2_platform.data.sources.listing import Slice, SourceFile
from lt2_platform.data.sources.readers import LEFT_OUT, read_rows
from lt2_platform.data.stream import shuffled
from lt2_platform.data.tokenizers.tokenize import load_recorded
from lt2_platform.data.units import framed_pieces, in_batches
from lt2_platform.storage import Storage

BATCH_CHARACTERS = 2**16  # tokenised at once; small, so that a lane that runs dry is not long in coming back
LiveUnit = tuple[Slice, ...]


class Cursor(NamedTuple):
    """The next token of a lane: `offset` into what row `row` of unit number `unit` became."""

    unit: int
    row: int
    offset: int


@dataclass(frozen=True)
class LivePlan:
    """Everything a stream depends on. units[s]: the units of source s; weights: how often each source has its turn.

    `tokenizer`: the dataset's record of it, with a full path. `quarantine`: where unusable rows are written, unit by
    unit; None: nowhere. `without`: the file of what documents may not overlap (lt2_platform.data.overlap).
    """

    files: tuple[SourceFile, ...]
    sources: tuple[FileSource, ...]
    units: tuple[tuple[LiveUnit, ...], ...]
    weights: tuple[float, ...]
    tokenizer: dict[str, Any]
    width: int
    seed: int
    max_document_tokens: int | None = None
    masked: bool = False
    quarantine: str | None = None
    without: str | None = None

    def unit(self, source: int, number: int) -> tuple[int, LiveUnit]:
        """(index, slices) of the unit that is number `number` of a source, counted through all epochs."""
        epoch, place = divmod(number, len(self.units[source]))
        index = int(_unit_order(self.seed, epoch, source, len(self.units[source]))[place])
        return index, self.units[source][index]

    def source_at(self, position: int) -> int:
        """Whose turn it is at a position of the global order: a golden-ratio sequence, so every stretch is mixed."""
        if len(self.weights) == 1:
            return 0
        ends = list(itertools.accumulate(self.weights))
        point = position * 0x9E3779B97F4A7C15 % 2**64 / 2**64 * ends[-1]
        return min(bisect.bisect_right(ends, point), len(ends) - 1)


@functools.lru_cache(maxsize=64)
def _unit_order(seed: int, epoch: int, source: int, n: int) -> np.ndarray:
    return shuffled(n, seed, epoch, source)


class _Made(NamedTuple):
    unit: int
    row: int
    tokens: np.ndarray  # (n,) marked


class Lane:
    """One source's part of one of `lanes` lanes: the rows of its documents from a cursor on, None: from the first."""

    def __init__(self, plan: LivePlan, source: int, lane: int, lanes: int, cursor: Cursor | None):
        self.plan, self.source, self.lanes = plan, source, lanes
        self.after = cursor or Cursor(lane, 0, 0)
        self.offset = self.after.offset
        self.ready: deque[_Made] = deque()
        self._batches = self._encoded(self.after)

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.ready[0].unit, self.ready[0].row, self.offset) if self.ready else self.after

    def take(self) -> np.ndarray:
        """The lane's next row, (width,), as a marked stream (see lt2_platform.data.pack)."""
        parts, missing = [], self.plan.width
        while missing:
            while not self.ready:
                self.ready.extend(next(self._batches))
            unit, row, tokens = self.ready[0]
            part = tokens[self.offset : self.offset + missing]
            parts.append(part)
            missing -= len(part)
            self.offset += len(part)
            if self.offset == len(tokens):
                self.ready.popleft()
                self.after, self.offset = Cursor(unit, row + 1, 0), 0
        return np.concatenate(parts)

    def _encoded(self, start: Cursor) -> Iterator[list[_Made]]:
        tokenizer = load_recorded(self.plan.tokenizer)
        for batch in in_batches(self._documents(start), BATCH_CHARACTERS):
            documents = [document for _, _, document in batch]
            source, limit = self.plan.sources[self.source], self.plan.max_document_tokens
            made = framed_pieces(documents, tokenizer, source, masked=self.plan.masked, limit=limit)
            yield [_Made(unit, row, join_framed(one)) for (unit, row, _), one in zip(batch, made, strict=True)]

    def _documents(self, start: Cursor) -> Iterator[tuple[int, int, Document]]:
        empty: set[int] = set()  # by index: numbers name the same few units again and again
        for number in itertools.count(start.unit, self.lanes):
            index, slices = self.plan.unit(self.source, number)
            if index in empty:
                continue
            first = start.row if number == start.unit else 0
            found = False
            for row, document in self._usable(index, slices):
                found = True
                if row >= first:
                    yield number, row, document
            if not found:
                empty.add(index)
            if len(empty) == len(self.plan.units[self.source]):
                raise ConfigError(f"no usable document in {len(empty):,} units of the corpus; check the source's type")

    def _usable(self, index: int, slices: LiveUnit) -> Iterator[tuple[int, Document]]:
        """(row, document) of a unit; bad rows are written to the quarantine once the unit is through."""
        rows = ((part, *found) for part in slices for found in self._rows(part))
        bad = []
        for row, (part, own, text) in enumerate(rows):
            if text is None or text is LEFT_OUT:
                continue
            if isinstance(text, Fault):
                name = self.plan.files[part.file].name
                where = {"source": name, "start": part.start, "row": own}
                bad.append(where | {"reason": text.reason, "sample": text.sample})
            else:
                yield row, text
        if bad and self.plan.quarantine:
            # The same bytes whoever writes them, so that a resume or another epoch changes nothing.
            lines = "".join(json.dumps(fault, ensure_ascii=False) + "\n" for fault in bad)
            name = f"unit-{self.source}-{index:05d}.jsonl"
            Storage(self.plan.quarantine).write_bytes(name, lines.encode())

    def _rows(self, part: Slice) -> Iterator[Any]:
        file, place = self.plan.files[part.file], self.plan.without
        return read_rows(file, part, self.plan.sources[file.source], None if place is None else overlap.read(place))


Cursors = Mapping[str, Sequence[int]]
"""Cursors by "<lane>/<source>"; what is not there has not begun."""


def live_batches(
    plan: LivePlan, *, position: int, global_batch_size: int, first: int, last: int, cursors: Cursors
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, Cursor]]]:
    """Entries [first, last) of every global batch from `position` on, without end; each with the cursors after it.

    A batch is as of PackedDataset.batch; ids are positions in the global order. cursors: those at `position`, of these
    lanes at least.
    """
    lanes: dict[str, Lane] = {}
    now = {name: Cursor(*cursor) for name, cursor in cursors.items() if first <= int(name.split("/")[0]) < last}
    while True:
        ids = np.arange(position + first, position + last, dtype=np.int64)
        rows = []
        for lane, place in zip(range(first, last), ids.tolist(), strict=True):
            source = plan.source_at(place)
            name = f"{lane}/{source}"
            if name not in lanes:
                lanes[name] = Lane(plan, source, lane, global_batch_size, now.get(name))
            rows.append(lanes[name].take())
            now[name] = lanes[name].cursor
        stream = np.concatenate(rows)
        tokens, doc_ids = pack(stream, plan.width, pad_id=0)
        batch = {"tokens": tokens.astype(np.int64), "doc_ids": doc_ids}
        if plan.masked:
            batch["loss_mask"] = learned(stream, plan.width)
        yield {**batch, "ids": ids}, dict(now)
        position += global_batch_size
