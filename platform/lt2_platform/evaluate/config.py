"""What to evaluate, as configs. Importable without torch, so that plans and recipes are instant.

A task of one's own is a subclass of `TaskConfig` in a file of one's own: its `module` names a function
(config, model, context: lt2_platform.evaluate.tasks.TaskContext) -> rows.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from lt2.config import Config, ConfigError, Layout, ModelConfig
from lt2.extension import Extension
from lt2_platform.data.sources.configs import Template

HeldOut = Literal["all", "selection", "report"]
"""Of the held-out rows: all, the half by which distillation chooses layers, or the half that no choice has seen."""


def check_depths(loops: tuple[int, ...]) -> tuple[int, ...]:
    """`loops`. Raises ConfigError for a depth below 1, or given twice."""
    if min(loops, default=1) < 1 or len(set(loops)) < len(loops):
        raise ConfigError(f"loops {list(loops)}: give different depths of at least 1, e.g. [1, 2, 4, 8]")
    return loops


Depths = Annotated[tuple[int, ...], AfterValidator(check_depths)]
"""Numbers of loops to evaluate at; none means the model's own."""


def check_thresholds(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    """`thresholds`. Raises ConfigError for one that is no probability above 0, or given twice."""
    if not all(0 < threshold <= 1 for threshold in thresholds) or len(set(thresholds)) < len(thresholds):
        raise ConfigError(
            f"exit_thresholds {list(thresholds)}: give different probabilities above 0 and at most 1, e.g. [0.5, 0.9]"
        )
    return thresholds


ExitThresholds = Annotated[tuple[float, ...], AfterValidator(check_thresholds)]
"""Thresholds of the exit gate to evaluate at, besides the model's own."""


def depth_name(n_loops: int, early_exit: bool = False, exit_threshold: float | None = None) -> str:
    """The folder of what was evaluated at a depth: "loops-4", "loops-4-early-exit", "loops-4-early-exit-0.6"."""
    at = "" if exit_threshold is None else f"-{exit_threshold}"
    return f"loops-{n_loops}" + f"-early-exit{at}" * early_exit


class TaskConfig(Extension):
    """Base of all tasks."""

    noun: ClassVar[str] = "task"

    def run(self, model: Any, context: Any) -> list[dict[str, Any]]:
        """The task's rows: flat dicts with `metric` and `value`, and maybe `stderr`, `n`, `unit` and `note`."""
        return self.implementation()(self, model, context)


AnyTask = Annotated[SerializeAsAny[TaskConfig], BeforeValidator(TaskConfig.read)]


class PerplexityConfig(TaskConfig):
    """Loss (nats per token) and perplexity on the held-out split of the data.

    `name` stands in results in place of "perplexity": where a run is evaluated on several datasets, say.
    """

    module: ClassVar[str] = "lt2_platform.evaluate.validation:perplexity_rows"
    type: Literal["perplexity"] = "perplexity"
    name: str | None = Field(default=None, pattern=r"^[\w.+-]+$")
    batch_size: int = Field(default=8, ge=1)
    max_sequences: int | None = Field(default=None, ge=1)
    document_mask: bool = False
    held_out: HeldOut = "all"


class PositionsConfig(TaskConfig):
    """Loss (nats per token) by how much of its document a model has read before: whether it uses a long context.

    The held-out documents are cut into spans of `length` predicted tokens, each read from its beginning with nothing
    before it, so that every position is of the same spans; shorter documents are left out. By default it is the rows'
    seq_len, or as often halved as it takes for 32 spans. `name` as of `perplexity`.
    """

    module: ClassVar[str] = "lt2_platform.evaluate.positions:positions_rows"
    type: Literal["positions"] = "positions"
    name: str | None = Field(default=None, pattern=r"^[\w.+-]+$")
    length: int | None = Field(default=None, ge=2)
    batch_size: int = Field(default=8, ge=1)
    max_spans: int | None = Field(default=None, ge=1)
    held_out: HeldOut = "all"


class ThroughputConfig(TaskConfig):
    """What to measure. The defaults are the protocol; fewer steps or repeats are for a quick look."""

    module: ClassVar[str] = "lt2_platform.evaluate.throughput.task:throughput_rows"
    type: Literal["throughput"] = "throughput"
    batch_size: int = Field(default=1, ge=1)
    context: int = Field(default=1024, ge=1)
    decode_steps: int = Field(default=128, ge=1)
    warmups: int = Field(default=3, ge=0)
    repeats: int = Field(default=5, ge=1)


class DiagnosticsConfig(TaskConfig):
    """Sink mass, largest activation and RMS at every (loop, layer), over the beginnings of held-out documents."""

    module: ClassVar[str] = "lt2_platform.evaluate.diagnostics:diagnostics_rows"
    type: Literal["diagnostics"] = "diagnostics"
    documents: int = Field(default=16, ge=1)
    length: int = Field(default=512, ge=16)


class HarnessConfig(TaskConfig):
    """lm-eval tasks on data from an evaluation pack: a suite of the paper, or tasks by name.

    `num_fewshot` examples (default: as many as the task's definition says) come from the pack's training split, drawn
    with `seed`, unless the definition has its own. An empty `pack` is that of the evaluate step. `max_length` is the
    window in tokens (default: the model's own, or the length that needles and RULER's prompts were made for).

    `chat` asks each item as a conversation: true by the template of the model's training (a Hugging Face folder's own),
    a name by that one. Examples are then turns of their own, unless `multiturn` is false, and `system` is what the
    system's turn says, before the task's own description.
    """

    module: ClassVar[str] = "lt2_platform.evaluate.harness.run:harness_rows"
    type: Literal["harness"] = "harness"
    pack: str = ""
    suite: Literal["core", "recall", "needles", "ruler", "reasoning"] | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = Field(default=None, ge=1)
    num_fewshot: int | None = Field(default=None, ge=0)
    seed: int = 1234
    batch_size: int = Field(default=16, ge=1)
    max_length: int | None = Field(default=None, ge=2)
    cpus_per_actor: int = Field(default=1, ge=1)
    chat: Literal[False, True, Template] = False
    multiturn: bool = True
    system: str = ""

    @model_validator(mode="after")
    def _check(self) -> HarnessConfig:
        if not self.chat and (self.system or not self.multiturn):
            field = "system" if self.system else "multiturn"
            raise ValueError(f"{field} is of conversations; set chat too (true, or a template's name)")
        if (self.suite is None) == (not self.tasks):
            raise ValueError("give either a suite (core, recall, needles, ruler, reasoning) or tasks by name")
        return self


RECALL_WORDS = 17  # that a program is written in, before the numbers


def program_length(n_bits: int, n_swaps: int) -> int:
    """Tokens of a program of state-based recall."""
    return (2 * n_bits + 4) + 20 + 17 * n_swaps


class StateRecallConfig(Config):
    """The curriculum of state-based recall (paper, Sec. 3.6): which n = m a model learns. The defaults are the paper's.

    A stage is passed when the accuracy over all asserts of `eval_examples` programs, looked at every `eval_every` steps
    and at the last, reaches `threshold` within `max_steps`; weights and optimizer then go on to the next stage. The
    vocabulary is that of the largest stage.

    Two settings make small budgets go further; neither is in the paper. `opening` are programs of (bits, swaps) to
    learn before the stages, by the same rule: with one swap, looking up a bit is learned before swaps are followed.
    `rope_theta` is the base of the rotary frequencies: finding the i-th bit means telling positions two apart, which
    of 10,000's frequencies only the few highest can.
    """

    layout: Layout
    n_loops: int = Field(default=1, ge=1)
    n_layers: int = Field(default=4, ge=1)
    dim: int = Field(default=256, ge=1)
    num_heads: int = Field(default=4, ge=1)
    stages: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    opening: tuple[tuple[int, int], ...] = ()
    rope_theta: float = Field(default=10_000.0, gt=1)
    threshold: float = Field(default=0.9, gt=0, le=1)
    max_steps: int = Field(default=100_000, ge=1)
    eval_every: int = Field(default=500, ge=1)
    eval_examples: int = Field(default=256, ge=1)
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=3e-4, gt=0)
    warmup_steps: int = Field(default=500, ge=0)
    seed: int = 0

    @property
    def model(self) -> ModelConfig:
        """The model, with the vocabulary and length of the largest stage's programs; one loop is a plain stack."""
        largest = max(self.stages)
        return ModelConfig(
            vocab_size=RECALL_WORDS + largest,
            dim=self.dim,
            n_layers=self.n_layers,
            n_loops=self.n_loops,
            num_heads=self.num_heads,
            layout=self.layout,
            loop_residual=self.n_loops > 1,
            max_seq_len=program_length(largest, largest),
            rope_theta=self.rope_theta,
        )

    @property
    def curriculum(self) -> tuple[tuple[int, int], ...]:
        """The (bits, swaps) of every program to pass, in order."""
        return (*self.opening, *((n, n) for n in self.stages))

    @model_validator(mode="after")
    def _stages_grow(self) -> StateRecallConfig:
        bits, swaps = [n for n, _ in self.curriculum], [n for _, n in self.curriculum]
        grows = bits == sorted(bits) and swaps == sorted(swaps) and len(set(self.curriculum)) == len(bits)
        if not self.stages or not grows or bits[0] < 5 or swaps[0] < 1:
            raise ValueError(
                f"opening {self.opening} and stages {self.stages} must grow, from at least 5 bits (five variables need "
                "five indices) and one swap"
            )
        _ = self.model  # a mixer that cannot be built of this size is a mistake of the config
        return self
