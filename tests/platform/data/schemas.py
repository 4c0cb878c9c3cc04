"""Files with the schemas, and the faults, of FineWeb-Edu, DCLM-baseline and OpenThoughts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


def write_fineweb_edu(folder, scores=(3, 4, 5, None, 3, 4)):
    """Two row groups; document i is f"lesson {i} …". Returns the texts. A README lies beside the data."""
    texts = [f"lesson {i} on fractions" for i in range(len(scores))]
    n = len(scores)
    table = pa.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{i}>" for i in range(n)],
            "dump": ["CC-MAIN-2024-10"] * n,
            "url": [f"https://example.org/{i}" for i in range(n)],
            "file_path": [f"s3://commoncrawl/{i}.warc.gz" for i in range(n)],
            "language": ["en"] * n,
            "language_score": [0.9] * n,
            "token_count": pa.array([9] * n, pa.int64()),
            "score": [None if score is None else score + 0.2 for score in scores],
            "int_score": pa.array(scores, pa.int64()),
        }
    )
    pq.write_table(table, folder / "000_00000.parquet", row_group_size=4)
    (folder / "README.md").write_text("# FineWeb-Edu\n")
    return texts


DCLM_ROWS = [
    ({"bff_contained_ngram_count_before_dedupe": 1, "text": "first page", "url": "u", "warcinfo": "w",
      "language_id_whole_page_fasttext": {"en": 0.98}, "metadata": {"WARC-Type": "response"}}, "first page"),
    ({"text": "fields of other types", "url": None, "metadata": "flattened", "previous_word_count": "12"},
     "fields of other types"),
    ({"url": "u", "text": "fields missing and new", "new": [1]}, "fields missing and new"),
    ({"text": None, "url": "u"}, "null text"),
    ({"url": "no text at all"}, "missing column"),
    ({"text": ["a", "list"]}, "not a string"),
    ('{"text": "half of an emoji \\ud83d", "url": "u"}', "lone surrogate"),
    ('{"text": "cut off', "invalid json"),
    ({"text": "déjà vu 😀", "metadata": None}, "déjà vu 😀"),
]  # fmt: skip
"""(row, its document or its fault)"""


def write_dclm(folder):
    """The rows in a .jsonl.zst of two frames and again in a .jsonl.zstd."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row, _ in DCLM_ROWS]
    frame = zstandard.ZstdCompressor().compress
    cut = len(lines) // 2
    halves = ["\n".join(half).encode() + b"\n" for half in (lines[:cut], lines[cut:])]
    (folder / "shard_00000000_processed.jsonl.zst").write_bytes(b"".join(map(frame, halves)))
    (folder / "shard_00000001_processed.jsonl.zstd").write_bytes(frame(b"".join(halves)))


THOUGHT = "<|begin_of_thought|>\n\nAdd.\n\n<|end_of_thought|>\n\n4"
CONVERSATIONS = [
    ([("user", "2+2?"), ("assistant", THOUGHT)], None),
    ([("human", "Why?"), ("gpt", "<think>Because.</think> So."), ("human", "Sure?"), ("gpt", "Yes.")], None),
    ([("user", "Long?"), ("assistant", "<think>Let me think about")], "unterminated think tag"),
    ([("user", "Long?"), ("assistant", "<|begin_of_thought|> and so")], "unterminated think tag"),
    ([("user", "Hello?")], "no assistant turn"),
    ([("user", "x"), ("assistant", None)], "null text"),
    ([("user", "x"), ("tool", "y"), ("assistant", "z")], "tool use"),
    ([("user", "x"), ("narrator", "y"), ("assistant", "z")], "unknown role"),
    ([], "not a list of turns"),
    (None, "no conversation"),
]
"""(turns, fault or None)"""


def write_openthoughts(path, column="conversations", system="Think first."):
    """CONVERSATIONS as a parquet file; `system` None leaves that column out."""
    names = ("from", "value") if column == "conversations" else ("role", "content")
    rows = [None if turns is None else [dict(zip(names, turn)) for turn in turns] for turns, _ in CONVERSATIONS]
    kind = pa.list_(pa.struct([(name, pa.string()) for name in names]))
    columns = {} if system is None else {"system": [system] * len(rows)}
    pq.write_table(pa.table({**columns, column: pa.array(rows, kind), "difficulty": range(len(rows))}), path)
