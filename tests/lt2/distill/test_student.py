"""Students against the teachers they are made of."""

import pytest
import torch

from lt2.config import ConfigError, MixerConfig
from lt2.distill import student as student_module
from lt2.distill.select import best_layers, uniform_layers
from lt2.distill.student import convert, start_from, student_config
from lt2.model import build
from tests.lt2 import tiny

GDN = MixerConfig.read({"type": "gdn", "conv_size": 0})
BIASED = {"type": "uniform", "mixer": {"type": "full", "num_kv_heads": 1, "bias": "qkvo"}}
WINDOWS = {"type": "uniform", "mixer": {"type": "window", "window": 4}}
RANDOM = {"type": "random", "attention": {"type": "full"}, "mixer": {"type": "gdn"}, "fraction": 0.5}


def teacher(layout=tiny.FULL, **fields):
    return tiny.model(layout, n_layers=3, **fields)


@pytest.mark.parametrize("layout", [tiny.FULL, BIASED, WINDOWS])
def test_with_every_layer_kept_the_student_is_the_teacher(layout):
    net = teacher(layout, sandwich_norm=True, norm_each_loop=True, halting={"type": "exit_gate"})
    net = net.float()  # as students are
    student = convert(net, GDN, range(3)).eval()
    ids = tiny.tokens(2, 9)
    ours, theirs = student(ids, per_loop=True), net(ids, per_loop=True)
    assert student.config.layout.kept == (0, 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours.loops, theirs.loops))
    assert torch.equal(student.logits(ours.hidden), net.logits(theirs.hidden))


def test_a_sparse_teachers_attention_is_not_dense_again_in_its_students_first_steps():
    sparse = {"type": "dsa", "top_k": 3, "index_dim": 8, "index_rope_dim": 4}
    net = tiny.model({"type": "uniform", "mixer": sparse}).float().eval()
    ids = tiny.tokens(2, 9)
    student = convert(net, GDN, range(len(net.blocks))).train()
    assert torch.equal(student(ids, step=0).hidden, net(ids).hidden)


@pytest.mark.parametrize("kind", ["gdn", "kda", "deltanet", "la"])
def test_new_mixers_begin_as_the_attentions_projections(kind):
    net = teacher()
    student = convert(net, MixerConfig.read({"type": kind}), (1,), both=True)
    for layer in (0, 1, 2):
        attention, mixer = (student.blocks[layer].mixers[name] for name in ("softmax", kind))
        q, k, v = mixer.qkv_proj.weight.chunk(3)
        for ours, theirs in ((q, "q_proj"), (k, "k_proj"), (v, "v_proj"), (mixer.o_proj.weight, "o_proj")):
            weight = getattr(net.blocks[layer].mixers["softmax"], theirs).weight
            assert torch.equal(ours, weight.float())
            assert torch.equal(getattr(attention, theirs).weight, weight.float())
    names = dict(student.named_parameters())
    for name, parameter in net.named_parameters():
        assert torch.equal(names[name], parameter.float())


def test_fewer_key_value_heads_are_repeated_whole():
    layout = {"type": "uniform", "mixer": {"type": "full", "num_heads": 4, "num_kv_heads": 2}}
    net = tiny.model(layout, num_heads=4)
    mixer = convert(net, GDN).blocks[0].mixers["gdn"]
    keys = net.blocks[0].mixers["softmax"].k_proj.weight.float().view(2, 4, 16)  # 2 heads of 4
    found = mixer.qkv_proj.weight.chunk(3)[1].view(4, 4, 16)
    assert torch.equal(found, keys[[0, 0, 1, 1]])


