"""lm-eval on tiny models: against direct computation, whatever the batch, order, actors and interruptions."""

import json

import pytest
import torch
from lm_eval.api.instance import Instance

from lt2.config import ConfigError
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
from lt2_platform.evaluate.compare import compare
from lt2_platform.evaluate.config import HarnessConfig
from lt2_platform.evaluate.harness.dispatch import Dispatcher, Work, batched, cut
from lt2_platform.evaluate.harness.lm import HarnessLM
from lt2_platform.evaluate.harness.models import ModelSource
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Pair
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.storage import Storage
from tests.lt2.mixers.samples import config, shipped_types
from tests.platform.evaluate.items import arc, choices, copa, nq, write
from tests.platform.evaluate.tiny import model, save

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id


class Source(ModelSource):
    """A model that is only in memory."""

    def identity(self):
        return "memory"

    def load_tokenizer(self):
        return ByteTokenizer()


def harness(tmp_path, net, *, batch_size=4, max_length=256, **options):
    scorer = LoopedScorer(net, max_length=max_length, eos_id=EOS)
    dispatcher = Dispatcher(Source("memory"), str(tmp_path / "out"), scorer=scorer)
    return HarnessLM(dispatcher, ByteTokenizer(), max_length=max_length, batch_size=batch_size, **options)


