"""lm-eval's Hugging Face model class over compressed caches: generation, likelihoods, and where each row ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .calls import calls
from .packed_share import OpenCache
from .row_ends import Reading, Requests, answer_lengths, forced, generated

if TYPE_CHECKING:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerBase

    from ..models.structure import CausalLM


def language_model(
    model: CausalLM, tokenizer: PreTrainedTokenizerBase, maker: OpenCache | None, step: int, batch: int
) -> HFLM:
    """lm-eval's model class over the caches of `maker`; None: the model's cache. step: tokens a forward pass of
    likelihoods. batch: requests at a time.
    """
    from lm_eval.models.huggingface import HFLM

    class CompressedLM(HFLM):  # type: ignore[misc]
        _requested = Requests(frozenset())  # the requests whose likelihoods are asked for

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            if maker is None:
                whole: Tensor = super()._model_call(inps, attn_mask, labels)
                return whole
            return forced_logits(self.model, inps, maker, step, self._requested.lengths(inps))

        def _loglikelihood_tokens(self, requests: list[Any], *others: Any, **settings: Any) -> list[tuple[float, bool]]:
            # as lm-eval sends them: the last token is only scored
            sent = (tuple((context + answer)[-(self.max_length + 1) : -1]) for _, context, answer in requests)
            self._requested = Requests(frozenset(sent))
            scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(requests, *others, **settings)
            return scores

        def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
            if maker is None:
                return self._generated(context, max_length, stop, kwargs)
            readings: list[Reading] = []
            with maker(readings=readings) as cache:
                out = self._generated(context, max_length, stop, kwargs | {"past_key_values": cache})
                answers = _answer_lengths(self, out[:, context.shape[1] :], stop)
                readings += generated(kwargs["attention_mask"].sum(1).tolist(), answers)
            return out

        def _generated(self, context: Tensor, max_length: int, stop: list[str], kwargs: Mapping[str, object]) -> Tensor:
            out: Tensor = super()._model_generate(context, max_length, stop, **kwargs)
            return out

    return CompressedLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, backend="causal")


def _answer_lengths(lm: HFLM, tokens: Tensor, stop: list[str]) -> list[int]:
    """The tokens of each row's answer, as lm-eval ends it where the row is alone: generated tokens (B, T) up to the
    first with which a stop string is there, or the text's end.
    """
    from lm_eval.models.huggingface import stop_sequences_criteria

    end = lm.model.generation_config.eos_token_id
    ends = {end} if isinstance(end, int) else set(end or ())
    criteria = stop_sequences_criteria(lm.tokenizer, stop, 0, len(tokens))

    def stopped(so_far: Tensor) -> list[bool]:
        for one in criteria:
            one(so_far, None)
        return [any(one.done_tracker[row] for one in criteria) for row in range(len(so_far))]

    return answer_lengths(tokens.cpu(), ends, stopped)


@torch.no_grad()
def forced_logits(
    model: nn.Module, ids: Tensor, maker: OpenCache, step: int, lengths: Sequence[int] | None = None
) -> Tensor:
    """Logits (B, T, vocabulary) of token ids (B, T), teacher-forced through a cache. Padding on the right changes no
    token before it. lengths: of the rows without it, for the share that was packed; None: none has padding.
    """
    readings: list[Reading] = []
    with maker(readings=readings) as cache:
        spans = calls(cache.scheme, 0, ids.shape[1], step)
        readings += forced([ids.shape[1]] * len(ids) if lengths is None else lengths, spans)
        parts = [
            model(input_ids=ids[:, first:last], past_key_values=cache, use_cache=True).logits for first, last in spans
        ]
    return torch.cat(parts, 1)