@pytest.mark.parametrize("kind", ["gla", "retnet", "hgrn2"])
def test_what_does_not_fit_stays_as_initialised(kind):
    net = teacher()
    mixer = convert(net, MixerConfig.read({"type": kind})).blocks[0].mixers[kind]
    fresh = convert(net, MixerConfig.read({"type": kind}), seed=7).blocks[0].mixers[kind]
    attention = net.blocks[0].mixers["softmax"]
    H, K, V = mixer.heads
    fused = "qfv_proj" if kind == "hgrn2" else "qkv_proj"
    parts, others = (getattr(m, fused).weight.split([H * K, H * K, H * V]) for m in (mixer, fresh))
    copied = {"gla": "v", "retnet": "qk", "hgrn2": "qv"}[kind]
    for name, part, other in zip("qkv", parts, others):
        assert torch.equal(part, other) == (name in copied)
        if name in copied:
            assert torch.equal(part, getattr(attention, f"{name}_proj").weight.float())


def test_biases_stay_where_attention_does_and_are_said_to_be_left_out_elsewhere(monkeypatch):
    found = []
    monkeypatch.setattr(student_module, "announce", lambda *message: found.append(message))
    net = teacher(BIASED)
    student = convert(net, GDN, (1,))
    biases = [[name for name, _ in block.mixers.named_parameters() if "bias" in name] for block in student.blocks]
    assert biases == [["gdn.dt_bias"], [f"softmax.{p}_proj.bias" for p in "qkvo"], ["gdn.dt_bias"]]
    kept, theirs = (model.blocks[1].mixers["softmax"].state_dict() for model in (student, net))
    assert all(torch.equal(kept[name], value.float()) for name, value in theirs.items())
    new = student.blocks[0].mixers["gdn"].qkv_proj.weight.chunk(3)[0]
    assert torch.equal(new, net.blocks[0].mixers["softmax"].q_proj.weight.float())
    said = ("conversion to gdn", "cpu", "no biases of q_proj, k_proj, v_proj, o_proj", "it has no place for them")
    assert found == [said] * 2


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        ({"type": "gdn"}, set()),
        ({"type": "gla"}, {"random q_proj, k_proj"}),
        ({"type": "gdn", "expand_v": 2.0}, {"random v_proj, o_proj"}),
    ],
)
def test_what_begins_at_random_is_said(mixer, said, monkeypatch):
    found = []
    monkeypatch.setattr(student_module, "announce", lambda *message: found.append(message[2]))
    convert(teacher(), MixerConfig.read(mixer))
    assert set(found) == said


def test_a_hybrid_that_is_trained_on_from_attention_says_that_its_mixers_are_new(monkeypatch):
    found = []
    monkeypatch.setattr(student_module, "announce", lambda *message: found.append(message))
    start_from(tiny.model(tiny.HYBRID), tiny.model(tiny.FULL))
    assert [(message[0], message[3]) for message in found] == [
        ("conversion to gdn", "only distillation begins mixers as attention")
    ]


def test_latent_attention_can_be_a_teacher_whose_queries_do_not_fit():
    mla = {"type": "mla", "kv_rank": 8, "rope_head_dim": 4}
    teacher = tiny.model({"type": "uniform", "mixer": mla}, num_heads=2)
    student = convert(teacher, MixerConfig.read({"type": "gdn", "conv_size": 0}), (0,))
    mixer = student.blocks[1].mixers["gdn"]
    assert torch.equal(mixer.o_proj.weight, teacher.blocks[1].mixers["mla"].o_proj.weight.float())


def test_a_student_of_stage_one_gives_students_of_any_kept_set():
    net = teacher()
    both = convert(net, GDN, both=True)
    with torch.no_grad():
        both.blocks[2].mixers["gdn"].qkv_proj.weight.add_(1)
    student = convert(net, GDN, (1,), seed=9)
    start_from(student, both)
    assert [sorted(block.mixers) for block in student.blocks] == [["gdn"], ["softmax"], ["gdn"]]
    theirs = dict(both.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in student.named_parameters())
    other = convert(net, GDN, (0,))
    with pytest.raises(ConfigError, match="layer 0 keeps attention here and has lost it there"):
        start_from(other, student)


def test_students_of_a_student_of_stage_one_are_those_of_its_teacher_whatever_the_order_of_layers():
    config = teacher().config
    both = student_config(config, GDN, both=True)
    assert student_config(both, GDN, (2, 0)) == student_config(config, GDN, [0, 2])


