"""LoopedLM as a transformers model: import this module, then AutoModelForCausalLM.from_pretrained(folder).

generate() runs on LT2's own caches, one per (loop, layer). Batches may be padded on either side: rows are compacted to
the left before the model sees them, so padding never enters a recurrent state. A model of random layout runs its first
draw here; the vote of its draws is `lt2.generate`'s and `lt2 eval`'s.

Shapes: B batch, L tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils.generic import ModelOutput

from lt2.config import ConfigError, ModelConfig
from lt2.explain import explain
from lt2.init import init_weights
from lt2.interop.requests import LoopedCache, looped, packed_documents, valid_tokens
from lt2.model import Block, LoopedLM
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
        self.check()
        for name, value in self.public_names().items():
            setattr(self, name, value)
        self.max_position_embeddings = self.looped.max_seq_len

    def public_names(self) -> dict[str, int]:
        config = self.looped
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "num_hidden_layers": config.n_layers,
            "num_loops": config.n_loops,
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.ffn_dim,
        }

    def check(self) -> None:
        """Raise ConfigError where a public name was set to something else than the model is."""
        for name, value in (self.public_names() | {"tie_word_embeddings": False}).items():
            if (found := getattr(self, name, value)) != value:
                raise ConfigError(
                    f"config.{name} is {found}, but only reports what config.lt2 says, {value}; change it there"
                )

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> LT2Config:
        return cls(lt2=config.model_dump(mode="json"), **kwargs)

    @property
    def looped(self) -> ModelConfig:
        """Raises ConfigError for what this LT2 cannot read, e.g. a mixer of one's own whose file is not there."""
        try:
            return ModelConfig.model_validate(self.lt2)
        except ValidationError as error:
            raise ConfigError(explain(error, f"{self.name_or_path or 'config'}: lt2")) from None


@dataclass
class LT2Output(ModelOutput):
    """loss: scalar, with labels; logits: (B, L, V); cache, with use_cache; hidden_states, with output_hidden_states:
    what each of the T·N unrolled layers reads and, last, what the head reads, each (B, L, D)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: LoopedCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class LT2ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LT2Config
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]
    _keep_in_fp32_modules_strict = sorted(KEEP_FP32)
    _is_stateful = True  # recurrent states cannot go back to a prefix, as assisted decoding asks
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True

    def __init__(self, config: LT2Config):
        super().__init__(config)
        config.check()
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

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = cast(nn.Linear, new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes the embeddings as transformers does, and updates the LoopedLM's own config."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.model.config.model_copy(update={"vocab_size": embeddings.num_embeddings})
        self.config.lt2 = self.model.config.model_dump(mode="json")
        return embeddings

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """The hook of `gradient_checkpointing_enable`: every use of a block runs again in backward."""
        self.gradient_checkpointing = enable
        for layer, block in enumerate(cast(list[Block], self.model.blocks)):
            block.__dict__.pop("forward", None)
            if enable and layer % every_n_layers == 0:
                block.forward = partial(_recomputed, block, block.forward, gradient_checkpointing_func)  # type: ignore[method-assign]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: LoopedCache | None = None,
        past_key_values: LoopedCache | None = None,  # older name of cache
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool = False,
        n_loops: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool = True,
    ) -> LT2Output | tuple[Tensor, ...]:
        """Logits of input_ids (B, L); attention_mask (B, tokens so far), 0 on padding.

        Positions follow from the mask; position_ids (B, L) that begin again at 0 without one mark packed documents,
        which then do not see each other. labels (B, L) are shifted here, -100 is ignored; num_items_in_batch: how many
        count in all micro-batches of a step, over which the loss is then a share of the mean. A cache grows as needed.
        n_loops runs another depth than the config's.

        Raises:
            ConfigError: a cache that is not `LoopedCache` or of other rows or depth, position_ids that the model would
                not follow, a mask that is not (B, tokens), or output_attentions, which linear mixers do not have.
        """
        if output_attentions:
            raise ConfigError(
                "LT2 models give no attention weights, most mixers have none; leave output_attentions out"
            )
        B, L = input_ids.shape
        cache = cache if cache is not None else past_key_values
        if cache is None and use_cache:
            room = max(L, self.config.max_position_embeddings)
            cache = LoopedCache(self.model.init_cache(B, room, n_loops=n_loops))
        held = None if cache is None else looped(cache).room(self.model, B, L, n_loops)
        valid = None if attention_mask is None else valid_tokens(attention_mask, B, L)
        doc_ids = None if position_ids is None else packed_documents(position_ids.expand(B, L), valid, held)
        seen: list[Tensor] = []
        record = lambda loop, layer, block, spec, seq, before, after: seen.append(before)  # noqa: E731
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        options: dict[str, Any] = {"cache": held, "n_loops": n_loops, "record": record if wanted else None}
        if valid is None or valid.all():
            output = self.model(input_ids, doc_ids=doc_ids, **options)
            states = [*seen, output.hidden]
        else:
            order = (~valid).to(torch.int8).argsort(dim=1, stable=True)
            lengths = valid.sum(1) if held is not None else None
            output = self.model(input_ids.gather(1, order), lengths=lengths, **options)
            back = order.argsort(1)[..., None]
            states = [h.gather(1, back.expand_as(h)) for h in (*seen, output.hidden)]
        hidden = states[-1]
        loss = None if labels is None else self.loss(hidden, labels, output.aux, valid, num_items_in_batch)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        result = LT2Output(
            loss=loss,
            logits=self.model.logits(hidden[:, kept]),
            cache=cache,
            hidden_states=tuple(states) if wanted else None,
        )
        return result if return_dict else result.to_tuple()

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        aux: dict[str, Tensor],
        valid: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Mean next-token cross entropy plus the model's auxiliary losses; nothing is asked of padding's states."""
        targets = labels[:, 1:] if valid is None else labels[:, 1:].masked_fill(~valid[:, :-1], IGNORE)
        entropy = chunked_cross_entropy(
            hidden[:, :-1].flatten(0, 1), self.model.head_weight, targets.flatten(), ignore_index=IGNORE
        )
        loss = entropy.loss / entropy.n_tokens.clamp(min=1) + sum(value.mean() for value in aux.values())
        return loss if num_items_in_batch is None else loss * entropy.n_tokens / num_items_in_batch

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        for name in ("tokenizer", "assistant_tokenizer"):  # of stop_strings; generate() passes them on
            kwargs.pop(name, None)
        return cast(Any, super()).prepare_inputs_for_generation(*args, **kwargs)

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


def _recomputed(block: Block, forward: Any, recompute: Any, h: Tensor, spec: Any, seq: Any, *rest: Any) -> Any:
    """A block's `forward`, which `recompute` runs again in backward; what is decoded is not."""
    if not block.training or any(value is not None for value in rest):
        return forward(h, spec, seq, *rest)
    return recompute(forward, h, spec, seq)


AutoConfig.register("lt2", LT2Config)
AutoModelForCausalLM.register(LT2Config, LT2ForCausalLM)
