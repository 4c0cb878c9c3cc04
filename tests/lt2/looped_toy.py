"""A small network with LoopedLM's interface, in fp64 when asked, whose gradients are easy to compare."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class Output:
    hidden: torch.Tensor
    loops: list | None = None
    aux: dict = field(default_factory=dict)
    loops_used: torch.Tensor | None = None


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.A_log = nn.Parameter(torch.zeros(dim))
        self.calls = 0

    def forward(self, h, position):
        self.calls += 1
        decayed = torch.exp(-torch.exp(self.A_log) * position.unsqueeze(-1))
        return h + self.down(torch.tanh(self.up(self.norm(h) * decayed)))


class LoopedToy(nn.Module):
    def __init__(self, vocab=17, dim=8, n_layers=3, n_loops=4, aux=0.0, tied=False):
        super().__init__()
        self.n_loops, self.aux_weight = n_loops, aux
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(n_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = None if tied else nn.Linear(dim, vocab, bias=False)
        self.rho = nn.Parameter(torch.zeros(n_loops, dim))

    @property
    def head_weight(self):
        return self.embed.weight if self.head is None else self.head.weight

    def forward(self, input_ids, *, doc_ids=None, step=None):
        position = torch.linspace(0, 1, input_ids.shape[1], dtype=self.norm.weight.dtype)
        h = self.embed(input_ids)
        for loop in range(self.n_loops):
            before = h
            for block in self.blocks:
                h = block(h, position)
            h = h + self.rho[loop] * before
        aux = {"size": self.aux_weight * h.square().mean()} if self.aux_weight else {}
        return Output(self.norm(h), aux=aux)


def toy(seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    model = LoopedToy(**options).to(dtype)
    with torch.no_grad():
        model.rho.normal_(std=0.1)
    return model
