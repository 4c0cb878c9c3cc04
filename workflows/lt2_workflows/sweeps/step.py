"""The sweep step: what trials share is run first, then Ray Tune runs the trials, then the table is written.

    out/trials/<name>.json   how a trial ended; a trial that has one is not run again
    out/rungs/<name>.json    of early stopping: see `KeptAsha`
    out/sweep.json           {"title", "paper", "trials", "rows"}: see `write_table`
    out/table.txt, .csv

Tune's own state is thrown away with every attempt, as Ray Train's is: the truth is in the trials' own steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lt2.config import ConfigError
from lt2_platform.evaluate import ablations
from lt2_platform.json_values import finite
from lt2_platform.machine.cores import share
from lt2_platform.storage import Storage
from lt2_platform.train.on_ray.stopping import conveyed
from lt2_platform.wording import amount, first_of
from lt2_workflows.console import table
from lt2_workflows.engine.attempt import Interrupted
from lt2_workflows.engine.context import StepContext
from lt2_workflows.engine.local_ray import join_ray
from lt2_workflows.engine.records import TTL_S, read_done, step_state
from lt2_workflows.graph import STEP_TYPES, Place, Workflow, fingerprint, step_type
from lt2_workflows.inputs import places_of
from lt2_workflows.sweeps.checks import check_trials, made_otherwise, remarks
from lt2_workflows.sweeps.config import SweepStep, Trial, check_asha, trainings

if TYPE_CHECKING:
    from lt2_platform.results.store import ResultsStore

# Variables by which a process finds Ray, and with which code: those of a submitted job travel in the last one.
RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "RAY_JOB_CONFIG_JSON_ENV_VAR")


def check_sweep(config: SweepStep) -> None:
    """Raise ConfigError for bad input that can be seen before anything runs."""
    if config.paper is not None:
        ablations.paper_table(config.paper)
    trials = config.expanded
    if config.scheduler.type == "asha":
        check_asha(config.scheduler, trials)


def sweep_places(config: SweepStep, context: StepContext) -> Iterator[Place]:
    """The places of all unfinished steps of the trials; a step that trials share comes once."""
    seen: set[str] = set()
    for trial in config.expanded:
        for name, step in trial.workflow.steps.items():
            if step.fingerprint in seen:
                continue
            seen.add(step.fingerprint)
            places = list(places_of(step.config, replace(context, workflow=trial.workflow, step=step)))
            if places and read_done(context.storage, step) is None:
                yield from (replace(place, field=f"{name}.{place.field}") for place in places)


def describe_sweep(config: SweepStep, context: StepContext) -> str:
    """A line per trial: what its steps would do and cost, and which are done."""
    lines = [f"{len(config.expanded)} trials, {config.resources.concurrent} at a time, {config.scheduler.type}"]
    width = max(len(trial.name) for trial in config.expanded)
    for trial in config.expanded:
        steps = trial.workflow.steps.values()
        done = sum(step_state(context.storage, step.folder)["state"] == "done" for step in steps)
        lines.append(f"    {trial.name:<{width}}  {done}/{len(steps)} steps done  {_cost(trial, context)}".rstrip())
    if read_done(context.storage, context.step) is None:
        lines += [f"         {remark}" for remark in remarks(config, context)]
    return "\n".join(lines)


def _cost(trial: Trial, context: StepContext) -> str:
    """What the trial's first training, or else its last step that can say, would do; and which others it trains."""
    described = [name for name, step in trial.workflow.configs.items() if STEP_TYPES[step.type].describe]
    name, *others = trainings(trial) or described[-1:] or [""]
    step = trial.workflow.steps.get(name)
    describe = STEP_TYPES[step.config.type].describe if step else None
    if step is None or describe is None:
        return ""
    told = describe(step.config, replace(context, workflow=trial.workflow, step=step))
    return f"{name}: {told}" + (f"; then {first_of(others)}" if others else "")


@step_type(SweepStep, check=check_sweep, describe=describe_sweep, places=sweep_places, fits=check_trials)
def run_sweep(config: SweepStep, context: StepContext) -> dict[str, Any]:
    """Result: {"text": the table, "title", "trials": number, "stopped", "failed", "rows": of `ablations.summarize`,
    without metrics}.

    Raises ConfigError when no trial at all got anywhere, with the first one's error, and Interrupted once it was asked
    to stop and the steps that were running have saved.
    """
    for remark in [*remarks(config, context), *made_otherwise(config, context)]:
        context.progress({"notice": remark})
    environment = _environment(config.resources.concurrent)
    workflows = {trial.name: _workflow(trial, context) for trial in config.expanded}
    with conveyed(context.stop, Storage(context.out)):
        context.stop.possible.set()
        run_shared(list(workflows.values()), context)
        records = run_trials(config, workflows, context, environment)
    failed = [record for record in records if record["state"] == "failed"]
    if len(failed) == len(records):
        again = f"--set {context.step.name}.retry={config.retry + 1} runs them again"
        raise ConfigError(f"all {len(records)} trials failed ({again}); {failed[0]['name']}: {failed[0]['error']}")
    return write_table(config, records, context)


