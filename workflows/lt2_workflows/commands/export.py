"""`lt2 export`: a checkpoint as transformers reads it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lt2_workflows.commands.models import check_writable, find_checkpoint
from lt2_workflows.commands.options import CheckpointArgument, StorageOption, check_template

if TYPE_CHECKING:
    from lt2_platform.data.tokenizers.tokenize import Tokenizer


def _verify(folder: Path | None) -> None:
    """`--verify FOLDER`, for which no other argument is needed: check, say so, and end."""
    if folder is None:
        return
    from lt2.interop.export import CERTIFICATE, verify_certificate
    from lt2_platform.wording import first_of

    files = verify_certificate(folder)["files"]
    typer.echo(f"{folder}: all {len(files)} files are the certified ones")
    if added := sorted({path.name for path in folder.iterdir()} - {*files, CERTIFICATE}):
        typer.echo(f"not certified, and there as well: {first_of(added)}")
    raise typer.Exit


def export(
    checkpoint: CheckpointArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, in the Hugging Face layout.")],
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    template: Annotated[
        str | None,
        typer.Option(help="Chat template to write: chatml, llama3 or plain. [default: the one it was trained with]"),
    ] = None,
    storage: StorageOption = None,
    verify: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Nothing but check that the files of an exported folder are still the certified ones.",
            callback=_verify,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Export a checkpoint for `from_pretrained`, with a certificate that the exported model computes the same."""
    import torch
    from transformers.utils import logging

    from lt2.config import ConfigError
    from lt2.interop.export import export_checkpoint
    from lt2.layout import loops_text
    from lt2_platform.data.tokenizers.tokenize import load_recorded
    from lt2_platform.data.tokenizers.tokenizer_json import write_tokenizer_json
    from lt2_platform.machine.devices import this_device
    from lt2_platform.storage import Storage
    from lt2_platform.train.checkpoints.checkpoint import load_model, read_info, resolve

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(dtypes)}")
    check_template(template)
    logging.disable_progress_bar()  # each of the checks loads what was written
    place = find_checkpoint(Storage(storage), checkpoint)
    check_writable(folder)
    place = resolve(place)
    model, _, tokenizer = load_model(place)
    info = read_info(place)
    known = tokenizer.get("chat_templates", [])
    chosen = template or (known[0] if len(known) == 1 else None)
    loaded = load_recorded(tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch)
        stop_ids, chat = [], ""
        if tokenizer["file"]:
            write_tokenizer_json(tokenizer["file"], files)
            if chosen is not None:
                stop_ids, chat = write_chat_template(chosen, loaded, files)
            elif known:
                chat = f"no chat template is written: it was trained on {', '.join(known)}; --template NAME writes one"
        checks = export_checkpoint(
            model,
            folder,
            tokenizer=files if tokenizer["file"] else None,
            bos_id=loaded.prefix_id,
            begin=loaded.bos_id is not None,
            eos_id=tokenizer["eos_id"],
            stop_ids=stop_ids,
            dtype=dtypes[dtype],
            device=this_device(),
            source={"checkpoint": place, "step": info.state.step, "tokens": info.state.tokens, "data": info.data},
        )
    inexact = [check for check in checks if check.tolerance > 0]  # what is merely copied must be the same bits
    worst = max(inexact, key=lambda check: check.error / check.tolerance)
    typer.echo(
        f"{folder}: {len(checks)} parity checks passed; the least exact is {worst.name} at "
        f"{loops_text(worst.n_loops)}, {worst.error:.1e} of {worst.tolerance:.0e} allowed (parity.json)"
    )
    if tokenizer["file"] is None:
        typer.echo(
            f"no tokenizer is written: transformers has none for bytes; evaluate it by `lt2 eval {checkpoint}` instead"
        )
    if chat:
        typer.echo(chat)


def write_chat_template(template: str, tokenizer: Tokenizer, files: Path) -> tuple[list[int], str]:
    """Add it to the tokenizer's files; returns at which tokens an answer ends, and what to tell the user."""
    from lt2_platform.data.sources.documents import end_of_answer
    from lt2_platform.data.tokenizers.chat_template import FILE, add_chat_template

    end = end_of_answer(template)
    stop = tokenizer.special_id(end.text) if end.special else None
    if add_chat_template(template, tokenizer, files):
        said = f"{FILE} is the template {template}, with the token ids of the training"
        if stop is None:
            said += f"; no single token ends its answers: give generate() stop_strings={[end.text]!r} and the tokenizer"
    else:
        said = (
            f"no chat template is written: transformers encodes a conversation as one text, and from that tokenizer "
            f"{tokenizer.name} does not make the token ids that training with {template} has; ask the checkpoint by "
            "`lt2 generate --chat` or `lt2 eval --chat`, or give generate() the ids of `trained_ids` (docs/data.md)"
        )
    return [] if stop is None else [stop], said
