"""The transformers wrapper: saving, loading, generate(), padding on either side, labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from lt2.config import ConfigError
from lt2.generate import generate
from lt2.interop.transformers import LT2Config, LT2ForCausalLM
from lt2.model import build
from tests.lt2.tiny import FULL, HYBRID, WINDOW_GDN, config, model, tokens

LAYOUTS = {"full": FULL, "hybrid": HYBRID, "window+gdn": WINDOW_GDN}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]


def padded(prompts: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    rows, masks = [], []
    for prompt in prompts:
        pad, ones = [7] * (longest - len(prompt)), [1] * len(prompt)
        rows.append(pad + prompt if side == "left" else prompt + pad)
        masks.append([0] * len(pad) + ones if side == "left" else ones + [0] * len(pad))
    return torch.tensor(rows), torch.tensor(masks)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_save_and_auto_load_give_the_same_model(tmp_path: Path, sharded: bool, tied: bool):
    wrapped = LT2ForCausalLM.of(model(tie_embeddings=tied, halting={"type": "act"}))
    wrapped.save_pretrained(tmp_path, max_shard_size="5KB" if sharded else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == sharded
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, LT2ForCausalLM)
    assert not loaded.training
    assert loaded.config.looped == wrapped.config.looped
    assert loaded.model.state_dict().keys() == wrapped.model.state_dict().keys()
    for name, tensor in wrapped.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    x = tokens(2, 7)
    expected = wrapped.model.logits(wrapped.model(x).hidden)
    torch.testing.assert_close(loaded(x).logits, expected, rtol=1e-13, atol=1e-13)


def test_config_round_trip_and_public_names(tmp_path: Path):
    LT2Config.of(config()).save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.looped == config()
    assert (loaded.vocab_size, loaded.hidden_size, loaded.num_hidden_layers, loaded.num_loops) == (23, 16, 2, 3)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "lt2"


def test_a_mixer_whose_file_is_not_there_is_named_in_one_line(tmp_path: Path):
    LT2Config.of(config(FULL)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    stored["lt2"]["layout"]["mixer"] = {"type": "mine", "source": "no/such/mine.py"}
    path.write_text(json.dumps(stored))
    place = re.escape(f"{tmp_path}: lt2: layout.uniform.mixer: source 'no/such/mine.py' does not exist")
    with pytest.raises(ConfigError, match=rf"^{place}[^\n]*$"):
        AutoConfig.from_pretrained(tmp_path)


def test_from_config_starts_from_our_initial_weights():
    fresh = AutoModelForCausalLM.from_config(LT2Config.of(config()))
    for name, tensor in build(config()).state_dict().items():
        assert torch.equal(fresh.model.state_dict()[name], tensor), name


def test_a_checkpoint_without_some_weight_is_refused(tmp_path: Path):
    wrapped = LT2ForCausalLM.of(model())
    state = {k: v for k, v in wrapped.state_dict().items() if k != "model.blocks.1.ffn.up_proj.weight"}
    wrapped.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match="no Linear.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_do_not_depend_on_padding_or_batch(layout: str, side: str):
    net = LT2ForCausalLM.of(model(LAYOUTS[layout]))
    ids, mask = padded(PROMPTS, side)
    logits = net(ids, attention_mask=mask).logits
    for row, prompt in enumerate(PROMPTS):
        alone = net(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits[row][mask[row].bool()], alone, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n_loops", [None, 1, 5])
def test_generate_equals_our_own_generate(layout: str, n_loops: int | None):
    net = LT2ForCausalLM.of(model(LAYOUTS[layout]))
    ids, mask = padded(PROMPTS, "left")
    out = net.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, n_loops=n_loops, pad_token_id=7)
    assert out[:, 5:].tolist() == generate(net.model, PROMPTS, max_new_tokens=8, n_loops=n_loops)


@pytest.mark.parametrize("halting", [{"type": "act", "epsilon": 0.2}, {"type": "exit_gate", "threshold": 0.6}])
def test_generate_with_early_exit_equals_our_own(halting: dict):
    net = LT2ForCausalLM.of(model(halting=halting))
    ids, mask = padded(PROMPTS, "left")
    out = net.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=7)
    assert out[:, 5:].tolist() == generate(net.model, PROMPTS, max_new_tokens=6)


def test_generate_stops_at_eos_and_runs_without_a_cache():
    net = LT2ForCausalLM.of(model())
    ids = torch.tensor([PROMPTS[0]])
    free = generate(net.model, PROMPTS[:1], max_new_tokens=8)[0]
    eos = free[3]
    expected = generate(net.model, PROMPTS[:1], max_new_tokens=8, eos_id=eos)[0]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": eos, "pad_token_id": 7}
    assert net.generate(ids, **options)[0, 5:].tolist() == expected
    assert net.generate(ids, use_cache=False, **options)[0, 5:].tolist() == expected
    assert len(expected) == free.index(eos) + 1


def test_beams_reorder_every_cache():
    """Beam search with the cache equals beam search that recomputes every prefix."""
    net = LT2ForCausalLM.of(model(WINDOW_GDN))
    ids, mask = padded(PROMPTS, "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 7}
    assert torch.equal(net.generate(ids, **options), net.generate(ids, use_cache=False, **options))


def test_several_continuations_of_each_prompt_have_caches_of_their_own():
    net = LT2ForCausalLM.of(model(WINDOW_GDN))
    ids, mask = padded(PROMPTS, "left")
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3}
    found = []
    for cached in (True, False):
        torch.manual_seed(1)
        found.append(net.generate(ids, use_cache=cached, pad_token_id=7, **options))
    assert len(found[0]) == 3 * len(PROMPTS)
    assert torch.equal(*found)


def test_one_counted_label_gives_its_own_loss_and_none_gives_nothing():
    net, x = LT2ForCausalLM.of(model()), tokens(2, 5)
    labels = torch.full_like(x, -100)
    assert net(x, labels=labels).loss == 0
    labels[1, 3] = x[1, 3]
    out = net(x, labels=labels)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[1, 2], x[1, 3]), rtol=1e-11, atol=1e-12)


def test_a_manual_loop_with_the_cache_continues_the_sequence():
    net = LT2ForCausalLM.of(model(max_seq_len=32))
    x = tokens(2, 9)
    first = net(x[:, :6], use_cache=True)
    rest = [net(x[:, i : i + 1], cache=first.cache).logits for i in range(6, 9)]
    torch.testing.assert_close(torch.cat([first.logits, *rest], 1), net(x).logits, rtol=1e-11, atol=1e-12)
    assert net(x).cache is None


def test_labels_give_the_shifted_cross_entropy_plus_aux():
    net = LT2ForCausalLM.of(model(halting={"type": "act", "ponder_weight": 0.5})).train()
    x = tokens(2, 8)
    labels = x.clone()
    labels[0, :4] = -100
    out = net(x, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    expected = expected + net.model(x).aux["ponder"].mean()
    torch.testing.assert_close(out.loss, expected, rtol=1e-11, atol=1e-12)
    out.loss.backward()
    assert net.model.embed.weight.grad.abs().sum() > 0


def test_logits_to_keep_is_the_tail():
    net = LT2ForCausalLM.of(model())
    x = tokens(2, 6)
    assert torch.equal(net(x, logits_to_keep=2).logits, net(x).logits[:, -2:])
