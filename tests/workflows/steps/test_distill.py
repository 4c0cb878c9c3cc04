"""The steps and recipes of distillation."""

import json
import shutil
from pathlib import Path

import pytest

from lt2.config import ConfigError
from lt2.distill.logits import loop_weights
from lt2.train.schedules import learning_rate
from lt2_platform.data.stream import PackedDataset
from lt2_platform.distill import measure
from lt2_platform.evaluate.validation import held_out_rows
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_platform.train import run_folder, worker
from lt2_platform.train.checkpoints.checkpoint import load_model, resolve
from lt2_platform.train.on_ray import trainer
from lt2_workflows.engine.context import StepContext
from lt2_workflows.graph import STEP_TYPES
from lt2_workflows.inputs import problems
from lt2_workflows.loading import load_workflow, workflow_from_record
from lt2_workflows.plan import describe_plan
from lt2_workflows.steps import pretrain
from lt2_workflows.steps.distill import describe_distill, run_distill
from lt2_workflows.steps.pretrain import describe_pretrain, run_pretrain
from lt2_workflows.steps.retention import run_retention
from lt2_workflows.steps.select_layers import run_select_layers
from tests.lt2.interop.test_ouro import OURO
from tests.platform.distill.stages import DISTILL, GDN, run_stage, write_teacher
from tests.platform.train.packed import train_config, write_dataset


def context_of(tmp_path, steps, name):
    workflow = workflow_from_record({"workflow": "w", "steps": steps}, source="test")
    return StepContext(Storage(str(tmp_path)), workflow, workflow.steps[name], lambda values: None)


def finish(context, results):
    """Record `results` of other steps as if they had run."""
    for name, result in results.items():
        folder = context.workflow.steps[name].folder
        context.storage.write_json(
            f"{folder}/done.json", {"attempt": 1, "ended": 0, "result": result, "provenance": {}}
        )


def stage(objective, **fields):
    train = {"steps": 4, "global_batch_size": 2, "objective": objective}
    return {"type": "distill", "data": "data", "teacher": "teacher", "train": train, **fields}


def probing(n):
    return {f"probe-{i}": stage({"type": "distill"}, kept=[i]) for i in range(n)}


def choice(**fields):
    return {"type": "select_layers", "count": 2, "n_layers": 3, **fields}


def test_the_layers_whose_probes_come_nearest_to_the_teacher_keep_attention(tmp_path):
    refs = [{"step": f"probe-{i}"} for i in range(3)]
    steps = probing(3) | {"select": choice(method="kl", probes=refs)}
    context = context_of(tmp_path, steps, "select")
    results = {f"probe-{i}": {"kept": [i], "kl": kl} for i, kl in enumerate((0.3, 0.1, 0.2))}
    finish(context, results)
    found = run_select_layers(context.step.config, context)
    assert (found["kept"], found["scores"]) == ([1, 2], [0.3, 0.1, 0.2])
    assert "0.3000" in found["text"]
    stored = json.loads((tmp_path / context.step.folder / "out/selection.json").read_text())
    assert stored == {"method": "kl", "kept": [1, 2], "scores": [0.3, 0.1, 0.2]}

    steps["select"] = choice(method="kl", probes=refs[::-1])
    context = context_of(tmp_path, steps, "select")
    with pytest.raises(ConfigError, match=r"probe probe-2 keeps \[2\], not \[0\]; give the probes in layers"):
        run_select_layers(context.step.config, context)


def test_even_spacing_needs_no_runs(tmp_path):
    context = context_of(tmp_path, {"select": choice(method="uniform", n_layers=24, count=6)}, "select")
    found = run_select_layers(context.step.config, context)
    assert found["kept"] == [3, 7, 11, 15, 19, 23]
    assert "KL" not in found["text"]  # nobody has measured any


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (choice(method="kl"), "method kl needs one probe per layer, 3; there are 0"),
        (choice(method="one_shot"), "method one_shot needs teacher, student"),
        (choice(method="uniform", count=4), "count 4 exceeds the 3 layers"),
        (stage({"type": "next_token"}), "give align"),
    ],
)
def test_mistakes_are_found_before_anything_runs(step, message):
    with pytest.raises(ConfigError, match=message):
        workflow_from_record({"workflow": "w", "steps": {"s": step}}, source="test")


