"""The peer of the training part: fla's own layers, MLP and fused loss in a plain loop of T passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class PlainAttention(nn.Module):
    """Causal MHA with rotary positions on PyTorch's SDPA: fla's own Attention cannot be built without flash-attn."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        from fla.modules import RotaryEmbedding

        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.rotary = RotaryEmbedding(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        q, k = self.rotary(q, k)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


class PeerBlock(nn.Module):
    def __init__(self, mixer: str, dim: int, num_heads: int, ffn: int, layer: int):
        super().__init__()
        from fla.layers import GatedDeltaNet, KimiDeltaAttention
        from fla.modules import GatedMLP, RMSNorm

        head_dim = dim // num_heads
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        if mixer == "full":
            self.mixer: nn.Module = PlainAttention(dim, num_heads)
        else:
            layers = {"gdn": GatedDeltaNet, "kda": KimiDeltaAttention}
            self.mixer = layers[mixer](
                hidden_size=dim, num_heads=num_heads, head_dim=head_dim, expand_v=1.0, layer_idx=layer, mode="chunk"
            )
        self.ffn = GatedMLP(hidden_size=dim, intermediate_size=ffn)

    def forward(self, h: Tensor) -> Tensor:
        y = self.mixer(self.norm1(h))
        h = h + (y[0] if isinstance(y, tuple) else y)
        return h + self.ffn(self.norm2(h))


class PeerLM(nn.Module):
    """Looped stack of PeerBlocks with a tied head and fla's fused linear cross entropy."""

    def __init__(self, mixers: list[str], *, dim: int, num_heads: int, ffn: int, vocab_size: int, n_loops: int):
        super().__init__()
        from fla.modules import FusedLinearCrossEntropyLoss, RMSNorm

        self.embed = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.blocks = nn.ModuleList(PeerBlock(m, dim, num_heads, ffn, i) for i, m in enumerate(mixers))
        self.norm = RMSNorm(dim)
        self.loss = FusedLinearCrossEntropyLoss()
        self.n_loops = n_loops

    def forward(self, tokens: Tensor, *, recompute: bool) -> Tensor:
        h = self.embed(tokens[:, :-1])
        for _ in range(self.n_loops):
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False) if recompute else block(h)
        h = self.norm(h)
        return self.loss(h.flatten(0, 1), tokens[:, 1:].flatten(), self.embed.weight.to(h.dtype))


def peer_step(model: PeerLM, optimizer: torch.optim.Optimizer, tokens: Tensor, *, recompute: bool) -> None:
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss = model(tokens, recompute=recompute)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
