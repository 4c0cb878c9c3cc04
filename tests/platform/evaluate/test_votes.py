"""Models of random layout are evaluated by the vote of their draws: choices, perplexity, generation, on disk."""

import json
from collections import Counter

import pytest
import torch

from lt2.analysis.accounting import forward_flops
from lt2.layout import draw_layers
from lt2.voting import drawn_models, vote_steps
from lt2_platform.data.stream import PackedDataset
from lt2_platform.data.tokenizers.tokenize import ByteTokenizer
from lt2_platform.evaluate.checkpoints import evaluate_checkpoint
from lt2_platform.evaluate.config import HarnessConfig, PerplexityConfig
from lt2_platform.evaluate.harness.scoring import LoopedScorer, Pair
from lt2_platform.evaluate.harness.tasks import packs
from lt2_platform.evaluate.harness.tasks.definitions import define
from lt2_platform.evaluate.harness.votes import Voted, decided_by_vote
from lt2_platform.storage import Storage
from tests.platform.evaluate.items import arc, choices, write
from tests.platform.evaluate.tiny import model, save
from tests.platform.train.packed import write_dataset

MASK = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "window", "window": 3}, "fraction": 0.5}
MIXER = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.3, "votes": 3}
BOS = ByteTokenizer.bos_id
VOTES = 5


def random_model(layout=MASK, **fields):
    return model(n_layers=4, layout=layout, **fields)


def logprobs(net, ids):
    """(K, L, V) of each draw, by the training step that draws it."""
    steps = vote_steps(net.config.layout)
    return torch.stack([net.logits(net(torch.tensor([ids]), step=step).hidden[0]).log_softmax(-1) for step in steps])


def mean_of(draws):
    return draws.exp().mean(0).log()


@pytest.mark.parametrize("layout", [MASK, MIXER], ids=["mask", "mixer"])
@torch.inference_mode()
def test_log_likelihoods_are_of_the_mean_probability_with_every_draws_own(layout):
    net = random_model(layout).double()
    pair = Pair((1, 2, 3, 4), (7, 8, 9))
    ((total, greedy, draws),) = LoopedScorer(net).loglikelihoods([pair]).results
    every = logprobs(net, [1, 2, 3, 4, 7, 8])[:, 3:]
    targets = torch.tensor(pair.continuation)
    at = lambda found: found.gather(-1, targets.expand(*found.shape[:-2], 3)[..., None]).sum((-1, -2))  # noqa: E731
    assert draws == pytest.approx(at(every).tolist(), abs=1e-10)
    assert len(set(draws)) > 1
    assert total == pytest.approx(float(at(mean_of(every))), abs=1e-10)
    assert greedy == bool((mean_of(every).argmax(-1) == targets).all())


@torch.inference_mode()
def test_continuations_follow_the_mean_probability(tmp_path):
    net = random_model(seed=2).double()
    prompts = [[5, 6, 7, 8], [9], [1, 2]]
    said = LoopedScorer(net).continuations(prompts, 6, lambda ids: False).results
    for prompt, found in zip(prompts, said):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(mean_of(logprobs(net, ids)[:, -1]).argmax()))
        assert found == ids[len(prompt) :]
    stopped = LoopedScorer(net, eos_id=said[0][1]).continuations(prompts[:1], 6, lambda ids: False).results
    assert stopped == [said[0][:2]]


@pytest.mark.parametrize("layout", [MASK, MIXER], ids=["mask", "mixer"])
@torch.inference_mode()
def test_a_drawn_model_is_the_model_at_its_step_and_hooks_see_it(layout):
    net = random_model(layout)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    seen = []
    net.register_forward_hook(lambda *_: seen.append(1))
    views = drawn_models(net)
    for view, step in zip(views, vote_steps(net.config.layout)):
        assert torch.equal(view(ids).hidden, net(ids, step=step).hidden)
        assert view.embed.weight is net.embed.weight
    assert len(seen) == 2 * len(views) == 2 * net.config.layout.votes
    assert drawn_models(model())[0].config.layout.type == "hybrid"