def test_the_report_has_every_student_and_stage(tmp_path):
    evaluation = {"type": "evaluate", "checkpoint": "x", "data": "data"}
    report = {
        "type": "retention",
        "teacher": {"step": "a"},
        "students": {"selected": {"step": "b"}},
        "stages": {"stage 2": {"step": "probe-0"}},
    }
    context = context_of(tmp_path, probing(1) | {"a": evaluation, "b": evaluation, "report": report}, "report")
    row = {"task": "continuation", "metric": "acc", "n_loops": 3}
    kl = {"kept": [0], "kl": 0.75, "report_kl": 0.25, "loss": 0.5, "tokens": 1000}
    finish(context, {"a": {"rows": [row | {"value": 0.8}]}, "b": {"rows": [row | {"value": 0.6}]}, "probe-0": kl})
    text = run_retention(context.step.config, context)["text"]
    assert "0.6000 (75.0 %)" in text
    assert "a pretraining's cross entropy" in text  # a stage of upcycle is one
    assert "0.2500" in text  # not the distance by which layers are chosen
    assert "0.7500" not in text
    out = tmp_path / context.step.folder / "out"
    assert (out / "retention.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "retention.json").read_text())["stages"][0]["attention kept"] == "0"


def planned(recipe, tmp_path, overrides=()):
    return describe_plan(load_workflow(recipe, overrides), Storage(str(tmp_path)))


def test_the_small_recipe_is_planned_with_its_costs(tmp_path):
    text = planned("distill_small", tmp_path)
    assert "align, 120 steps, 246k tokens in rows of 32; attention kept in no layer" in text
    assert "attention kept in the choice of select;" in text


def test_the_full_recipe_is_the_papers_and_plans_without_its_weights(tmp_path):
    workflow = load_workflow("distill_ouro_14b")
    rows = {"prepare-512": 512, "prepare-4k": 4096, "prepare-32k": 32_768}
    assert {name: workflow.configs[name].seq_len for name in rows} == rows
    for name, tokens in {"align": 100e6, "stage2": 600e6, "stage3": 600e6}.items():
        step = workflow.configs[name]
        train = step.train
        assert train.steps * train.global_batch_size * rows[step.data.step] == pytest.approx(tokens, rel=2e-3)
    assert (workflow.configs["select"].count, len(workflow.configs["select"].probes)) == (6, 24)
    assert workflow.configs["stage2-uniform"].kept == (3, 7, 11, 15, 19, 23)
    stage3 = workflow.configs["stage3"]
    assert stage3.train.lr * stage3.train.objective.rest_lr_scale == pytest.approx(7e-6)
    assert stage3.train.min_lr_ratio == 1
    text = planned("distill_ouro_14b", tmp_path)
    assert "Ouro-1.4B -> a checkpoint of 1.43B parameters in fp32" in text
    assert "distill, 2,289 steps, 600M tokens in rows of 32,768" in text
    only = load_workflow("distill_ouro_14b:dclm").configs
    assert (only["prepare-32k"].source.type, workflow.configs["prepare-32k"].source.type) == ("dclm", "openthoughts")
    with pytest.raises(ConfigError, match="unknown data 'c4'; choose openthoughts or dclm"):
        load_workflow("distill_ouro_14b:c4")


def test_a_plan_reads_the_ouro_folder_if_it_is_there_and_a_run_needs_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OURO | {"num_hidden_layers": 24}))
    workflow = load_workflow("distill_ouro_14b", [f"teacher.folder={tmp_path}"])
    assert workflow.configs["teacher"].model.dim == 16
    storage = Storage(str(tmp_path / "storage"))

    def missing(workflow):
        return problems(workflow, storage, [workflow.steps["teacher"]])

    weights, tokenizer = missing(workflow)
    assert weights.startswith(f"teacher.folder: {tmp_path} has neither model.safetensors nor ")
    assert tokenizer.startswith(f"teacher.folder: tokenizer file {tmp_path}/tokenizer.json does not exist")
    (tmp_path / "model.safetensors").touch()
    assert missing(load_workflow("distill_ouro_14b", [f"teacher.folder={tmp_path}", "teacher.tokenizer=byte"])) == []
    (line,) = missing(load_workflow("distill_ouro_14b"))
    assert line.startswith("teacher.folder: Ouro-1.4B has no config.json")


def in_this_process(config, *, progress, stop, **where):
    """`pretrain` without Ray, whose own tests are with the trainer."""
    spec = run_folder.open_run(config, **where)
    return run_folder.close_run(spec, worker.run(spec))


def test_training_goes_on_from_the_weights_of_another_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "pretrain", in_this_process)
    monkeypatch.setattr(pretrain, "join_ray", dict)
    first = write_teacher(tmp_path, steps=4)
    model, config, _ = load_model(first)
    train = train_config(steps=1, lr=1e-9, warmup_steps=0).model_dump(mode="json")
    longer = config.model_dump(mode="json") | {"rope_theta": 5e5}
    step = {"type": "pretrain", "data": str(tmp_path / "data"), "start": first, "model": longer, "train": train}
    context = context_of(tmp_path / "storage", {"extend": step}, "extend")
    assert "from the weights of " + first in describe_pretrain(context.step.config, context)
    result = run_pretrain(context.step.config, context)
    extended, config, _ = load_model(context.out)
    assert (result["step"], config.rope_theta) == (1, 5e5)
    for name, weight in model.state_dict().items():
        assert (extended.state_dict()[name] - weight).abs().max() < 1e-6, name


