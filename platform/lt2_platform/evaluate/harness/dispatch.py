"""Batches of requests, formed once and answered by any number of model actors, each answer kept on disk.

What is in a batch depends only on the set of requests (duplicates asked once, sorted by length, then content), never on
their order, on how many actors there are, or on which batches an earlier attempt has answered. So the numbers are
bitwise the same on 1 or N actors of one kind, and a killed evaluation continues on another number of them. An answer is
found again by the same code on the same kind of device only: one from before a fix is computed anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from lt2.config import ModelConfig
from lt2_platform.data.tokenizers.tokenize import Tokenizer
from lt2_platform.evaluate.harness.code import code_sha256
from lt2_platform.evaluate.harness.models import Loaded, ModelSource, load
from lt2_platform.evaluate.harness.scoring import Pair, Scorer
from lt2_platform.failures import portably
from lt2_platform.json_values import sha256_of
from lt2_platform.machine.devices import this_device
from lt2_platform.progress import Progress
from lt2_platform.storage import Storage
from lt2_platform.storage_errors import STORAGE_ERRORS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """One batch: pairs to score, or prompts to continue until one of the strings `until` or `stop_ids` appears."""

    kind: Literal["loglikelihood", "generate"]
    pairs: tuple[Pair, ...] = ()
    prompts: tuple[tuple[int, ...], ...] = ()
    max_new_tokens: int = 0
    until: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def key(self) -> str:
        """The name under which its answer is kept; it does not depend on who answers."""
        return sha256_of(asdict(self))[:32]


@dataclass
class Tally:
    """What all batches cost: tokens by the loops they ran, Σ tokens · length, and how many were found on disk."""

    loops: dict[int, int] = field(default_factory=dict)
    positions: float = 0.0
    batches: int = 0
    resumed: int = 0

    def add(self, answer: dict[str, Any], *, resumed: bool) -> None:
        for loops, tokens in answer["loops"].items():
            self.loops[int(loops)] = self.loops.get(int(loops), 0) + tokens
        self.positions += answer["positions"]
        self.batches += 1
        self.resumed += resumed


def batched(items: Sequence[Any], size: int, length: Callable[[Any], int]) -> list[tuple[Any, ...]]:
    """Distinct items, longest first (so that a batch that does not fit memory fails at once), `size` to a batch."""
    order = sorted(set(items), key=lambda item: (-length(item), item))
    return [tuple(order[start : start + size]) for start in range(0, len(order), size)]


def answer(scorer: Scorer, tokenizer: Tokenizer, work: Work) -> dict[str, Any]:
    """JSON-able {"results": [[log-likelihood, greedy], …] or [text, …], "loops", "positions"}."""
    if work.kind == "loglikelihood":
        scored = scorer.loglikelihoods(work.pairs)
        results = [list(result) for result in scored.results]
    else:
        stop = lambda ids: ids[-1] in work.stop_ids or any(text in tokenizer.decode(ids) for text in work.until)  # noqa: E731
        scored = scorer.continuations(work.prompts, work.max_new_tokens, stop)
        said = [ids[:-1] if ids and ids[-1] in work.stop_ids else ids for ids in scored.results]
        results = [cut(tokenizer.decode(ids), work.until) for ids in said]
    return {"results": results, "loops": {str(n): c for n, c in scored.loops.items()}, "positions": scored.positions}


def cut(text: str, until: Sequence[str]) -> str:
    """`text` up to the first of the strings."""
    for mark in until:
        text = text.split(mark)[0] if mark else text
    return text


class Dispatcher:
    """Answers batches here (`actors` 0) or on Ray actors, each with its own copy of the model and the same threads.

    With Ray, an actor that dies is restarted and its batch asked again.
    """

    def __init__(
        self,
        source: ModelSource,
        out: str,
        *,
        actors: int = 0,
        scorer: Scorer | None = None,
        cpus: int = 1,
        looped: ModelConfig | None = None,
    ) -> None:
        """`scorer`: the loaded model for answering here, so that it need not be loaded again; `looped`: its config."""
        self.source, self.storage, self.actors, self.cpus = source, Storage(out), actors, cpus
        self.looped, self.scorer = looped, scorer
        self.tally = Tally()
        self.pool: list[Any] = []

    @cached_property
    def kept(self) -> str:
        """Name of the folder, in `batches`, of what this model answers by this code on this kind of device."""
        return sha256_of([self.source.identity(), code_sha256(self.looped), self.device])[:16]

    @property
    def device(self) -> str:
        """The kind of device that answers, "cuda" or "cpu"."""
        if self.actors:
            return "cuda" if self._gpus() else "cpu"
        return this_device()

    def run(self, works: Sequence[Work], progress: Progress) -> list[list[Any]]:
        """The results of each batch, in order; what `out` already holds is not asked again."""
        names = [f"batches/{self.kept}/{work.key()}.json" for work in works]
        # Read once: another evaluation that ends, of other code, may remove them.
        found = {name: stored for name in names if (stored := self._stored(name)) is not None}
        known = set(found)
        missing = [(name, work) for name, work in zip(names, works) if name not in known]
        for done, (name, given) in enumerate(self.answers(missing), start=1):
            self.storage.write_json(name, given)
            found[name] = given
            progress({"batch": done + len(known), "batches": len(works)})
        for name in names:
            self.tally.add(found[name], resumed=name in known)
        return [found[name]["results"] for name in names]

    def _stored(self, name: str) -> dict[str, Any] | None:
        try:
            return self.storage.read_json(name)
        except FileNotFoundError:
            return None

    def forget_others(self) -> None:
        """Drop what other weights, code or devices have answered here: for an evaluation that has ended."""
        try:
            for name in self.storage.list("batches"):
                if name != self.kept:
                    self.storage.delete(f"batches/{name}")
        except STORAGE_ERRORS as error:  # they are in nobody's way
            log.warning("old answers stay in %s/batches: %s", self.storage.root, error)

    def answers(self, missing: Sequence[tuple[str, Work]]):
        """Yield (name, answer) in the order in which they are answered."""
        if not missing:
            return
        if not self.actors:
            if self.scorer is None:
                self.scorer = load(self.source).scorer
            for name, work in missing:
                yield name, answer(self.scorer, self.source.load_tokenizer(), work)
            return
        import ray
        from ray.util import ActorPool

        from lt2_platform.train.on_ray.places import check_places

        if not self.pool:
            gpus = self._gpus()
            request = {"CPU": self.cpus} | ({"GPU": gpus} if gpus else {})
            check_places(self.actors, request, "--actors (num_workers of a step)", per_worker="cpus_per_actor")
            # No limit of retries: until a lost node is noticed, each fails at once. The limit is that of restarts.
            actor = ray.remote(num_cpus=self.cpus, num_gpus=gpus, max_restarts=3, max_task_retries=-1)(ModelActor)
            self.pool = [actor.remote(self.source, self.cpus) for _ in range(self.actors)]
        ask = lambda actor, item: actor.answer.remote(*item)  # noqa: E731
        yield from ActorPool(self.pool).map_unordered(ask, list(missing))

    def _gpus(self) -> int:
        """How many GPUs each actor takes: one where the cluster has any."""
        import ray

        return 1 if ray.cluster_resources().get("GPU", 0) else 0


class ModelActor:
    """One copy of the model on a Ray worker."""

    def __init__(self, source: ModelSource, threads: int):
        torch.set_num_threads(threads)  # sums may be split by thread, and all actors must split them alike
        self.source = source

    @cached_property
    def loaded(self) -> Loaded:
        """Not made with the actor: of what is raised there Ray says that the actor died."""
        return load(self.source)

    @portably
    def answer(self, name: str, work: Work) -> tuple[str, dict[str, Any]]:
        return name, answer(self.loaded.scorer, self.loaded.tokenizer, work)
