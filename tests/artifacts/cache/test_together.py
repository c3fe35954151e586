"""With remember=True new blocks of layers whose codecs are alike are decoded by one call, bit for bit as by many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcal.methods.data_free import DataFree, Preset, preset
from kvcal_artifacts.cache import KVCalCache, reading
from kvcal_artifacts.codecs.higgs import Higgs
from kvcal_artifacts.codecs.uniform import Uniform
from kvcal_artifacts.scheme import Scheme
from tests.support.architectures import TINY, initialise

PRESETS = ("uniform-3", "kivi-2", "higgs-2", "turboquant-3", "innerq-hybrid", "squat-2", "squat-pre-2", "fp8", "mixkvq")
MIXED = Preset("uniform-2", "higgs-2", sink=4, recent=16, per_layer=("0:keys=uniform-8",))


@pytest.fixture(scope="module")
def model() -> Any:
    made = TINY["llama"]()
    initialise(made, 0)
    return made.eval()


def outputs(model: Any, scheme: Scheme) -> tuple[list[torch.Tensor], int]:
    """Logits of every call, and the bytes of what blocks decode to at the end."""
    ids = torch.randint(0, model.config.vocab_size, (2, 520), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), KVCalCache(scheme, model, remember=True) as cache:
        logits = [model(input_ids=one, past_key_values=cache, use_cache=True).logits for one in ids.split(40, 1)]
        return logits, cache.nbytes("decoded")


@pytest.mark.parametrize("method", [*map(preset, PRESETS), MIXED], ids=[*PRESETS, "mixed"])
def test_figures_are_those_of_layers_alone(model: Any, method: DataFree, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = method.scheme(model)
    together, size = outputs(model, scheme)
    monkeypatch.setattr(reading, "TOGETHER", 0)
    alone, size_alone = outputs(model, scheme)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert size == size_alone


def decoded(model: Any, scheme: Scheme, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each call of a codec's decode, of keys, in a forward behind a prompt of several blocks."""
    rows: list[int] = []
    inner = kind.decode

    def counted(self: Any, packed: Any, *rest: Any) -> torch.Tensor:
        if self.role == "key":
            rows.append(next(iter(packed.values())).shape[0])
        numbers: torch.Tensor = inner(self, packed, *rest)
        return numbers

    ids = torch.randint(0, model.config.vocab_size, (2, 120), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), KVCalCache(scheme, model, remember=True) as cache:
        model(input_ids=ids[:, :100], past_key_values=cache, use_cache=True)
        monkeypatch.setattr(kind, "decode", counted)
        model(input_ids=ids[:, 100:], past_key_values=cache, use_cache=True)
    return rows


def test_one_call_decodes_what_all_layers_packed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model.config.num_hidden_layers
    scheme = Preset("uniform-2", "uniform-2", sink=4, recent=16).scheme(model)
    assert decoded(model, scheme, Uniform, monkeypatch) == [2 * layers]


def test_a_limit_cuts_what_is_decoded_at_a_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, scheme = model.config.num_hidden_layers, Preset("uniform-2", "uniform-2", sink=4, recent=16).scheme(model)
    shape = scheme.layers[0].key.shape  # type: ignore[union-attr]
    monkeypatch.setattr(reading, "TOGETHER", 2 * shape.values * 2)  # of two rows, two blocks: a layer has these
    assert decoded(model, scheme, Uniform, monkeypatch) == [2] * layers


def test_codecs_of_other_constants_are_apart(model: Any) -> None:
    shape = Preset("higgs-2", "higgs-2").scheme(model).layers[0].key.shape  # type: ignore[union-attr]
    one, same, other = (Higgs(shape, "key", seed=seed) for seed in (0, 0, 1))
    assert one.decoding() == same.decoding() != other.decoding()
    turned = Higgs(shape, "key", sign=-one.sign)
    assert turned.config() == one.config() and turned.decoding() != one.decoding()
