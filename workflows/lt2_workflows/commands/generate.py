"""`lt2 generate`: continue a text with a trained model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from lt2_workflows.commands.evaluation import StorageOption
from lt2_workflows.commands.models import find_checkpoint

if TYPE_CHECKING:
    from lt2_platform.data.tokenize import Tokenizer


def generate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, its folder, or a run's name.")],
    text: Annotated[str, typer.Argument(help="The prompt.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    seed: int = 0,
    loops: Annotated[
        int | None, typer.Option(min=1, help="Another depth than trained; no token stops earlier.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda (in bf16) or cpu; cuda where there is one.")] = None,
    storage: StorageOption = None,
) -> None:
    """Continue a text with a trained model, shown as it is made."""
    import torch

    from lt2.config import ConfigError
    from lt2.decode import merge_projections
    from lt2.generate import generate as continue_tokens
    from lt2.layout import loops_text
    from lt2_platform.data.tokenize import encode, load_tokenizer
    from lt2_platform.storage import Storage
    from lt2_platform.train.checkpoints.checkpoint import load_model

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where not in ("cuda", "cpu") or (where == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"--device {where}: " + ("no GPU here" if where == "cuda" else "choose cuda or cpu"))
    model, _, info = load_model(find_checkpoint(Storage(storage), checkpoint))
    if where == "cuda":
        model = model.to("cuda", torch.bfloat16)
        merge_projections(model)
    if loops is not None:
        model = model.at_depth(loops, halting=False)
    tokenizer = load_tokenizer(info["file"] or "byte")
    shown = Shown(tokenizer, text)
    begin = time.perf_counter()
    (tokens,) = continue_tokens(
        model,
        [encode(tokenizer, text)],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=tokenizer.eos_id,
        seed=seed,
        stop=shown,
    )
    seconds = time.perf_counter() - begin
    typer.echo(tokenizer.decode(tokens)[len(shown.text) :])
    typer.echo(
        f"{len(tokens)} tokens, {len(tokens) / seconds:,.1f} a second with the prompt's reading, on {where}, "
        + loops_text(model.depth)
        + (" at most" if model.config.halting is not None else ""),
        err=True,
    )


class Shown:
    """Asked after every new token whether to stop, it never does, but prints what has become readable."""

    def __init__(self, tokenizer: Tokenizer, prompt: str):
        self.tokenizer, self.prompt = tokenizer, prompt
        self.text = ""

    def __call__(self, tokens: list[int]) -> bool:
        if len(tokens) == 1:
            typer.echo(self.prompt, nl=False)
        text = self.tokenizer.decode(tokens)
        if text.startswith(self.text) and not text.endswith("\ufffd"):  # perhaps the first bytes of a character
            typer.echo(text[len(self.text) :], nl=False)
            self.text = text
        return False
