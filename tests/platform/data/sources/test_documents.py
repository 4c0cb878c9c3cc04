"""Documents that are split, and documents of which only a part is learned, from their rows to the loss."""

import json

import numpy as np
import pytest
import torch

from lt2.config import ConfigError, ModelConfig
from lt2.model import build
from lt2.train.loop import Batch
from lt2.train.loss import next_token_objective
from lt2_platform.data.pack import IGNORED, frame, join_framed, learned, pack, split_framed
from lt2_platform.data.prepare import PrepareConfig, prepare
from lt2_platform.data.sources.configs import OpenThoughtsConfig
from lt2_platform.data.sources.documents import conversation, end_of_answer, question, text_of
from lt2_platform.data.stream import PackedDataset
from lt2_platform.distill.measure import teacher_kl
from lt2_platform.evaluate.validation import perplexity

BOS, EOS = 256, 257


def test_split_framed():
    document = frame(np.arange(10, dtype=np.uint32), BOS, EOS)
    assert [piece.tolist() for piece in split_framed(document, 12, BOS)] == [document.tolist()]
    pieces = split_framed(document, 5, BOS)
    assert [piece.tolist() for piece in pieces] == [[BOS, 0, 1, 2, 3], [BOS, 4, 5, 6, 7], [BOS, 8, 9, EOS]]
    bare = frame(np.arange(10, dtype=np.uint32), None, EOS)
    assert [piece.tolist() for piece in split_framed(bare, 4, None)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, EOS]]


