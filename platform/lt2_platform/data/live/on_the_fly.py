"""The listing of a corpus that is tokenised while training, as its manifest keeps it under KEY.

Nothing of the corpus is read for it but a few documents of the held-out units, which become the validation split, and
of every local file some small blocks that tell whether it is still the same when a run begins or goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.data.live.lanes import LivePlan, LiveUnit
from lt2_platform.data.sources import listing as sources
from lt2_platform.data.sources.configs import MixtureConfig
from lt2_platform.data.sources.listing import Slice, SourceFile
from lt2_platform.data.stream import shuffled
from lt2_platform.data.units import Unit
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS, out_of_reach

if TYPE_CHECKING:
    from lt2_platform.data.prepare import PrepareConfig

KEY = "on_the_fly"
FEWEST_UNITS = 1024  # where units of 128 KiB, the smallest, allow
HELD_OUT_UNITS, HELD_OUT_DOCUMENTS = 64, 256  # at most so many units per source, and of each so many documents


@dataclass(frozen=True)
class Listing:
    """Files, the units of each source, and which of them are held out."""

    files: tuple[SourceFile, ...]
    units: tuple[tuple[LiveUnit, ...], ...]
    held_out: tuple[tuple[int, ...], ...]

    def held_out_work(self) -> list[Unit]:
        """What makes the validation split: the first documents of every held-out unit."""
        chosen = [own[index] for own, indices in zip(self.units, self.held_out, strict=True) for index in indices]
        return [
            Unit(index, tuple((self.files[part.file], part) for part in unit), HELD_OUT_DOCUMENTS)
            for index, unit in enumerate(chosen)
        ]

    def record(self) -> dict[str, Any]:
        """As JSON, for the manifest."""
        return {
            "files": [asdict(file) for file in self.files],
            "units": [[[[part.file, part.start, part.stop] for part in unit] for unit in own] for own in self.units],
            "held_out": [list(indices) for indices in self.held_out],
        }

    @classmethod
    def read(cls, record: dict[str, Any]) -> Listing:
        return cls(
            tuple(SourceFile(**file) for file in record["files"]),
            tuple(tuple(tuple(Slice(*part) for part in unit) for unit in own) for own in record["units"]),
            tuple(tuple(indices) for indices in record["held_out"]),
        )

    def check_unchanged(self) -> None:
        """Raise ConfigError if a file is missing or another than when it was listed."""
        with ThreadPoolExecutor(16) as pool:
            changed = [change for change in pool.map(_change, self.files) if change]
        if changed:
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            raise ConfigError(
                f"the corpus has changed since it was listed: {changed[0]}{more}; restore it, or prepare it again for "
                "a new run"
            )


def _change(file: SourceFile) -> str | None:
    try:
        size, version = sources.version_of(file.path, sampled=True)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except STORAGE_ERRORS as error:  # nothing is known of the file
        raise ConfigError(out_of_reach(file.name, error)) from error
    if size != file.bytes:
        return f"{file.name} has {size:,} bytes instead of {file.bytes:,}"
    return None if version == file.version else f"{file.name} has other content"


def plan(config: PrepareConfig, files: Sequence[SourceFile], bad: Sequence[str] = ()) -> Listing:
    """The listing of a config's files; of each source `validation_fraction` of the units, 1 to 64, are held out.

    Raises ConfigError for a source with too few units for that, and as `plan_units` does.
    """
    units: list[list[LiveUnit]] = [[] for _ in config.parts]
    # Small corpora in smaller units: a batch then has a lane for each, and epochs are shuffled more finely.
    smaller = min(sources.UNIT_BYTES, sum(file.bytes for file in files) // FEWEST_UNITS)
    for unit in sources.plan_units(files, config.parts, max(sources.PIECE_BYTES, smaller), bad):
        units[files[unit[0].file].source].append(_joined(unit))
    held_out = []
    for source, own in enumerate(units):
        count = min(max(1, round(config.validation_fraction * len(own))), HELD_OUT_UNITS)
        count = count if config.validation_fraction else 0
        if count >= len(own):
            raise ConfigError(
                f"a source of {len(own)} unit(s) is too small to tokenise on the fly and hold some out; "
                "set prepare.tokenize to ahead"
            )
        held_out.append(tuple(sorted(shuffled(len(own), config.seed, source)[:count].tolist())))
    return Listing(tuple(files), tuple(map(tuple, units)), tuple(held_out))


def _joined(unit: Sequence[Slice]) -> LiveUnit:
    """The unit with each run of neighbouring slices of a file joined into one slice."""
    joined: list[Slice] = []
    for part in unit:
        if joined and joined[-1].file == part.file and joined[-1].stop == part.start:
            part = replace(joined.pop(), stop=part.stop)
        joined.append(part)
    return tuple(joined)


def live_plan(
    uri: str, manifest: dict[str, Any], config: PrepareConfig, *, seed: int, quarantine: str | None = None
) -> LivePlan:
    """What training streams from such a dataset; config: the manifest's own."""
    listing = Listing.read(manifest[KEY])
    kept = [
        tuple(unit for index, unit in enumerate(own) if index not in indices)
        for own, indices in zip(listing.units, map(set, listing.held_out), strict=True)
    ]
    tokenizer, source = manifest["tokenizer"], config.source
    shares = source.sources if isinstance(source, MixtureConfig) else ()
    return LivePlan(
        files=listing.files,
        sources=tuple(config.parts),
        units=tuple(kept),
        weights=tuple(share.weight for share in shares if share.weight is not None) or (1.0,),
        tokenizer=tokenizer | {"file": Storage(uri).join(tokenizer["file"]) if tokenizer["file"] else None},
        width=config.seq_len + 1,
        seed=seed,
        max_document_tokens=config.max_document_tokens,
        masked="loss_mask" in manifest,
        quarantine=quarantine,
        without=Storage(uri).join(manifest["decontaminated"]["file"]) if config.decontaminate is not None else None,
    )
