"""What to evaluate. Importable without torch, so that plans and recipes are instant."""

from __future__ import annotations

from lt2.config import Config


class ThroughputConfig(Config):
    """What to measure. The defaults are the protocol; fewer steps or repeats are for a quick look."""

    batch_size: int = 1
    context: int = 1024
    decode_steps: int = 128
    warmups: int = 3
    repeats: int = 5
