"""Frozen schemas of a looped language model. Importable without torch.

Adding a mixer of your own: subclass `MixerConfig` with a new `type` in a file of yours and give that file as
`source` ("path/to/file.py") in the config; the file is imported when the config is read, so that a recorded config
replays wherever the file is present.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError, model_validator


class ConfigError(ValueError):
    """A mistake in what the user asked for; its message is one line naming the thing and the fix."""


class Config(BaseModel):
    """Base of every configuration in LT2: frozen, and a typo is an error rather than an ignored key."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Dims(Config):
    """The widths a mixer is built for, and the longest sequence it is trained on."""

    dim: int
    num_heads: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_seq_len: int | None = None


CacheSpec = dict[str, tuple[tuple[int, ...], str]]
"""Name -> (shape without the batch dimension, dtype): "compute" is the model's dtype, else a torch dtype's name."""

_mixer_types: dict[str, type[MixerConfig]] = {}


class MixerConfig(Config):
    """Base of all token mixers. A subclass with a literal `type` registers itself.

    `module` names the class that runs it, as "package.module:Class"; it is built as Class(config, dims).
    Configs of one layer that share `weights` run on one set of parameters, so a loop-level schedule may change
    only their `run_fields` (paper Fig. 3b: the mask changes per loop, the weights do not).
    """

    module: ClassVar[str]
    weights: ClassVar[str]
    run_fields: ClassVar[frozenset[str]] = frozenset({"type"})

    type: str
    source: str | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        name = cls.model_fields["type"].default
        if not isinstance(name, str):
            return
        known = _mixer_types.get(name)
        if known is not None and known.__module__.startswith("lt2.") and known.__module__ != cls.__module__:
            raise ConfigError(f"mixer type {name!r} of {cls.__name__} is a shipped one; give your mixer another type")
        _mixer_types[name] = cls

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A config from a user's file is pickled as data: another process cannot import its class by name."""
        return (_read_mixer, (self.model_dump(),)) if self.source else super().__reduce_ex__(protocol)

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


def load_source(path: str) -> ModuleType:
    """A user's Python file as a module, imported once, under a name derived from its absolute path."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"mixer source {path!r} does not exist; give the path of the Python file that defines it")
    name = "lt2_user_" + "_".join(file.with_suffix("").parts[1:])
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _read_mixer(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("source"):
        load_source(value["source"])
    name = value.get("type")
    if name not in _mixer_types:
        near = get_close_matches(str(name), _mixer_types, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown mixer type {name!r}{hint} (known: {', '.join(sorted(_mixer_types))})")
    return _mixer_types[name].model_validate(value)


AnyMixer = Annotated[SerializeAsAny[MixerConfig], BeforeValidator(_read_mixer)]


def mixer_types() -> dict[str, type[MixerConfig]]:
    """Every registered mixer, by `type`."""
    return dict(_mixer_types)


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
        if not (a.isdigit() and b.isdigit() and int(a) + int(b) > 0):
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
    fraction: float = 0.2
    votes: int = 5
    seed: int = 0


Layout = Annotated[UniformLayout | HybridLayout | LoopLayout | RandomLayout, Field(discriminator="type")]


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

    At 1 every token runs every loop, which is right until the gate has been trained.
    """

    type: Literal["exit_gate"] = "exit_gate"
    threshold: float = Field(1.0, gt=0, le=1)
    frozen_kv: FrozenKV = "propagate"


class ModelConfig(Config):
    """A looped language model: n_layers physical blocks applied n_loops times (paper Eq. 2)."""

    vocab_size: int
    dim: int
    n_layers: int
    n_loops: int = 4
    num_heads: int
    layout: Layout
    ffn_hidden: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
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

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        for name in ("vocab_size", "dim", "n_layers", "n_loops", "num_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        from lt2.layout import layout

        by_weights: dict[tuple[int, str], MixerConfig] = {}
        for loop in layout(self):
            for layer, mixer in enumerate(loop):
                mixer.check(self.dims)
                first = by_weights.setdefault((layer, mixer.weights), mixer)
                if first.shared_weights() != mixer.shared_weights():
                    raise ValueError(
                        f"layer {layer} runs {first.type!r} and {mixer.type!r} on one set of weights, "
                        f"so they may differ only in {sorted(mixer.run_fields - {'type'})}"
                    )
        return self


def explain(error: ValidationError, source: str = "config") -> str:
    """One line per problem of a pydantic error: where, what is wrong, and the nearest valid key."""
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            key = str(item["loc"][-1])
            near = get_close_matches(key, _sibling_keys(error, item["loc"]), n=1)
            lines.append(f"{source}: {where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{source}: {where}: {message}")
    return "\n".join(lines)


def _sibling_keys(error: ValidationError, loc: tuple[Any, ...]) -> list[str]:
    """Valid keys beside an unknown one: follow the path of the error through the field annotations."""
    known = {cls.__name__: cls for cls in _subclasses(Config)}
    here = {known[error.title]} if error.title in known else set(known.values())
    for part in loc[:-1]:
        tagged = {cls for cls in here if getattr(cls.model_fields.get("type"), "default", None) == part}
        if tagged:
            here = tagged
            continue
        below = " ".join(str(cls.model_fields[part].annotation) for cls in here if part in cls.model_fields)
        named = {cls for name, cls in known.items() if re.search(rf"\b{name}\b", below)}
        here = {sub for cls in named for sub in _subclasses(cls)} or here
    return sorted({name for cls in here for name in cls.model_fields})


def _subclasses(cls: type) -> set[type]:
    return {cls}.union(*(_subclasses(sub) for sub in cls.__subclasses__()))


from lt2 import mixer_configs as _shipped  # noqa: E402,F401  registers the shipped mixers
