"""Items asked as conversations: by the token ids of training, and as tasks of their own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer, Tokenizer, describe, encode
from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
from lt2_platform.evaluate.compare import compare
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.chat import FolderChat, TrainedChat
from lt2_platform.evaluate.harness.dispatch import Dispatcher
from lt2_platform.evaluate.harness.lm import HarnessLM
from lt2_platform.evaluate.harness.models import FolderTokenizer, ModelSource
from lt2_platform.evaluate.harness.recall import NEW_TOKENS, WINDOW
from lt2_platform.evaluate.harness.run import evaluate, item_scores
from lt2_platform.evaluate.harness.scoring import Scored
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage
from tests.platform import chats
from tests.platform.data.tokenizers.test_chat_template import written
from tests.platform.evaluate.items import choices, write
from tests.platform.evaluate.test_formats import MATH, hub_folder, math_scoring_installed, sums
from tests.platform.evaluate.tiny import model, save


@dataclass(frozen=True)
class Source(ModelSource):
    tokenizer: Any = None
    templates: tuple[str, ...] = ()

    def identity(self):
        return "listener"

    def load_tokenizer(self):
        return self.tokenizer

    def chat_templates(self):
        return list(self.templates)


@dataclass
class Listener:
    """Writes down what it is asked, and says `answer`, ids that it is stopped in as a model is."""

    answer: list[int] = field(default_factory=list)
    max_length: int = 8192
    pairs: list[Any] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    model: Any = None

    def loglikelihoods(self, pairs):
        self.pairs += pairs
        return Scored([(-1.0, False) for _ in pairs], {}, 0.0)

    def continuations(self, prompts, max_new_tokens, stop):
        self.prompts += [list(prompt) for prompt in prompts]
        ends = [n for n in range(1, len(self.answer) + 1) if stop(self.answer[:n])]
        return Scored([self.answer[: ends[0]] if ends else self.answer for _ in prompts], {}, 0.0)


def ask(tmp_path, tokenizer: Tokenizer, template: str, task: str, answer: Sequence[int] = (), out="out", **fields: Any):
    """(rows, what a model trained on the template was asked)."""
    listener = Listener(list(answer))
    config = HarnessConfig(pack=str(tmp_path / "pack"), tasks=(task,), chat=True, **fields)
    source = Source("memory", tokenizer=tokenizer, templates=(template,))
    return evaluate(config, source, out=str(tmp_path / out), scorer=listener), listener


def request(kind, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def examples(rows):
    return [(f"Question: {row['question']}\nAnswer:", row["answer"]) for row in rows]


@pytest.fixture(params=[*chats.MARKERS, "chatml without markers"])
def trained(request, tmp_path):
    """(template, a tokenizer with its markers or without)."""
    template, _, without = request.param.partition(" ")
    return template, chats.tokenizer(tmp_path / "tokenizer", *(() if without else chats.MARKERS[template]))


@pytest.fixture
def gsm8k(tmp_path):
    packs.build(str(tmp_path / "pack"), {"gsm8k": hub_folder(tmp_path / "gsm8k", train=sums(2, 5), test=sums(2))})


@pytest.mark.parametrize("multiturn", [True, False])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_few_shot_prompts_have_the_token_ids_of_training(tmp_path, gsm8k, trained, multiturn, system):
    template, tokenizer = trained
    rows, listener = ask(tmp_path, tokenizer, template, "gsm8k", num_fewshot=2, multiturn=multiturn, system=system)
    possible = []
    for (question, answer), shots in itertools.product(examples(sums(2)), itertools.permutations(examples(sums(2, 5)))):
        if multiturn:
            turns = [turn for asked, said in shots for turn in (("user", asked), ("assistant", said))]
            turns += [("user", question), ("assistant", answer)]
        else:
            before = "".join(f"{asked} {said}\n\n" for asked, said in shots)
            turns = [("user", before + question), ("assistant", answer)]
        turns = [("system", system)] * bool(system) + turns
        possible.append((chats.trained_on(template, tokenizer, turns), answer))
    assert len(listener.prompts) == 2
    for prompt in listener.prompts:
        ((answer, right),) = [(ids[len(prompt) :], said) for ids, said in possible if ids[: len(prompt)] == prompt]
        assert tokenizer.decode(answer).startswith(right)
        assert prompt.count(tokenizer.bos_id) == 1
    called = "gsm8k+2-shot+chat" + "+one-turn" * (not multiturn) + "+system-213c22" * bool(system)
    assert {row["task"] for row in rows} == {called}
    assert {(row["chat"], row["multiturn"], row["system"]) for row in rows} == {(template, multiturn, system)}
    assert (tmp_path / "out" / "samples" / f"{called}.jsonl").is_file()


@pytest.mark.skipif(not math_scoring_installed(), reason="needs math-verify and antlr 4.11, which moto does not take")
@pytest.mark.parametrize("multiturn", [True, False])
def test_minerva_math_is_asked_with_its_four_examples(tmp_path, multiturn):
    for row in MATH:
        hub_folder(tmp_path / "hendrycks_math" / row["type"].lower(), test=[row, row])
    packs.build(str(tmp_path / "pack"), packs.discover(str(tmp_path)))
    tokenizer = chats.tokenizer(tmp_path / "tokenizer", *chats.MARKERS["chatml"])
    said = tokenizer.encode_batch(["Final Answer: The final answer is $2$. I hope it is correct."])[0].tolist()
    answer = [*said, tokenizer.special_id("<|im_end|>")]
    rows, listener = ask(tmp_path, tokenizer, "chatml", "minerva_math", answer, multiturn=multiturn)
    assert {row["task"] for row in rows} == {"minerva_math+chat" + "+one-turn" * (not multiturn)}
    assert {row["metric"]: row["value"] for row in rows} == {"exact_match": 0.5, "math_verify": 0.5}
    for prompt in map(tokenizer.decode, listener.prompts):
        assert prompt.count("Problem:\n") == 5
        assert prompt.count("assistant\n") == (5 if multiturn else 1)


def test_an_answer_ends_with_the_assistants_turn(tmp_path, gsm8k, trained):
    """Of gsm8k's two filters, one takes the last number: here what comes after the turn."""
    template, tokenizer = trained
    question, right = examples(sums(1))[0]
    ids = chats.trained_on(template, tokenizer, [("user", question), ("assistant", right), ("user", "Not 12?")])
    _, listener = ask(tmp_path, tokenizer, template, "gsm8k", num_fewshot=0, limit=1)
    answer = ids[len(listener.prompts[0]) :]
    assert "12" in tokenizer.decode(answer)
    rows, _ = ask(tmp_path, tokenizer, template, "gsm8k", answer, "again", num_fewshot=0, limit=1)
    assert {row["metric"]: row["value"] for row in rows} == {
        "exact_match/strict-match": 1.0,
        "exact_match/flexible-extract": 1.0,
    }


