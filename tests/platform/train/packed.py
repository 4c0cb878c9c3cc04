"""A packed dataset written by hand in the format of lt2_platform.data.prepare, and configs small enough for a test."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lt2.config import ModelConfig
from lt2.train.config import TrainConfig
from lt2_platform.data.prepare import SCHEMA_VERSION
from lt2_platform.storage import Storage

VOCAB, SEQ_LEN = 23, 12
TOKENIZER = {"name": "byte", "sha256": "0" * 64, "vocab_size": VOCAB, "bos_id": 1, "eos_id": 2, "file": None}


def write_dataset(folder, *, n=40, validation=4, tokenizer=TOKENIZER) -> str:
    storage = Storage(str(folder))
    splits = {}
    for seed, (split, rows) in enumerate({"train": n, "validation": validation}.items()):
        rng = np.random.default_rng(seed)
        # A walk, not noise: there is something to learn, so a wrong update shows in the loss.
        tokens = (
            np.cumsum(rng.integers(0, 3, (rows, SEQ_LEN + 1)), axis=1) + rng.integers(0, VOCAB, (rows, 1))
        ) % VOCAB
        table = pa.table(
            {
                "sequence_id": pa.array(range(rows), pa.int64()),
                "tokens": pa.array(tokens.astype(np.int32).tolist(), pa.list_(pa.int32())),
                "doc_ids": pa.array([[0] * 5 + [1] * (SEQ_LEN - 4)] * rows, pa.list_(pa.int32())),
            }
        )
        sink = io.BytesIO()
        pq.write_table(table, sink, row_group_size=64, write_page_checksum=True)
        path = f"{split}/part-00000.parquet"
        storage.write_bytes(path, sink.getvalue())
        sha256 = hashlib.sha256(sink.getvalue()).hexdigest()
        files = [{"path": path, "sequences": rows, "sha256": sha256}]
        splits[split] = {"files": files, "sequences": rows, "tokens": rows * SEQ_LEN, "documents": 2 * rows}
    manifest = {"schema_version": SCHEMA_VERSION, "fingerprint": "f" * 64, "tokenizer": tokenizer, "seq_len": SEQ_LEN}
    storage.write_json("manifest.json", manifest | {"seed": 0, "sources": [], "splits": splits})
    return storage.root


HYBRID = {"type": "hybrid", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "ratio": "1:1"}
MODEL = {"dim": 16, "n_layers": 2, "n_loops": 2, "num_heads": 2, "ffn_hidden": 24, "layout": HYBRID}


def model_config(**fields) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": VOCAB, **MODEL, **fields})


def train_config(**fields) -> TrainConfig:
    defaults = {"steps": 6, "global_batch_size": 8, "lr": 1e-2, "warmup_steps": 1, "log_every": 1, "seed": 5}
    return TrainConfig.model_validate(defaults | fields)


def checkpoints(out) -> list[str]:
    return sorted(path.parent.name for path in Path(out, "checkpoints").glob("*/COMPLETE"))
