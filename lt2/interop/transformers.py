"""LoopedLM as a transformers model: import this module, then AutoModelForCausalLM.from_pretrained(folder).

generate() runs on LT2's own caches, one per (loop, layer). Batches may be padded on either side: rows are compacted to
the left before the model sees them, so padding never enters a recurrent state. A model of random layout runs its first
draw here; the vote of its draws is `lt2.generate`'s and `lt2 eval`'s.

Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.generic import ModelOutput

from lt2.cache import Cache
from lt2.config import ConfigError, ModelConfig
from lt2.init import init_weights
from lt2.model import LoopedLM
from lt2.train.loss import IGNORE, chunked_cross_entropy
from lt2.train.parallel import KEEP_FP32


class LT2Config(PreTrainedConfig):
    """Holds a ModelConfig as the plain dictionary `lt2`; the usual public names are derived from it.

    LT2Config.of(model_config) makes one; `.looped` gives it back.
    """

    model_type = "lt2"

    lt2: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs["tie_word_embeddings"] = False  # a tied LoopedLM has one matrix, so there is nothing to tie
        super().__post_init__(**kwargs)
        if self.lt2 is None:
            return
        config = self.looped
        self.vocab_size, self.hidden_size = config.vocab_size, config.dim
        self.num_hidden_layers, self.num_loops = config.n_layers, config.n_loops
        self.num_attention_heads, self.intermediate_size = config.num_heads, config.ffn_dim
        self.max_position_embeddings = config.max_seq_len

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> LT2Config:
        return cls(lt2=config.model_dump(mode="json"), **kwargs)

    @property
    def looped(self) -> ModelConfig:
        return ModelConfig.model_validate(self.lt2)


class LoopedCache:
    """LT2's cache under the interface that transformers' generate() expects."""

    is_compileable = False
    is_linear = (False,)

    def __init__(self, held: Cache):
        self.held = held

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.held.used

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.held.max_len

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.held.reorder(beam_idx)


@dataclass
class LT2Output(ModelOutput):
    """loss: scalar, with labels; logits: (B, L, V); cache, with use_cache."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: LoopedCache | None = None


class LT2ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LT2Config
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = sorted(KEEP_FP32)

    def __init__(self, config: LT2Config):
        super().__init__(config)
        self.model = LoopedLM(config.looped)
        self.post_init()

    @classmethod
    def of(cls, model: LoopedLM, **config: Any) -> LT2ForCausalLM:
        """Wrap a model; its weights are shared, not copied."""
        with torch.device("meta"):
            wrapped = cls(LT2Config.of(model.config, dtype=model.embed.weight.dtype, **config))
        wrapped.model = model
        return wrapped.train(model.training)

    def init_weights(self) -> None:
        if not self.model.embed.weight.is_meta:
            init_weights(self.model)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Called for what a checkpoint did not hold: our checkpoints are complete, so anything absent is damage."""
        for name, parameter in module.named_parameters(recurse=False):
            if not getattr(parameter, "_is_hf_initialized", False):
                raise ConfigError(f"the checkpoint has no {type(module).__name__}.{name}; export it again")

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,  # accepted for generate(); positions follow from the mask
        cache: LoopedCache | None = None,
        past_key_values: LoopedCache | None = None,  # older name of cache
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        n_loops: int | None = None,
        return_dict: bool = True,
    ) -> LT2Output | tuple[Tensor, ...]:
        """Logits of input_ids (B, L); attention_mask (B, tokens so far), 0 on padding.

        labels (B, L) are shifted here, -100 is ignored. With use_cache and no cache, one of max_position_embeddings
        tokens is made. n_loops runs another depth than the config's.
        """
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache:
            cache = LoopedCache(
                self.model.init_cache(len(input_ids), self.config.max_position_embeddings, n_loops=n_loops)
            )
        held = None if cache is None else cache.held
        valid = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].bool()
        if valid is None or valid.all():
            output = self.model(input_ids, cache=held, n_loops=n_loops)
            hidden = output.hidden
        else:
            order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
            output = self.model(
                input_ids.gather(1, order),
                lengths=valid.sum(1) if held is not None else None,
                cache=held,
                n_loops=n_loops,
            )
            hidden = output.hidden.gather(1, order.argsort(1)[..., None].expand_as(output.hidden))
        loss = None if labels is None else self.loss(hidden, labels, output.aux)
        logits = self.model.logits(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        result = LT2Output(loss=loss, logits=logits, cache=cache)
        return result if return_dict else result.to_tuple()

    def loss(self, hidden: Tensor, labels: Tensor, aux: dict[str, Tensor]) -> Tensor:
        """Mean next-token cross entropy plus the model's auxiliary losses."""
        targets = labels[:, 1:].flatten()
        entropy = chunked_cross_entropy(
            hidden[:, :-1].flatten(0, 1), self.model.head_weight, targets, ignore_index=IGNORE
        )
        return entropy.loss / entropy.n_tokens.clamp(min=1) + sum(value.mean() for value in aux.values())

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """generate()'s hook for its cache: ours, as long as the request needs and as wide as its beams."""
        given = model_kwargs.get("cache")
        if given is not None:
            given._is_user_defined = True
            return
        if generation_config.use_cache is False:
            return
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        model_kwargs["cache"] = LoopedCache(
            self.model.init_cache(rows, max_cache_length + 1, n_loops=model_kwargs.get("n_loops"))
        )


AutoConfig.register("lt2", LT2Config)
AutoModelForCausalLM.register(LT2Config, LT2ForCausalLM)