def test_choices_are_encoded_as_training_encodes_an_answer(tmp_path, trained):
    template, tokenizer = trained
    packs.build(str(tmp_path / "pack"), write(tmp_path / "data", mine=choices(2)))
    _, listener = ask(tmp_path, tokenizer, template, "mine")
    possible = [
        chats.trained_on(template, tokenizer, [("user", row["query"]), ("assistant", choice)])
        for row in choices(2)
        for choice in row["choices"]
    ]
    assert len(listener.pairs) == 4
    for pair in listener.pairs:
        ids = [*pair.context, *pair.continuation]
        assert [ids] == [said[: len(ids)] for said in possible if said[: len(ids)] == ids]
        assert tokenizer.decode(pair.continuation) in ("small", "rather large")


def test_what_the_assistant_has_begun_is_one_text_with_how_it_goes_on(tmp_path, trained):
    """A task of lm-eval with a gen_prefix."""
    template, tokenizer = trained
    listener = Listener()
    dispatcher = Dispatcher(Source("memory", tokenizer=tokenizer), str(tmp_path / "out"), scorer=listener)
    chat = TrainedChat(template, "chat", tokenizer)
    lm = HarnessLM(dispatcher, tokenizer, max_length=512, batch_size=2, chat=chat)
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "So it"}]
    lm.loglikelihood([request("loglikelihood", lm.apply_chat_template(messages, False), " is 46.")])
    (pair,) = listener.pairs
    ids = [*pair.context, *pair.continuation]
    assert ids == chats.trained_on(template, tokenizer, [("user", "Who?"), ("assistant", "So it is 46.")])[: len(ids)]
    assert (
        list(pair.continuation) == encode(tokenizer, "So it is 46.", bos=False)[len(encode(tokenizer, "So it")) - 1 :]
    )
    lm.generate_until([request("generate_until", lm.apply_chat_template(messages, False), {"max_gen_toks": 3})])
    assert listener.prompts == [list(pair.context)]


def test_recall_leaves_room_for_the_template(tmp_path):
    tokenizer = chats.tokenizer(tmp_path / "tokenizer", *chats.MARKERS["chatml"])
    rows = [{"context": "Question: Ann has 12 pens. " * 900, "prompt": "How many?", "answers": ["12"]}]
    packs.build(str(tmp_path / "pack"), write(tmp_path / "data", cloze=rows))
    for system in ("", "Be brief."):
        _, listener = ask(tmp_path, tokenizer, "chatml", "cloze", out=f"out{system}", system=system)
        (prompt,) = listener.prompts
        assert WINDOW - NEW_TOKENS - 12 < len(prompt) <= WINDOW - NEW_TOKENS
        assert prompt[:2] == [tokenizer.bos_id, tokenizer.special_id("<|im_start|>")]


