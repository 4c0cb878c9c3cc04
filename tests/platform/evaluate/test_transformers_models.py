"""Models of transformers through our harness: the same numbers as lm-eval's own HFLM gives."""

import hashlib
import json

import pyarrow as pa
import pytest
import tokenizers
import torch
from lm_eval.api.instance import Instance
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lt2.config import ConfigError
from lt2.interop.export import export_checkpoint
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer, describe, load_tokenizer, tokenizer_files
from lt2_platform.evaluate.checkpoints import evaluate_anything
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.chat import chat_of
from lt2_platform.evaluate.harness.dispatch import Dispatcher
from lt2_platform.evaluate.harness.lm import HarnessLM
from lt2_platform.evaluate.harness.long_context import needles
from lt2_platform.evaluate.harness.models import FolderTokenizer, ModelSource, load
from lt2_platform.evaluate.harness.tasks import packs
from tests.platform.evaluate.items import arc, choices, nq, write
from tests.platform.evaluate.tiny import model, save

TEXTS = [("The river is", " long and cold"), ("Question: who?\nAnswer:", " nobody"), ("a ", "stone"), ("x", " y")]


def byte_level(*, bos):
    """A tokenizer of bytes with <s> and </s>."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: index for index, token in enumerate(sorted(alphabet))} | {"<s>": 256, "</s>": 257}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if bos:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 256)]
        )
    return inner


def save_folder(folder, *, bos, **more):
    """A tiny Llama with a byte-level tokenizer that begins texts with BOS or does not; `more` is the tokenizer's."""
    inner = byte_level(bos=bos)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", **more).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=258, max_position_embeddings=512, bos_token_id=256, eos_token_id=257, initializer_range=0.3, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def both(folder, out, *, max_length=512):
    """(ours, lm-eval's own) on the same weights."""
    pytest.importorskip("accelerate", reason="lm-eval's HFLM needs it")
    from lm_eval.models.huggingface import HFLM

    source = ModelSource(folder)
    loaded = load(source)
    theirs = HFLM(
        pretrained=loaded.scorer.model, tokenizer=loaded.tokenizer._tokenizer, batch_size=1, max_length=max_length
    )
    dispatcher = Dispatcher(source, str(out), scorer=loaded.scorer)
    chat = None
    if loaded.tokenizer.chat_template is not None:
        chat = chat_of(HarnessConfig(tasks=("any",), chat=True), source, loaded.tokenizer)
    return HarnessLM(dispatcher, loaded.tokenizer, max_length=max_length, batch_size=3, chat=chat), theirs


def asked(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no-bos"])
def test_loglikelihoods_and_generation_agree_with_hflm(tmp_path, bos):
    ours, theirs = both(save_folder(tmp_path / "model", bos=bos), tmp_path / "out")
    requests = asked("loglikelihood", *TEXTS, ("", "start"))
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    options = {"until": ["\n"], "max_gen_toks": 10, "do_sample": False}
    requests = asked("generate_until", *((context, options) for context, _ in TEXTS))
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


TURNS = (
    "{{ FIRST }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("bos", [True, False], ids=["bos", "no-bos"])
@pytest.mark.parametrize("first", ["bos_token", "''"])
def test_conversations_by_a_folders_own_template_agree_with_hflm(tmp_path, bos, first):
    folder = save_folder(tmp_path / "model", bos=bos, chat_template=TURNS.replace("FIRST", first))
    ours, theirs = both(folder, tmp_path / "out")
    turns = [("system", "Brief."), ("user", "Who?"), ("assistant", "Ann."), ("user", "And?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    context = ours.apply_chat_template(messages)
    assert context == theirs.apply_chat_template(messages)
    assert context.endswith("[user] And?\n[assistant] ")
    begun = [*messages, {"role": "assistant", "content": "It was"}]
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)
    assert ours.tok_encode(context).count(256) == (bos or first == "bos_token")
    requests = asked(
        "loglikelihood", (context, "Bob"), (context, " Bob"), (ours.apply_chat_template(begun, False), " Bo")
    )
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
    requests = asked("generate_until", (context, {"until": ["\n"], "max_gen_toks": 10, "do_sample": False}))
    assert ours.generate_until(requests) == theirs.generate_until(requests, disable_tqdm=True)


def test_an_answer_ends_where_a_folders_generation_config_says(tmp_path):
    folder = save_folder(tmp_path / "model", bos=True, chat_template=TURNS.replace("FIRST", "bos_token"))
    ours, _ = both(folder, tmp_path / "out")
    context = ours.apply_chat_template([{"role": "user", "content": "Who?"}])
    options = {"until": [], "max_gen_toks": 10, "do_sample": False}
    (whole,) = ours.generate_until(asked("generate_until", (context, options)))
    mark = next(letter for letter in whole[1:] if letter.isascii())
    (end,) = ours.tok_encode(mark, add_special_tokens=False)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, end]}))
    again, _ = both(folder, tmp_path / "again")
    assert again.generate_until(asked("generate_until", (context, options))) == [whole.split(mark)[0]]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template .* name one"),
        ("{{ raise_exception('no system role') }}", r"refuses turns of system, user \(no system role\); fix it"),
        ({"a": TURNS, "b": TURNS}, "refuses turns of system, user .*no default"),
    ],
)
def test_a_folder_that_cannot_be_asked_conversations(tmp_path, template, message):
    folder = save_folder(tmp_path / "model", bos=True, chat_template=template)
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "data", mine=choices()))
    config = HarnessConfig(pack=pack, tasks=("mine",), chat=True, system="Brief.")
    with pytest.raises(ConfigError, match=message):
        evaluate_anything(folder, [config], out=str(tmp_path / "out"))
    named = evaluate_anything(folder, [config.model_copy(update={"chat": "plain"})], out=str(tmp_path / "out"))
    assert {row["task"] for row in named.rows} == {"mine+plain+system-" + hashlib.sha256(b"Brief.").hexdigest()[:6]}


