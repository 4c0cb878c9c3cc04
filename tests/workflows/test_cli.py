"""The command line: exit codes, one clear line for a mistake, JSON for machines, and an instant --help."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lt2.config import ConfigError
from lt2_platform.results import index as index_files
from lt2_platform.results.index import read_index
from lt2_platform.results.store import ResultsStore
from lt2_platform.storage import Storage
from lt2_workflows.cli import main
from lt2_workflows.commands import records
from tests.workflows.conftest import FAKE_STEPS

CHAIN = f"{FAKE_STEPS}:chain"


def lt2(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lt2_workflows.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "shown", "heavy"),
    [
        (["--help"], "Usage:", ["torch", "ray", "numpy", "pydantic", "fsspec", "pyarrow"]),
        # It builds the model on the meta device, as whatever loads a checkpoint does.
        (["plan", "quickstart"], "647k parameters", ["ray", "torch._dynamo", "torch.distributed.tensor"]),
    ],
)
def test_commands_import_only_what_they_need(arguments, shown, heavy):
    call = f"import sys; sys.argv = {['lt2', *arguments]}; from lt2_workflows.cli import main"
    code = f"{call}\ntry: main()\nfinally: print(sorted(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown in output
    assert not [name for name in heavy if f"'{name}'" in output]


def test_run_status_and_json(tmp_path):
    root = str(tmp_path / "s")
    done = lt2("run", CHAIN, "--storage", root)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(lt2("status", "--json", "--storage", root).stdout)
    assert [(step["name"], step["state"]) for step in found["steps"]] == [
        ("first", "done"),
        ("second", "done"),
        ("third", "done"),
    ]
    shown = lt2("status", "chain", "--storage", root).stdout
    assert found["id"] in shown
    assert shown.count(" done ") == 3


def test_a_record_is_run_again_without_the_file_it_was_made_from(tmp_path):
    recipe, root = tmp_path / "mine.py", tmp_path / "s"
    shutil.copy(FAKE_STEPS, recipe)
    assert lt2("run", f"{recipe}:chain", "--storage", str(root)).returncode == 0
    recipe.unlink()
    (record,) = root.glob("workflows/chain-*/dag.json")
    again = lt2("run", str(record), "--set", "third.lines=5", "--storage", str(root))
    assert again.returncode == 0, again.stderr
    assert [again.stderr.count(each) for each in ("skipped", " started")] == [2, 1]


def test_steps_on_s3_talk_not_about_keys_and_leave_nothing_behind(s3_root, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = lt2("run", CHAIN, "--storage", s3_root)
    assert not list(tmp_path.iterdir())
    assert done.returncode == 0
    storage = Storage(s3_root)
    logs = [storage.read_bytes(path).decode() for path in storage.glob("steps/*/attempts/1/log")]
    assert len(logs) == 3
    assert "credentials" not in done.stderr + "".join(logs)


def test_an_export_that_has_no_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = lt2("export", str(tmp_path / "run"), str(tmp_path / "file/model"), "--storage", str(tmp_path))
    assert_one_line(
        done, f"lt2: {tmp_path}/file/model cannot be written (a part of the path is a file); choose another"
    )


def test_a_failed_step_is_named_with_attempt_and_log(tmp_path):
    done = lt2(
        "run",
        CHAIN,
        "--storage",
        str(tmp_path / "s"),
        "--set",
        "second.fail=error",
        "--set",
        "second.resources.retries=0",
    )
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    at = lines.index("second     failed in attempt 1: ValueError: this step fails")
    assert "Traceback" in Path(lines[at + 1].split("log: ")[1]).read_text()
    assert lines[at + 2 :] == ["third      not run: needs second", "lt2: failed: second"]
    assert done.stderr.count("this step fails") == 1


def test_storage_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LT2_STORAGE", str(tmp_path / "from-env"))
    assert lt2("run", CHAIN, "--set", "first.lines=1").returncode == 0
    assert (tmp_path / "from-env" / "workflows").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quickstrat"], "lt2: unknown recipe 'quickstrat'; did you mean 'quickstart'?"),
        (["run", CHAIN, "--set", "first.lnies=1"], "first.lnies: unknown key 'lnies'; did you mean 'lines'?"),
        (["run", CHAIN, "--set", "first.fail=bad_input"], "first      failed in attempt 1: the corpus is empty;"),
        (["step", CHAIN, "second"], "lt2: step 'second' needs first, not finished in"),
        (["status", "nothing"], "lt2: no workflow 'nothing' in"),
        (["plan", CHAIN, "--set", b"first.lines=\xe9"], "lt2: the argument first.lines=\\udce9 is not UTF-8; give ano"),
        (["plan", "missing.yaml"], "lt2: recipe record missing.yaml does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    (tmp_path / "s").mkdir()
    assert_one_line(lt2(*arguments, "--storage", str(tmp_path / "s")), message)


def assert_one_line(done: subprocess.CompletedProcess, message: str) -> None:
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


COMMANDS = [
    ["status"],
    ["results"],
    ["plan", CHAIN],
    ["run", CHAIN],
    ["report", "chain"],
    ["diagnose", "run"],
    ["note", "run", "text"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_bucket_that_is_not_there_is_no_empty_store(command, s3_root):
    assert_one_line(
        lt2(*command, "--storage", "s3://nobucket/x"), "(there is no bucket nobucket); create it, or choose"
    )


@pytest.mark.parametrize("command", COMMANDS[:2], ids=lambda command: command[0])
def test_a_folder_that_is_not_there_is_no_empty_store(command, tmp_path):
    root = str(tmp_path / "mistyped")
    assert_one_line(
        lt2(*command, "--storage", root), f"lt2: folder {root} does not exist; choose another with --storage"
    )


@pytest.mark.parametrize("command", COMMANDS[2:4], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("environment", "root", "message"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}, "s3://b/x",
         "lt2: storage root s3://b/x cannot be read (Could not connect to the endpoint URL"),
        ({}, "s3://bucket/x", "(Unable to locate credentials); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ({}, "s3://", "lt2: s3:// names no bucket; give s3://bucket/prefix"),
        ({}, "s3://no bucket", "('no bucket' is not a valid bucket name); give s3://bucket/prefix"),
        ({}, "", "lt2: the storage root is empty; give a folder or s3://bucket/prefix"),
    ],
)  # fmt: skip
def test_an_unusable_root_is_one_line(command, environment, root, message, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {"AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1", **environment}.items():
        monkeypatch.setenv(name, value)
    assert_one_line(lt2(*command, "--storage", root), message)


def test_a_store_that_takes_no_writes_is_one_line(tmp_path, monkeypatch, capsys):
    root = str(tmp_path / "s")
    assert lt2("run", CHAIN, "--storage", root).returncode == 0

    def read_only(storage, full):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Storage, "_writing", read_only)
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001/COMPLETE").write_text("{}")
    place = str(tmp_path)
    for command in (["report", "chain"], ["diagnose", place], ["checkpoints", place, "--prune", "best"]):
        monkeypatch.setattr(sys, "argv", ["lt2", *command, "--storage", root])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("lt2: storage root ")
        assert "(Read-only file system); choose another with --storage or LT2_STORAGE" in line


def test_an_unwritable_root_is_refused_before_anything_happens(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = lt2("run", CHAIN, "--storage", str(tmp_path / "file" / "s"))
    assert done.returncode == 2
    assert f"lt2: storage root {tmp_path}/file/s cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("prepare.tokenizer=bite", "lt2: prepare.tokenizer: unknown tokenizer 'bite'; use byte, or a path"),
        ("prepare.tokenizer=/no/such.json", "lt2: prepare.tokenizer: tokenizer file /no/such.json does not exist"),
        ("prepare.source=/no/such/corpus", "lt2: prepare.source: source /no/such/corpus does not exist"),
        ("prepare.source=/no/such/*.txt", "lt2: prepare.source: source /no/such/*.txt matches no file"),
        (
            "pretrain.model.n_loop=2",
            "lt2: quickstart: pretrain.model.n_loop: unknown key 'n_loop'; did you mean 'n_loops'?",
        ),
        ("pretrain.model.layout.mixer.type=gnd", "unknown mixer type 'gnd'; did you mean 'gdn'?"),
    ],
)
def test_bad_input_of_the_quickstart_leaves_nothing_behind(setting, message, tmp_path):
    root = tmp_path / "s"
    done = lt2("run", "quickstart", "--storage", str(root), "--set", setting)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not root.exists()


def test_results_of_an_empty_store(tmp_path):
    assert json.loads(lt2("results", "--json", "--storage", str(tmp_path)).stdout) == []


def test_results_are_a_block_per_run_and_can_be_narrowed(tmp_path):
    store = ResultsStore(Storage(str(tmp_path)))
    for seed in (1, 2):
        with store.create_run(f"r{seed}", {"config": {"train": {"seed": seed}, "long": "x" * seed}}) as writer:
            writer.log(8, {"loss": 2.0, "lr": 0.1})
    shown = lt2("results", "--storage", str(tmp_path)).stdout
    assert "r1\n  long=x  train.seed=1\nmetric" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("loss")] == [
        ["loss", "8", "2", "nats/token"]
    ] * 2
    one = lt2("results", "r2", "--metric", "l?", "--storage", str(tmp_path)).stdout
    assert one.splitlines()[0] == "r2"
    assert "lr " in one
    assert "loss" not in one
    assert "r1" not in one
    assert json.loads(lt2("results", "r2", "--metric", "acc*", "--json", "--storage", str(tmp_path)).stdout) == []
    trials = {"a-x": {"part_of": "sweep-1"}, "b-x": {"part_of": "sweep-2"}, "a": {}}
    for (name, more), step in zip(trials.items(), ("r2", "r1", "sweep-1")):  # a sweep stands for its trials' runs
        record = {"workflow": name, "id": name, "name": name, "steps": {}, "ids": {"s": step}} | more
        store.storage.write_json(f"workflows/{name}/dag.json", record)
    swept = json.loads(lt2("results", "a", "--json", "--storage", str(tmp_path)).stdout)
    assert {row["run"] for row in swept} == {"r2"}
    refused = lt2("results", "r3", "--storage", str(tmp_path))
    assert refused.returncode == 2
    assert "no run or workflow 'r3' with numbers; runs in" in refused.stderr


def test_what_is_not_finite_is_null_in_json(tmp_path, monkeypatch, capsys):
    store = ResultsStore(Storage(str(tmp_path)))
    with store.create_run("r1", {}) as writer:
        writer.log(8, {"loss": math.nan})
    store.log_eval("r1", "validation", [{"task": "perplexity", "metric": "perplexity", "value": math.inf}])
    store.log_eval("r1", "validation", [{"task": "swde", "metric": "f1", "value": math.nan}])
    monkeypatch.setattr(sys, "argv", ["lt2", "results", "r1", "--json", "--storage", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    found = {row["metric"]: row["value"] for row in rows}
    assert found == {"loss": None, "validation/perplexity/perplexity": None, "validation/swde/f1": None}


def test_results_of_a_run_read_the_index_once(tmp_path, monkeypatch, capsys):
    with ResultsStore(Storage(str(tmp_path))).create_run("r1", {}) as writer:
        writer.log(8, {"loss": 2.0})
    reads = []
    monkeypatch.setattr(index_files, "read_index", lambda storage, read=read_index: reads.append(1) or read(storage))
    monkeypatch.setattr(sys, "argv", ["lt2", "results", "r1", "--storage", str(tmp_path)])
    with pytest.raises(SystemExit) as done:
        main()
    assert (done.value.code, reads) == (0, [1])
    assert capsys.readouterr().out.startswith("r1\n")


def test_a_note_on_a_run(tmp_path, monkeypatch):
    store = ResultsStore(Storage(str(tmp_path)))
    store.create_run("r1", {"config": {}}).close()
    monkeypatch.setenv("LOGNAME", "ada")
    assert (
        lt2("note", "r1", "  the baseline\nof all ", "--storage", str(tmp_path)).stdout == "r1: the baseline\nof all\n"
    )
    ((run, name, row),) = store.index().evals
    assert (run, name, row["note"], row["author"]) == ("r1", "note", "the baseline\nof all", "ada")
    assert lt2("results", "--storage", str(tmp_path)).stdout == "(nothing yet)\n"  # it is none
    assert_one_line(lt2("note", "r2", "x", "--storage", str(tmp_path)), "no run or workflow 'r2'")
    assert_one_line(lt2("note", "r1", "x" * 2001, "--storage", str(tmp_path)), "2,001 characters; at most 2,000")
    store.storage.write_json("workflows/w-1/dag.json", {"workflow": "w", "ids": {"prepare": "p", "pretrain": "r1"}})
    records.note("w", "by its workflow", str(tmp_path))
    assert store.index().evals[-1][2]["note"] == "by its workflow"
    store.storage.write_json("workflows/w-2/dag.json", {"workflow": "w", "ids": {"pretrain": "r3"}})
    store.create_run("r3", {"config": {}}).close()
    with pytest.raises(ConfigError, match="w has several runs, name one: r1, r3"):
        records.note("w", "x", str(tmp_path))


def test_status_shows_the_newest_workflow_last_and_long_errors_at_the_end(tmp_path):
    storage = Storage(str(tmp_path))
    for name, ended, error in (("old-2", 1000.0, None), ("new-1", 2000.0, "x" * 300)):
        storage.write_json(f"workflows/{name}/dag.json", {"workflow": name[:3], "ids": {"only": f"only-{name}"}})
        storage.write_json(f"steps/only-{name}/spec.json", {"needs": {}, "config": {"type": "fake"}})
        storage.write_json(
            f"steps/only-{name}/attempts/1/state.json", {"state": "failed", "ended": ended, "error": error}
        )
    shown = lt2("status", "--storage", str(tmp_path)).stdout
    assert shown.index("old-2") < shown.index("new-1")
    assert "1970-01-01 00:33" in shown
    assert shown.index("attempts/1/log", shown.index("only-new-1")) < shown.index("x" * 300)
    attempt = "steps/only-new-1/attempts/2"
    storage.write_json(f"{attempt}/state.json", {"state": "running", "started": 3000.0, "ended": None, "error": None})
    lease = {"host": "elsewhere", "pid": 7, "beat": 1, "time": 3000.0, "ttl_s": 30.0, "released": False}
    storage.write_json(f"{attempt}/lease.json", lease)
    assert (
        "its process ended without reporting an error; the same command resumes"
        in lt2("status", "--storage", str(tmp_path)).stdout
    )


def test_generate_without_a_checkpoint(tmp_path):
    done = lt2("generate", "no-such-run", "text", "--storage", str(tmp_path))
    assert done.returncode == 2
    assert "no checkpoint, run or workflow 'no-such-run'" in done.stderr


def test_plan_shows_what_would_run_and_writes_nothing(tmp_path):
    root = tmp_path / "s"
    shown = lt2("plan", CHAIN, "--storage", str(root))
    assert shown.returncode == 0, shown.stderr
    assert not root.exists()
    assert [line.split()[:2] for line in shown.stdout.splitlines()[1:4]] == [
        ["first", "run"],
        ["second", "run"],
        ["third", "run"],
    ]
    assert lt2("step", CHAIN, "first", "--storage", str(root)).returncode == 0
    assert lt2("plan", CHAIN, "--storage", str(root)).stdout.splitlines()[1].split()[:2] == ["first", "skip"]
