"""References to what other steps made, by kind."""

from __future__ import annotations

from typing import ClassVar

from lt2_workflows.graph import Ref


class DatasetRef(Ref):
    """A packed dataset."""

    accepts: ClassVar[str] = "dataset"


class CheckpointRef(Ref):
    """A training run; its newest checkpoint is meant."""

    accepts: ClassVar[str] = "checkpoint"


class PackRef(Ref):
    """A pack of test items."""

    accepts: ClassVar[str] = "pack"


class EvaluationRef(Ref):
    """The numbers of an evaluate step."""

    accepts: ClassVar[str] = "evaluation"


class SelectionRef(Ref):
    """The layers that a select_layers step chose."""

    accepts: ClassVar[str] = "selection"


class TopKRef(Ref):
    """A teacher's stored top-k."""

    accepts: ClassVar[str] = "teacher_topk"
