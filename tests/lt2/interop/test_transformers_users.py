"""What users of transformers do with a model: turns, Trainer, hidden states, new tokens, packed rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    DynamicCache,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from lt2.config import ConfigError
from lt2.generate import generate
from lt2.interop.transformers import LT2ForCausalLM
from tests.lt2.mixers.samples import FIELDS
from tests.lt2.tiny import FULL, HYBRID, WINDOW_GDN, model, tokens

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def left_padded() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[7, 7, 3, 1, 4], [9, 2, 6, 5, 3]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("fields", [{}, {"norm_each_loop": True, "sandwich_norm": True}], ids=["plain", "ouro"])
def test_hidden_states_are_what_every_unrolled_layer_and_the_head_read(fields: dict[str, Any]):
    net = LT2ForCausalLM.of(model(**fields))
    x = tokens(2, 6)
    output = net(x, output_hidden_states=True)
    assert len(output.hidden_states) == 3 * 2 + 1
    assert torch.equal(output.hidden_states[0], net.model.embed(x))
    for loop in (1, 2, 3):  # what the first layer of the loop after this one reads, normed
        after = output.hidden_states[2 * loop]
        after = after if loop == 3 else net.model.final_norm(after)
        torch.testing.assert_close(after, net.model(x, n_loops=loop).hidden, **CLOSE)
    assert torch.equal(output.logits, net.model.logits(output.hidden_states[-1]))
    assert net(x).hidden_states is None
    with pytest.raises(ConfigError, match="no attention weights"):
        net(x, output_attentions=True)


def test_hidden_states_of_padded_rows_are_those_of_the_rows_alone():
    net = LT2ForCausalLM.of(model())
    ids, mask = left_padded()
    padded = net(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    alone = net(ids[:1, 2:], output_hidden_states=True).hidden_states
    for both, one in zip(padded, alone, strict=True):
        torch.testing.assert_close(both[0, 2:], one[0], **CLOSE)


def test_hidden_states_while_generating_are_complete_where_tokens_halt():
    net = LT2ForCausalLM.of(model(halting={"type": "exit_gate", "threshold": 0.05}))
    ids, mask = left_padded()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 7, "return_dict_in_generate": True}
    found = net.generate(ids, attention_mask=mask, output_hidden_states=True, **options)
    assert [len(step) for step in found.hidden_states] == [7, 7, 7]


@pytest.mark.parametrize("mixer", FIELDS)
def test_a_cache_grows_as_the_conversation_does(mixer: str):
    layout = {"type": "uniform", "mixer": {"type": mixer, **FIELDS[mixer][0]}}
    net = LT2ForCausalLM.of(model(layout, dim=32, num_heads=4 if mixer == "nsa" else 2, max_seq_len=64))
    net.config.max_position_embeddings = 4
    x = tokens(2, 23)
    cache, logits = None, []
    for piece in x.split([3, 1, 7, 1, 1, 10], dim=1):
        output = net(piece, cache=cache, use_cache=True)
        cache = output.cache
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), net(x).logits, rtol=1e-9, atol=1e-10)


def test_a_second_turn_continues_the_first_ones_cache():
    net = LT2ForCausalLM.of(model(WINDOW_GDN))
    options = {"max_new_tokens": 5, "do_sample": False}
    first = net.generate(tokens(1, 6), return_dict_in_generate=True, **options)
    both = torch.cat([first.sequences, tokens(1, 4, seed=1)], 1)
    assert torch.equal(net.generate(both, cache=first.cache, **options), net.generate(both, **options))


def test_a_cache_that_is_ahead_of_the_text_and_prompts_padded_on_the_right_are_refused():
    net = LT2ForCausalLM.of(model())
    x, options = tokens(1, 6), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 7}
    cache = net.generate(x, return_dict_in_generate=True, **options).cache
    with pytest.raises(ConfigError, match="do not continue the 8 tokens in the cache"):
        net.generate(x, cache=cache, **options)
    ids, mask = left_padded()
    with pytest.raises(ConfigError, match=r"pad prompts of generate\(\) on the left"):
        net.generate(ids.flip(1), attention_mask=mask.flip(1), **options)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda net: DynamicCache(), "is a LoopedCache, not DynamicCache"),
        (lambda net: net(tokens(1, 4), use_cache=True).cache, "of 1 rows and 3 loops, the request of 2 and 3"),
        (lambda net: net(tokens(2, 4), use_cache=True, n_loops=2).cache, "of 2 rows and 2 loops, the request of 2"),
    ],
)
def test_a_cache_of_something_else_is_refused(cache, message: str):
    net = LT2ForCausalLM.of(model())
    with pytest.raises(ConfigError, match=message):
        net.generate(tokens(2, 6), cache=cache(net), max_new_tokens=3)


def test_stop_strings_and_assistants():
    letters = {chr(97 + index): index for index in range(23)}
    pieces = Tokenizer(BPE(vocab=letters, merges=[]))
    pieces.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    net = LT2ForCausalLM.of(model())
    free = generate(net.model, [[3, 1, 4]], max_new_tokens=8)[0]
    options = {"max_new_tokens": 8, "do_sample": False}
    stop = {"stop_strings": [chr(97 + free[2])], "tokenizer": tokenizer}
    out = net.generate(torch.tensor([[3, 1, 4]]), **options, **stop)[0, 3:].tolist()
    assert out == free[: free.index(free[2]) + 1]
    with pytest.raises(ValueError, match="not supported with stateful models"):
        net.generate(torch.tensor([[3, 1, 4]]), assistant_model=net, **options)


def test_packed_rows_are_told_by_their_positions_and_others_are_refused():
    net = LT2ForCausalLM.of(model(HYBRID))
    documents = [[3, 1, 4, 1], [9, 2], [6, 5, 3]]
    batch = DataCollatorWithFlattening()([{"input_ids": ids} for ids in documents])
    logits = net(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
    alone = [net(torch.tensor([ids])).logits[0] for ids in documents]
    torch.testing.assert_close(logits, torch.cat(alone), **CLOSE)
    x = tokens(1, 4)
    assert torch.equal(net(x, position_ids=torch.arange(4)[None]).logits, net(x).logits)
    for positions in ([[1, 2, 3, 4]], [[0, 0, 2, 3]]):
        with pytest.raises(ConfigError, match="position_ids are not the tokens' places"):
            net(x, position_ids=torch.tensor(positions))
    with pytest.raises(ConfigError, match=r"attention_mask is \(1, 1, 4, 4\)"):
        net(x, attention_mask=torch.ones(1, 1, 4, 4))


def test_nothing_is_asked_of_the_padding_before_a_row():
    net = LT2ForCausalLM.of(model())
    ids, mask = left_padded()
    labels = ids.masked_fill(mask == 0, -100)
    rows = [net(row[None], labels=row[None]).loss * (len(row) - 1) for row in (ids[0, 2:], ids[1])]
    torch.testing.assert_close(net(ids, attention_mask=mask, labels=labels).loss, sum(rows) / 6, **CLOSE)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [30, 17])
def test_new_tokens_are_added_and_saved(tmp_path: Path, tied: bool, size: int):
    net = LT2ForCausalLM.of(model(tie_embeddings=tied))
    x = tokens(2, 5, vocab_size=17)
    before = net(x).logits
    net.resize_token_embeddings(size)
    assert net.config.looped.vocab_size == net.model.config.vocab_size == size
    torch.testing.assert_close(net(x).logits[..., :17], before[..., :17], **CLOSE)
    net.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(x).logits, net(x).logits, **CLOSE)


def test_public_names_that_say_something_else_are_refused(tmp_path: Path):
    LT2ForCausalLM.of(model(FULL)).save_pretrained(tmp_path)
    for name, value in {"num_loops": 1, "num_hidden_layers": 1, "tie_word_embeddings": True}.items():
        with pytest.raises(ConfigError, match=rf"config.{name} is {value}, but only reports what config.lt2 says"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **{name: value})


def test_gradient_checkpointing_changes_nothing_but_memory():
    plain = LT2ForCausalLM.of(model(halting={"type": "act"})).train()
    thrifty = copy.deepcopy(plain)
    thrifty.gradient_checkpointing_enable()
    assert thrifty.is_gradient_checkpointing
    x, runs = tokens(2, 7), {plain: 0, thrifty: 0}
    for net in (plain, thrifty):
        for block in net.model.blocks:
            block.mixer_norm.register_forward_hook(lambda *_, net=net: runs.update({net: runs[net] + 1}))
        net(x, labels=x).loss.backward()
    assert (runs[plain], runs[thrifty]) == (6, 12)  # loops and layers, once more in backward
    for (name, a), b in zip(plain.named_parameters(), thrifty.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name, **CLOSE)
    thrifty.eval()
    assert torch.equal(thrifty.generate(x, max_new_tokens=4), plain.eval().generate(x, max_new_tokens=4))
    thrifty.gradient_checkpointing_disable()
    assert not thrifty.is_gradient_checkpointing


def test_trainer_gives_the_same_weights_however_a_batch_is_split(tmp_path: Path):
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 9).tolist()]
    for row in rows[:3]:  # so that micro-batches count other numbers of tokens
        row["labels"] = [-100] * 5 + row["labels"][5:]
    weights = []
    for size, steps in ((8, 1), (4, 2)):
        net = LT2ForCausalLM.of(model())
        arguments = TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            gradient_checkpointing=steps == 2, optim="sgd", learning_rate=0.1, max_grad_norm=0, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        Trainer(net, arguments, train_dataset=Dataset.from_list(rows)).train()
        weights.append(net.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, msg=name, rtol=1e-9, atol=1e-10)
