"""Rotary positions in config.json files: `rope_theta` and `rope_scaling`, or both in `rope_parameters`."""

from __future__ import annotations

from typing import Any

from lt2.config import ConfigError, ModelConfig

ORIGINAL = "original_max_position_embeddings"
FIELDS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
    "yarn": {"factor", "beta_fast", "beta_slow", "attention_factor", ORIGINAL},
}


def rope_from(config: dict[str, Any], *, default_theta: float = 10_000.0) -> dict[str, Any]:
    """Our rope_theta and rope_scaling. Raises ConfigError for what we do not have of them."""
    given_in = [config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    kinds = list(dict.fromkeys(found.get("rope_type") or found.get("type") or "default" for found in given_in))
    if len(kinds) > 1:  # as where a scaling is added to a config that newer transformers wrote
        raise ConfigError(
            f"config has rope_scaling of type {kinds[0]!r} and rope_parameters of type {kinds[1]!r}; keep one, with "
            "rope_theta"
        )
    told = (config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})
    theta = told.pop("rope_theta", None) or config.get("rope_theta") or default_theta
    kind = kinds[0] if kinds else "default"
    for name in ("rope_type", "type"):
        told.pop(name, None)
    share = told.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1
    if share != 1:
        raise ConfigError(
            f"config has partial_rotary_factor={share}; only heads that are rotated whole can be imported"
        )
    given = {name: value for name, value in told.items() if value is not None}
    if kind != "default" and kind not in FIELDS:
        raise ConfigError(f"config has rope_scaling of type {kind!r}; only {', '.join(FIELDS)} can be imported")
    if unknown := sorted(given.keys() - FIELDS.get(kind, set())):
        raise ConfigError(f"config has rope_scaling {kind!r} with {', '.join(unknown)}, which cannot be imported")
    if kind == "default":
        return {"rope_theta": theta}
    scaling = {"type": kind} | {name: value for name, value in given.items() if name != ORIGINAL}
    if ORIGINAL in FIELDS[kind]:
        lengths = {length for length in (given.get(ORIGINAL), config.get(ORIGINAL)) if length}
        if len(lengths) > 1:  # versions of transformers differ in which one they take
            raise ConfigError(f"config has {ORIGINAL} twice, {sorted(lengths)}; keep the one it was trained with")
        original = next(iter(lengths), config.get("max_position_embeddings"))
        scaling["original_max_seq_len"] = original
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope_to(config: ModelConfig) -> dict[str, Any]:
    """What `rope_from` reads: rope_theta and rope_scaling (None without one)."""
    described: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump(exclude_none=True)
        kind = scaling.pop("type")
        if "original_max_seq_len" in scaling:
            scaling[ORIGINAL] = scaling.pop("original_max_seq_len")
        described["rope_scaling"] = {"rope_type": kind} | scaling
    return described
