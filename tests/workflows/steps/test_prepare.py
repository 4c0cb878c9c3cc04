"""The prepare step: identities that outlast new options, and checks before anything is written."""

import json
import os
import time

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models

from lt2.config import ConfigError, load_source
from lt2_platform.data.sources.listing import describe, look_through
from lt2_platform.data.tokenizers.tokenize import describe as describe_tokenizer
from lt2_platform.data.tokenizers.tokenize import load_tokenizer
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage
from lt2_workflows.console import describe as line
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import STEP_TYPES, Workflow, fingerprint
from lt2_workflows.inputs import places_of
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.plan import describe_costs, describe_plan
from lt2_workflows.steps import prepare
from lt2_workflows.steps.prepare import PrepareStep, describe_prepare
from tests.platform.distill.stages import ALIGN


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


def test_what_a_dataset_holds_is_said_when_it_is_made_and_planned_with():
    splits = {"train": {"tokens": 870613, "sequences": 6801}, "validation": {"tokens": 44120}}
    assert prepare.contents(splits) == "871k tokens in 6,801 rows, 44.1k tokens held out"
    assert prepare.contents(splits | {"train": {"tokens": None, "sequences": None}}) == "44.1k tokens held out"
    assert prepare.shares({"mixture": [{"source": "a/", "epochs": 1.0}, {"source": "jsonl b", "epochs": 0.731}]}) == (
        "; epochs of a/ 1.00, of jsonl b 0.73"
    )
    assert prepare.shares({}) == ""
    parts = [{"source": name, "epochs": 1.0, "held_out": tokens} for name, tokens in (("a/", 9), ("b/", 0))]
    assert prepare.shares({"mixture": parts}) == "; epochs of a/ 1.00, of b/ 1.00 (nothing held out)"


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
    files, _ = look_through(step.parts, sampled=tokenize == "on_the_fly")
    manifest = {"sources": [describe(file, 1) for file in files], "tokenizer": {}}
    assert "CHANGED" not in describe_prepare(step, context)  # nothing is prepared yet
    context.storage.write_json(f"{context.step.folder}/out/manifest.json", manifest)
    assert "CHANGED" not in describe_prepare(step, context)
    later = time.time() + 60
    os.utime(tmp_path / "books/a.txt", (later, later))
    assert "CHANGED" not in describe_prepare(step, context)  # touched, not changed
    (tmp_path / "books/a.txt").write_text("text of A " * 50)
    os.utime(tmp_path / "books/a.txt", (later, later))
    assert describe_prepare(step, context).endswith(
        f"; THE CORPUS HAS CHANGED since: {tmp_path}/books/a.txt has other content. The dataset and what was made from "
        "it are used as they are; to start afresh, rename what has changed or use another --storage"
    )
    event = {"event": "skipped", "step": "prepare", "drift": [], "stale": STEP_TYPES["prepare"].outdated(step, context)}
    assert "THE CORPUS HAS CHANGED" in line(event)  # `lt2 run` says it too
    (tmp_path / "books/b.txt").unlink()
    (tmp_path / "books/d.txt").write_text("new")
    assert "a.txt has other content and 2 more. The" in describe_prepare(step, context)
    (tmp_path / "books").rename(tmp_path / "elsewhere")
    assert "CHANGED" not in describe_prepare(step, context)  # the dataset does not need it
    context.storage.write_bytes(f"{context.step.folder}/out/manifest.json", b'{"sources": [')
    with pytest.raises(ConfigError, match=r"out/manifest\.json is damaged \(no JSON: .*\); "):
        describe_prepare(step, context)


def test_a_finished_dataset_does_not_need_a_corpus_that_is_out_of_reach(tmp_path, monkeypatch):
    step = PrepareStep(source=f"{tmp_path}/books")
    context = context_of(step, tmp_path)
    context.storage.write_json(f"{context.step.folder}/out/manifest.json", {"sources": [], "tokenizer": {}})

    def refused(*_):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(prepare, "changed_since", refused)
    assert STEP_TYPES["prepare"].outdated(step, context) == ""


def write_tokenizer(path, *words, bos="<s>"):
    """A word-level tokenizer.json, and the tokenizer_config.json beside it."""
    ids = {word: index for index, word in enumerate(("[UNK]", "<s>", "<b>", "</s>", *words))}
    Tokenizer(models.WordLevel(ids, unk_token="[UNK]")).save(str(path))
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": "</s>"}))


def test_a_tokenizer_changed_in_place_is_told(tmp_path):
    spec = tmp_path / "tokenizer.json"
    (tmp_path / "a.txt").write_text("text")
    step = PrepareStep(source=f"{tmp_path}/a.txt", tokenizer=str(spec))
    context = context_of(step, tmp_path / "s")
    write_tokenizer(spec, "one")
    sources = [describe(file, 1) for file in look_through(step.parts)[0]]
    manifest = {"sources": sources, "tokenizer": {**describe_tokenizer(load_tokenizer(str(spec))), "file": "t"}}
    context.storage.write_json(f"{context.step.folder}/out/manifest.json", manifest)
    outdated = STEP_TYPES["prepare"].outdated
    assert outdated(step, context) == ""
    said = f"THE TOKENIZER HAS CHANGED since: {spec} has other content. The dataset and what was made from it are used"
    for change in ({"words": ("two",)}, {"words": ("one",), "bos": "<b>"}):
        write_tokenizer(spec, *change.pop("words"), **change)
        assert outdated(step, context).startswith(said)
        assert said in describe_prepare(step, context)
    later = time.time() + 60
    (tmp_path / "a.txt").write_text("other")
    os.utime(tmp_path / "a.txt", (later, later))
    assert outdated(step, context).startswith(
        f"THE CORPUS HAS CHANGED since: {tmp_path}/a.txt has other content; {said}"
    )
    write_tokenizer(spec, "one")
    assert "TOKENIZER" not in outdated(step, context)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))  # the file is as it was
    assert f"THE TOKENIZER HAS CHANGED since: {spec} now begins no text with BOS" in outdated(step, context)
    spec.unlink()
    assert "TOKENIZER" not in outdated(step, context)  # the dataset has its own


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


