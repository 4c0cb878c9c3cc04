"""How far a student is from its teacher on held-out text, and the scores by which layers are chosen.

Shapes: B sequences, L positions, T loops.
"""

from __future__ import annotations

from typing import Any

import torch

from lt2.config import ConfigError, KeptLayout
from lt2.distill.kl import chunked_topk_kl, top_k
from lt2.layout import layout
from lt2.model import LoopedLM
from lt2.train.loop import Batch, autocast
from lt2.train.loss import IGNORE, next_token_targets
from lt2_platform.data.stream import PackedDataset
from lt2_platform.distill.run import check_tokenizer
from lt2_platform.evaluate.config import HeldOut
from lt2_platform.evaluate.validation import check_counted, chunks, held_out_rows
from lt2_platform.machine.devices import this_device
from lt2_platform.progress import Progress, silent
from lt2_platform.results.store import ResultsStore
from lt2_platform.train.checkpoints import checkpoint


@torch.inference_mode()
def teacher_kl(
    student: LoopedLM,
    teacher: LoopedLM,
    dataset: PackedDataset,
    *,
    held_out: HeldOut,
    max_sequences: int = 32,
    batch_size: int = 4,
    document_mask: bool = False,
) -> dict[str, Any]:
    """KL(teacher ‖ student) over the whole vocabulary, nats per token, on the first sequences of that part of a split.

    Returns {"kl": of the final loop, "kl_loops": of every loop, "tokens"}. Both run every loop, in bf16 on a GPU.

    Raises:
        ConfigError: an empty split, one in which no token counts, or models of different loops or vocabularies.
    """
    for name in ("n_loops", "vocab_size"):
        ours, theirs = getattr(student.config, name), getattr(teacher.config, name)
        if ours != theirs:
            raise ConfigError(f"the student's {name} is {ours}, the teacher's {theirs}; they must be equal")
    part = held_out_rows(dataset, held_out)[:max_sequences]
    T, device = student.config.n_loops, student.embed.weight.device
    models = [model.at_depth(T, halting=False).eval() for model in (student, teacher)]
    sums, tokens = torch.zeros(T, dtype=torch.float64), 0
    for rows in chunks(part, batch_size):
        batch = Batch.from_numpy(dataset.batch(rows), device)
        doc_ids = batch.input_doc_ids(document_mask)
        counted = (next_token_targets(batch, document_mask=document_mask) != IGNORE).flatten()
        with autocast("auto", device):
            ours, theirs = (
                [state.flatten(0, 1) for state in model(batch.tokens[:, :-1], doc_ids=doc_ids, per_loop=True).loops]
                for model in models
            )
            found = chunked_topk_kl(
                ours,
                student.head_weight,
                lambda loop, start, stop, states=theirs: top_k(states[loop][start:stop], teacher.head_weight, None),
                loop_weights=[1 / T] * T,
                counted=counted,
            )
        sums += found.kl.double().cpu()
        tokens += int(counted.sum())
    check_counted(tokens, dataset, part)
    loops = (sums / tokens).tolist()
    return {"kl": loops[-1], "kl_loops": loops, "tokens": tokens}


def checkpoint_kl(student: str, teacher: str, data: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """`teacher_kl` of stored models on both halves of the validation split, by which to choose and which to report.

    On a GPU if there is one.
    """
    ours, theirs, dataset = _load(student), _load(teacher), PackedDataset(data, "validation")
    chosen_by = teacher_kl(ours, theirs, dataset, held_out="selection", **options)
    return chosen_by, teacher_kl(ours, theirs, dataset, held_out="report", **options)


def check_held_out(data: str) -> None:
    """What `log_distance` will need, before the training that it ends. Raises ConfigError for too few held-out rows."""
    held_out_rows(PackedDataset(data, "validation"), "report")


def log_distance(
    out: str, teacher: str, data: str, *, store: ResultsStore, run_id: str, teacher_name: str, **options: Any
) -> dict[str, Any]:
    """What ends a stage, whoever launched it: `checkpoint_kl` of the run in `out`; its report becomes the run's result.

    teacher_name: what the result says of the teacher, its run or path. options: as of `teacher_kl`.
    Returns {"kl", "kl_loops"}, by which layers are chosen, and "report_kl", on the half that no choice has seen.
    """
    student = checkpoint.resolve(out)
    chosen_by, found = checkpoint_kl(student, teacher, data, **options)
    row = {"task": "distillation", "n": found["tokens"], "unit": "nats/token", "teacher": teacher_name}
    row["step"] = checkpoint.read_info(student).state.step
    rows = [row | {"metric": "teacher_kl", "value": found["kl"]}]
    rows += [row | {"metric": f"teacher_kl_loop_{loop}", "value": kl} for loop, kl in enumerate(found["kl_loops"])]
    store.log_eval(run_id, "distillation", rows)
    return {"kl": chosen_by["kl"], "kl_loops": chosen_by["kl_loops"], "report_kl": found["kl"]}


def one_shot_scores(
    student: str,
    teacher: str,
    data: str,
    *,
    progress: Progress = silent,
    **options: Any,
) -> list[float]:
    """The final loop's KL with each single layer kept, in turn, and no training: a stage-1 student runs all of them.

    Documents are masked, unless `options` say otherwise, as in the student's training.

    Raises:
        ConfigError: a student that does not hold both mixers, or data of another tokenizer.
    """
    trained = checkpoint.read_info(checkpoint.resolve(student))
    check_tokenizer(trained.tokenizer, data, student)
    options = {"document_mask": trained.train.get("document_mask", False), **options}
    ours, theirs = _load(student), _load(teacher)
    kept = ours.config.layout
    if not isinstance(kept, KeptLayout) or not kept.both:
        raise ConfigError(f"{student} does not hold attention and mixer in every layer; give a student of stage 1")
    dataset, scores = PackedDataset(data, "validation"), []
    for layer in range(ours.config.n_layers):
        ours.schedule = layout(ours.config, (layer,))
        scores.append(teacher_kl(ours, theirs, dataset, held_out="selection", **options)["kl"])
        progress({"layer": layer + 1, "layers": ours.config.n_layers})
    return scores


def _load(place: str) -> LoopedLM:
    return checkpoint.load_model(place)[0].to(this_device())