def asked(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


def loglikelihood(net, context, continuation):
    """Token by token, in fp64, one row, no padding."""
    ids = torch.tensor([*context, *continuation])
    logprobs = net.double().logits(net(ids[None, :-1]).hidden[0]).log_softmax(-1)
    first = len(context) - 1
    return float(sum(logprobs[first + i, token] for i, token in enumerate(continuation)).detach())


@pytest.fixture
def pack(tmp_path):
    place = str(tmp_path / "pack")
    packs.build(place, write(tmp_path / "data", arc_easy=arc(), copa=copa(), nq_open=nq(), mine=choices()))
    return place


def run(checkpoint, pack, out, **fields):
    usual = {"tasks": ("arc_easy", "copa", "nq_open", "mine"), "max_length": 320}
    config = HarnessConfig.model_validate({"pack": pack, **usual, **fields})
    return evaluate_checkpoint(checkpoint, [config], data=None, out=str(out)).rows


def numbers(rows):
    return {(row["task"], row["metric"]): (row["value"], row["stderr"]) for row in rows}


def test_scores_are_those_of_each_text_alone_with_bos_once(tmp_path):
    lm = harness(tmp_path, model().double())
    texts = [("ab", " cde"), ("a longer context", "x"), ("", "start"), ("q ", "z"), ("ab", " cde")]
    split = [*texts[:3], ("q", " z"), texts[4]]  # a space between them belongs to the continuation
    found = lm.loglikelihood(asked("loglikelihood", *texts))
    encode = lambda text: list(text.encode())  # noqa: E731
    for (context, continuation), (total, _) in zip(split, found):
        assert total == pytest.approx(loglikelihood(model(), [BOS, *encode(context)], encode(continuation)), abs=1e-10)
    assert found[0] == found[4]
    assert not lm.problems


def test_a_context_of_spaces_is_an_empty_one_with_and_without_bos(tmp_path, monkeypatch):
    texts = [(" ", "a"), ("", " a")]
    first, second = harness(tmp_path / "bos", model()).loglikelihood(asked("loglikelihood", *texts))
    assert first == second
    assert first[0] == pytest.approx(loglikelihood(model(), [BOS], b" a"), rel=1e-5)
    monkeypatch.setattr(ByteTokenizer, "bos_id", None)
    first, second = harness(tmp_path / "unbegun", model()).loglikelihood(asked("loglikelihood", *texts))
    assert first == second
    assert first[0] == pytest.approx(loglikelihood(model(), [BOS], b" a"), rel=1e-5)  # as lm-eval asks such models
    monkeypatch.setattr(ByteTokenizer, "prefix_id", None)
    first, second = harness(tmp_path / "none", model()).loglikelihood(asked("loglikelihood", *texts))
    assert first == second
    assert first[0] == pytest.approx(loglikelihood(model(), [EOS], b" a"), rel=1e-5)


def test_greedy_says_whether_the_continuation_is_the_models_own(tmp_path):
    net = model()
    lm = harness(tmp_path, net)
    own = net.logits(net(torch.tensor([[BOS, *b"abc"]])).hidden[0, -1]).argmax().item()
    scorer = LoopedScorer(net)
    other = (own + 1) % 256
    scored = scorer.loglikelihoods([Pair((BOS, *b"abc"), (own,)), Pair((BOS, *b"abc"), (other,))])
    assert [greedy for _, greedy in scored.results] == [True, False]
    assert scored.loops == {2: 8}
    assert lm.tok_encode("é") == [BOS, *"é".encode()]


@pytest.mark.parametrize("mixer", shipped_types())
def test_a_score_depends_on_nothing_else_in_the_batch(mixer):
    fields = {"dim": 32, "layout": {"type": "uniform", "mixer": config(mixer).model_dump()}}
    scorer = LoopedScorer(model(**fields).double())
    pairs = [Pair(tuple(range(1, 2 + n)), tuple(range(3, 5 + n % 3))) for n in range(1, 40, 6)]
    together = [total for total, _ in scorer.loglikelihoods(pairs).results]
    alone = [scorer.loglikelihoods([pair]).results[0][0] for pair in pairs]
    backwards = [total for total, _ in scorer.loglikelihoods(pairs[::-1]).results][::-1]
    assert together == pytest.approx(alone, abs=1e-10)
    assert backwards == pytest.approx(alone, abs=1e-10)


def test_order_and_repeats_of_requests_change_no_bit(tmp_path):
    texts = [("context " * (i % 4 + 1), f"answer {i % 5}") for i in range(12)]
    net = model()
    first = harness(tmp_path / "a", net).loglikelihood(asked("loglikelihood", *texts))
    again = harness(tmp_path / "b", net).loglikelihood(asked("loglikelihood", *texts[::-1], *texts))
    assert again[:12][::-1] == first
    assert again[12:] == first


def test_what_cannot_be_scored_is_counted_and_never_wins(tmp_path):
    lm = harness(tmp_path, model(), max_length=8)
    texts = [("context", ""), ("c", "more than eight tokens"), ("a context that is long", "abc"), ("ok", "fine")]
    found = lm.loglikelihood(asked("loglikelihood", *texts))
    assert found[0] == found[1] == (float("-inf"), False)
    assert lm.problems == {"empty_continuation": 1, "continuation_too_long": 1, "context_cut": 1}
    # of the cut context the last 8 + 1 - 3 tokens are left
    assert found[2][0] == pytest.approx(loglikelihood(model(), b"s long"[-6:], b"abc"), rel=1e-5)


def test_rolling_scores_every_token_once_and_bos_once(tmp_path):
    lm = harness(tmp_path, model(), max_length=5)
    text = "abcdefghijklm"
    (found,) = lm.loglikelihood_rolling(asked("loglikelihood_rolling", (text,)))
    ids = [BOS, *text.encode()]
    windows = [(ids[0:1], ids[1:6]), (ids[5:6], ids[6:11]), (ids[8:11], ids[11:14])]
    assert found == pytest.approx(sum(loglikelihood(model(), *window) for window in windows), rel=1e-5)


def test_generation_is_greedy_ends_at_a_stop_string_and_ignores_its_neighbours(tmp_path):
    net = model(seed=3)
    prompts = ["a", "some longer prompt", "mid one"]
    options = {"until": ["\n"], "max_gen_toks": 12}
    lm = harness(tmp_path, net)
    found = lm.generate_until(asked("generate_until", *((p, options) for p in prompts)))
    for prompt, text in zip(prompts, found):
        ids = [BOS, *prompt.encode()]
        for _ in range(12):
            ids.append(int(net.logits(net(torch.tensor([ids])).hidden[0, -1]).argmax()))
        assert text == ByteTokenizer().decode(ids[1 + len(prompt) :]).split("\n")[0]
    mark = found[1][2:4]
    (stopped,) = lm.generate_until(asked("generate_until", (prompts[1], {"until": [mark], "max_gen_toks": 12})))
    assert stopped == found[1].split(mark)[0]
    with pytest.raises(ConfigError, match="300 tokens are to be generated in a window of 256; give a max_length above"):
        lm.generate_until(asked("generate_until", ("a", {"max_gen_toks": 300})))
    with pytest.raises(ConfigError, match="only greedy"):
        lm.generate_until(asked("generate_until", ("a", {"temperature": 0.7})))


def test_suite_rows_come_with_errors_hashes_and_cost(tmp_path, pack):
    checkpoint = save(tmp_path / "run", model())
    rows = run(checkpoint, pack, tmp_path / "out")
    found = {(row["task"], row["metric"]) for row in rows}
    assert found == {
        ("arc_easy", "acc"), ("arc_easy", "acc_norm"), ("copa", "acc"), ("nq_open", "exact_match"),
        ("mine", "acc"), ("mine", "acc_norm"),
    }  # fmt: skip
    row = next(row for row in rows if (row["task"], row["metric"]) == ("arc_easy", "acc"))
    assert (row["n"], row["split"], row["mean_loops"], len(row["task_sha256"])) == (6, "validation", 2.0, 64)
    assert {row["limit"] for row in rows} == {None}
    quick = run(checkpoint, pack, tmp_path / "quick", tasks=("arc_easy",), limit=2)
    assert {(row["n"], row["limit"]) for row in quick} == {(2, 2)}
    assert row["stderr"] == pytest.approx((row["value"] * (1 - row["value"]) / 5) ** 0.5)
    # by hand
    hits = 0
    for item in arc():
        scores = [
            loglikelihood(model(), [BOS, *f"Question: {item['question']}\nAnswer:".encode()], f" {text}".encode())
            for text in item["choices"]["text"]
        ]
        hits += scores.index(max(scores)) == item["choices"]["label"].index(item["answerKey"])
    assert row["value"] == hits / 6
    samples = Storage(str(tmp_path / "out")).read_bytes("harness/loops-2/samples/arc_easy.jsonl").decode().splitlines()
    assert sum(json.loads(line)["scores"]["acc"] for line in samples) == hits


def test_a_window_without_room_for_an_answer_is_refused_before_any_task(tmp_path, pack):
    checkpoint = save(tmp_path / "run", model())
    with pytest.raises(ConfigError, match="nq_open: 256 tokens are to be generated in a window of 256; give a max_"):
        run(checkpoint, pack, tmp_path / "out", max_length=256)
    assert not list((tmp_path / "out").glob("**/samples"))


def test_a_comparison_says_where_windows_cut_items(tmp_path, pack):
    checkpoint, tasks = save(tmp_path / "run", model()), ("copa", "nq_open")
    a = run(checkpoint, pack, tmp_path / "a", tasks=tasks, max_length=51 + 256)
    b = run(checkpoint, pack, tmp_path / "b", tasks=tasks, max_length=50 + 256)
    assert [row["value"] for row in a + b if row["metric"] == "context_cut"] == [3]
    notes = {row["task"]: row["note"] for row in compare(str(tmp_path / "a"), str(tmp_path / "b"))}
    assert notes == {"copa": "", "nq_open": "3 of the 4 in both cut to other windows (a whole, b 306 tokens)"}
    run(checkpoint, pack, tmp_path / "c", tasks=("copa",), max_length=30)
    (row,) = compare(str(tmp_path / "c"), str(tmp_path / "b"))
    assert row["note"] == "5 of the 5 in both cut to other windows (a 30 tokens, b whole)"


def test_no_bars_of_lm_eval_among_ours(tmp_path, pack, capfd):
    run(save(tmp_path / "run", model()), pack, tmp_path / "out", tasks=("mine",))
    assert "it/s" not in capfd.readouterr().err


def test_each_task_is_charged_what_it_spent_itself(tmp_path):
    net = model(halting={"type": "act"})
    data = write(tmp_path / "data", short=choices(), long=[row | {"query": row["query"] * 20} for row in choices()])
    packs.build(str(tmp_path / "pack"), data)
    checkpoint = save(tmp_path / "run", net)
    spent = lambda rows: {(row["task"], row["mean_loops"], row["flops_per_token"]) for row in rows}  # noqa: E731
    both = spent(run(checkpoint, str(tmp_path / "pack"), tmp_path / "both", tasks=("short", "long")))
    alone = [
        spent(run(checkpoint, str(tmp_path / "pack"), tmp_path / name, tasks=(name,))) for name in ("short", "long")
    ]
    assert len(both) == 2
    assert both == alone[0] | alone[1]


def test_an_interrupted_evaluation_asks_only_what_is_missing(tmp_path, pack, monkeypatch):
    checkpoint = save(tmp_path / "run", model())
    whole = run(checkpoint, pack, tmp_path / "whole", batch_size=3)
    calls = []
    original = LoopedScorer.loglikelihoods

    def failing(self, pairs):
        calls.append(len(pairs))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, pairs)

    monkeypatch.setattr(LoopedScorer, "loglikelihoods", failing)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, pack, tmp_path / "out", batch_size=3)
    answered = len(list((tmp_path / "out").glob("**/batches/*/*.json")))
    assert answered == 3
    assert run(checkpoint, pack, tmp_path / "out", batch_size=3) == whole
    total = len(list((tmp_path / "whole").glob("**/batches/*/*.json")))
    generated = 2  # of nq_open, which asks no log-likelihoods
    assert len(calls) == 1 + total - generated
    before = len(calls)
    run(save(tmp_path / "other", model(seed=1)), pack, tmp_path / "out", batch_size=3)
    assert len(calls) > before  # another model's answers are not taken for its own


