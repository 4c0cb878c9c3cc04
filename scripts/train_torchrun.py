#!/usr/bin/env python3
"""Pretrain without Ray: the same loop, data, checkpoints and metrics as `lt2 run`, started by torchrun.

    torchrun --nproc-per-node 8 scripts/train_torchrun.py --config pretrain.json --data DATASET --out RUN_FOLDER

The config is JSON {"model": …, "train": …} (lt2_platform.train.config.PretrainConfig); docs/training.md has one.
The same command resumes; SIGTERM and Ctrl-C save first. --start-from begins with the weights of another run,
--continue-from goes on from one with its optimizer, step and place in the data.

With --teacher it is a stage of distillation, and the config {"mixer": …, "kept": …, "train": …}
(lt2_platform.distill.run.DistillRun): the student begins as --student, or as the teacher itself. At the end rank 0
measures its distance to the teacher on held-out text (`teacher_kl`), as the step distill does.
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

from lt2.config import ConfigError  # noqa: E402
from lt2.explain import explain  # noqa: E402
from lt2.train.loop import PreemptedError  # noqa: E402
from lt2_platform.distill.measure import check_held_out, log_distance  # noqa: E402
from lt2_platform.distill.run import DistillRun, check_tokenizer, plan_stage  # noqa: E402
from lt2_platform.results.store import ResultsStore  # noqa: E402
from lt2_platform.storage import Storage, default_root  # noqa: E402
from lt2_platform.train import run_folder, worker  # noqa: E402
from lt2_platform.train.checkpoints.checkpoint import read_info, resolve  # noqa: E402
from lt2_platform.train.config import PretrainConfig, Sources, Workers  # noqa: E402
from lt2_platform.train.reporting.wandb_sink import WandbSink  # noqa: E402


def planned(arguments: argparse.Namespace) -> tuple[PretrainConfig, Sources]:
    """What to train, and the models it begins with or learns from. Raises ConfigError where they do not fit."""
    text = Path(arguments.config).read_text()
    if arguments.teacher is None:
        for option in ("student", "topk"):
            if getattr(arguments, option) is not None:
                raise ConfigError(f"--{option} is for a stage of distillation; give its --teacher as well")
        config = PretrainConfig.model_validate_json(text)
        if config.train.objective.needs_teacher:
            raise ConfigError(f"{arguments.config}: train.objective {config.train.objective.type} needs a --teacher")
        if arguments.start_from is not None:
            check_tokenizer(read_info(resolve(arguments.start_from)).tokenizer, arguments.data, arguments.start_from)
        if arguments.start_from is not None and arguments.continue_from is not None:
            raise ConfigError("give --start-from (another run's weights) or --continue-from (all of it), not both")
        return config, Sources(start=arguments.start_from, continue_from=arguments.continue_from)
    if arguments.continue_from is not None:
        raise ConfigError("--continue-from is for pretraining; a stage of distillation begins with its --student")
    if arguments.start_from is not None:
        raise ConfigError("--start-from with --teacher: what a stage of distillation begins with is its --student")
    stage = DistillRun.model_validate_json(text)
    if arguments.score_sequences < 1:
        raise ConfigError(f"--score-sequences {arguments.score_sequences}: give 1 or more")
    check_held_out(arguments.data)
    models = {name: getattr(arguments, name) for name in ("teacher", "student", "topk")}
    return plan_stage(stage, **models, data=arguments.data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="JSON file")
    parser.add_argument("--data", required=True, help="packed dataset, local or s3://")
    parser.add_argument("--out", required=True, help="run folder, local or s3://")
    parser.add_argument(
        "--start-from", help="run or checkpoint whose weights it begins with, of a model of the same sizes"
    )
    parser.add_argument(
        "--continue-from", help="run or checkpoint to go on from with everything, to train.steps of the config"
    )
    parser.add_argument("--teacher", help="run or checkpoint to distil from")
    parser.add_argument("--student", help="run or checkpoint of an earlier stage (default: the teacher)")
    parser.add_argument("--topk", help="the teacher's stored top-k, in place of asking it")
    parser.add_argument(
        "--score-sequences", type=int, default=32,
        help="held-out sequences of each half on which the distance to the teacher is measured",
    )  # fmt: skip
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
    rank_zero = int(os.environ.get("RANK", 0)) == 0
    try:
        config, sources = planned(arguments)
        teacher = arguments.teacher and resolve(arguments.teacher)  # its run may go on meanwhile
        spec = run_folder.open_run(
            config,
            data=arguments.data,
            out=arguments.out,
            run_id=arguments.run_id or Path(arguments.out).name,
            storage_root=arguments.storage,
            workers=Workers(num_workers=world_size, profile_steps=arguments.profile_steps),
            sources=sources,
        )
        # One rank's curve is everybody's.
        sink = WandbSink(spec.run_id, spec.out, config.model_dump(mode="json"), arguments.wandb if rank_zero else "off")
        with sink:
            result = worker.run(spec, callbacks=[sink])
    except PreemptedError as stop:
        print(f"{stop}; the same command resumes from there", file=sys.stderr)
        return 143
    except ValidationError as error:
        print(explain(error, arguments.config), file=sys.stderr)
        return 2
    except (ConfigError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    found = run_folder.close_run(spec, result) if rank_zero else {}
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank_zero and teacher is not None:
        found |= log_distance(
            spec.out,
            teacher,
            arguments.data,
            store=ResultsStore(Storage(arguments.storage)),
            run_id=spec.run_id,
            teacher_name=arguments.teacher,
            max_sequences=arguments.score_sequences,
            document_mask=config.train.document_mask,
        )
    if rank_zero:
        print(found)
    return 0


if __name__ == "__main__":
    code = main()
    # Not sys.exit: gloo's C++ threads now and then abort a process that has done all its work, and torchrun would call
    # a finished run failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
