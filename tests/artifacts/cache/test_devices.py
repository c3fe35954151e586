"""One bundle, several devices: what one cache does with the codecs never moves another's."""

from __future__ import annotations

import pytest
import torch

from kvcal_artifacts.cache import KVCalCache
from kvcal_artifacts.codecs import Codec
from tests.support import schemes

pytestmark = pytest.mark.transformers
META = torch.device("meta")  # stands in for a second device where there is none


def devices(codec: Codec) -> set[torch.device]:
    return {tensor.device for tensor in codec.tensors().values()}


def test_codecs_on_another_device_leave_the_first_alone() -> None:
    model, ids = schemes.tiny("llama"), torch.arange(1, 61)[None]
    scheme = schemes.aqua("llama")
    with KVCalCache(scheme, model) as cache, torch.no_grad():
        model(ids, past_key_values=cache)
        for layer in range(len(scheme.layers)):
            away = scheme.on(layer, META)
            assert devices(away.key) == {META}
            assert scheme.on(layer, META) is away
        again = model(ids, past_key_values=cache).logits
    assert bool(torch.isfinite(again).all())
    assert all(META not in devices(pair.key) | devices(pair.value) for pair in scheme.layers if pair)