def test_rolling_agrees_where_hflm_scores_bos_once(tmp_path):
    ours, theirs = both(save_folder(tmp_path / "model", bos=False), tmp_path / "out", max_length=16)
    requests = asked("loglikelihood_rolling", ("The river is long and cold, and so is the winter here.",))
    assert ours.loglikelihood_rolling(requests) == pytest.approx(
        theirs.loglikelihood_rolling(requests, disable_tqdm=True), abs=1e-3
    )


def test_a_model_folder_is_evaluated_like_a_checkpoint(tmp_path):
    folder = save_folder(tmp_path / "model", bos=True)
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "data", arc_easy=arc(), mine=choices(), nq_open=nq(2)))
    config, other = (HarnessConfig(pack=pack, tasks=tasks) for tasks in (("arc_easy", "mine"), ("nq_open",)))
    found = evaluate_anything(folder, [config, other], out=str(tmp_path / "out"))
    for name in ("harness", "harness-1"):  # a second one leaves the answers of the first, should it be cut off
        assert list((tmp_path / "out" / name / "loops-1/batches").iterdir())
    assert {(row["task"], row["metric"], row["n"]) for row in found.rows} >= {
        ("arc_easy", "acc", 6),
        ("mine", "acc", 4),
    }
    assert found.evaluations()["validation"]
    with pytest.raises(ConfigError, match="not an LT2 model"):
        evaluate_anything(folder, [config], out=str(tmp_path / "out"), loops=[1, 2])


def test_a_folder_without_a_tokenizer_says_what_to_evaluate_instead(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\. If .* byte-level .* exported from: lt2 eval RUN --pack P"
    ):
        FolderTokenizer.load(str(tmp_path), None)


@pytest.mark.parametrize("begin", [True, False])
def test_an_exported_folder_gives_the_numbers_of_its_checkpoint(tmp_path, begin):
    """Needles beyond its length included, by a pack made for the tokenizer.json that the checkpoint has; for models
    whose texts begin with BOS, and for those whose texts do not, as their own tokenizer had it."""
    file = tmp_path / "tokenizer.json"
    byte_level(bos=False).save(str(file))
    if not begin:
        PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(file))
    assert (tokenizer.bos_id is not None) == begin
    net = model(max_seq_len=512, vocab_size=258)
    record = {**describe(tokenizer), "file": "tokenizer/tokenizer.json"}
    checkpoint = save(tmp_path / "run", net, tokenizer=record, files=tokenizer_files(str(file)))
    folder = tmp_path / "export"
    named = {"bos_id": tokenizer.prefix_id, "eos_id": tokenizer.eos_id, "begin": begin}
    export_checkpoint(net, folder, tokenizer=str(file), **named)
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "data", arc_easy=arc(), mine=choices()))
    made = pa.Table.from_pylist(needles.make("niah_single_1", tokenizer, 900, samples=2))
    packs.add(pack, {"niah_single_1_900": {"test": made}}, {"niah_single_1_900": "here"}, tokenizer=tokenizer)
    tasks = [HarnessConfig(pack=pack, tasks=("arc_easy", "mine", "niah_single_1_900"))]
    found, answers = [], []
    for place in (checkpoint, str(folder)):
        out = tmp_path / f"out-{len(found)}"
        evaluation = evaluate_anything(place, tasks, out=str(out), loops=[1, 2])
        found.append((evaluation.rows, evaluation.n_loops, evaluation.parameters))
        answers.append([path.read_text() for path in sorted(out.rglob("samples/*.jsonl"))])
    assert found[0] == found[1]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6
    assert {row["task"] for row in found[1][0]} == {"arc_easy", "mine", "niah_single_1_900"}
    assert not [row for row in found[1][0] if row["metric"] == "context_cut"]
    vocabulary = packs.read_manifest(pack)["tasks"]["niah_single_1_900"]["tokenizer"]["vocabulary"]
    exported = ModelSource(str(folder)).load_tokenizer()
    assert vocabulary == exported.vocabulary == tokenizer.vocabulary
    assert exported.prefix_id == tokenizer.prefix_id == 256


def test_a_folder_whose_weights_are_cut_is_named(tmp_path):
    folder = save_folder(tmp_path / "llama", bos=True)
    weights = tmp_path / "llama" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"^the weights in .*/llama are damaged \(.+\); copy or export it again$"):
        load(ModelSource(folder))


def test_needles_made_for_another_vocabulary_are_refused_for_a_folder(tmp_path):
    folder = save_folder(tmp_path / "model", bos=True)
    made = pa.Table.from_pylist(needles.make("niah_single_1", ByteTokenizer(), 900, samples=1))
    pack = str(tmp_path / "pack")
    packs.add(pack, {"niah_single_1_900": {"test": made}}, {"niah_single_1_900": "here"}, tokenizer=ByteTokenizer())
    with pytest.raises(ConfigError, match="made for tokenizer 'byte' .*; build niah_single_1_900 again"):
        evaluate_anything(folder, [HarnessConfig(pack=pack, tasks=("niah_single_1_900",))], out=str(tmp_path / "out"))