def test_needles_of_ours_are_read_whole_with_the_template_around(tmp_path):
    net = model(max_seq_len=64)
    rows = [{"query": "a needle " * 30, "outputs": ["7"], "max_length": 1 + 9 * 30 + 8, "max_new_tokens": 8}]
    packs.build(str(tmp_path / "pack"), write(tmp_path / "data", needle=rows))
    config = HarnessConfig(pack=str(tmp_path / "pack"), tasks=("needle",), chat=True)
    rows = run(tmp_path, net, ["chatml"], config)
    assert "context_cut" not in {row["metric"] for row in rows}


def run(tmp_path, net, templates, config, out="out"):
    known = {"chat_templates": templates} if templates else {}
    place = save(
        tmp_path / f"run-{'-'.join(templates)}", net, tokenizer={**describe(ByteTokenizer()), "file": None, **known}
    )
    return evaluate_checkpoint(place, [config], data=None, out=str(tmp_path / out)).rows


@pytest.mark.parametrize(
    ("templates", "message"),
    [
        ([], "was not trained on conversations; name a template"),
        (["chatml", "plain"], "was trained on several templates; name one of chatml, plain"),
    ],
)
def test_a_template_that_cannot_be_told(tmp_path, templates, message):
    packs.build(str(tmp_path / "pack"), write(tmp_path / "data", mine=choices(2)))
    config = HarnessConfig(pack=str(tmp_path / "pack"), tasks=("mine",), chat=True)
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, model(), templates, config)
    rows = run(tmp_path, model(), templates, config.model_copy(update={"chat": "plain"}))
    assert {(row["task"], row["chat"]) for row in rows} == {("mine+plain", "plain")}


@pytest.mark.parametrize("bos", [True, False])
def test_a_prompt_of_an_export_counts_as_that_of_its_checkpoint(tmp_path, bos):
    ours, theirs = written("chatml", tmp_path, markers=True, bos=bos)
    hashes = set()
    for chat in (TrainedChat("chatml", "chat", ours), FolderChat(FolderTokenizer(theirs, "export"), ())):
        text = chat.render([{"role": "user", "content": "How many?"}])
        sample = {"doc_id": 0, "doc_hash": "", "prompt_hash": text, "target_hash": "", "metrics": ["acc"], "acc": 1.0}
        sample |= {"filter": "none", "filtered_resps": [], "arguments": [(text, " 7")]}
        hashes.add(item_scores(sample, chat)["prompt_hash"])
    assert len(hashes) == 1


def test_what_is_asked_otherwise_is_another_task_everywhere(tmp_path):
    """Of one model: its rows, hashes and samples; a comparison says when it is of two ways of asking."""
    packs.build(str(tmp_path / "pack"), write(tmp_path / "data", mine=choices(4)))
    config = HarnessConfig(pack=str(tmp_path / "pack"), tasks=("mine",), max_length=256)
    ways = {
        "text": {},
        "chat": {"chat": True},
        "named": {"chat": "chatml"},
        "other": {"chat": "llama3"},
        "system": {"chat": True, "system": "Be brief."},
    }
    found = {
        name: run(tmp_path, model(), ["chatml"], config.model_copy(update=fields), name)[0]
        for name, fields in ways.items()
    }
    called = {name: row["task"] for name, row in found.items()}
    assert called == {
        "text": "mine", "chat": "mine+chat", "named": "mine+chat", "other": "mine+llama3",
        "system": "mine+chat+system-213c22",
    }  # fmt: skip
    assert "chat" not in found["text"]
    hashes = {name: row["task_sha256"] for name, row in found.items()}
    assert len(set(hashes.values())) == 4
    assert hashes["chat"] == hashes["named"]
    notes = {row["metric"]: row["note"] for row in compare(str(tmp_path / "text"), str(tmp_path / "chat"))}
    assert notes == dict.fromkeys(("acc", "acc_norm"), "asked differently: b as mine+chat")
    assert {row["note"] for row in compare(str(tmp_path / "chat"), str(tmp_path / "named"))} == {""}
    # With both ways on one side, only the same way is compared.
    answers = Storage(str(tmp_path / "text")).read_bytes("harness/loops-2/samples/mine.jsonl")
    Storage(str(tmp_path / "chat")).write_bytes("harness/loops-2/samples/mine.jsonl", answers)
    for other, task in (("text", "mine"), ("named", "mine+chat")):
        rows = compare(str(tmp_path / "chat"), str(tmp_path / other))
        assert {(row["task"], row["note"]) for row in rows} == {(task, "")}


@pytest.mark.parametrize(("field", "value"), [("system", "Be brief."), ("multiturn", False)])
def test_what_only_conversations_have_is_refused_without_them(field, value):
    with pytest.raises(ValueError, match=f"{field} is of conversations; set chat too"):
        HarnessConfig.model_validate({"tasks": ("mine",), field: value})
