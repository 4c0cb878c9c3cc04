"""Frozen schemas of a looped language model. Importable without torch.

A mixer of one's own is a subclass of `MixerConfig` in a file of one's own (docs/extending.md).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, SerializeAsAny, model_validator

from lt2.extension import Config, ConfigError, Extension, load_source

__all__ = ["Config", "ConfigError", "MixerConfig", "ModelConfig", "load_source", "mixer_types"]


class Dims(Config):
    """The widths a mixer is built for, and the longest sequence it is trained on."""

    dim: int
    num_heads: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_seq_len: int | None = None


CacheSpec = dict[str, tuple[tuple[int, ...], str]]
"""Name -> (shape without the batch dimension, dtype): "compute" is the model's dtype, else a torch dtype's name."""


LOOP_METRICS = frozenset({"loss", "n_tokens", "request"})
"""Names of what the training loop adds up itself; no objective's metric has one."""

METRICS = LOOP_METRICS | {"ce", "ponder", "mean_loops"}
"""And of what the shipped objectives add up; no mixer's auxiliary loss, which is logged by its type, has one."""


class MixerConfig(Extension):
    """Base of all token mixers. A subclass with a literal `type` registers itself.

    `module` names the class that runs it, as "package.module:Class"; it is built as Class(config, dims).
    Configs of one layer that share `weights` run on one set of parameters, so a loop-level schedule may change
    only their `run_fields` (paper Fig. 3b: the mask changes per loop, the weights do not).
    """

    noun: ClassVar[str] = "mixer"
    weights: ClassVar[str]
    run_fields: ClassVar[frozenset[str]] = frozenset({"type"})

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        name = cls.model_fields["type"].default
        if isinstance(name, str) and not hasattr(cls, "weights"):
            raise ConfigError(f"mixer {cls.__name__} has no `weights`: the name of its parameters, such as its type")
        if name in METRICS:
            raise ConfigError(f"mixer {cls.__name__} has the type {name!r}, the name of a metric; rename it")

    def check(self, dims: Dims) -> None:
        """Raise ValueError, naming the rule and the values, when this mixer cannot be built at `dims`."""

    def rope_dim(self, dims: Dims) -> int | None:
        """Rotated dimensions per head, None when the mixer uses no rotary positions."""
        return None

    def rope_dims(self, dims: Dims) -> tuple[int, ...]:
        """Every rotary table this mixer reads; more than one where parts of it rotate at different widths."""
        size = self.rope_dim(dims)
        return () if size is None else (size,)

    def cache_spec(self, dims: Dims, max_len: int) -> CacheSpec:
        """What one (loop, layer) keeps per sequence while decoding up to `max_len` tokens (paper Table 1)."""
        raise TypeError(f"{type(self).__name__} must define cache_spec to be decoded or accounted for")

    def sequence_flops(self, dims: Dims, seq_len: int) -> float:
        """Forward FLOPs per token of mixing over the sequence, projections excluded, averaged over seq_len tokens."""
        raise TypeError(f"{type(self).__name__} must define sequence_flops to be accounted for")

    def shared_weights(self) -> dict[str, Any]:
        return self.model_dump(exclude=set(self.run_fields))


AnyMixer = Annotated[SerializeAsAny[MixerConfig], BeforeValidator(MixerConfig.read)]


def mixer_types() -> dict[str, type[MixerConfig]]:
    """Every registered mixer, by `type`."""
    return dict(MixerConfig.kinds)


class UniformLayout(Config):
    """One mixer in every layer of every loop."""

    type: Literal["uniform"] = "uniform"
    mixer: AnyMixer


class HybridLayout(Config):
    """Depth-level hybrid: `ratio` "a:b" places a attention layers for every b mixer layers (paper §2.3)."""

    type: Literal["hybrid"] = "hybrid"
    attention: AnyMixer
    mixer: AnyMixer
    ratio: str = "1:4"
    pattern: Literal["interleave", "bookend", "front", "back"] = "interleave"

    @property
    def parts(self) -> tuple[int, int]:
        """(attention, mixer) layers per period."""
        a, _, b = self.ratio.partition(":")
        if not (a.isdecimal() and b.isdecimal() and int(a) + int(b) > 0):
            raise ValueError(f"ratio {self.ratio!r} is not of the form 'a:b' with whole numbers, e.g. '1:4'")
        return int(a), int(b)


class LoopLayout(Config):
    """Loop-level hybrid: one mixer per loop over shared weights, e.g. full -> window 512 -> 256 -> 128."""

    type: Literal["loops"] = "loops"
    mixers: tuple[AnyMixer, ...]


class RandomLayout(Config):
    """A fresh draw of which `fraction` of the layers run attention, per training step (paper Table 3, level)."""

    type: Literal["random"] = "random"
    attention: AnyMixer
    mixer: AnyMixer
    fraction: float = Field(default=0.2, gt=0, le=1)
    votes: PositiveInt = 5
    seed: int = 0