@pytest.mark.parametrize("n_loops", [1, 2, 5])
@pytest.mark.parametrize("layout", [tiny.HYBRID, RANDOM])
def test_a_model_of_other_loops_begins_as_its_source_run_so_deep(layout, n_loops):
    source, deeper = tiny.model(layout), tiny.model(layout, n_loops=n_loops, seed=1)
    start_from(deeper, source)
    ids = tiny.tokens(2, 9)
    assert torch.equal(deeper(ids).hidden, source(ids, n_loops=n_loops).hidden)


def test_residuals_of_loops_and_an_exit_gate_may_begin_with_a_run():
    source = tiny.model(n_loops=1, loop_residual=False)
    gated = build(tiny.config(halting={"type": "exit_gate"})).double().eval()
    gate = gated.halt.weight.clone()
    start_from(gated, source)
    ids = tiny.tokens(2, 9)
    assert torch.equal(gated(ids).hidden, source(ids, n_loops=3).hidden)
    assert torch.equal(gated.halt.weight, gate)
    with pytest.raises(ConfigError, match="it has no halt.weight"):
        start_from(tiny.model(halting={"type": "act"}), source)
    with pytest.raises(ConfigError, match="it has rho, which the model here lacks"):
        start_from(tiny.model(loop_residual=False), tiny.model())


def test_mistakes_are_named():
    config = teacher().config
    with pytest.raises(ConfigError, match=r"kept layers \[0, 3\]: give different ones of 0 to 2"):
        student_config(config, GDN, (0, 3))
    with pytest.raises(ConfigError, match="'window' runs on the same weights as the teacher's 'full'"):
        student_config(config, MixerConfig.read({"type": "window"}))
    with pytest.raises(ConfigError, match="the teacher has layout 'hybrid'"):
        student_config(tiny.model().config, GDN)
    some = {"type": "kept", "attention": {"type": "full"}, "mixer": WINDOWS["mixer"], "kept": [0]}
    with pytest.raises(ConfigError, match="the teacher has layout 'kept'; distil from one with the same attention"):
        student_config(teacher(some).config, GDN)
    with pytest.raises(ConfigError, match="halting type 'act'"):
        student_config(teacher(halting={"type": "act"}).config, GDN)
    with pytest.raises(ConfigError, match="blocks.0.ffn"):
        start_from(convert(teacher(), GDN), teacher(ffn_hidden=32))
    with pytest.raises(ConfigError, match="layer 0 has no k_proj.bias of softmax here; give both mixers the same"):
        start_from(teacher({"type": "uniform", "mixer": {"type": "full", "num_kv_heads": 1}}), teacher(BIASED))
    with pytest.raises(ConfigError, match="layer 0 has no k_norm.weight of softmax there"):
        start_from(teacher({"type": "uniform", "mixer": {"type": "full", "qk_norm": True}}), teacher())
    shared = teacher({"type": "random", "attention": {"type": "full"}, "mixer": GDN.model_dump()})
    for ours, theirs in ((shared, teacher()), (teacher(), shared)):
        with pytest.raises(ConfigError, match=r"k_proj.weight of softmax \w+; with layout 'random' mixers of a layer"):
            start_from(ours, theirs)
    with pytest.raises(ConfigError, match="it has 2 layers, not 3"):
        start_from(convert(teacher(), GDN), tiny.model(tiny.FULL))


def test_the_layers_of_each_selection():
    assert uniform_layers(24, 6) == (3, 7, 11, 15, 19, 23)
    assert uniform_layers(8, 3) == (1, 4, 7)
    assert uniform_layers(4, 0) == ()
    assert uniform_layers(3, 3) == (0, 1, 2)
    assert best_layers([0.4, 0.1, 0.3, 0.1], 2) == (1, 3)
    assert best_layers([0.4, 0.1, 0.3, 0.1], 1) == (1,)
    with pytest.raises(ConfigError, match="5 layers are to keep attention, of 4"):
        best_layers([0.0] * 4, 5)
    with pytest.raises(ConfigError, match=r"the KL with layers \[0, 2\] alone kept is NaN; check their runs"):
        best_layers([float("nan"), 0.5, float("nan")], 1)
