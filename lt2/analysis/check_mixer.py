"""Check a mixer, shipped or a user's own, against every parity check: `lt2 check-mixer path.py:MyMixerConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from lt2.analysis.parity import CHECKS, TOLERANCE, Sample
from lt2.config import ConfigError, MixerConfig, load_source, mixer_types
from lt2.explain import explain
from lt2.model import build


@dataclass(frozen=True)
class Check:
    """One check's outcome; `detail` says what was measured or raised."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """All checks of one mixer."""

    mixer: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{'pass' if c.passed else 'FAIL'}  {c.name:<24} {c.detail}" for c in self.checks]
        return "\n".join([f"mixer {self.mixer}", *lines])


def check_mixer(
    target: str | MixerConfig,
    *,
    fields: Mapping[str, Any] | None = None,
    dim: int = 32,
    num_heads: int = 2,
    seq_len: int = 24,
) -> Report:
    """Run every parity check on a mixer; of one that cannot be built, that is the whole report.

    Args:
        target: "path.py:MyMixerConfig" for a mixer of one's own, the `type` of a registered one, or a config.
        fields: config fields to set, where the defaults do not fit so small a model.
        dim, num_heads, seq_len: size of the model and length of the sequences to check at; seq_len is at least 12.

    Raises:
        ConfigError: no such file, class or type, or a config that is not valid at this size.
    """
    if seq_len < 12:
        raise ConfigError(f"seq_len is {seq_len}; the checks cut sequences into pieces and need at least 12")
    mixer = target if isinstance(target, MixerConfig) else load_mixer(target, fields or {})
    sample = Sample(mixer, dim=dim, num_heads=num_heads, seq_len=seq_len)
    try:
        sample.config  # noqa: B018  validates
    except ValidationError as error:
        raise ConfigError(explain(error, mixer.type)) from error
    try:
        build(sample.config)
    except Exception as error:  # the mixer's own: said once, not by every check that needs a model
        return Report(mixer.type, (Check("build", False, f"raised {type(error).__name__}: {error}"),))
    return Report(mixer.type, tuple(run_check(name, check, sample) for name, check in CHECKS.items()))


def load_mixer(target: str, fields: Mapping[str, Any]) -> MixerConfig:
    """The config that `target` names: "path.py:Class", "path.py" where that file defines one, or a registered type."""
    path, _, name = (target + ":" if target.endswith(".py") else target).rpartition(":")
    try:
        if not path:
            if target not in mixer_types():
                raise ConfigError(
                    f"no mixer {target!r}; give path.py:MyMixerConfig or one of {', '.join(mixer_types())}"
                )
            return mixer_types()[target](**fields)
        own = mixers_in(load_source(path))
        if name not in own and (name or len(own) != 1):
            there = f"it has {', '.join(own)}" if own else "it has none; see docs/extending.md"
            raise ConfigError(f"{path} defines no MixerConfig named {name!r}; {there}" if name else f"{path}: {there}")
        cls = own[name] if name else next(iter(own.values()))
        config = cls(source=path, **fields)
        config.implementation()
        return config
    except ValidationError as error:
        raise ConfigError(explain(error, target)) from error


def mixers_in(module: ModuleType) -> dict[str, type[MixerConfig]]:
    """The mixers that a file of one's own defines, by the name of their class."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, MixerConfig) and value.__module__ == module.__name__
    }


def run_check(name: str, check: Callable[[Sample], float], sample: Sample) -> Check:
    """Run one check; whatever the mixer's code raises is its outcome, not ours."""
    try:
        deviation = check(sample)
    except Exception as error:
        return Check(name, False, f"raised {type(error).__name__}: {error}")
    return Check(name, deviation <= TOLERANCE, f"largest deviation {deviation:.1e} (tolerance {TOLERANCE:.0e})")
