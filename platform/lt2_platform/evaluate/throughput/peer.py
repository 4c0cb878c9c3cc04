"""The throughput of transformers' generate() on the same model and tokens, beside `task.measure`."""

from __future__ import annotations

from typing import Any

import torch

from lt2.analysis.timing import repeat_seconds
from lt2.model import LoopedLM
from lt2_platform.evaluate.config import ThroughputConfig
from lt2_platform.evaluate.throughput.task import rate


@torch.inference_mode()
def measure_peer(model: LoopedLM, config: ThroughputConfig) -> dict[str, Any]:
    """{"name", "prefill_tokens_per_s", "decode_tokens_per_s"}, as `measure` has them.

    One generated token is the prefill's; the decode rate is of the tokens after it, by the difference of two calls.
    """
    from lt2.interop.transformers import LT2ForCausalLM

    device = model.embed.weight.device
    wrapped: Any = LT2ForCausalLM.of(model)
    shape = (config.batch_size, config.context)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    mask = torch.ones_like(input_ids)

    def generate(tokens: int) -> None:
        wrapped.generate(
            input_ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )

    options = {"warmups": config.warmups, "repeats": config.repeats}
    first = repeat_seconds(lambda: generate(1), device, **options)
    both = repeat_seconds(lambda: generate(1 + config.decode_steps), device, **options)
    # Of two noisy times the difference may be nothing; no rate is given then.
    after = [long - short for long, short in zip(both, first) if long > short]
    decode = rate(config.batch_size * config.decode_steps, after) if after else None
    prefill = rate(config.batch_size * config.context, first)
    return {"name": "transformers generate()", "prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