class KeptLayout(Config):
    """Attention in the layers of `kept`, the mixer in all others: what distillation ends with (paper, Sec. Distilling).

    With `both`, every layer holds the weights of both, so that a teacher and its students of any kept set are one
    model: it runs as the student of `kept`, and distillation's first stage trains it.
    """

    type: Literal["kept"] = "kept"
    attention: AnyMixer
    mixer: AnyMixer
    kept: tuple[int, ...] = ()
    both: bool = False

    @model_validator(mode="after")
    def _check(self) -> KeptLayout:
        if self.both and self.attention.weights == self.mixer.weights:
            raise ValueError(
                f"both: {self.attention.type!r} and {self.mixer.type!r} run on one set of weights, so no layer can "
                "hold both; choose a mixer with weights of its own, e.g. gdn"
            )
        return self


Layout = Annotated[UniformLayout | HybridLayout | LoopLayout | RandomLayout | KeptLayout, Field(discriminator="type")]


FrozenKV = Literal["propagate", "share"]
"""Keys and values of a halted token in later loops: from its frozen state, or those of its last loop."""


class ActHalting(Config):
    """Adaptive computation time, as a training relaxation and frozen inference (paper App. A)."""

    type: Literal["act"] = "act"
    epsilon: float = Field(0.01, ge=0, lt=1)
    ponder_weight: float = Field(0.01, ge=0)
    frozen_kv: FrozenKV = "propagate"


class ExitGate(Config):
    """Ouro's exit gate: stop at the first loop whose cumulative exit probability reaches `threshold`.

    At 1 a token stops early only where the gate's sigmoid rounds to 1, so an untrained gate runs every loop.
    """

    type: Literal["exit_gate"] = "exit_gate"
    threshold: float = Field(1.0, gt=0, le=1)
    frozen_kv: FrozenKV = "propagate"


class LinearRope(Config):
    """Positions divided by `factor` (Chen et al. 2023)."""

    type: Literal["linear"] = "linear"
    factor: float = Field(ge=1)


class Llama3Rope(Config):
    """Llama 3.1's (Grattafiori et al. 2024): `factor` times as slow for what turns fewer than low_freq_factor times in
    original_max_seq_len tokens, as before for more than high_freq_factor times, and in between for the rest."""

    type: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_seq_len: PositiveInt

    @model_validator(mode="after")
    def _check(self) -> Llama3Rope:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        return self


class YarnRope(Config):
    """YaRN (Peng et al. 2023): from as before to `factor` times as slow, between frequencies that turn beta_fast and
    beta_slow times in original_max_seq_len tokens. Queries and keys are multiplied by attention_factor; None is that
    paper's 0.1 ln(factor) + 1."""

    type: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1)
    original_max_seq_len: PositiveInt
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> YarnRope:
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow {self.beta_slow} must be below beta_fast {self.beta_fast}")
        return self


RopeScaling = LinearRope | Llama3Rope | YarnRope
"""How rotary frequencies are slowed down for rows longer than a model was trained on."""


class ModelConfig(Config):
    """A looped language model: n_layers physical blocks applied n_loops times (paper Eq. 2)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_loops: int = 4
    num_heads: int
    layout: Layout
    ffn_hidden: PositiveInt | None = None
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: Annotated[RopeScaling, Field(discriminator="type")] | None = None
    norm_eps: float = Field(default=1e-6, ge=0)
    tie_embeddings: bool = False
    loop_residual: bool = True
    norm_each_loop: bool = False
    sandwich_norm: bool = False
    global_depth_init: bool = False
    halting: Annotated[ActHalting | ExitGate, Field(discriminator="type")] | None = None
    max_seq_len: int = 4096

    @property
    def dims(self) -> Dims:
        return Dims(
            dim=self.dim,
            num_heads=self.num_heads,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
            max_seq_len=self.max_seq_len,
        )

    @property
    def ffn_dim(self) -> int:
        """SwiGLU hidden width: 8d/3 rounded up to a multiple of 256 unless given."""
        return self.ffn_hidden or -(-8 * self.dim // 3 // 256) * 256

    def exits_at(self, threshold: float) -> Self:
        """This model with its exit gate at another threshold. Raises ConfigError if it has no gate, or for no
        probability above 0."""
        if not isinstance(self.halting, ExitGate):
            raise ConfigError(f"exit threshold {threshold}: only a model with halting.type 'exit_gate' has one")
        if not 0 < threshold <= 1:
            raise ConfigError(f"exit threshold {threshold}: give a probability above 0 and at most 1")
        return self.model_copy(update={"halting": self.halting.model_copy(update={"threshold": threshold})})

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for name in ("vocab_size", "dim", "n_layers", "n_loops", "num_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        from lt2.layout import layout, schedules

        by_weights: dict[tuple[int, str], MixerConfig] = {}
        for loop in (row for schedule in (layout(self), *schedules(self)) for row in schedule):
            for layer, mixer in enumerate(loop):
                mixer.check(self.dims)
                first = by_weights.setdefault((layer, mixer.weights), mixer)
                if first.shared_weights() != mixer.shared_weights():
                    raise ValueError(
                        f"layer {layer} runs {first.type!r} and {mixer.type!r} on one set of weights, "
                        f"so they may differ only in {sorted(mixer.run_fields - {'type'})}"
                    )
        return self


from lt2 import mixer_configs as _shipped  # noqa: E402,F401  registers the shipped mixers
