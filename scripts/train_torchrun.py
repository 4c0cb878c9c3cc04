#!/usr/bin/env python3
"""Pretrain without Ray: the same loop, data, checkpoints and metrics as `lt2 run`, started by torchrun.

    torchrun --nproc-per-node 8 scripts/train_torchrun.py --config pretrain.json --data DATASET --out RUN_FOLDER

The config is JSON {"model": …, "train": …} (lt2_platform.train.config.PretrainConfig). The same command resumes;
SIGTERM and Ctrl-C save first.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import ValidationError

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "platform")]

from lt2.config import ConfigError, explain  # noqa: E402
from lt2.train.loop import PreemptedError  # noqa: E402
from lt2_platform.storage import default_root  # noqa: E402
from lt2_platform.train import run_folder, worker  # noqa: E402
from lt2_platform.train.config import PretrainConfig  # noqa: E402
from lt2_platform.train.reporting.wandb_sink import WandbSink  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON file")
    parser.add_argument("--data", required=True, help="packed dataset, local or s3://")
    parser.add_argument("--out", required=True, help="run folder, local or s3://")
    parser.add_argument("--storage", default=default_root(), help="root of the results store")
    parser.add_argument("--run-id", default=None, help="name in the results store (default: the run folder's name)")
    parser.add_argument(
        "--wandb", default="auto", choices=["auto", "online", "offline", "off"],
        help="auto: what WANDB_MODE says, else online with WANDB_API_KEY, else offline files in the run folder",
    )  # fmt: skip
    parser.add_argument(
        "--profile-steps", nargs=2, type=int, metavar=("FIRST", "LAST"), help="trace these steps of rank 0"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        config = PretrainConfig.model_validate_json(Path(arguments.config).read_text())
        spec = run_folder.open_run(
            config,
            data=arguments.data,
            out=arguments.out,
            run_id=arguments.run_id or Path(arguments.out).name,
            storage_root=arguments.storage,
            num_workers=world_size,
            profile_steps=tuple(arguments.profile_steps) if arguments.profile_steps else None,
        )
        # One rank's curve is everybody's.
        rank_zero = int(os.environ.get("RANK", 0)) == 0
        sink = WandbSink(spec.run_id, spec.out, config.model_dump(mode="json"), arguments.wandb if rank_zero else "off")
        with sink:
            result = worker.run(spec, callbacks=[sink])
    except PreemptedError as stop:
        print(f"{stop}; the same command goes on from there", file=sys.stderr)
        return 143
    except ValidationError as error:
        print(explain(error, arguments.config), file=sys.stderr)
        return 2
    except (ConfigError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    if int(os.environ.get("RANK", 0)) == 0:
        print(run_folder.close_run(spec, result))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    # Not sys.exit: gloo's C++ threads now and then abort a process that has done all its work, and torchrun would call
    # a finished run failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
