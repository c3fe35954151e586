"""The model of a config, without its weights: which class it has, where its head is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcal_artifacts.errors import ModelUnavailable

from .hub import one_line

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

    class CausalLM(PreTrainedModel):
        """What Transformers' auto classes for text make: a PreTrainedModel that is a GenerationMixin, too."""

        def generate(self, inputs: Tensor, **options: object) -> Tensor:
            """Token ids (B, T): those of `inputs` and the new ones behind them."""
            ...

        def get_output_embeddings(self) -> nn.Module | None: ...


def model_class(config: PreTrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """Transformers' auto class for models of this config that generate text: causal LMs, else those that also read
    images.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> CausalLM:
    """The model of that config, a causal LM or one that also reads images, on the meta device: no memory is taken."""
    try:
        with torch.device("meta"):
            model: CausalLM = model_class(config).from_config(config, dtype=dtype)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, ImportError, RuntimeError) as error:
        raise ModelUnavailable(f"model type {config.model_type!r}: {one_line(error)}") from error
    model.eval().requires_grad_(False)
    return model


def head_of(model: CausalLM) -> nn.Module:
    """The layer that makes logits. Raises ModelUnavailable where there is none."""
    head = model.get_output_embeddings()
    if head is None:
        raise ModelUnavailable(f"{type(model).__name__} has no output embeddings; load a causal language model")
    return head


def tied(model: PreTrainedModel) -> bool:
    """Whether the head is the embedding; a model that also reads images may say so in its text part alone."""
    config = model.config
    outer = getattr(config, "tie_word_embeddings", None)
    return bool(config.get_text_config().tie_word_embeddings if outer is None else outer)