@pytest.mark.parametrize("limit", [3, 40, 1000])
def test_the_document_cap_loses_nothing(tmp_path, no_ray, limit):
    texts = [f"{i} " * (i + 1) for i in range(60)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = PrepareConfig(
        source=f"{tmp_path}/x.jsonl", seq_len=2, validation_fraction=0, max_document_tokens=limit, shard_sequences=500
    )
    manifest = prepare(config, str(tmp_path / "out"))
    lengths = [len(text) + 2 for text in texts]
    assert manifest["documents_split"] == sum(length > limit for length in lengths)
    assert manifest["sources"][0]["documents"] == len(texts)
    pieces = sum(1 if length <= limit else -(-(length - 1) // (limit - 1)) for length in lengths)
    assert manifest["splits"]["train"]["documents"] == pieces
    stream = PackedDataset(str(tmp_path / "out")).batch(range(manifest["splits"]["train"]["sequences"]))["tokens"]
    stream = stream.reshape(-1)
    assert bytes(token for token in stream if token < 256).decode() == "".join(texts)[: (stream < 256).sum()]
    starts = np.flatnonzero(stream == BOS)
    assert np.diff(starts).max() <= limit


def test_masks_follow_the_tokens_through_packing():
    ignored = np.array([1, 2, 3], dtype=np.uint32) | IGNORED
    chat = frame(np.concatenate([ignored, np.array([4, 5], dtype=np.uint32)]), BOS, EOS)
    asked = frame(ignored, BOS, EOS)
    plain = frame(np.array([6], dtype=np.uint32), BOS, EOS)
    stream = join_framed([chat, asked, plain])
    tokens, doc_ids = pack(stream, 8, 99)
    assert tokens.reshape(-1).tolist() == [BOS, 1, 2, 3, 4, 5, EOS, BOS, 1, 2, 3, EOS, BOS, 6, EOS, 99]
    assert learned(stream, 8).reshape(-1).astype(int).tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert doc_ids.reshape(-1).tolist() == [0] * 7 + [1] + [0] * 4 + [1] * 3 + [-1]
    pieces = split_framed(chat, 4, BOS)
    assert [((piece & IGNORED) == 0).astype(int).tolist() for piece in pieces] == [[0, 0, 0, 0], [0, 1, 1, 1]]


@pytest.fixture
def conversations(tmp_path, no_ray):
    turns = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "ANSWER"}] * 2
    (tmp_path / "x.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 30)

    def make(loss):
        source = {"type": "openthoughts", "path": f"{tmp_path}/x.jsonl", "format": "jsonl", "loss": loss}
        prepare(PrepareConfig(source=source, seq_len=63, validation_fraction=0), str(tmp_path / loss))
        return PackedDataset(str(tmp_path / loss))

    return make


def test_only_answers_are_learned(conversations):
    masked = conversations("assistant")
    batch = masked.batch(range(masked.n_sequences))
    assert batch["loss_mask"].dtype == np.bool_
    stream, mask = batch["tokens"].reshape(-1), batch["loss_mask"].reshape(-1)
    said = bytes(token for token in stream[mask] if token < 256).decode()
    assert set(said.split("<|im_end|>\n")) <= {"ANSWER"[:n] for n in range(7)}
    assert said.count("ANSWER") == bytes(token for token in stream if token < 256).decode().count("ANSWER")
    assert mask[stream == EOS].all()
    assert not mask[stream == BOS].any()
    everything = conversations("all")
    assert "loss_mask" not in everything.batch([0])
    assert np.array_equal(everything.batch(range(everything.n_sequences))["tokens"], batch["tokens"])


@pytest.mark.parametrize(("template", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("plain", "")])
def test_a_question_is_a_conversation_up_to_its_answer(template, end):
    said = ["Q?", "A\n\nB", "Q2?", "C"]
    roles = ["user", "assistant"] * 2
    turns = [{"role": role, "content": text} for role, text in zip(roles, said)]
    document = conversation(OpenThoughtsConfig(path="x", template=template), {"messages": turns})
    asked = question(template, "Q?")
    assert document[: len(asked)] == asked
    assert document[len(asked)].text == "A\n\nB"
    marker, following = end_of_answer(template), document[len(asked) + 1 :]
    assert (marker.text, marker.special) == ((end, True) if end else ("\n\nUser: ", False))
    assert text_of(following).startswith(marker.text)
    assert marker.special == following[0].special


def test_a_dataset_of_conversations_says_by_which_template(conversations, tmp_path):
    assert conversations("assistant").manifest["tokenizer"]["chat_templates"] == ["chatml"]
    chats = {"type": "openthoughts", "path": f"{tmp_path}/x.jsonl", "format": "jsonl", "template": "plain"}
    plain = {"type": "text", "path": f"{tmp_path}/x.txt"}
    (tmp_path / "x.txt").write_text("text " * 300)
    shares = [{"weight": 1, "source": source} for source in (chats, chats | {"template": "llama3"}, plain)]
    for name, source, known in (
        ("mixed", {"type": "mixture", "sources": shares}, {"chat_templates": ["llama3", "plain"]}),
        ("text", plain, {}),
    ):
        config = PrepareConfig.model_validate({"source": source, "seq_len": 63, "validation_fraction": 0})
        record = prepare(config, str(tmp_path / name))["tokenizer"]
        assert {key: value for key, value in record.items() if key == "chat_templates"} == known


def test_the_loss_counts_exactly_the_learned_targets(conversations):
    dataset = conversations("assistant")
    arrays = next(dataset.batches(position=0, global_batch_size=4, prefetch=0))
    config = {"vocab_size": 259, "dim": 16, "n_layers": 1, "n_loops": 1, "num_heads": 2, "max_seq_len": 64}
    torch.manual_seed(0)
    model = build(ModelConfig.model_validate({**config, "layout": {"type": "uniform", "mixer": {"type": "full"}}}))
    batch = Batch.from_numpy(arrays)
    loss, n_tokens, _ = next_token_objective(document_mask=True)(model, batch)
    doc_ids = torch.from_numpy(arrays["doc_ids"])
    hidden = model(batch.tokens[:, :-1], doc_ids=doc_ids[:, :-1]).hidden
    logits = model.logits(hidden).log_softmax(-1)
    each = -logits.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    mask = torch.from_numpy(arrays["loss_mask"])[:, 1:] & (doc_ids[:, 1:] == doc_ids[:, :-1])
    assert int(n_tokens) == int(mask.sum()) > 0
    torch.testing.assert_close(loss, each[mask].sum(), rtol=1e-5, atol=1e-5)


def test_held_out_rows_of_prompts_alone_have_no_perplexity_and_no_distance(tmp_path, no_ray):
    turns = [{"role": "user", "content": "Q" * 200}, {"role": "assistant", "content": "A"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"messages": turns, "n": n}) + "\n" for n in range(4)))
    source = {"type": "openthoughts", "path": f"{tmp_path}/x.jsonl", "format": "jsonl", "loss": "assistant"}
    prepare(PrepareConfig(source=source, seq_len=31, validation_fraction=0), str(tmp_path / "out"))
    config = {"vocab_size": 259, "dim": 16, "n_layers": 1, "n_loops": 1, "num_heads": 2, "max_seq_len": 32}
    model = build(ModelConfig.model_validate({**config, "layout": {"type": "uniform", "mixer": {"type": "full"}}}))
    dataset = PackedDataset(str(tmp_path / "out"))
    assert perplexity(model, dataset)["tokens"] > 0
    told = "no token of the 2 train sequences asked for counts in the loss; ask for"
    with pytest.raises(ConfigError, match=told):
        perplexity(model, dataset, max_sequences=2)
    with pytest.raises(ConfigError, match=told):
        teacher_kl(model, model, dataset, held_out="all", max_sequences=2)
