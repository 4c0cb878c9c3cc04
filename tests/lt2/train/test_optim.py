import torch
from torch import nn

from lt2.train.optim import adamw, freeze, set_lr


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.rho = nn.Parameter(torch.zeros(2, 4))
        self.A_log = nn.Parameter(torch.zeros(2, 2))
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def decayed_names(model, **options):
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = adamw(model, lr=1e-3, weight_decay=0.1, **options).param_groups
    return {names[p] for group in groups if group["weight_decay"] for p in group["params"]}, {
        names[p] for group in groups for p in group["params"]
    }


def test_only_matrices_decay():
    decayed, trained = decayed_names(Toy())
    assert decayed == {"embed.weight", "linear.weight"}
    assert trained == {"embed.weight", "linear.weight", "linear.bias", "norm.weight", "norm.bias", "rho", "A_log"}


def test_decay_all_decays_every_trained_parameter():
    decayed, trained = decayed_names(Toy(), decay_all=True)
    assert decayed == trained


def test_set_lr_honours_a_groups_own_scale():
    model = Toy()
    optimizer = adamw(model, lr=1e-3)
    optimizer.param_groups[0]["lr_scale"] = 0.5
    set_lr(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_what_has_no_rate_is_frozen_and_what_has_a_small_one_is_not():
    model = Toy()
    freeze(model, lambda name: {"norm.weight": 0.0, "rho": 0.07}.get(name, 1.0))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"norm.weight"}