def test_multiple_choice_is_decided_by_the_majority_and_recorded(tmp_path):
    net = random_model()
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "data", arc_easy=arc(8)))
    config = HarnessConfig(pack=pack, tasks=("arc_easy",), max_length=320)
    found = evaluate_checkpoint(save(tmp_path / "run", net), [config], data=None, out=str(tmp_path / "out"))
    rows = {(row["task"], row["metric"]): row for row in found.rows}

    hits = {"acc": 0, "acc_norm": 0}
    split_votes = 0
    for item in arc(8):
        context = [BOS, *f"Question: {item['question']}\nAnswer:".encode()]
        scores = []
        for text in item["choices"]["text"]:
            ids = [*context, *f" {text}".encode()]
            rest = torch.tensor(ids[len(context) :])
            with torch.inference_mode():
                said = logprobs(net, ids[:-1])[:, len(context) - 1 :].gather(-1, rest.expand(VOTES, -1)[..., None])
            scores.append(said.sum((1, 2)))
        gold = item["choices"]["label"].index(item["answerKey"])
        per_draw = torch.stack(scores, 1)  # (K, options)
        sizes = torch.tensor([float(len(text)) for text in item["choices"]["text"]])
        for metric, table in (("acc", per_draw), ("acc_norm", per_draw / sizes)):
            counts = Counter(table.argmax(1).tolist())
            best = max(counts, key=lambda option: (counts[option], float(table[:, option].sum())))
            hits[metric] += best == gold
            split_votes += len(counts) > 1
    assert split_votes  # else this would not tell a vote from one draw
    for metric, n in hits.items():
        assert rows["arc_easy", metric]["value"] == pytest.approx(n / 8)
    assert {row["votes"] for row in found.rows} == {VOTES}
    assert {row["votes"] for row in found.evaluations()["validation"]} == {VOTES}  # what the results store gets
    record = json.loads(next((tmp_path / "out").glob("**/evaluation.json")).read_text())
    assert record["rows"][0]["votes"] == VOTES
    (sample, *_) = Storage(str(tmp_path / "out")).read_bytes("harness/loops-2/samples/arc_easy.jsonl").splitlines()
    draws = json.loads(sample)["draws"]
    assert [len(each) for each in draws] == [VOTES] * len(arc()[0]["choices"]["text"])


def test_the_majority_wins_over_the_mean_and_what_has_no_score_over_nothing(tmp_path):
    pack = str(tmp_path / "pack")
    packs.build(pack, write(tmp_path / "data", mine=choices(2)))
    config = HarnessConfig(pack=pack, tasks=("mine",))
    task = define("mine", packs.read_manifest(pack)["tasks"]["mine"], config, ByteTokenizer()).task
    decided_by_vote(task, 3)
    small, large = (float(len(text)) for text in choices()[0]["choices"])
    doc = choices(2)[1]  # the second option is right
    # by the mean probability and by the sum the first wins; two of three draws prefer the second
    first, second = Voted(-1.0, False, (-1.0, -5.0, -5.0)), Voted(-2.0, False, (-90.0, -4.0, -4.0))
    assert task.process_results(doc, [first, second]) == {"acc": 1.0, "acc_norm": 1.0}
    # normalised, the longer one wins although no draw prefers it
    longer = Voted(-6.0, False, (-5.1 / small * large * 0.9,) * 3)
    assert task.process_results(doc, [Voted(-5.0, False, (-5.1,) * 3), longer]) == {"acc": 0.0, "acc_norm": 1.0}
    assert task.process_results(doc, [(float("-inf"), False), second]) == {"acc": 1.0, "acc_norm": 1.0}


@pytest.mark.parametrize("document_mask", [False, True])
def test_perplexity_is_of_the_mean_probability_and_costs_every_draw(tmp_path, document_mask):
    data = write_dataset(tmp_path / "data")
    net = random_model()
    tasks = [PerplexityConfig(document_mask=document_mask)]
    checkpoint = save(tmp_path / "run", net)
    rows = evaluate_checkpoint(checkpoint, tasks, data=data, out=str(tmp_path / "out")).rows
    loss = next(row for row in rows if row["metric"] == "loss")
    batch = PackedDataset(data, "validation").batch([0, 1, 2, 3])
    tokens, doc_ids = (torch.as_tensor(batch[name]) for name in ("tokens", "doc_ids"))
    total, n = 0.0, 0
    for row, docs in zip(tokens, doc_ids):
        ids = docs[None, :-1] if document_mask else None
        with torch.inference_mode():
            draws = [net(row[None, :-1], doc_ids=ids, step=step).hidden[0] for step in vote_steps(net.config.layout)]
            mean = mean_of(torch.stack([net.logits(draw).log_softmax(-1) for draw in draws]))
        counted = docs[1:] >= 0
        if document_mask:
            counted &= docs[1:] == docs[:-1]
        total -= float(mean.gather(-1, row[1:, None])[:, 0][counted].double().sum())
        n += int(counted.sum())
    assert loss["value"] == pytest.approx(total / n, rel=1e-5)
    assert (loss["n"], loss["votes"]) == (n, VOTES)
    assert loss["flops_per_token"] == pytest.approx(VOTES * forward_flops(net.config, 12, n_loops=2))
    assert len({draw_layers(net.config.layout, 4, step) for step in vote_steps(net.config.layout)}) > 1
