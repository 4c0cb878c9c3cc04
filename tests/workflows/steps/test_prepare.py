"""The prepare step: identities that outlast new options, and checks before anything is written."""

import os
import time

import pytest

from lt2.config import ConfigError
from lt2_platform.data.sources import describe, files_of
from lt2_platform.storage import Storage
from lt2_workflows.attempt import StepContext
from lt2_workflows.console import describe as line
from lt2_workflows.graph import STEP_TYPES, Workflow, fingerprint
from lt2_workflows.inputs import places_of
from lt2_workflows.steps import prepare
from lt2_workflows.steps.prepare import PrepareStep, describe_prepare


@pytest.mark.parametrize(
    ("fields", "digest"),
    [
        ({}, "48e82ce3a032dce0"),
        ({"source": "books/"}, "6905a1e9b94b5134"),
        ({"source": ("a.txt", "b/"), "tokenizer": "byte", "max_documents": 5}, "c3570eb804ae211f"),
        (
            {"source": "x.jsonl", "format": "jsonl", "text_column": "body", "seq_len": 2048},
            "2a1e38648ae0c804",
        ),
    ],
)
def test_prepare_steps_from_before_sources_had_types_are_found_again(fields, digest):
    assert fingerprint(PrepareStep(**fields), {}).startswith(digest)


def context_of(step, root):
    workflow = Workflow("one", {"prepare": step})
    return StepContext(Storage(str(root)), workflow, workflow.steps["prepare"], lambda values: None)


@pytest.mark.parametrize("tokenize", ["ahead", "on_the_fly"])
def test_a_plan_says_when_the_corpus_of_a_finished_dataset_has_changed(tmp_path, tokenize):
    (tmp_path / "books").mkdir()
    for name in "abc":
        (tmp_path / "books" / f"{name}.txt").write_text(f"text of {name} " * 50)
    step = PrepareStep(source=f"{tmp_path}/books", tokenize=tokenize)
    context = context_of(step, tmp_path)
    files = files_of(step.parts, sampled=tokenize == "on_the_fly")
    manifest = {"sources": [describe(file, 1) for file in files]}
    assert "CHANGED" not in describe_prepare(step, context)  # nothing is prepared yet
    context.storage.write_json(f"{context.step.folder}/out/manifest.json", manifest)
    assert "CHANGED" not in describe_prepare(step, context)
    later = time.time() + 60
    os.utime(tmp_path / "books/a.txt", (later, later))
    assert "CHANGED" not in describe_prepare(step, context)  # touched, not changed
    (tmp_path / "books/a.txt").write_text("text of A " * 50)
    os.utime(tmp_path / "books/a.txt", (later, later))
    assert describe_prepare(step, context).endswith(
        f"; THE CORPUS HAS CHANGED since: {tmp_path}/books/a.txt has other content. The dataset and what was made of "
        "it are used as they are; another name of the corpus or another --storage begins anew"
    )
    event = {"event": "skipped", "step": "prepare", "drift": [], "stale": STEP_TYPES["prepare"].outdated(step, context)}
    assert "THE CORPUS HAS CHANGED" in line(event)  # `lt2 run` says it too
    (tmp_path / "books/b.txt").unlink()
    (tmp_path / "books/d.txt").write_text("new")
    assert "a.txt has other content and 2 more. The" in describe_prepare(step, context)
    (tmp_path / "books").rename(tmp_path / "elsewhere")
    assert "CHANGED" not in describe_prepare(step, context)  # the dataset does not need it


def test_a_finished_dataset_does_not_need_a_corpus_that_is_out_of_reach(tmp_path, monkeypatch):
    step = PrepareStep(source=f"{tmp_path}/books")
    context = context_of(step, tmp_path)
    context.storage.write_json(f"{context.step.folder}/out/manifest.json", {"sources": []})

    def refused(*_):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(prepare, "changed_since", refused)
    assert STEP_TYPES["prepare"].outdated(step, context) == ""


def look_at(step, root):
    for place in places_of(step, context_of(step, root)):
        place.look(place.uri)


def test_prepare_checks_every_path_of_a_mixture(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    shares = [
        {"weight": 1, "source": f"{tmp_path}/a.txt"},
        {"weight": 1, "source": {"type": "python_stdlib"}},
        {"weight": 2, "source": {"type": "dclm", "path": f"{tmp_path}/nope"}},
    ]
    step = PrepareStep.model_validate({"source": {"type": "mixture", "sources": shares[:2]}})
    look_at(step, tmp_path)
    assert describe_prepare(step, context_of(step, tmp_path)).startswith(
        f"50% {tmp_path}/a.txt + 50% python-stdlib -> byte tokens"
    )
    with pytest.raises(ConfigError, match=rf"^source {tmp_path}/nope does not exist; give a file, a folder"):
        look_at(PrepareStep.model_validate({"source": {"type": "mixture", "sources": shares}}), tmp_path)