def test_the_pack_whose_items_are_left_out_must_be_there_and_a_change_of_it_is_told(tmp_path):
    def places():
        step = PrepareStep(decontaminate={"pack": f"{tmp_path}/pack"})
        storage = Storage(str(tmp_path / "storage"))
        workflow = Workflow("w", {"prepare": step})
        context = StepContext(storage, workflow, workflow.steps["prepare"], lambda values: None)
        assert f", without what overlaps {tmp_path}/pack" in describe_prepare(step, context)
        return [place for place in places_of(step, context) if place.field == "decontaminate.pack"]

    (place,) = places()
    with pytest.raises(ConfigError, match="is not an evaluation pack"):
        place.look(place.uri)
    rows = {"test": pa.Table.from_pylist([{"query": "q", "choices": ["a"], "gold": 0}])}
    packs.add(place.uri, {"mine": rows}, {"mine": "here"})
    place.look(place.uri)
    before = place.version(place.uri)
    needles = {"test": pa.Table.from_pylist([{"query": "hay", "outputs": ["1"], "max_length": 9}])}
    packs.add(place.uri, {"needles": needles}, {"needles": "here"})
    assert place.version(place.uri) == before  # no text of anybody's
    packs.add(place.uri, {"more": rows}, {"more": "here"})
    after = place.version(place.uri)
    changed = [name for name, digest in before.items() if after[name] != digest]
    assert (sorted(before), changed) == (["mine", "the list of tasks"], ["the list of tasks"])


def test_rows_that_were_left_out_are_counted_beside_all_of_them_with_the_reasons():
    manifest = {
        "sources": [{"documents": 5, "left_out": 2}, {"documents": 1}],
        "quarantine": {"rows": 3, "reasons": {"empty text": 1, "unknown role": 2}},
    }
    assert prepare.left_out(manifest) == "3 of 11 rows could not be used (2 unknown role, 1 empty text)"
    manifest["quarantine"]["reasons"] = {"unknown role": 3}
    assert prepare.left_out(manifest) == "3 of 11 rows could not be used (unknown role)"
    live = {"sources": [{"documents": None}], "splits": {"validation": {"documents": 7}}}
    assert prepare.left_out(manifest | live) == "3 of 10 held-out rows could not be used (unknown role)"


@pytest.mark.parametrize(("held_out", "fraction", "said"), [(0, 0.01, True), (0, 0, False), (1, 0.01, False)])
def test_data_of_which_nothing_could_be_held_out_is_told(tmp_path, monkeypatch, held_out, fraction, said):
    split = {"documents": held_out, "sequences": 1, "tokens": 9, "unigram_entropy": 1.0}
    manifest = {"tokenizer": {}, "seq_len": 8, "quarantine": {"rows": 0}, "splits": {"validation": split}}
    monkeypatch.setattr(prepare, "join_ray", lambda: None)
    monkeypatch.setattr(prepare, "prepare", lambda config, out: manifest)
    step = PrepareStep(validation_fraction=fraction)
    workflow, told = Workflow("one", {"prepare": step}), []
    prepare.run_prepare(step, StepContext(Storage(str(tmp_path)), workflow, workflow.steps["prepare"], told.append))
    begun = [values["notice"].split(",")[0] for values in told]
    assert begun == ["nothing is held out"] * said + ["9 tokens held out"]


OWN = """
from typing import ClassVar, Literal
from lt2_workflows.graph import StepConfig, step_type

class MineStep(StepConfig):
    produces: ClassVar[str] = "dataset"
    type: Literal["my_dataset"] = "my_dataset"

@step_type(MineStep)
def run(config, context):
    return {}
"""


def test_a_plan_waits_for_a_dataset_that_a_step_of_ones_own_makes(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    load_source(str(tmp_path / "own.py"))
    train = {"steps": 1, "global_batch_size": 1}
    mixer = {"type": "uniform", "mixer": {"type": "full"}}
    model = {"dim": 8, "n_layers": 1, "num_heads": 1, "layout": mixer}
    data, teacher = {"step": "data"}, {"step": "train"}
    steps = {
        "data": {"type": "my_dataset"},
        "train": {"type": "pretrain", "data": data, "model": model, "train": train},
        "align": {"type": "distill", "data": data, "teacher": teacher, "train": train | {"objective": ALIGN}},
    }
    workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
    storage, unknown = Storage(str(tmp_path / "storage")), "not known before its data, step data, is there"
    assert [line.strip() for line in describe_plan(workflow, storage).splitlines()].count(unknown) == 2
    costs = describe_costs(workflow, storage, card="h100")
    assert costs == f"\ntrain: {unknown}\n\nalign: {unknown}"
