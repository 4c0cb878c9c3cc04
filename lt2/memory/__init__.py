"""How much memory a training step needs on each worker, before anything is launched.

One block of every kind runs forward and backward on tensors without data, under the recomputation asked for, while its
storages are counted (`live`, `trace`); a walk over the step's units (embedding, T x N blocks, loss, and back) adds them
up and finds the peak (`walk`). On CUDA, fla's and flash kernels are outlined (`lt2.ops.outline`). Left out: document
masks, what torch.compile saves by fusing, fragmentation, and what lies outside torch's allocator (`OUTSIDE`).
"""

from lt2.memory.live import LiveStorages
from lt2.memory.plan import OUTSIDE, Known, keeps_gathered, plan_memory
from lt2.memory.walk import Memory

__all__ = ["OUTSIDE", "Known", "LiveStorages", "Memory", "keeps_gathered", "plan_memory"]
