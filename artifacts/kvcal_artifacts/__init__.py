"""Bundles and the runtime: what a server needs to load a compressed cache.

import kvcal_artifacts
cache = kvcal_artifacts.load_cache("x.kvcal.safetensors", model)
model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from .bundle import Bundle
    from .cache import KVCalCache


def load_bundle(path: str | os.PathLike[str]) -> Bundle:
    """Read a bundle file and check all of it; raises errors.CorruptBundle or errors.IncompatibleBundle."""
    from .bundle import load_bundle as load

    return load(path)


def load_cache(
    bundle: Bundle | str | os.PathLike[str],
    model: nn.Module,
    *,
    keep: float | None = None,
    heavy: float | None = None,
    subspace: str | None = None,
    strict: bool = False,
    offload: bool = False,
    remember: bool = False,
    kernels: str = "auto",
    require_kernels: bool = False,
    max_length: int | None = None,
) -> KVCalCache:
    """A Transformers cache for `model.generate(past_key_values=cache)` that stores what the bundle says.

    bundle: a path, what load_bundle gave, or a preset that looks at the model and chooses codecs: auto-4, auto-3 or
    auto-2. describe()["auto"] then says which and why; a file of such a name is ./auto-4. keep: store only this share
    of the tokens, of these the share `heavy` (0.5) by the attention they get (H2O, see scheme.HeavyHitters); None: as
    the bundle says. subspace: prompt, calibrated or both, for keys that SQuat stores; None: as the bundle says. The
    other options are those of KVCalCache. Raises errors.IncompatibleBundle, naming both values, if the bundle was made
    for another model. Raises errors.UnsupportedModel for a model that cannot be compressed, and errors.UsageError for
    what is no loaded model, such as its name.
    """
    from .bundle import Bundle
    from .cache import KVCalCache
    from .errors import UsageError
    from .hf import check_supported
    from .presets import AUTO_BITS
    from .scheme import HeavyHitters

    if keep is None and heavy is not None:
        raise UsageError(f"heavy={heavy:g} is a share of the tokens that keep=... keeps: give keep too")
    if hasattr(bundle, "forward"):
        raise UsageError(f"bundle is a {type(bundle).__name__}, a model: the order is load_cache(bundle, model)")
    check_supported(model)
    chosen: dict[str, object] | None = None
    if isinstance(bundle, str) and bundle in AUTO_BITS:
        from .cache.auto import auto_scheme

        scheme, chosen = auto_scheme(bundle, model)
    else:
        loaded = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
        loaded.check(model)
        scheme = loaded.scheme
    if keep is not None:
        scheme = scheme.keeping(HeavyHitters(keep, 0.5 if heavy is None else heavy))
    if subspace is not None:
        from .scheme.subspace import choose

        scheme = choose(scheme, subspace)
    cache = KVCalCache(
        scheme,
        model,
        strict=strict,
        offload=offload,
        remember=remember,
        kernels=kernels,
        require_kernels=require_kernels,
        max_length=max_length,
    )
    cache.auto = chosen
    return cache


__all__ = ["load_bundle", "load_cache"]
