"""The shipped step types, one idea to a module: a config and a thin call into lt2_platform.

Importing them imports neither torch nor Ray: plans and drivers need only the configs. Recipes import from here; the
sweep step is in lt2_workflows.sweeps.
"""

from lt2_workflows.steps.average import AverageStep
from lt2_workflows.steps.distill import DistillStep
from lt2_workflows.steps.document import DocumentStep
from lt2_workflows.steps.evaluate import EvaluateStep
from lt2_workflows.steps.prepare import PrepareStep
from lt2_workflows.steps.pretrain import PretrainStep, TrainResources
from lt2_workflows.steps.refs import CheckpointRef, DatasetRef, EvaluationRef, PackRef, SelectionRef, TopKRef
from lt2_workflows.steps.report import ReportStep
from lt2_workflows.steps.retention import ItemsStep, RetentionStep
from lt2_workflows.steps.select_layers import SelectLayersStep
from lt2_workflows.steps.state_recall import StateRecallStep
from lt2_workflows.steps.teacher import ImportModelStep, ImportOuroStep, TeacherTopKStep

__all__ = [
    "AverageStep",
    "CheckpointRef",
    "DatasetRef",
    "DistillStep",
    "DocumentStep",
    "EvaluateStep",
    "EvaluationRef",
    "ImportModelStep",
    "ImportOuroStep",
    "ItemsStep",
    "PackRef",
    "PrepareStep",
    "PretrainStep",
    "ReportStep",
    "RetentionStep",
    "SelectLayersStep",
    "SelectionRef",
    "StateRecallStep",
    "TeacherTopKStep",
    "TopKRef",
    "TrainResources",
]