def test_few_shot_examples_need_a_training_split(tmp_path, pack):
    checkpoint = save(tmp_path / "run", model())
    with pytest.raises(ConfigError, match="no training split"):
        run(checkpoint, pack, tmp_path / "out", tasks=("copa",), num_fewshot=2)
    train = {"mine": str(tmp_path / "data" / "mine-train.jsonl")}
    (tmp_path / "data" / "mine-train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices(6)))
    packs.build(str(tmp_path / "few"), train)
    manifest = packs.read_manifest(str(tmp_path / "few"))
    validation = Storage(pack).read_bytes("mine/validation.parquet")
    Storage(str(tmp_path / "few")).write_bytes("mine/validation.parquet", validation)
    manifest["tasks"]["mine"]["splits"]["validation"] = packs.read_manifest(pack)["tasks"]["mine"]["splits"][
        "validation"
    ]
    Storage(str(tmp_path / "few")).write_json("manifest.json", manifest)
    few = str(tmp_path / "few")
    first = run(checkpoint, few, tmp_path / "out1", tasks=("mine",), num_fewshot=2)
    again = run(checkpoint, few, tmp_path / "out2", tasks=("mine",), num_fewshot=2)
    other = run(checkpoint, few, tmp_path / "out3", tasks=("mine",), num_fewshot=2, seed=5)
    hashes = lambda out: [json.loads(line)["prompt_hash"] for line in next(out.glob("**/mine*.jsonl")).open()]  # noqa: E731
    assert first == again
    assert {(row["task"], row["num_fewshot"]) for row in first} == {("mine+2-shot", 2)}  # another task than mine
    assert hashes(tmp_path / "out1") == hashes(tmp_path / "out2") != hashes(tmp_path / "out3")
    assert first[0]["task_sha256"] != other[0]["task_sha256"]


def test_data_frozen_for_another_tokenizer_is_refused(tmp_path):
    class Other(ByteTokenizer):
        name, sha256, vocabulary = "other", "1" * 64, "1" * 64

    place = str(tmp_path / "pack")
    packs.build(place, write(tmp_path, mine=choices()), tokenizer=Other())
    with pytest.raises(ConfigError, match="mine was made for tokenizer 'other'"):
        run(save(tmp_path / "run", model()), place, tmp_path / "out", tasks=("mine",))


def test_a_model_with_fewer_embeddings_than_tokens_is_refused(tmp_path, pack):
    with pytest.raises(ConfigError, match="tokenizer has 259 tokens, the model only 200"):
        run(save(tmp_path / "run", model(vocab_size=200)), pack, tmp_path / "out", tasks=("mine",))


def test_configs_name_a_suite_or_tasks():
    for fields in ({}, {"suite": "core", "tasks": ("copa",)}):
        with pytest.raises(ValueError, match="either a suite"):
            HarnessConfig(pack="p", **fields)


def test_batches_are_a_function_of_the_set_of_requests():
    items = [(1, 2, 3), (4,), (5, 6), (0,), (1, 2, 3)]
    assert batched(items, 2, len) == [((1, 2, 3), (5, 6)), ((0,), (4,))]
    assert batched(items[::-1], 2, len) == batched(items, 2, len)
    work = Work("loglikelihood", pairs=(Pair((1,), (2,)),))
    assert work.key() != Work("loglikelihood", pairs=(Pair((1,), (3,)),)).key()
    assert cut("one. two\nthree", ["\n", "."]) == "one"


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_one_or_two_actors_give_the_same_bits(tmp_path, pack, ray_here):
    checkpoint = save(tmp_path / "run", model())
    config = HarnessConfig(pack=pack, max_length=320, batch_size=3, tasks=("arc_easy", "nq_open"))
    rows, answers = [], []
    for actors in (1, 2):
        out = tmp_path / f"out{actors}"
        rows.append(evaluate_checkpoint(checkpoint, [config], data=None, out=str(out), actors=actors).rows)
        files = sorted(out.glob("**/batches/*/*.json"))
        answers.append({file.name: file.read_bytes() for file in files})
    assert rows[0] == rows[1]
    assert answers[0] == answers[1]
    assert len(answers[0]) > 4
    with pytest.raises(ConfigError, match="no room for 3 workers of 1 CPU: .* for 2; .* lower --actors"):
        evaluate_checkpoint(checkpoint, [config], data=None, out=str(tmp_path / "out3"), actors=3)
