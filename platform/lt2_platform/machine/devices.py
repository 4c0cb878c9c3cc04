"""On what a process of ours computes."""

from __future__ import annotations

import torch


def this_device() -> str:
    """ "cuda" where there is a card, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
