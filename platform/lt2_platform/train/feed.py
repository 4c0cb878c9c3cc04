"""Where a worker's batches come from: packed shards, read by itself or by Ray Data, or text it tokenises meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from lt2.config import ConfigError
from lt2.train.config import TrainConfig
from lt2.train.loop import TrainState
from lt2_platform.data.live.live import CURSORS, DEPTH, LiveDataset, write_cursors
from lt2_platform.data.live.on_the_fly import KEY
from lt2_platform.data.stream import PackedDataset, load_manifest
from lt2_platform.storage import Storage
from lt2_platform.train.ranks import gather

Reader = Callable[..., Iterator[dict[str, Any]]]
"""As lt2_platform.data.ray_stream.ray_batches."""


@dataclass(frozen=True)
class Feed:
    """The training data of one rank, which is rank `rank` of `world_size`."""

    dataset: PackedDataset | LiveDataset
    config: TrainConfig
    rank: int
    world_size: int

    @classmethod
    def open(cls, data: str, config: TrainConfig, rank: int, world_size: int) -> Feed:
        """Raises ConfigError if `data` is no finished dataset."""
        dataset = LiveDataset(data) if KEY in load_manifest(data) else PackedDataset(data, "train")
        return cls(dataset, config, rank, world_size)

    def packed(self) -> PackedDataset:
        """The dataset, for what needs sequences by number. Raises ConfigError for one without."""
        if isinstance(self.dataset, LiveDataset):
            raise ConfigError(f"{self.dataset.uri} is tokenised while training, a stored top-k has nothing of it")
        return self.dataset

    def batches(
        self,
        state: TrainState,
        found: str | None,
        out: str,
        skip: Collection[int],
        *,
        prefetch: int,
        reader: Reader | None,
    ) -> Any:
        """A generator of batches from state.position; closing it ends what reads ahead.

        found: the checkpoint that `state` is of; out: the run's folder; reader: reads packed shards instead of this
        process.
        """
        config, dataset = self.config, self.dataset
        common: dict[str, Any] = {
            "position": state.position,
            "global_batch_size": config.global_batch_size,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": config.seed,
        }
        if isinstance(dataset, LiveDataset):
            place = Storage(found) if found is not None else None
            cursors = place.read_bytes(CURSORS) if place is not None and place.exists(CURSORS) else None
            deep = {"prefetch": max(prefetch, DEPTH), "quarantine": Storage(out).join("quarantine")}
            return dataset.batches(**common, **deep, cursors=cursors)
        if reader is None:
            return dataset.batches(**common, prefetch=prefetch)
        passed_over = sum(position >= state.position for position in skip)
        return reader(dataset, **common, prefetch=prefetch, limit=config.steps - state.step + passed_over)

    def files(self, state: TrainState) -> dict[str, bytes]:
        """What a checkpoint at `state` must hold to go on in the data; {} where the position is enough. Collective."""
        if not isinstance(self.dataset, LiveDataset):
            return {}
        parts = gather(self.dataset.cursors(state.position))
        return {CURSORS: write_cursors(state.position, self.config.global_batch_size, parts)}
