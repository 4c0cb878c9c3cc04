"""What runs and their settings are called where there is little room."""

from __future__ import annotations

from lt2_dashboards.queries import Snapshot
from lt2_platform.results.store import RunInfo, differences
from lt2_platform.results.tables import as_text

MAX_TOLD = 3  # settings in a run's name


def told_apart(snapshot: Snapshot, runs: list[str]) -> dict[str, str]:
    """What runs are called: by their names, several of one step also by what they differ in: "stage2-1a2b3c4d (k=8)".

    Those of the same settings differ in the weights that they begin with: "(start=stage2-1a2b3c4d)".
    """
    names: dict[str, str] = {run: run for run in runs}
    steps: dict[str, list[RunInfo]] = {}
    for run, found in snapshot.runs(runs).items():
        if "-" in run:  # others were named by somebody
            steps.setdefault(run.rpartition("-")[0], []).append(found)
    for group in steps.values():
        apart = differences({run.run_id: run.config for run in group})
        for run in group if len(group) > 1 else []:
            settings = {
                key: as_text(value) for key, value in apart[run.run_id].items() if not key.startswith("sources.")
            }
            short = short_names(list(settings))
            told = [f"{short[key]}={value}" for key, value in list(settings.items())[:MAX_TOLD]]
            start = run.info.get("models", {}).get("start")
            if not told and start:
                told = [f"start={str(start).removesuffix('/out').rpartition('/')[2]}"]
            names[run.run_id] = f"{run.run_id} ({', '.join(told)})" if told else run.run_id
    return names


def short_names(keys: list[str]) -> dict[str, str]:
    """By key its shortest ending that no other key has, as in the runs table: train.lr -> lr, layout.type as it is."""
    names = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        alone = (e for e in endings if not any(k != key and (k == e or k.endswith(f".{e}")) for k in keys))
        names[key] = next(alone, key)
    return names
