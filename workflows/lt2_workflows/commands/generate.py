"""`lt2 generate`: continue a text with a trained model, or ask one that was trained on conversations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from lt2_workflows.commands.models import find_checkpoint
from lt2_workflows.commands.options import (
    AskedByOption,
    CheckpointArgument,
    StorageOption,
    check_template,
    chosen_device,
)

if TYPE_CHECKING:
    from lt2.model import LoopedLM
    from lt2_platform.data.sources.documents import Piece
    from lt2_platform.data.tokenizers.tokenize import Tokenizer


def generate(
    checkpoint: CheckpointArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt.")],
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send TEXT as a chat message, in the template of the training; prints the answer."),
    ] = False,
    template: AskedByOption = None,
    system: Annotated[str, typer.Option(help="System message, with --chat or --template.", show_default=False)] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    seed: int = 0,
    loops: Annotated[
        int | None, typer.Option(min=1, help="Run this many loops instead of the model's own, without early exit.")
    ] = None,
    exit_threshold: Annotated[
        float | None, typer.Option(help="Exit threshold instead of the model's own; it needs an exit gate.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda (in bf16) or cpu. [default: cuda if available]")] = None,
    storage: StorageOption = None,
) -> None:
    """Continue a text with a trained model, printed as it is generated."""
    import torch

    from lt2.config import ConfigError
    from lt2.decode import merge_projections
    from lt2.generate import generate as continue_tokens
    from lt2.layout import loops_text
    from lt2_platform.data.sources.documents import end_of_answer, question
    from lt2_platform.data.tokenizers.tokenize import encode, load_recorded
    from lt2_platform.data.units import encode_documents
    from lt2_platform.storage import Storage
    from lt2_platform.train.checkpoints.checkpoint import load_model, read_info, resolve

    where = chosen_device(device)
    if system and not (chat or template):
        raise ConfigError("--system needs --chat or --template NAME")
    if loops is not None and exit_threshold is not None:
        raise ConfigError("give --loops (no early exit) or --exit-threshold, not both")
    check_template(template)
    place = find_checkpoint(Storage(storage), checkpoint)
    trained_on = read_info(resolve(place)).tokenizer.get("chat_templates", [])
    template = chat_template(checkpoint, trained_on, chat=chat, named=template)
    model, _, info = load_model(place)
    if where == "cuda":
        model = model.to("cuda", torch.bfloat16)
        merge_projections(model)
    if exit_threshold is not None:
        model = model.at_depth(model.config.n_loops, exit_threshold=exit_threshold)
    if loops is not None:
        model = model.at_depth(loops, halting=False)
    tokenizer = load_recorded(info)
    if template is None:
        empty = tokenizer.eos_id if tokenizer.prefix_id is None else tokenizer.prefix_id
        prompt, shown = encode(tokenizer, text) or [empty], Shown(tokenizer, text)
    else:
        prompt = [
            *encode(tokenizer, ""),
            *encode_documents(tokenizer, [question(template, text, system=system)])[0].tolist(),
        ]
        shown = Shown(tokenizer, end=end_of_answer(template))
    check_memory(model, len(prompt), max_new_tokens, where)
    begin = time.perf_counter()
    (tokens,) = continue_tokens(
        model,
        [prompt],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=tokenizer.eos_id,
        seed=seed,
        stop=shown,
    )
    seconds = time.perf_counter() - begin
    typer.echo(shown.rest(tokens))
    typer.echo(
        f"{len(tokens)} tokens, {len(tokens) / seconds:,.1f} tokens/s including the prompt, on {where}, "
        + loops_text(model.depth)
        + (" at most" if model.config.halting is not None else ""),
        err=True,
    )


def check_memory(model: LoopedLM, prompt: int, max_new_tokens: int, device: str) -> None:
    """Raise ConfigError where the cache of so many tokens is more than the device holds."""
    from lt2.analysis.accounting import cache_bytes
    from lt2.config import ConfigError
    from lt2.layout import loops_text

    needed = cache_bytes(model.config, prompt + max_new_tokens, dtype=model.embed.weight.dtype, n_loops=model.depth)
    if needed > (memory := memory_bytes(device)):
        raise ConfigError(
            f"{prompt} tokens and --max-new-tokens {max_new_tokens} at {loops_text(model.depth)} need a cache of "
            f"{needed / 1e9:,.0f} GB, and {device} has {memory / 1e9:,.0f} GB; ask for fewer"
        )


def memory_bytes(device: str) -> int:
    """What the device has in all that this process may use: "cuda" or "cpu"."""
    import torch

    from lt2_platform.machine import memory

    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return memory.usable()


def chat_template(checkpoint: str, known: list[str], *, chat: bool, named: str | None) -> str | None:
    """The template to ask by, or None to continue the text as it is. known: those the model was trained on.

    Says so on stderr if the model was trained otherwise. Raises ConfigError if the template cannot be told.
    """
    from lt2.config import ConfigError
    from lt2_platform.data.sources.configs import Template

    if named is not None:
        if named not in known:
            trained = f"on {', '.join(known)}" if known else "on no conversations, according to its checkpoint"
            typer.echo(f"{checkpoint} was not trained on {named} but {trained}", err=True)
        return named
    if not chat:
        if known:
            typer.echo(f"{checkpoint} was trained on conversations; --chat uses their template", err=True)
        return None
    if not known:
        raise ConfigError(
            f"--chat: according to its checkpoint {checkpoint} was not trained on conversations; "
            f"--template {'|'.join(get_args(Template))} uses a template anyway"
        )
    if len(known) > 1:
        raise ConfigError(f"--chat: {checkpoint} was trained on several templates; choose --template {'|'.join(known)}")
    return known[0]


class Shown:
    """Asked after every new token whether to stop, it prints what has become readable; true at `end`, if one is given.

    end: a special token where the tokenizer has it, else text; neither is printed.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str = "", end: Piece | None = None):
        self.tokenizer, self.prompt = tokenizer, prompt
        self.end_id = tokenizer.special_id(end.text) if end is not None and end.special else None
        self.end = end.text if end is not None and self.end_id is None else None
        self.text = ""

    def __call__(self, tokens: list[int]) -> bool:
        if len(tokens) == 1:
            typer.echo(self.prompt, nl=False)
        text = self.tokenizer.decode(tokens)
        if text.startswith(self.text) and not text.endswith("\ufffd"):  # perhaps the first bytes of a character
            readable = self._before_end(text)
            typer.echo(readable[len(self.text) :], nl=False)
            self.text = readable
        return tokens[-1] == self.end_id or (self.end is not None and self.end in text)

    def rest(self, tokens: list[int]) -> str:
        """What is not printed yet of all tokens."""
        text = self.tokenizer.decode(tokens)
        ended = tokens[-1] == self.tokenizer.eos_id or (self.end is not None and self.end in text)
        return (self._before_end(text) if ended else text)[len(self.text) :]

    def _before_end(self, text: str) -> str:
        """Without the end and what comes after it, nor what may become the end."""
        if self.end is None:
            return text
        before, found, _ = text.partition(self.end)
        begun = (size for size in range(len(self.end) - 1, 0, -1) if before.endswith(self.end[:size]))
        return before if found else before[: len(before) - next(begun, 0)]
