"""Stages of distillation as training runs: what they start from, train and leave, and that they resume exactly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lt2.config import ConfigError, MixerConfig
from lt2.distill.student import convert
from lt2.train.loop import STOP, PreemptedError
from lt2_platform.distill import measure
from lt2_platform.distill.measure import checkpoint_kl, one_shot_scores
from lt2_platform.distill.teacher import identity, load_teacher, store_pretrained
from lt2_platform.storage import Storage
from lt2_platform.train import worker
from lt2_platform.train.checkpoints import checkpoint
from tests.platform.distill.stages import (
    ALIGN,
    BYTE,
    DISTILL,
    GDN,
    open_stage,
    run_stage,
    weights,
    write_ouro,
    write_teacher,
)
from tests.platform.train.packed import train_config, write_dataset
from tests.platform.train.test_worker import losses
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """root, with the runs teacher, align and distill."""
    root = tmp_path_factory.mktemp("stages")
    teacher = write_teacher(root)
    aligned = run_stage(root, "align", ALIGN, teacher=teacher)
    run_stage(root, "distill", DISTILL, teacher=teacher, student=aligned, kept=(1,))
    return root


def test_alignment_trains_the_new_mixers_of_the_teacher_and_nothing_else(trained):
    teacher, aligned = weights(str(trained / "teacher")), weights(str(trained / "align"))
    assert all(torch.equal(aligned[name], value) for name, value in teacher.items())
    start = convert(checkpoint.load_model(str(trained / "teacher"))[0], MixerConfig.read(GDN), both=True, seed=5)
    new = {name: value for name, value in start.state_dict().items() if name not in teacher}
    assert new.keys() == aligned.keys() - teacher.keys()
    assert not any(torch.equal(aligned[name], value) for name, value in new.items())
    curve = losses(trained, "align")
    assert curve[6] < 0.8 * curve[1]


def test_the_second_stage_starts_where_the_first_ended_and_trains_everything(trained):
    aligned, distilled = weights(str(trained / "align")), weights(str(trained / "distill"))
    assert {name for name in distilled if ".mixers." in name} == {
        name
        for name in aligned
        if ("blocks.0" in name and ".gdn." in name) or ("blocks.1" in name and ".softmax." in name)
    }
    assert not any(torch.equal(aligned[name], value) for name, value in distilled.items())
    moved = {name: (value - aligned[name]).abs().max() for name, value in distilled.items()}
    slow = [moved[name] for name in moved if ".gdn." not in name]
    assert max(slow) < 0.1 * max(moved[name] for name in moved if ".gdn." in name)
    teacher, data = str(trained / "teacher"), str(trained / "data")
    before, _ = checkpoint_kl(str(trained / "align"), teacher, data)  # with no attention kept
    after, reported = checkpoint_kl(str(trained / "distill"), teacher, data)
    assert after["kl"] < before["kl"]
    assert after["kl"] != reported["kl"]  # of other held-out text
    assert len(after["kl_loops"]) == 2
    assert after["kl"] == after["kl_loops"][-1]


def test_the_layers_of_the_student_stay_in_a_later_stage(trained):
    spec = open_stage(trained, "third", DISTILL, teacher=str(trained / "teacher"), student=str(trained / "distill"))
    assert spec.model["layout"] == checkpoint.read_info(
        checkpoint.resolve(str(trained / "distill"))
    ).model.layout.model_dump(mode="json")
    assert spec.model["layout"]["kept"] == [1]


def test_with_every_layer_kept_there_is_no_distance_to_the_teacher(trained, tmp_path):
    write_dataset(tmp_path / "data")
    teacher = str(trained / "teacher")
    frozen = {"lr": 1e-30, "weight_decay": 0.0}
    out = run_stage(tmp_path, "all", DISTILL, teacher=teacher, kept=(0, 1), steps=2, **frozen)
    assert [half["kl"] for half in checkpoint_kl(out, teacher, str(tmp_path / "data"))] == [0, 0]
    assert set(losses(tmp_path, "all").values()) == {0.0}


@pytest.mark.parametrize("objective", [ALIGN, DISTILL], ids=lambda o: o["type"])
def test_an_interrupted_stage_resumes_exactly(trained, tmp_path, objective):
    write_dataset(tmp_path / "data")
    name = objective["type"]
    options = {"teacher": str(trained / "teacher")}
    if objective is DISTILL:
        options |= {"student": str(trained / "align"), "kept": (1,)}
    spec = open_stage(tmp_path, name, objective, **options)
    asked = []

    def stop():
        asked.append(None)
        return STOP if len(asked) == 3 else 0

    with pytest.raises(PreemptedError, match="after step 3 of 6"):
        worker.run(spec, stop=stop)
    assert worker.run(open_stage(tmp_path, name, objective, **options))["step"] == 6
    assert losses(tmp_path, name) == losses(trained, name)
    ours, theirs = weights(str(tmp_path / name)), weights(str(trained / name))
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())


def rank_stages(root, teacher, aligned):
    """On each of two ranks, both stages, with and without keeping what is gathered."""
    root, fields = Path(root), {"workers": 2, "micro_batch_size": 2}
    for keep in (True, False):
        fields["keep_gathered"] = keep
        worker.run(open_stage(root, f"align-{keep}", ALIGN, teacher=teacher, **fields))
        worker.run(open_stage(root, f"distill-{keep}", DISTILL, teacher=teacher, student=aligned, kept=(1,), **fields))


def test_sharded_teacher_and_student_learn_what_one_process_learns(trained, tmp_path):
    write_dataset(tmp_path / "data")
    run_ranks(rank_stages, 2, str(tmp_path), str(trained / "teacher"), str(trained / "align"))
    for name in ("align", "distill"):
        for keep in (True, False):
            assert losses(tmp_path, f"{name}-{keep}") == pytest.approx(losses(trained, name), rel=1e-4)


def test_an_ouro_folder_goes_through_all_stages(tmp_path):
    write_dataset(tmp_path / "data", tokenizer=BYTE)
    store_pretrained(write_ouro(tmp_path / "ouro"), str(tmp_path / "teacher"), tokenizer="byte")
    teacher = str(tmp_path / "teacher")
    aligned = run_stage(tmp_path, "align", ALIGN, teacher=teacher, steps=3)
    second = run_stage(tmp_path, "second", DISTILL, teacher=teacher, student=aligned, kept=(0,), steps=3)
    third = run_stage(tmp_path, "third", DISTILL, teacher=teacher, student=second, steps=2, min_lr_ratio=1.0)
    config = checkpoint.read_info(checkpoint.resolve(third)).model
    assert (config.vocab_size, config.n_loops, config.layout.kept) == (320, 4, (0,))
    assert config.halting.type == "exit_gate"
    ours, theirs = weights(third), weights(teacher)
    assert torch.equal(ours["halt.weight"], theirs["halt.weight"])
    assert checkpoint_kl(third, teacher, str(tmp_path / "data"))[1]["kl"] < 10
    assert one_shot_scores(aligned, teacher, str(tmp_path / "data"))[0] > 0


def test_a_tokenizer_with_more_tokens_than_the_ouro_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer 'byte' has 259 tokens, the model in .* only 23"):
        store_pretrained(write_ouro(tmp_path / "ouro", vocab_size=23), str(tmp_path / "out"), tokenizer="byte")
    with pytest.raises(ConfigError, match="is a folder in Hugging Face's format; make it a checkpoint first"):
        identity(str(tmp_path / "ouro"))


def test_a_teacher_is_frozen_in_the_precision_of_training_and_never_stops_early(trained, tmp_path):
    store_pretrained(write_ouro(tmp_path / "ouro"), str(tmp_path / "teacher"), tokenizer="byte")
    cpu = torch.device("cpu")
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        net = load_teacher(str(tmp_path / "teacher"), train_config(precision=precision), cpu)
        assert {p.dtype for p in net.parameters()} == {dtype}
        assert not any(p.requires_grad for p in net.parameters())
        assert net.config.halting is None
    hybrid = load_teacher(str(trained / "distill"), train_config(precision="bf16"), cpu)
    kinds = {name.rsplit(".", 1)[-1]: p.dtype for name, p in hybrid.named_parameters()}
    assert (kinds["A_log"], kinds["weight"]) == (torch.float32, torch.bfloat16)


def test_single_layer_scores_are_those_of_single_layer_students(trained):
    teacher, data = str(trained / "teacher"), str(trained / "data")
    scores = one_shot_scores(str(trained / "align"), teacher, data)
    spec = open_stage(
        trained, "swap", DISTILL, teacher=teacher, student=str(trained / "align"), kept=(1,), steps=2, lr=1e-30,
        weight_decay=0.0,
    )  # fmt: skip
    worker.run(spec)
    assert checkpoint_kl(spec.out, teacher, data)[0]["kl"] == pytest.approx(scores[1], rel=1e-6)
    with pytest.raises(ConfigError, match="does not hold attention and mixer in every layer"):
        one_shot_scores(str(trained / "distill"), teacher, data)


def test_single_layer_scores_mask_documents_as_the_training_did(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(measure, "teacher_kl", lambda *of, **options: seen.append(options) or {"kl": 1.0})
    known = checkpoint.read_info
    for masked in (True, False):
        train = train_config(document_mask=masked).model_dump()
        monkeypatch.setattr(checkpoint, "read_info", lambda uri, train=train: replace(known(uri), train=train))
        one_shot_scores(str(trained / "align"), str(trained / "teacher"), str(trained / "data"), max_sequences=3)
    assert seen == [
        {"held_out": "selection", "max_sequences": 3, "document_mask": masked} for masked in (True, True, False, False)
    ]


def test_a_top_k_of_another_teacher_is_refused(trained, tmp_path):
    teacher, stored = str(trained / "teacher"), Storage(str(tmp_path))
    with pytest.raises(ConfigError, match="holds no finished top-k"):
        open_stage(trained, "x", DISTILL, teacher=teacher, topk=stored.root)
    stored.write_json("topk.json", {"teacher": identity(str(trained / "align"))})
    with pytest.raises(ConfigError, match=r"is the top-k of another teacher than .*/teacher, or of another of its ch"):
        open_stage(trained, "x", DISTILL, teacher=teacher, topk=stored.root)
    stored.write_json("topk.json", {"teacher": identity(teacher)})
    assert open_stage(trained, "with-topk", DISTILL, teacher=teacher, topk=stored.root).sources["topk"] == stored.root


def test_mistakes_are_named(trained, tmp_path):
    teacher = str(trained / "teacher")
    write_dataset(tmp_path / "data", tokenizer=BYTE)
    with pytest.raises(ConfigError, match="prepare the data with the model's"):
        open_stage(tmp_path, "x", ALIGN, teacher=teacher)
    with pytest.raises(ConfigError, match="has layout 'uniform'; give one that a stage has trained"):
        open_stage(trained, "x", DISTILL, teacher=teacher, student=teacher)
    with pytest.raises(ConfigError, match="the teacher has layout 'kept'"):
        open_stage(trained, "x", DISTILL, teacher=str(trained / "distill"))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        open_stage(trained, "x", DISTILL, teacher=str(tmp_path / "nowhere"))
    again = run_stage(trained, "again", ALIGN, teacher=teacher, steps=2)
    with pytest.raises(ConfigError, match=r"another config \(sources.start"):
        open_stage(trained, "distill", DISTILL, teacher=teacher, student=again, kept=(1,))
