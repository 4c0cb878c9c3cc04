"""Conversations, tokenizers with and without a template's markers, and the token ids that training has of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lt2_platform.data.pack import IGNORED, frame
from lt2_platform.data.sources.configs import OpenThoughtsConfig
from lt2_platform.data.sources.documents import Fault, conversation
from lt2_platform.data.tokenizers.tokenize import Tokenizer, load_tokenizer
from lt2_platform.data.units import encode_documents

MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEXTS = [
    "Question: Ann has 12 pens and buys 34.\nAnswer: So it is 46.\n\nUser: What is 3 + 4?\n\nAssistant: It is 7.\n\n",
    "System: Be brief. user\nHow many? assistant\n system\n def f(x):\n\treturn x\n\n\n 1. one\n 2. two\n",
]


def tokenizer_file(
    folder: Path, *specials: str, bos: bool = True, pre_tokenizer: Any = BYTES, normalizer: Any = None
) -> str:
    """A tokenizer.json with merges across words' and lines' ends, which has these markers as special tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.normalizer = pre_tokenizer, normalizer
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*(["<s>"] if bos else []), "</s>", *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def tokenizer(folder: Path, *specials: str, bos: bool = True) -> Tokenizer:
    return load_tokenizer(tokenizer_file(folder, *specials, bos=bos))


def trained_on(template: str, tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> list[int]:
    """Token ids of the document that the data source `openthoughts` makes of these turns (role, text)."""
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    config = OpenThoughtsConfig.model_validate({"path": "x", "template": template})
    document = conversation(config, row)
    assert document is not None
    assert not isinstance(document, Fault)
    (ids,) = encode_documents(tokenizer, [document])
    return [int(token & ~IGNORED) for token in frame(ids, tokenizer.bos_id, tokenizer.eos_id)]
