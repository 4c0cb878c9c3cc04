"""`lt2 pack`, `lt2 eval` and `lt2 compare` as a user types them."""

import json
import shutil
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer, describe
from lt2_platform.evaluate.harness.tasks.suites import SUITES
from lt2_platform.evaluate.paper.main_table import TASKS
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.cli import app
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.records import write_workflow
from lt2_workflows.loading import workflow_from_record
from lt2_workflows.steps.evaluate import run_evaluate
from tests.platform.evaluate.items import arc, choices, write
from tests.platform.evaluate.tiny import model, save
from tests.platform.train.packed import write_dataset


def lt2(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_build_verify_evaluate_and_compare(tmp_path):
    places = write(tmp_path / "data", arc_easy=arc(), mine=choices())
    pack, root = tmp_path / "pack", tmp_path / "storage"
    built = lt2("pack", "build", pack, *(f"{task}={path}" for task, path in places.items()))
    assert "arc_easy" in built
    assert "2 tasks, all files as recorded" in lt2("pack", "verify", pack)
    for seed, run in enumerate(("one-12345678", "two-12345678")):
        save(root / "steps" / run / "out", model(seed=seed))
        options = ["--pack", pack, "--suite", "tasks=arc_easy,mine", "--max-length", 200, "--storage", root]
        assert f"stored as {run}" in lt2("eval", run, *options)
    table = lt2("eval", "one-12345678", *options, "--loops", "1,2,4")
    assert "flops_per_token" in table
    assert "exit_threshold" not in table
    rows = json.loads(lt2("eval", "one-12345678", *options, "--json"))
    assert {row["task"] for row in rows} == {"arc_easy", "mine"}
    stored = {row["metric"]: row["value"] for row in ResultsStore(Storage(str(root))).results() if "one" in row["run"]}
    acc = next(row["value"] for row in rows if (row["task"], row["metric"]) == ("arc_easy", "acc"))
    assert stored["validation/arc_easy/acc"] == acc
    folders = [path.parent for run in ("one", "two") for path in sorted(root.glob(f"evals/{run}-*/*/evaluation.json"))]
    record = json.loads((folders[-1] / "evaluation.json").read_text())
    assert record["tasks"][0]["tasks"] == ["arc_easy", "mine"]
    assert record["versions"]["lm_eval"]
    compared = json.loads(lt2("compare", folders[-1], folders[-1], "--json"))
    assert {row["p_value"] for row in compared} == {1.0}


def test_an_evaluation_that_is_interrupted_says_that_it_continues(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lt2_platform.evaluate.checkpoints.evaluate_anything", interrupted)
    pack = tmp_path / "pack"
    lt2("pack", "build", pack, *(f"{task}={path}" for task, path in write(tmp_path / "data", arc_easy=arc()).items()))
    save(tmp_path / "storage" / "steps" / "one-12345678" / "out", model())
    result = CliRunner().invoke(
        app,
        [
            "eval",
            "one-12345678",
            "--pack",
            str(pack),
            "--suite",
            "tasks=arc_easy",
            "--storage",
            str(tmp_path / "storage"),
        ],
    )
    assert (result.exit_code, result.stderr) == (130, "lt2: stopped; the same command continues from here\n")


def test_actors_get_a_ray_with_a_place_for_each(tmp_path, monkeypatch):
    seen = []

    @contextmanager
    def head(num_cpus, **options):
        seen.append(num_cpus)
        yield {}

    def asked(*args, actors, **kwargs):
        seen.append(actors)
        raise KeyboardInterrupt

    monkeypatch.setattr("lt2_workflows.engine.local_ray.ray_head", head)
    monkeypatch.setattr("lt2_platform.evaluate.checkpoints.evaluate_anything", asked)
    save(tmp_path / "steps" / "one-12345678" / "out", model())
    command = ["eval", "one-12345678", "--pack", str(tmp_path), "--storage", str(tmp_path), "--actors", "99"]
    assert "is not an evaluation pack" in str(CliRunner().invoke(app, command).exception)
    assert seen == []  # what the pack lacks is said before anything starts
    monkeypatch.setattr("lt2_platform.evaluate.harness.tasks.packs.require", lambda pack, tasks: {})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    CliRunner().invoke(app, command)
    assert seen == [99, 99]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "nothing answers at RAY_ADDRESS=127.0.0.1:1" in str(CliRunner().invoke(app, command).exception)


def test_runs_that_a_recipe_evaluated_are_compared(tmp_path):
    pack, root = tmp_path / "pack", Storage(str(tmp_path / "storage"))
    lt2("pack", "build", pack, *(f"{task}={path}" for task, path in write(tmp_path / "data", arc_easy=arc()).items()))
    task = {"type": "harness", "pack": str(pack), "tasks": ["arc_easy"], "max_length": 200}
    tasks = [task, {"type": "perplexity", "batch_size": 1}, {"type": "positions", "length": 3}]
    evaluate = {"type": "evaluate", "checkpoint": {"step": "pretrain"}, "tasks": tasks}
    data, sizes = write_dataset(tmp_path / "packed"), model().config.model_dump(mode="json")
    runs = []
    for seed in (0, 1):
        train = {"steps": 1, "global_batch_size": 1, "seed": seed}
        steps = {"pretrain": {"type": "pretrain", "data": data, "model": sizes, "train": train}}
        steps["evaluate"] = evaluate | {"data": data}
        workflow = workflow_from_record({"workflow": "test", "steps": steps}, source="test")
        runs.append(workflow.steps["pretrain"].id)
        save(tmp_path / "storage" / "steps" / runs[-1] / "out", model(seed=seed))
        context = StepContext(root, workflow, workflow.steps["evaluate"])
        run_evaluate(context.step.config, context)
    (first, *_) = json.loads(lt2("compare", *runs, "--storage", root.root, "--json"))
    assert (first["task"], first["n"]) == ("arc_easy", len(arc()))
    rows = {
        (row["task"], row["metric"]): row for row in json.loads(lt2("compare", *runs, "--storage", root.root, "--json"))
    }
    stored = ResultsStore(root).results(runs)
    for task, metric in (("perplexity", "loss"), ("positions", "loss"), ("positions", "late_loss")):
        found, values = (
            rows[task, metric],
            [row["value"] for row in stored if row["metric"] == f"validation/{task}/{metric}"],
        )
        assert sorted(values) == sorted([found["a"], found["b"]])
        assert found["difference"] == pytest.approx(found["b"] - found["a"], abs=1e-4)
        assert found["stderr"] > 0
        assert 0 < found["p_value"] < 1
    for run in runs:
        shutil.rmtree(tmp_path / "storage" / "evals" / run, ignore_errors=True)
    shown = CliRunner().invoke(app, ["compare", *runs, "--storage", root.root])
    assert shown.exit_code == 0
    assert "no items of tasks are compared: no evaluation of" in shown.stderr
    assert "late_loss" in shown.stdout
    info = ResultsStore(root).index().runs[runs[-1]].info  # of a model that no training of ours has logged
    assert list(info.items())[:2] == [("workflow", workflow.id), ("step", runs[-1])]  # in this place it is looked for


def test_a_model_trained_on_conversations_is_asked_as_one(tmp_path):
    pack, root = tmp_path / "pack", tmp_path / "storage"
    lt2("pack", "build", pack, *(f"{task}={path}" for task, path in write(tmp_path / "data", mine=choices()).items()))
    record = {**describe(ByteTokenizer()), "file": None, "chat_templates": ["chatml"]}
    save(root / "steps" / "one-12345678" / "out", model(), tokenizer=record)
    options = ["eval", "one-12345678", "--pack", pack, "--suite", "tasks=mine", "--max-length", 300, "--storage", root]
    plain = CliRunner().invoke(app, [str(option) for option in options])
    assert "one-12345678 was trained on conversations; --chat uses their template" in plain.stderr
    table = lt2(*options, "--chat", "--system", "Be brief.").splitlines()
    assert table[0].split() == ["task", "metric", "value", "stderr", "n", "chat"]
    assert table[2].split()[0] == "mine+chat+system-213c22"
    assert table[2].split()[-1] == "chatml"
    for wrong, message in (
        (["--template", "qwen"], "--template qwen: choose one of chatml, llama3, plain"),
        (["--system", "Be brief."], "--system needs --chat or --template NAME"),
        (["--no-multiturn"], "--no-multiturn needs --chat"),
    ):
        with pytest.raises(ConfigError, match=message):
            lt2(*options, *wrong)


def test_an_exit_gate_is_asked_at_several_thresholds(tmp_path):
    pack, root = tmp_path / "pack", tmp_path / "storage"
    lt2("pack", "build", pack, *(f"{task}={path}" for task, path in write(tmp_path / "data", mine=choices()).items()))
    save(root / "steps" / "one-12345678" / "out", model(n_loops=4, halting={"type": "exit_gate", "threshold": 0.6}))
    options = ["--pack", pack, "--suite", "tasks=mine", "--exit-thresholds", "0.3,0.9", "--storage", root]
    assert "exit_threshold  mean_loops" in lt2("eval", "one-12345678", *options)
    rows = [row for row in json.loads(lt2("eval", "one-12345678", *options, "--json")) if row["metric"] == "acc"]
    assert [row.get("exit_threshold") for row in rows] == [None, 0.3, 0.9]
    assert 1 <= rows[1]["mean_loops"] < rows[0]["mean_loops"] < rows[2]["mean_loops"] <= 4
    stored = {row["metric"] for row in ResultsStore(Storage(str(root))).results() if row["metric"].endswith("0.9")}
    assert "depth/mine/acc/4 loops, early exit at 0.9" in stored
    (folder,) = root.glob("evals/one-12345678/*/harness/loops-4-early-exit-0.9")
    own = json.loads(lt2("compare", folder, folder.parent / "loops-4-early-exit", "--json"))
    assert own[0]["n"] == rows[0]["n"]


def test_runs_are_compared_at_the_depths_that_they_were_trained_at(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for run, loops, scores in (("a", 2, {1: "000", 2: "001"}), ("b", 4, {2: "000", 4: "111"}), ("c", 8, {1: "010"})):
        store.create_run(run, {"config": {"model": {"n_loops": loops}}}).close()
        for depth, given in scores.items():
            lines = [
                json.dumps({"task": "copa", "doc_id": n, "doc_hash": f"{n}", "scores": {"acc": int(score)}})
                for n, score in enumerate(given)
            ]
            path = f"evals/{run}/e{depth}/harness/loops-{depth}/samples/copa.jsonl"
            store.storage.write_bytes(path, "\n".join(lines).encode())
    options = ("--storage", str(tmp_path), "--json")
    (row,) = json.loads(lt2("compare", "a", "b", *options))
    assert (row["n"], row["a"], row["b"]) == (3, pytest.approx(1 / 3), 1)
    assert "\na is a, b is b; the difference is b - a" in lt2("compare", "a", "b", *options[:-1])
    (row,) = json.loads(lt2("compare", "a", "c", *options))  # at no depth of its own, and at one only
    assert row["b"] == pytest.approx(1 / 3)
    depths = (f"evals/a/e{depth}/harness/loops-{depth}" for depth in (1, 2))  # in the storage, wherever that is
    (row,) = json.loads(lt2("compare", *depths, *options))
    assert (row["a"], row["b"]) == (0, pytest.approx(1 / 3))


def test_a_workflow_means_its_run_with_scored_items(tmp_path):
    """Its newest may be the first one trained further, of which nothing was asked."""
    root, runs = Storage(str(tmp_path)), {}
    data, sizes = write_dataset(tmp_path / "packed"), model().config.model_dump(mode="json")
    for name, score in (("a", 0), ("b", 1)):
        step = {"type": "pretrain", "data": data, "model": sizes, "train": {"steps": 2 + score, "global_batch_size": 1}}
        steps = {"pretrain": step, "extend": step | {"start": {"step": "pretrain"}}}
        workflow = workflow_from_record({"workflow": name, "steps": steps}, source="test")
        write_workflow(root, workflow)
        runs[name] = workflow.steps["pretrain"].id
        for each in workflow.steps.values():
            save(tmp_path / "steps" / each.id / "out/checkpoints/step-00000003", model())
        root.write_bytes(f"evals/{workflow.steps['extend'].id}/e/evaluation.json", b"{}")  # of perplexity, say
        line = {"task": "copa", "doc_id": 0, "doc_hash": "0", "scores": {"acc": score}}
        root.write_bytes(f"evals/{runs[name]}/e/harness/loops-3/samples/copa.jsonl", json.dumps(line).encode())
    result = CliRunner().invoke(app, ["compare", "a", "b", "--json", "--storage", str(tmp_path)])
    (row,) = json.loads(result.stdout)
    assert (row["a"], row["b"]) == (0, 1)
    assert f"a: {runs['a']}, its newest run with scored items; `lt2 status a` lists all" in result.stderr


def test_a_model_from_elsewhere_gets_a_run_of_its_own_once(tmp_path):
    pack, root = tmp_path / "pack", tmp_path / "storage"
    lt2("pack", "build", pack, *(f"{task}={path}" for task, path in write(tmp_path / "data", arc_easy=arc()).items()))
    place = save(tmp_path / "elsewhere", model())
    for depth in (1, 2):
        lt2("eval", place, "--pack", pack, "--suite", "tasks=arc_easy", "--loops", depth, "--storage", root)
    index = ResultsStore(Storage(str(root))).index()
    (run,) = index.runs.values()
    assert run.state == "finished"
    assert run.config == {"evaluated": str(place)}
    assert {name for name, _, _ in index.evals} == {run.run_id}
    lt2("eval", place, "--pack", pack, "--suite", "tasks=arc_easy", "--storage", (own := tmp_path / "own"))
    (row, *_) = json.loads(lt2("compare", place, next(own.glob("evals/*/*")), "--storage", own, "--json"))
    assert row["p_value"] == 1  # a model's folder means its evaluation, as it does to lt2 eval


def test_rulers_tasks_are_made_and_added(tmp_path):
    pack = tmp_path / "pack"
    options = ["--tokenizer", "byte", "--samples", "2", "--tasks", "ruler_vt,niah_single_1", "--lengths", "3000,4000"]
    made = lt2("pack", "ruler", pack, *options).split()
    assert made[::3] == ["ruler_vt_3000", "ruler_vt_4000", "niah_single_1_3000", "niah_single_1_4000"]
    assert "4 tasks, all files as recorded" in lt2("pack", "verify", pack)
    with pytest.raises(ConfigError, match="give numbers of tokens"):
        lt2("pack", "ruler", pack, "--tokenizer", "byte", "--lengths", "4k")
    options = ["--tokenizer", "byte", "--tasks", "niah_single_1,niah_single_2", "--lengths", "300,400"]
    with pytest.raises(ConfigError) as all_at_once:
        lt2("pack", "needles", pack, *options)
    assert [line.split()[0] for line in str(all_at_once.value).splitlines()] == ["niah_single_1:"] * 2 + [
        "niah_single_2"
    ]


def test_a_task_that_the_pack_has_already_is_replaced_aloud(tmp_path):
    places = write(tmp_path / "data", mine=choices(), arc_easy=arc())
    pack, one = tmp_path / "pack", f"mine={places['mine']}"
    first = lt2("pack", "build", pack, one)
    assert lt2("pack", "build", pack, one) == f"{first.rstrip()}; unchanged\n"
    other = write(tmp_path / "other", mine=choices()[:2])["mine"]
    again = lt2("pack", "build", pack, f"mine={other}", f"arc_easy={places['arc_easy']}").splitlines()
    assert again[0].endswith(f"; replaces what was there, {first.split(maxsplit=1)[1].rstrip()}")
    assert ";" not in again[1]


def test_mistakes_are_named(tmp_path):
    root = tmp_path / "storage"
    with pytest.raises(ConfigError, match="nothing to build"):
        lt2("pack", "build", tmp_path / "pack")
    with pytest.raises(ConfigError, match="expected TASK=PATH"):
        lt2("pack", "build", tmp_path / "pack", "arc_easy")
    (tmp_path / "own.jsonl").write_text('{"query": "a", "choices": ["b", "c"], "gold": 0}')
    for name in ("../x", "a/b", "a,b", ""):
        with pytest.raises(ConfigError, match=f"task '{name}': use 1 to 128 letters, digits"):
            lt2("pack", "build", tmp_path / "pack", f"{name}={tmp_path}/own.jsonl")
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        lt2("eval", "./nowhere", "--pack", tmp_path, "--storage", root)
    save(root / "steps" / "one-12345678" / "out", model())
    with pytest.raises(ConfigError, match="--exit-thresholds 0.5,x: give comma-separated numbers"):
        lt2("eval", "one-12345678", "--pack", tmp_path, "--exit-thresholds", "0.5,x", "--storage", root)
    with pytest.raises(ConfigError, match="unknown suite 'cor'"):
        lt2("eval", "one-12345678", "--pack", tmp_path, "--suite", "cor", "--storage", root)
    with pytest.raises(ConfigError, match="--suite tasks=, names no task"):
        lt2("eval", "one-12345678", "--pack", tmp_path, "--suite", "tasks=,", "--storage", root)
    with pytest.raises(ConfigError, match="not an evaluation pack"):
        lt2("eval", "one-12345678", "--pack", tmp_path, "--storage", root)
    with pytest.raises(ConfigError, match="no evaluation of 'one-12345678'"):
        lt2("compare", "one-12345678", "one-12345678", "--storage", root)
    with pytest.raises(ConfigError, match="no checkpoint, run or workflow 'two-12345678'"):
        lt2("compare", "one-12345678", "two-12345678", "--storage", root)


def test_paper_table_shows_our_runs_beside_the_papers(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    rows = [{"task": task, "metric": metric, "value": 0.5} for task in TASKS for metric in ("acc", "acc_norm")]
    rows += [{"task": "perplexity", "metric": "perplexity", "value": 12.5}]
    store.log_eval("mine", "validation", rows)
    piqa = {"task": "piqa", "metric": "acc", "value": 0.7}
    store.log_eval("partial", "validation", [piqa])
    store.log_eval("quick", "validation", [piqa | {"n": 4, "limit": 4}])
    store.log_eval("whole", "validation", [piqa | {"n": 4, "limit": 4}, piqa | {"n": 9, "limit": None}])
    lines = lt2("paper-table", "--storage", tmp_path, "--format", "csv").splitlines()
    assert "mine,ours,12.5,50.0,50.0,50.0,50.0,50.0,50.0,50.0,50.0,50.0," in lines
    assert any(line.startswith("partial,ours,,,,,70.0,") and "no ARC-E" in line for line in lines)
    told = {line.partition(",")[0]: "a quick look, 4 items a task; no ARC-E" in line for line in lines}
    assert (told["partial"], told["quick"], told["whole"]) == (False, True, False)
    assert "Looped Mamba2" in lt2("paper-table", "--storage", tmp_path)
    assert r"mine & 12.50 & 50.00" in lt2("paper-table", "mine", "--storage", tmp_path, "--format", "latex")
    with pytest.raises(ConfigError, match="no scale '7B'"):
        lt2("paper-table", "--storage", tmp_path, "--scale", "7B")
    with pytest.raises(
        ConfigError, match="no run or workflow 'other' with evaluations; those with some: mine, partial, quick, whole"
    ):
        lt2("paper-table", "other", "--storage", tmp_path)


def test_perplexities_on_two_texts_are_told_apart(tmp_path):
    store, row = ResultsStore(Storage(str(tmp_path))), {"task": "perplexity", "metric": "perplexity"}
    store.create_run("mine", {"config": {}}).close()
    store.log_eval("mine", "validation", [row | {"value": 12.5, "n": 90, "data": "aaaa"}])
    assert not lt2("paper-table", "mine", "--storage", tmp_path, "--format", "csv").splitlines()[-1].count("text")
    assert "aaaa" not in lt2("results", "--storage", tmp_path)
    store.log_eval("mine", "validation", [row | {"value": 9.5, "n": 90, "data": "bbbb"}])
    last = lt2("paper-table", "mine", "--storage", tmp_path, "--format", "csv").splitlines()[-1]
    assert last.startswith("mine,ours,9.5,,")
    assert "PPL is on one of 2 texts; no ARC-E" in last
    lines = [line.split() for line in lt2("results", "--storage", tmp_path).splitlines() if "perplexity" in line]
    assert [line[1:] for line in lines] == [["12.5", "no", "90", "aaaa"], ["9.5", "90", "bbbb"]]


def test_a_result_without_a_value_is_none(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    row = {"task": "piqa", "metric": "acc", "value": 0.7, "n": 4}
    store.log_eval("mine", "validation", [row, row | {"value": None, "n": 9}])
    for table in ("main", "recall"):
        lines = lt2("paper-table", "--table", table, "--storage", tmp_path, "--format", "csv").splitlines()
        assert lines[-1].startswith("mine,ours,,,,,70.0,") == (table == "main")


def test_paper_table_of_recall(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    rows = [{"task": task, "metric": "contains", "value": 0.5} for task in (*SUITES["recall"], *SUITES["needles"])]
    store.log_eval("mine", "validation", rows)
    store.log_eval("other", "validation", [{"task": "piqa", "metric": "acc", "value": 0.7}])
    lines = lt2("paper-table", "--table", "recall", "--storage", tmp_path, "--format", "csv").splitlines()
    assert lines[0].startswith("model,source,SWDE,SQuAD,FDA,TriviaQA,NQ,DROP,Avg,NIAH-1 1k,")
    assert lines[-1] == "mine,ours," + "50.0," * 19
    assert lines[-2].startswith("Looped Hybrid (Full+GDN),paper,53.1,48.9,62,67.8,34,30.2,49.3")
    assert r"mine & 50.00" in lt2("paper-table", "--table", "recall", "--storage", tmp_path, "--format", "latex")
    with pytest.raises(ConfigError, match="long-context table at 1.3B only"):
        lt2("paper-table", "--table", "recall", "--scale", "0.6B", "--storage", tmp_path)
    with pytest.raises(ConfigError, match="unknown table 'ruler'"):
        lt2("paper-table", "--table", "ruler", "--storage", tmp_path)