def test_a_stage_through_its_step(tmp_path, monkeypatch):
    teacher, measured = write_teacher(tmp_path, steps=4), []
    learned_from, distance = Path(resolve(teacher)), measure.log_distance

    def train_meanwhile(*arguments, **options):
        """The teacher's run goes on while the stage learns from it."""
        found = in_this_process(*arguments, **options)
        shutil.copytree(learned_from, learned_from.with_name(learned_from.name.replace("4", "5")))
        assert resolve(teacher) != str(learned_from)
        return found

    monkeypatch.setattr(trainer, "pretrain", train_meanwhile)
    monkeypatch.setattr(pretrain, "join_ray", dict)
    monkeypatch.setattr(measure, "log_distance", lambda *of, **how: measured.append(of[1]) or distance(*of, **how))
    train = train_config(steps=3, objective={"type": "align"}).model_dump(mode="json")
    step = {"type": "distill", "data": str(tmp_path / "data"), "teacher": teacher, "mixer": GDN, "train": train}
    context = context_of(tmp_path / "storage", {"align": step}, "align")
    result = run_distill(context.step.config, context)
    assert measured == [str(learned_from)]
    assert (result["step"], result["kept"]) == (3, [])
    assert result["kl"] == result["kl_loops"][-1] > 0
    stored = {row["metric"]: row["value"] for row in ResultsStore(context.storage).results()}
    assert stored["distillation/distillation/teacher_kl"] == result["report_kl"] != result["kl"]
    assert {row["teacher"] for _, _, row in ResultsStore(context.storage).index().evals} == {teacher}
    assert STEP_TYPES["distill"].config is type(context.step.config)


def test_a_plan_reads_the_layers_of_a_student_that_is_a_path(tmp_path):
    teacher = write_teacher(tmp_path, steps=2)
    student = run_stage(tmp_path, "student", DISTILL, teacher=teacher, kept=(1,), steps=2)

    def described(**fields):
        step = stage({"type": "distill"}, data=str(tmp_path / "data"), teacher=teacher, **fields)
        later = stage({"type": "distill"}, data=str(tmp_path / "data"), teacher=teacher, student={"step": "next"})
        context = context_of(tmp_path / "storage", {"next": step, "later": later}, "next")
        texts = [describe_distill(context.workflow.configs[name], context) for name in ("next", "later")]
        assert texts[0] == texts[1]
        return texts[0]

    assert "; attention kept in [1]; " in described(student=student)
    assert "; attention kept in no layer; " in described()
    text = described(student=str(tmp_path / "soon"))
    assert text.endswith("attention kept in the layers of the student it starts from, which is not there yet")
    assert described(student=str(tmp_path / "soon"), kept=[0]).endswith("attention kept in [0]")  # its mixer is unknown
    with pytest.raises(ConfigError, match="has layout 'uniform'; give one that a stage has trained"):
        described(student=teacher)


def test_layers_are_chosen_on_one_half_of_the_held_out_rows_and_results_reported_on_the_other(tmp_path):
    write_dataset(tmp_path / "data")
    dataset = PackedDataset(str(tmp_path / "data"), "validation")
    halves = [set(held_out_rows(dataset, part)) for part in ("selection", "report")]
    assert min(map(len, halves)) >= dataset.n_sequences // 2
    assert set.union(*halves) == set(range(dataset.n_sequences))
    assert not set.intersection(*halves)
    for recipe in ("distill_small", "distill_ouro_14b", "paper_end_to_end", "paper_end_to_end_small"):
        configs = load_workflow(recipe).configs.values()
        asked = [
            task for step in configs if step.type == "evaluate" for task in step.tasks if task.type == "perplexity"
        ]
        assert asked
        parts = [task.held_out for task in asked] + [step.held_out for step in configs if step.type == "items"]
        assert set(parts) == {"report"}, recipe


def test_held_out_text_that_cannot_be_halved_is_refused_before_a_stage_trains(tmp_path):
    write_dataset(tmp_path / "data", validation=1)
    step = stage({"type": "align"}, data=str(tmp_path / "data"), teacher="teacher")
    context = context_of(tmp_path / "storage", {"align": step}, "align")
    with pytest.raises(ConfigError, match="one validation sequence has no halves; raise validation_fraction"):
        run_distill(context.step.config, context)


@pytest.mark.parametrize("recipe", ["distill_small", "distill_ouro_14b"])
def test_stage_3_begins_with_the_loop_weights_that_stage_2_ends_with(recipe):
    """It runs the schedule anew; docs/distillation.md says why. In between, every loop learns from the teacher."""
    configs = load_workflow(recipe).configs
    second, third = configs["stage2"].train, configs["stage3"].train
    weights = lambda train, step: loop_weights(train.objective, 4, step, train.steps)  # noqa: E731
    assert weights(third, 0) == weights(second, second.steps - 1) == (0, 0, 0, 1)
    assert weights(third, third.steps // 4) == (0.25,) * 4
    rate = learning_rate(**{key: getattr(third, key) for key in ("lr", "steps", "warmup_steps", "min_lr_ratio")})
    assert {rate(step) for step in range(third.steps)} == {third.lr}  # constant, as the paper has it
