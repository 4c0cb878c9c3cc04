"""A model's actor, without Ray."""

from __future__ import annotations

import pytest
import torch

from lt2.config import ConfigError
from lt2_platform.evaluate.harness.dispatch import ModelActor
from lt2_platform.evaluate.harness.models import ModelSource


def test_a_model_that_cannot_be_loaded_says_so_and_not_that_its_actor_died(tmp_path):
    actor = ModelActor(ModelSource(str(tmp_path)), torch.get_num_threads())
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        actor.answer("name", None)  # type: ignore[arg-type]
