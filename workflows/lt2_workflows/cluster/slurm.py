"""A Slurm batch script: Ray on every node of the allocation, a recipe on it, everything gone at the end."""

from __future__ import annotations

import shlex

from lt2_workflows.cluster.settings import ClusterSettings

SCRIPT = r"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --partition={partition}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus}
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --time={hours}:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# Usage: sbatch lt2.sbatch [RECIPE [--set KEY=VALUE …]]. Submit it again, or let Slurm requeue it: finished steps are
# skipped, and a step that was cut off continues from its last checkpoint.
set -euo pipefail
umask 077

python={python}
storage=${{LT2_STORAGE:-{root}}}
if [ $# -eq 0 ]; then set -- {recipe}; fi

# A token of this job's own, on the shared file system: Ray listens on all interfaces.
folder=$HOME/.lt2/slurm-$SLURM_JOB_ID
mkdir -p "$folder"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$folder/token
"$python" -c 'import secrets; print(secrets.token_hex(32), end="")' > "$folder/token"
export RAY_TRAIN_ENABLE_STATE_TRACKING=1 RAY_USAGE_STATS_ENABLED=0

# Two jobs may share a login node or, without --exclusive, a machine: the ports follow from the job's number.
port=$((20000 + SLURM_JOB_ID % 5000 * 2))
ray() {{ "$python" -m ray.scripts.scripts "$@"; }}
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${{nodes[0]}}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname -I | cut -d' ' -f1)

on_nodes() {{  # options of srun, then those of ray start; stays in the background
    srun --overlap --ntasks-per-node=1 "$@" &
    started+=($!)
}}
started=()
finish() {{
    trap - EXIT TERM
    for pid in "${{started[@]}}"; do kill -TERM "$pid" 2>/dev/null || true; done
    wait || true
    rm -rf "$folder"
}}
trap finish EXIT

# Each node joins by Slurm's name of it, so that those which do not can be told.
start=(bash -c 'exec "$@" --node-name="$SLURMD_NODENAME"' ray
    "$python" -m ray.scripts.scripts start --block --disable-usage-stats --num-cpus={cpus}{num_gpus})
on_nodes --nodes=1 --ntasks=1 -w "$head" "${{start[@]}}" --head --node-ip-address="$address" --port=$port \
    --include-dashboard=false ${{LT2_RAY_OPTIONS:-}}
up=
for _ in $(seq 60); do
    ray status --address "$address:$port" > "$folder/status" 2>&1 && up=yes && break
    kill -0 "${{started[0]}}" || {{ echo "lt2: the head did not start" >&2; exit 1; }}
    sleep 2
done
if [ -z "$up" ]; then
    echo "lt2: Ray's head on $head does not answer at $address:$port:" >&2
    cat "$folder/status" >&2
    exit 1
fi
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    others=$((SLURM_JOB_NUM_NODES - 1))
    on_nodes --nodes=$others --ntasks=$others -x "$head" "${{start[@]}}" --address "$address:$port"
fi
"$python" -P -m lt2_workflows.cluster.nodes "$address:$port" "${{LT2_NODES_S:-300}}" "${{nodes[@]}}"

# In the background, so that Slurm's signal reaches us while it runs: the driver then releases its leases.
RAY_ADDRESS=$address:$port "$python" -P -m lt2_workflows.cli run "$@" --storage "$storage" &
driver=$!
trap 'kill -TERM $driver 2>/dev/null' TERM
code=0
wait $driver || code=$?
if kill -0 $driver 2>/dev/null; then  # the wait ended by the signal, not with the driver
    code=0
    wait $driver || code=$?
fi
exit $code
"""


def batch_script(settings: ClusterSettings) -> str:
    """The text of the script; RECIPE and its settings default to those of `job`."""
    slurm, job = settings.slurm, settings.job
    recipe = [job.recipe, *(part for item in job.set for part in ("--set", item))]
    return SCRIPT.format(
        name=settings.name,
        partition=slurm.partition,
        nodes=slurm.nodes,
        cpus=slurm.cpus_per_node,
        gpus=slurm.gpus_per_node,
        num_gpus=f" --num-gpus={slurm.gpus_per_node}" if slurm.gpus_per_node else "",
        hours=slurm.hours,
        python=shlex.quote(slurm.python),
        root=shlex.quote(slurm.root),
        recipe=shlex.join(recipe),
    )