def _environment(concurrent: int) -> dict[str, str]:
    """How a trial's processes find Ray, and their share of this machine's cores."""
    import ray

    join_ray()
    found = {name: os.environ[name] for name in RAY_VARIABLES if name in os.environ}
    return found | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} | share(os.environ, concurrent)


def _workflow(trial: Trial, context: StepContext) -> Workflow:
    name = f"{context.workflow.name}-{trial.name}"
    return replace(trial.workflow, name=name, recipe_file=context.workflow.recipe_file, part_of=context.step.id)


def run_shared(workflows: Sequence[Workflow], context: StepContext) -> None:
    """Run the steps that are the same in every trial, so that a bad source fails once and no trial waits for it."""
    from lt2_workflows.engine import executor

    if len(workflows) < 2:
        return
    first = workflows[0]
    same = {
        name
        for name, step in first.steps.items()
        if all(name in each.steps and each.steps[name].fingerprint == step.fingerprint for each in workflows)
    }
    configs = {name: step.config for name, step in first.steps.items() if name in same}
    if not configs:
        return
    shared = replace(first, name=f"{context.workflow.name}-shared", configs=configs, shared=True)

    def say(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            values = event["values"]
            if "notice" in values:
                values = {"notice": f"{event['step']}: {values['notice']}"}
            context.progress({"counts": f"{event['step']} step", **values})

    outcomes = executor.run(shared, context.storage, say=say, stop=context.stop.asked)
    for name, outcome in outcomes.items():
        if outcome.state in ("failed", "bad_input"):
            raise ConfigError(f"{name}, which every trial needs: {outcome.error} (log: {outcome.log})")
    for name, outcome in outcomes.items():
        if outcome.state == "interrupted":
            raise Interrupted(f"{name}, which every trial needs: {outcome.error or 'stopped before it began'}")


# Ray Tune


def run_trials(
    config: SweepStep, workflows: Mapping[str, Workflow], context: StepContext, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run what has no record yet; the records of all trials, in order."""
    folder = f"{context.step.folder}/out/trials"
    if config.retry:
        take_over(config, context)
    known = {name.removesuffix(".json") for name in context.storage.list(folder)}
    jobs = {}
    for trial in config.expanded:
        if trial.name in known:
            continue
        jobs[trial.name] = {
            "label": trial.label,
            "record": workflows[trial.name].record(),
            "storage": context.storage.root,
            "sweep": context.out,
            "environment": dict(environment),
            "ttl_s": TTL_S,
            "watch": [config.scheduler.step] if config.scheduler.type == "asha" else trainings(trial),
        }
    if jobs:
        from lt2_workflows.sweeps.tune import tune_trials  # Ray Tune

        tune_trials(config, jobs, context, folder)
    records = [context.storage.read_json(f"{folder}/{trial.name}.json") for trial in config.expanded]
    records = with_flops(records, context)
    log_to_runs(records, context)
    return records


def take_over(config: SweepStep, context: StepContext) -> None:
    """Give a sweep whose `retry` was raised the records of those before, without those of the trials that failed."""
    storage, new = context.storage, f"{context.step.folder}/out"
    for retry in reversed(range(config.retry)):
        before = fingerprint(config.model_copy(update={"retry": retry}), {})
        old = f"{replace(context.step, fingerprint=before).folder}/out"
        for path in (*storage.glob(f"{old}/rungs/*.json"), *storage.glob(f"{old}/trials/*.json")):
            record = storage.read_bytes(path)
            if path.startswith(f"{old}/rungs") or json.loads(record)["state"] != "failed":
                storage.create_exclusive(f"{new}{path.removeprefix(old)}", record)


# The table


def with_flops(records: Sequence[Mapping[str, Any]], context: StepContext) -> list[dict[str, Any]]:
    """The records with "training_flops" of all that a trial has trained (see `lt2_platform.results.flops`), or None."""
    from lt2_platform.results.flops import spent
    from lt2_platform.results.store import ResultsStore

    runs = ResultsStore(context.storage).index().runs
    trained = ([runs[step] for step in record.get("steps", {}).values() if step in runs] for record in records)
    return [{**record, "training_flops": spent(each)} for record, each in zip(records, trained, strict=True)]


def log_to_runs(records: Sequence[Mapping[str, Any]], context: StepContext) -> None:
    """Add each trial's headline numbers to its run as evaluation "sweep", task <the step's id>.

    So the dashboard's sweeps page, told to show that result, draws the runs of this sweep and no others.
    """
    from lt2_platform.results.store import ResultsStore

    store: ResultsStore = ResultsStore(context.storage)
    known = {run for run, name, row in store.index().evals if name == "sweep" and row["task"] == context.step.id}
    for record in records:
        if record["run"] is None or record["run"] in known:
            continue
        numbers = ablations.headline(record["metrics"]) or dict(list(record["metrics"].items())[:8])
        if record.get("training_flops"):
            numbers[ablations.FLOPS] = record["training_flops"]
        place = {"task": context.step.id} | {key: record[key] for key in ("label", "group", "seed")}
        rows = [{**place, "metric": name, "value": value} for name, value in numbers.items()]
        store.log_eval(record["run"], "sweep", rows)


def write_table(config: SweepStep, records: list[dict[str, Any]], context: StepContext) -> dict[str, Any]:
    """Write sweep.json (null for what is not finite), table.txt and table.csv; the step's result."""
    rows = ablations.summarize(records, config.paper)
    title = ablations.paper_table(config.paper).title if config.paper else context.workflow.name
    counts = ablations.counts(rows)
    shown = [_shown(row, config.paper is not None, counts) for row in rows]
    names = dict.fromkeys(name for line in shown for name in line)  # a configuration may have numbers that others lack
    columns = [name for name in names if any(line.get(name) not in ("", None) for line in shown)]
    bad = [f"{record['name']} {record['state']}{_why(record)}" for record in records if record["state"] != "done"]
    rest = _not_shown(rows, columns)
    text = "\n".join([f"\n{title}\n", table(shown, columns), *_notes(config), *rest, *bad, ""])
    out = f"{context.step.folder}/out"
    whole = {"title": title, "paper": config.paper, "trials": records, "rows": rows}
    context.storage.write_json(f"{out}/sweep.json", finite(whole))
    context.storage.write_bytes(f"{out}/table.txt", text.encode())
    context.storage.write_bytes(f"{out}/table.csv", ablations.as_csv(rows).encode())
    ended = {state: sum(record["state"] == state for record in records) for state in ("stopped", "failed")}
    kept = [{key: value for key, value in row.items() if key != "metrics"} for row in rows]
    return {"text": text, "title": title, "trials": len(records), **ended, "rows": kept}


def _shown(row: Mapping[str, Any], with_paper: bool, counts: Collection[str]) -> dict[str, Any]:
    line = {"group": row["group"], "configuration": row["label"]}
    line["parameters"] = amount(row["parameters"]) if row["parameters"] else ""
    line["training FLOPs"] = amount(row[ablations.FLOPS]) if row[ablations.FLOPS] else ""
    line |= {"seeds": row["n"], "stopped early": row["stopped"] or "", "failed": row["failed"] or ""}
    line |= ablations.score_cells(row, with_paper=with_paper)
    if row["PPL"] is None and row["Avg"] is None:
        for key, pair in list(row["metrics"].items())[:6]:
            line[key] = ablations.plus_minus(*pair, digits=0 if key in counts else 3)
    return line


def _not_shown(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> Iterator[str]:
    """Where the numbers are that the table has no column for."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    others = [name for name in names if name not in columns and name != "perplexity/perplexity"]
    if others:
        yield f"Not shown: {first_of(others, 8)}; `lt2 report`, table.csv of this step and the dashboard have all."


def _notes(config: SweepStep) -> Iterator[str]:
    if config.paper is not None:
        yield ""
        yield "Paper: 100B tokens of FineWeb-Edu. Perplexities on other data or at other sizes differ in scale."
        yield from ablations.paper_table(config.paper).notes
    if len(config.seeds) > 1:
        yield "± is the standard deviation over seeds. " + ablations.P_MEANS
    else:
        yield "One seed each, so any difference may be chance: add --seeds 0,1 (finished trials are kept)."


def _why(record: Mapping[str, Any]) -> str:
    if record["state"] == "stopped":
        return f" by the scheduler at step {record['last']['step']:,}" if record["last"] else " by the scheduler"
    return f": {record['error']}" + (f" (log: {record['log']})" if record["log"] else "")
