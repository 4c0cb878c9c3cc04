"""Writing safetensors the way the Hugging Face ecosystem reads them: one file, or shards and an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_safetensors(weights: dict[str, Tensor], folder: Path, *, max_shard_bytes: int) -> list[str]:
    """Write weights (on CPU) into folder and return the file names.

    Tensors keep their order; a shard closes before it would pass max_shard_bytes. Equal weights give equal files.
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.contiguous()
        filled += size
    if len(shards) == 1:
        _save(shards[0], folder / "model.safetensors")
        return ["model.safetensors"]
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards):
        _save(shard, folder / file)
    (folder / "model.safetensors").unlink(missing_ok=True)  # of an earlier model: it would be read in their place
    total = sum(t.numel() * t.element_size() for t in weights.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, shard in zip(files, shards) for name in shard},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*files, "model.safetensors.index.json"]


def open_to_others(files: Iterable[Path]) -> None:
    """Give weight files the permissions that others get in their folder: safetensors writes for the owner alone."""
    for file in files:
        plain = file.with_name(f".{file.name}")
        plain.touch(exist_ok=False)
        file.chmod(plain.stat().st_mode)
        plain.unlink()


def _save(weights: dict[str, Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})
    open_to_others([path])
