"""Wait until every node of a Slurm allocation has joined its Ray, by the name it was given: lt2.sbatch runs this before
the recipe, as `python -m lt2_workflows.cluster.nodes ADDRESS SECONDS NAME…`.
"""

from __future__ import annotations

import logging
import sys
import time

from lt2_workflows.engine.local_ray import NoRayError, connect


def main(address: str, seconds: str, *names: str) -> int:
    """Exit code: 1, with the names of those that are missing on stderr, after so many seconds."""
    import ray

    try:
        connect(address, log_to_driver=False, logging_level=logging.ERROR)
    except NoRayError as error:
        print(f"lt2: {error}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + float(seconds)
    while missing := set(names) - {node["NodeName"] for node in ray.nodes() if node["Alive"]}:
        if time.monotonic() > deadline:
            print(
                f"lt2: after {seconds} s, {len(missing)} of {len(names)} nodes have not joined Ray: "
                f"{', '.join(sorted(missing))}; the output of `ray start` there is above. Check them, exclude them "
                f"(sbatch --exclude={','.join(sorted(missing))}), or wait longer (LT2_NODES_S)",
                file=sys.stderr,
            )
            return 1
        time.sleep(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
