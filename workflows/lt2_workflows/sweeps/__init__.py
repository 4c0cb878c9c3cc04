"""Sweeps: many trainings as one step, over a grid or with Ray Tune's search. Recipes import from here."""

from lt2_workflows.sweeps.config import SweepResources, SweepStep, TrialConfig
from lt2_workflows.sweeps.step import run_sweep

__all__ = ["SweepResources", "SweepStep", "TrialConfig", "run_sweep"]
