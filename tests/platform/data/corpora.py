"""A small corpus in every format, and the documented cutting rule on whole files."""

import json
import random
from contextlib import nullcontext

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from lt2_platform.data import cut, prepare
from lt2_platform.data.sources.bad_files import refuse
from lt2_platform.data.sources.configs import PlainSource
from lt2_platform.data.sources.listing import look_through

WORDS = [
    "loop",
    "state",
    "gate",
    "delta",
    "déjà",
    "循環",
    "window",
    "token\tlinear",
    "time\nmemory",
    "😀",
    "the",
    "of",
    "and",
]


def find_files(source, format="auto"):
    """The files that a bare path means; raises for what is wrong with them, as planning does."""
    files, bad = look_through([PlainSource(path=source, format=format)])
    refuse(bad)
    return files


def document(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_corpus(folder) -> list[tuple[str, list[str]]]:
    """Files in every format below `folder`; returns (file name, its documents) in source order."""
    rng = random.Random(7)
    texts = {name: [document(rng, rng.randint(3, 400)) for _ in range(40)] for name in "abcd"}
    rows = {name: [json.dumps({"text": text, "label": 1}).encode() + b"\n" for text in texts[name]] for name in texts}
    frame = zstandard.ZstdCompressor().compress
    (folder / "a.jsonl").write_bytes(b"".join(rows["a"]))
    (folder / "b.jsonl.zst").write_bytes(frame(b"".join(rows["b"][:15])) + frame(b"".join(rows["b"][15:])))
    (folder / "c.jsonl.zstd").write_bytes(frame(b"".join(rows["c"])))
    pq.write_table(pa.table({"id": range(40), "text": texts["d"]}), folder / "d.parquet", row_group_size=9)
    book = "".join(document(rng, 60) + rng.choice(["\n\n", "\n", "\r\n\r\n"]) for _ in range(900))
    (folder / "e.txt").write_bytes(book.encode())
    return [
        ("a.jsonl", texts["a"]),
        ("b.jsonl.zst", texts["b"]),
        ("c.jsonl.zstd", texts["c"]),
        ("d.parquet", texts["d"]),
        ("e.txt", expected_pieces(book.encode())),
    ]


def expected_pieces(content: bytes, piece: int = 128 * 1024) -> list[str]:
    """The rule on a whole file at once: a cut after the first blank line of each 128 KiB, else its first newline."""
    cuts = [0]
    for start in range(piece, len(content), piece):
        window = content[start : start + piece]
        blanks = [window.find(mark) + len(mark) for mark in (b"\n\n", b"\n\r\n") if mark in window]
        newline = [window.find(b"\n") + 1] if b"\n" in window else []
        if blanks or newline:
            cuts.append(start + min(blanks or newline))
    return [content[a:b].decode() for a, b in zip(cuts, [*cuts[1:], len(content)], strict=True)]


def in_turn(patch):
    """prepare() does its work in this process, one item after another, while `patch` (a MonkeyPatch) holds."""
    patch.setattr(prepare, "some_ray", lambda parallelism: nullcontext())
    for module in (prepare, cut):
        patch.setattr(module, "spread", lambda function, items, shared, limit: (function(i, shared) for i in items))
