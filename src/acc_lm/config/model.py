"""Sections `model`, `adapter` and `tokenizer` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from acc_lm.config.fields import (
    NotLearned,
    Place,
    PositiveFloat,
    PositiveInt,
    Section,
    Settings,
    Strings,
    no_number,
)

NEW_TOKENS = ("add_tokens", "add_special_tokens")
"""Keys of the `tokenizer` section that name tokens to add."""


class ModelConfig(Section):
    """Model to train: `name_or_path` continues from existing weights, `config` starts from scratch."""

    name_or_path: Annotated[Place | None, NotLearned] = None
    """Hub id or local folder of a causal language model to continue from."""
    revision: Annotated[str | None, NotLearned] = None
    """Branch, tag or commit of the Hub id."""
    config: Settings | None = None
    """Config of a model from scratch: a `model_type` of transformers and its own field names; vocab_size, bos_token_id and eos_token_id come from the tokenizer if left out."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the parameters; compute precision is `training.mixed_precision`."""
    gradient_checkpointing: Annotated[Literal[False, True, "selective"], BeforeValidator(no_number), NotLearned] = False
    """Recompute activations in the backward pass, with the same result. true: all of a block, least memory, about a third more compute; selective: all but matrix products and attention (FlexAttention is recomputed outside compiled models), about half the memory."""
    freeze: Strings = ()
    """Name patterns of parameters that are not trained, e.g. `model.embed_tokens.*`; each must match at least one."""
    resize_embeddings: bool = False
    """Enlarge the embeddings when the tokenizer has more ids than the model."""
    trust_remote_code: Annotated[bool, NotLearned] = False
    """Run Python code that a model repository contains."""
    router_loss: Literal["exact", "per_micro_batch", "off"] = "exact"
    """Load-balancing loss of a mixture of experts, times the model's own coefficient (`router_aux_loss_coef`); no effect on other models. exact: over the global batch however it is split, at the cost of a second forward pass under accumulation; per_micro_batch: mean over the micro-batches, as in other tools; off: none."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.name_or_path is None) == (self.config is None):
            got = "neither" if self.config is None else "both"
            raise ValueError(
                f"must have exactly one of name_or_path and config, got {got}; "
                "set the one you do not want to null (name_or_path: existing weights, config: from scratch)"
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config must name a model_type of transformers, got none; add e.g. model_type: llama")
        asked = (self.config or {}).get("output_router_logits")
        if isinstance(asked, bool) and asked != (self.router_loss != "off"):
            raise ValueError(
                f"config.output_router_logits must be left out because model.router_loss decides it, got {asked} with {self.router_loss}; "
                "set model.router_loss to exact or off"
            )
        return self


class AdapterConfig(Section):
    """Adapter: small matrices that are trained on top of a frozen model, instead of the model itself."""

    kind: Literal["none", "lora"] = "none"
    """Kind of adapter. none: train the model itself; lora: train low-rank matrices added to its linear layers (Hu et al., 2021, arXiv:2106.09685)."""
    rank: PositiveInt = 16
    """Rank of each pair of matrices."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter's update, which is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability on the adapter's input."""
    target_modules: Strings = ("all-linear",)
    """Linear layers that get an adapter, by the ends of their names, e.g. [q_proj, v_proj]; all-linear: all but the output head."""
    use_dora: bool = False
    """Train the magnitude of each output's weights separately from their direction (DoRA: Liu et al., 2024, arXiv:2402.09353)."""
    use_rslora: bool = False
    """Multiply the update by alpha / sqrt(rank) instead (rsLoRA: Kalajdzievski, 2023, arXiv:2312.03732)."""
    quantize_base: Literal["none", "nf4"] = "none"
    """Quantization of the frozen weights of the adapted layers; nf4: stored in 4 bits (QLoRA: Dettmers et al., 2023, arXiv:2305.14314)."""

    also_train: Strings = ()
    """Modules that are trained completely with the adapter, by the ends of their names, e.g. [embed_tokens, lm_head] for new tokens; exported with it, as peft's `modules_to_save`."""

    @model_validator(mode="after")
    def _belongs_to_an_adapter(self) -> AdapterConfig:
        if "kind" not in self.model_fields_set:  # a kind that was forgotten would train the entire model
            for name, field in type(self).model_fields.items():
                value = getattr(self, name)
                if value != field.default:
                    shown = list(value) if isinstance(value, tuple) else value
                    raise ValueError(
                        f"kind must be set with {name}, got {shown} without it; set adapter.kind to lora, or leave {name} out"
                    )
        if self.also_train and self.kind == "none":
            raise ValueError(
                f"also_train must be empty without an adapter, which trains all modules, got {list(self.also_train)}; "
                "set adapter.kind to lora, or leave it out"
            )
        if self.quantize_base != "none" and self.kind == "none":
            raise ValueError(
                f"quantize_base must be none without an adapter, got {self.quantize_base}, whose weights cannot be trained; "
                "set adapter.kind to lora"
            )
        return self


class TokenizerConfig(Section):
    """Tokenizer of the text: an existing one, or one built from the training split."""

    name_or_path: Annotated[Place | None, NotLearned] = None
    """Hub id or local folder; takes precedence over `kind`. null: the tokenizer of `model.name_or_path`, else `kind`."""
    revision: str | None = None
    """Branch, tag or commit of the Hub id."""
    kind: Literal["bpe", "char", "byte"] = "bpe"
    """Kind of the tokenizer built here: byte-level BPE trained on the training split, characters, or bytes."""
    vocab_size: Annotated[int, Field(ge=257)] = 4096
    """Number of ids of a BPE tokenizer trained here, including the 256 bytes and the end token."""
    add_tokens: Strings = ()
    """Tokens to add to the vocabulary, each found in text wherever it is spelled; the model gets a row for each that is new."""
    add_special_tokens: Strings = ()
    """Tokens to add that only a chat template or a prompt can write; text that spells them is text. Decoded text leaves them out."""

    @model_validator(mode="after")
    def _tokens_can_be_added(self) -> TokenizerConfig:
        seen: set[str] = set()
        for key in NEW_TOKENS:
            for token in getattr(self, key):
                if not token or token in seen:
                    raise ValueError(
                        f"{key} must name each token once, got {f'{token!r} twice' if token else 'an empty one'}; remove it"
                    )
                seen.add(token)
        return self

    @model_validator(mode="after")
    def _revision_is_of_a_tokenizer(self) -> TokenizerConfig:
        if self.revision is not None and "name_or_path" not in self.model_fields_set:
            raise ValueError(
                f"name_or_path must be set with revision, got {self.revision} without it; name the tokenizer, or set model.revision, which "
                "is that of a model and its tokenizer"
            )
        return self

    @property
    def adds_tokens(self) -> bool:
        return bool(self.add_tokens or self.add_special_tokens)

    def content(self) -> str:
        """The section as text, for a hash; keys of new tokens only if they are set, so that older hashes stay valid."""
        return self.model_dump_json(exclude={key for key in NEW_TOKENS if not getattr(self, key)})
