"""Frozen schemas of a looped language model. Importable without torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A mistake in what the user asked for; its message is one line naming the thing and the fix."""


class Config(BaseModel):
    """Base of every configuration in LT2: frozen, and a typo is an error rather than an ignored key."""

    model_config = ConfigDict(frozen=True, extra="forbid")
