"""The paper's suites, and where each task's definition and data come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lt2.config import ConfigError
from lt2_platform.evaluate.harness.long_context.needles import TOKENS_TO_GENERATE
from lt2_platform.evaluate.harness.long_context.ruler import TASKS as RULER_TASKS
from lt2_platform.evaluate.harness.recall import NEW_TOKENS, WINDOW, contains_all, contains_any
from lt2_platform.evaluate.paper.main_table import TASKS as MAIN_TABLE

LENGTHS = (1024, 2048, 4096, 8192)
"""Of the needle tasks; training is at 4,096."""

SUITES: dict[str, tuple[str, ...]] = {
    "core": (*MAIN_TABLE, "copa", "social_iqa", "race", "commonsense_qa"),
    "recall": ("swde", "fda", "squad_completion", "triviaqa_cloze", "nq_cloze", "drop_cloze"),
    "needles": tuple(f"niah_single_{i}_{length}" for i in (1, 2, 3) for length in LENGTHS),
    "ruler": tuple(f"{name}_4096" for name in RULER_TASKS),
    "reasoning": ("gsm8k", "minerva_math", "mmlu"),
}


@dataclass(frozen=True)
class Upstream:
    """A task of lm-eval: its YAML inside lm_eval/tasks, and where its data usually lies inside a folder of datasets.

    Attributes:
        columns: what its rows have at least.
        rename: columns of other releases of the same data, to those the YAML reads; booleans become 0 and 1.
        merge: the data's configs (subjects) are parts of one task; few-shot examples are of the same `subject`, if rows
            have one.
        few_shot: upstream's split of the few-shot examples; packs call it "train".
        settings: what is changed in the YAML.
        needs: packages that its scoring imports, as pip takes them.
        window: tokens that a document, the prompt at its end and the continuation may take; None: it is not cut.
    """

    yaml: str
    folders: tuple[str, ...]
    columns: tuple[str, ...]
    rename: tuple[tuple[str, str], ...] = ()
    merge: bool = False
    few_shot: str = "train"
    settings: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    window: int | None = None


ARC = ("question", "choices", "answerKey")
MMLU = {
    "description": "The following are multiple choice questions (with answers) about "
    "{{subject.replace('_', ' ')}}.\n\n",
    "tag": None,
    "task_alias": None,
}
"""lm-eval has one task per subject; by size, the mean over them is the mean over all questions."""

UPSTREAM: dict[str, Upstream] = {
    "arc_easy": Upstream("arc/arc_easy.yaml", ("ai2_arc/ARC-Easy",), ARC),
    "arc_challenge": Upstream("arc/arc_challenge.yaml", ("ai2_arc/ARC-Challenge",), ARC),
    "hellaswag": Upstream(
        "hellaswag/hellaswag.yaml", ("hellaswag",), ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    ),
    "piqa": Upstream("piqa/piqa.yaml", ("piqa",), ("goal", "sol1", "sol2", "label")),
    "winogrande": Upstream(
        "winogrande/default.yaml",
        ("winogrande/winogrande_xl", "winogrande"),
        ("sentence", "option1", "option2", "answer"),
    ),
    "openbookqa": Upstream(
        "openbookqa/openbookqa.yaml", ("openbookqa/main", "openbookqa"), ("question_stem", "choices", "answerKey")
    ),
    "sciq": Upstream(
        "sciq/sciq.yaml",
        ("sciq",),
        ("question", "support", "distractor1", "distractor2", "distractor3", "correct_answer"),
    ),
    "boolq": Upstream(
        "super_glue/boolq/default.yaml",
        ("super_glue/boolq", "boolq"),
        ("passage", "question", "label"),
        rename=(("answer", "label"),),
    ),
    "copa": Upstream(
        "super_glue/copa/default.yaml", ("super_glue/copa",), ("premise", "choice1", "choice2", "question", "label")
    ),
    "social_iqa": Upstream(
        "siqa/siqa.yaml",
        ("social_i_qa", "siqa"),
        ("context", "question", "answerA", "answerB", "answerC", "label"),
    ),
    "race": Upstream("race/race.yaml", ("race/high", "race"), ("article", "problems")),
    "commonsense_qa": Upstream("commonsense_qa/default.yaml", ("tau/commonsense_qa", "commonsense_qa"), ARC),
    "swde": Upstream("swde/swde.yaml", ("based-swde-v2", "swde"), ("text", "value"), window=WINDOW),
    "fda": Upstream("fda/fda.yaml", ("based-fda", "fda"), ("text", "value"), window=WINDOW),
    "squad_completion": Upstream(
        "squad_completion/squad_completion.yaml",
        ("based-squad", "squad_completion"),
        ("text", "value"),
        # lm-eval 0.4.13 means these, but its defaults (256 tokens, an empty line) come first.
        settings={"generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS}},
        window=WINDOW,
    ),
    "nq_open": Upstream("nq_open/nq_open.yaml", ("nq_open",), ("question", "answer")),
    "triviaqa": Upstream("triviaqa/default.yaml", ("trivia_qa/rc.nocontext",), ("question", "answer")),
    "gsm8k": Upstream("gsm8k/gsm8k.yaml", ("gsm8k/main", "gsm8k"), ("question", "answer")),
    "minerva_math": Upstream(
        "minerva_math/minerva_math_algebra.yaml",
        ("hendrycks_math", "minerva_math"),
        ("problem", "solution"),
        merge=True,
        needs=("math-verify", "antlr4-python3-runtime==4.11"),
    ),
    "mmlu": Upstream(
        "mmlu/default/mmlu_abstract_algebra.yaml",
        ("mmlu/all", "mmlu"),
        ("question", "subject", "choices", "answer"),
        merge=True,
        few_shot="dev",
        settings=MMLU,
    ),
}

CHOICES: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")],
    "metadata": {"version": 1.0},
}
"""Multiple choice whose prompts are already made: rows {query, choices, gold: index}."""


def generated(process_results: Any, new_tokens: int, until: list[str]) -> dict[str, Any]:
    """The lm-eval config of a task whose greedy continuations of {query} `process_results` scores."""
    return {
        "output_type": "generate_until",
        "doc_to_text": "{{query}}",
        "doc_to_target": "",
        "process_results": process_results,
        "generation_kwargs": {"until": until, "max_gen_toks": new_tokens, "do_sample": False},
        "metric_list": [{"metric": "contains", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


FORMATS: dict[str, dict[str, Any]] = {
    "choices": CHOICES,
    "needles": generated(contains_all, TOKENS_TO_GENERATE, []),
    "documents": generated(contains_any, TOKENS_TO_GENERATE, []),
    "cloze": generated(contains_any, NEW_TOKENS, ["\n"]),
}
COLUMNS = {
    "choices": {"query", "choices", "gold"},
    "needles": {"query", "outputs", "max_length"},
    "documents": {"query", "answers", "max_length"},
    "cloze": {"context", "prompt", "answers"},
}
"""What rows of each format have at least. A column `max_new_tokens`, the same in all rows, changes a format's own;
`max_length` counts BOS, prompt and continuation."""


def suite_tasks(suite: str | None, tasks: tuple[str, ...]) -> tuple[str, ...]:
    if suite is None:
        return tasks
    if suite not in SUITES:
        raise ConfigError(f"unknown suite {suite!r}; choose from {', '.join(SUITES)}, or give tasks=NAME,NAME")
    return SUITES[suite]
