"""Export a model for `from_pretrained`, with a parity certificate beside its weights.

    <folder>/config.json, generation_config.json, model*.safetensors  what transformers reads
    <folder>/<tokenizer files>
    <folder>/parity.json                                               what was compared, how closely, which files

The files are written to a neighbouring folder, loaded back from there, certified, and only then moved into place.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from lt2.config import ConfigError
from lt2.interop.certificate import LENGTHS, Check, ParityError, certify
from lt2.interop.shards import open_to_others
from lt2.interop.transformers import LT2ForCausalLM
from lt2.layout import loops_text
from lt2.model import LoopedLM
from lt2.packages import version_of
from lt2.train.parallel import cast_weights

SCHEMA_VERSION = 1
CERTIFICATE = "parity.json"


def export_checkpoint(
    model: LoopedLM,
    folder: str | Path,
    *,
    tokenizer: Any | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    begin: bool = True,
    stop_ids: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    lengths: tuple[int, ...] = LENGTHS,
    device: str = "cpu",
    source: Mapping[str, Any] | None = None,
) -> list[Check]:
    """Write model to a new folder in the Hugging Face layout and certify it; returns the passed checks.

    tokenizer: an object with save_pretrained, or the path of a tokenizer file or folder; a tokenizer.json without a
    tokenizer_config.json is told to begin texts with bos_id if `begin` (`name_special_tokens`), all else is copied as
    it is.
    stop_ids: tokens besides eos_id at which `generate()` ends, such as a chat template's end of turn.
    dtype: convert weights first (decays stay fp32); None keeps each parameter's own. device: where certification runs.
    source: where the model comes from, as JSON; the certificate records it.

    Raises:
        ConfigError: the folder exists, or the tokenizer does not.
        ParityError: the reloaded model differs from the one in memory; nothing is left behind.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists; export to a new folder or remove it first")
    if dtype is not None:
        model = converted(model, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        staged = Path(name) / "model"
        write_model(model, staged, bos_id, eos_id, stop_ids)
        if tokenizer is not None:
            write_tokenizer(tokenizer, staged)
            name_special_tokens(staged, bos_id=bos_id, eos_id=eos_id, begin=begin)
        checks = certify(model, load_wrapped(staged), lengths=lengths, device=device)
        failed = [check for check in checks if not check.passed]
        if failed:
            worst = "; ".join(
                f"{c.name} at {loops_text(c.n_loops)}: {c.error:.1e} > {c.tolerance:.0e}" for c in failed[:3]
            )
            raise ParityError(f"not exported: {len(failed)} of {len(checks)} parity checks fail ({worst})")
        certificate = describe(staged, checks, lengths, source)
        (staged / CERTIFICATE).write_text(json.dumps(certificate, indent=2) + "\n")
        staged.rename(folder)
    return checks


def verify_certificate(folder: str | Path) -> dict[str, Any]:
    """The certificate of an exported folder whose files are still the certified ones."""
    path = Path(folder) / CERTIFICATE
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {folder}; give one that `lt2 export` wrote, or a copy of it")
    if not path.is_file():
        raise ConfigError(f"{folder} has no {CERTIFICATE}; export the checkpoint again")
    try:
        certificate = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); copy or export it again") from None
    if not isinstance(certificate, dict) or not isinstance(certificate.get("files"), dict):
        raise ConfigError(f"{path} names no files; export the checkpoint again")
    for name, digest in certificate["files"].items():
        file = Path(folder) / name
        if not file.is_file():
            raise ConfigError(f"{folder}: {name} is certified but not there; copy the whole folder again")
        if sha256(file) != digest:
            raise ConfigError(f"{folder}: {name} is not the file that was certified; copy or export it again")
    return certificate


def load_wrapped(folder: str | Path) -> LT2ForCausalLM:
    return LT2ForCausalLM.from_pretrained(folder, local_files_only=True)


def converted(model: LoopedLM, dtype: torch.dtype) -> LoopedLM:
    """A copy whose parameters are in dtype, but for those that rounding would spoil."""
    copied = copy.deepcopy(model)
    cast_weights(copied, dtype)
    return copied


def write_model(model: LoopedLM, folder: Path, bos_id: int | None, eos_id: int | None, stop_ids: Sequence[int]) -> None:
    wrapped = LT2ForCausalLM.of(model, bos_token_id=bos_id, eos_token_id=eos_id)
    ends = list(dict.fromkeys([*([] if eos_id is None else [eos_id]), *stop_ids]))
    wrapped.generation_config = GenerationConfig(
        bos_token_id=bos_id, eos_token_id=ends if len(ends) > 1 else eos_id, pad_token_id=eos_id
    )
    wrapped.save_pretrained(folder, max_shard_size="5GB")
    open_to_others(sorted(folder.glob("*.safetensors")))


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
        return
    source = Path(tokenizer)
    if not source.exists():
        raise ConfigError(f"tokenizer {tokenizer!r} does not exist; give a tokenizer file, its folder, or the object")
    for file in [source] if source.is_file() else sorted(f for f in source.iterdir() if f.is_file()):
        if (folder / file.name).exists():
            raise ConfigError(
                f"tokenizer file {file.name} would overwrite the model's; give only the tokenizer's files"
            )
        shutil.copy(file, folder / file.name)


def name_special_tokens(folder: Path, *, bos_id: int | None, eos_id: int | None, begin: bool) -> None:
    """Have `AutoTokenizer` know BOS and EOS and, with `begin`, begin every text with BOS, as training does then.

    Only for a tokenizer.json that came without a tokenizer_config.json: that says such things itself.
    """
    file, config = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if (bos_id is None and eos_id is None) or config.exists() or not file.exists():
        return
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(file))
    bos, eos = (None if index is None else tokenizer.id_to_token(index) for index in (bos_id, eos_id))
    if begin and bos is not None and tokenizer.encode("a").ids[:1] != [bos_id]:
        first = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, bos_id)])
        before = tokenizer.post_processor
        tokenizer.post_processor = first if before is None else processors.Sequence([before, first])
        tokenizer.save(str(file))
    special = {"bos_token": bos, "eos_token": eos, "pad_token": eos}
    named = {name: token for name, token in special.items() if token is not None}
    config.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}, indent=2) + "\n")


def describe(
    folder: Path, checks: Sequence[Check], lengths: tuple[int, ...], source: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The certificate: what was checked on which files by which versions."""
    return {
        "schema_version": SCHEMA_VERSION,
        "claim": "logits of the reloaded files equal those of the exported model, one row at a time without a cache",
        "error": "max |difference| / max(1, max |logit|)",
        "source": None if source is None else dict(source),
        "row_lengths": list(lengths),
        "checks": [check.as_dict() for check in checks],
        "files": {file.name: sha256(file) for file in sorted(folder.iterdir())},
        "versions": {name: version_of(name) for name in ("lt2", "torch", "transformers", "safetensors")},
    }


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
