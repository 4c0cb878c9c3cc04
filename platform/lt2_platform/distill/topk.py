"""A teacher's top-k logits computed once, over Ray Data, and read back beside the tokens they belong to.

    <out>/topk.json                what it is of: teacher, data, k, loops; written last
    <out>/part-000000.parquet      64 sequences, one per row group: topk_logits (fp16 bits), topk_ids (int32),
                                   each a flat (L, T, K) list

Logits are stored less each token's largest one, which no softmax sees and fp16 needs. A part takes
6·64·L·T·K bytes: at L = 4,096, T = 4 and k = 64 a sequence is 6.3 MB and a million tokens are 1.5 GB, so this pays only
where the same tokens are trained on several times, or where the student's GPUs have no room for the teacher.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from lt2.config import ConfigError
from lt2.distill.kl import top_k
from lt2.model import LoopedLM
from lt2.train.parallel import cast_weights
from lt2_platform.data.spread import some_ray, spread
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.units import ROW_GROUP
from lt2_platform.distill.teacher import identity
from lt2_platform.progress import Progress, silent
from lt2_platform.remake import remaking
from lt2_platform.storage import Storage, absolute
from lt2_platform.storage_errors import is_of_the_store
from lt2_platform.train.checkpoints import checkpoint
from lt2_platform.wording import one_line

MANIFEST, SCHEMA_VERSION = "topk.json", 1
LENGTH_ROWS = 2048  # tokens whose logits are alive at a time


@dataclass(frozen=True)
class Job:
    """What every task needs to know. loops: how many of the last loops are stored; batch_size counts sequences."""

    teacher: str
    data: str
    out: str
    k: int
    loops: int
    document_mask: bool
    batch_size: int


def store_top_k(
    *,
    teacher: str,
    data: str,
    out: str,
    k: int = 64,
    final_only: bool = False,
    document_mask: bool = False,
    batch_size: int = 4,
    parallelism: int | None = None,
    num_gpus: float = 0,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Store the top-k of every training sequence of `data`; returns the manifest. Parts that are there are kept.

    document_mask: as in the training that will read it. Uses the running Ray, or a local one for the duration.

    Raises:
        ConfigError: no such teacher or data, tokenizers that differ, k above the vocabulary, or a folder that holds
            the top-k of something else.
    """
    teacher, data, out = checkpoint.resolve(absolute(teacher)), absolute(data), absolute(out)
    dataset, info = PackedDataset(data, "train"), checkpoint.read_info(teacher)
    if info.tokenizer.get("sha256") != dataset.manifest["tokenizer"]["sha256"]:
        raise ConfigError(f"{teacher} and {data} have different tokenizers; prepare the data with the teacher's")
    if k > info.model.vocab_size:
        raise ConfigError(f"k {k} exceeds the teacher's vocabulary of {info.model.vocab_size}; lower it")
    job = Job(teacher, data, out, k, 1 if final_only else info.model.n_loops, document_mask, batch_size)
    storage = Storage(out)
    described = {name: value for name, value in asdict(job).items() if name in ("k", "loops", "document_mask")}
    record = {
        "schema_version": SCHEMA_VERSION,
        **described,
        "teacher": identity(teacher),
        "data": dataset.manifest["fingerprint"],
        "sequences": dataset.n_sequences,
        "seq_len": dataset.seq_len,
    }
    if storage.exists(MANIFEST):
        if storage.read_json(MANIFEST) != record:
            raise ConfigError(f"{out} holds the top-k of another teacher, data or setting; use another folder")
        return record
    bound = storage.create_exclusive("job.json", json.dumps(record).encode())
    if not bound and storage.read_json("job.json") != record:
        raise ConfigError(f"{out} was started for another teacher, data or setting; use another folder")
    parts = list(range(-(-dataset.n_sequences // ROW_GROUP)))
    with some_ray(None):
        for done, _ in enumerate(spread(write_part, parts, job, parallelism, num_gpus=num_gpus), start=1):
            progress({"part": done, "parts": len(parts)})
    storage.write_json(MANIFEST, record)
    return record


def write_part(part: int, job: Job) -> int:
    """Write one part unless it is there; returns its number."""
    storage, name = Storage(job.out), f"part-{part:06d}.parquet"
    if storage.exists(name):
        return part
    model = _model(job.teacher)
    dataset = PackedDataset(job.data, "train")
    first, last = part * ROW_GROUP, min((part + 1) * ROW_GROUP, dataset.n_sequences)
    rows: dict[str, list[np.ndarray]] = {"topk_logits": [], "topk_ids": []}
    for start in range(first, last, job.batch_size):
        found = dataset.batch(np.arange(start, min(start + job.batch_size, last)))
        logits, ids = asked(model, found, job)
        rows["topk_logits"] += list(logits.flatten(1).cpu().numpy().view(np.uint16))
        rows["topk_ids"] += list(ids.flatten(1).cpu().numpy())
    columns = {key: pa.FixedSizeListArray.from_arrays(np.concatenate(v), len(v[0])) for key, v in rows.items()}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=1, compression="zstd", write_page_checksum=True)
    storage.write_bytes(name, sink.getvalue())
    return part


@functools.lru_cache(maxsize=1)  # a worker process takes many parts
def _model(place: str) -> LoopedLM:
    model, config, _ = checkpoint.load_model(place)
    model = model.at_depth(config.n_loops, halting=False)
    if torch.cuda.is_available():
        cast_weights(model, torch.bfloat16)
        model = model.to("cuda")
    return model.eval()


@torch.inference_mode()
def asked(model: LoopedLM, batch: dict[str, np.ndarray], job: Job) -> tuple[Tensor, Tensor]:
    """(logits fp16, ids int32), both (B, L, T, K), of the input positions of a batch."""
    device = model.embed.weight.device
    tokens = torch.from_numpy(batch["tokens"]).to(device)[:, :-1]
    doc_ids = torch.from_numpy(batch["doc_ids"]).to(device)[:, :-1] if job.document_mask else None
    states = model(tokens, doc_ids=doc_ids, per_loop=True).loops
    assert states is not None
    logits, ids = [], []
    for state in states[-job.loops :]:
        pieces = [top_k(piece, model.head_weight, job.k) for piece in state.flatten(0, 1).split(LENGTH_ROWS)]
        found = [_sorted(piece.logits, piece.ids) for piece in pieces]
        logits.append(torch.cat([values for values, _ in found]).view(*tokens.shape, -1))
        ids.append(torch.cat([tokens for _, tokens in found]).view(*tokens.shape, -1))
    return torch.stack(logits, 2), torch.stack(ids, 2)


def _sorted(logits: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    if ids is None:  # the whole vocabulary
        logits, ids = logits.sort(dim=-1, descending=True)
    return (logits - logits[:, :1]).half(), ids.int()


def check_teacher(topk: str, teacher: str) -> None:
    """Raise ConfigError unless the finished folder `topk` is of the newest checkpoint of `teacher`."""
    if _finished(topk)["teacher"] != identity(teacher):
        raise ConfigError(
            f"{topk} is the top-k of another teacher than {teacher}, or of another of its checkpoints; store it again, "
            "or give that teacher"
        )


def _finished(uri: str) -> dict[str, Any]:
    storage = Storage(uri)
    if not storage.exists(MANIFEST):
        raise ConfigError(f"{uri} holds no finished top-k (no {MANIFEST}); run its step to the end first")
    return storage.read_json(MANIFEST)


class StoredTopK:
    """The rows of a finished folder, by sequence number.

    Raises ConfigError if there is none, or if it is not of this dataset.
    """

    def __init__(self, uri: str, dataset: PackedDataset, *, document_mask: bool = False):
        self.storage, self.record = Storage(uri), _finished(uri)
        if self.record["data"] != dataset.manifest["fingerprint"]:
            raise ConfigError(f"{uri} is the top-k of other data than {dataset.uri}; store it again for this data")
        if self.record["document_mask"] != document_mask:
            raise ConfigError(
                f"{uri} was stored with document_mask {self.record['document_mask']}, training has {document_mask}; "
                "make them equal"
            )

    def attach(self, batches: Iterator[dict[str, np.ndarray]]) -> Iterator[dict[str, np.ndarray]]:
        """The batches with topk_logits (fp16) and topk_ids (int32), both (B, L, T, K)."""
        for batch in batches:
            rows = [self.row(number) for number in batch["ids"].tolist()]
            yield batch | {name: np.stack([row[name] for row in rows]) for name in ("topk_logits", "topk_ids")}

    def row(self, number: int) -> dict[str, np.ndarray]:
        """topk_logits (fp16) and topk_ids (int32) of a sequence, (L, T, K). Not kept: an epoch has each but once."""
        table = self._read(*divmod(number, ROW_GROUP))
        shape = (self.record["seq_len"], self.record["loops"], self.record["k"])
        columns = {name: table[name].combine_chunks().flatten().to_numpy() for name in ("topk_logits", "topk_ids")}
        return {
            "topk_logits": columns["topk_logits"].view(np.float16).reshape(shape),
            "topk_ids": columns["topk_ids"].reshape(shape),
        }

    def _read(self, part: int, place: int) -> pa.Table:
        name = f"part-{part:06d}.parquet"
        fs, path = self.storage.arrow_fs(name)
        try:
            with pq.ParquetFile(path, filesystem=fs, page_checksum_verification=True) as file:
                return file.read_row_group(place)
        except (OSError, pa.ArrowException) as error:
            if is_of_the_store(error):
                raise
            advice = remaking(self.storage.root, "store it again in another folder")
            raise ConfigError(f"{self.storage.join(name)} is damaged ({one_line(error)}); {advice}") from error
