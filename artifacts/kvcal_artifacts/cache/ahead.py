"""Kernels that caches will ask for later, compiled and tried meanwhile: a GPU's first use of a scheme takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from .. import hf
from ..paths import choose
from ..scheme import Scheme
from .construction import local_heads

GPU = "cuda"
AT_ONCE = 2  # schemes; the variants of a kernel are compiled by several threads each


@contextmanager
def kernels_tried_ahead(model: nn.Module, schemes: Iterable[Scheme]) -> Iterator[None]:
    """While the block runs, threads try the kernels that caches of these schemes will ask for on the model's GPUs, in
    their order. The verdicts are those that the caches find then. At the end of the block what has not begun is left.

    An error is left to the cache that meets it.
    """
    trials = [trial for scheme in schemes for trial in _trials(model, scheme)]
    if not trials:
        yield
        return
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kernels")
    try:
        for trial in trials:
            pool.submit(trial)
        yield
    finally:
        pool.shutdown(cancel_futures=True)


def _trials(model: nn.Module, scheme: Scheme) -> list[Callable[[], None]]:
    """A call for each kind of layer on a GPU that tries its kernels. Sites are found here, as that runs the model."""
    local, sites, _, _ = local_heads(scheme, model)
    rotary = hf.rotary_width(model) if scheme.frame == "pre_rope" else 0
    trials: dict[tuple[object, ...], Callable[[], None]] = {}
    for index in local.compressed:
        site, (device, dtype) = sites[index], sites[index].placed
        if device.type != GPU:
            continue
        ratio = 1 if hf.odd_attention(site) else site.ratio
        pair = local.on(index, device, ratio)
        kind = pair.key.encoding(), pair.value.encoding(), site.kv_heads, site.head_dim, ratio, device, dtype
        trials.setdefault(kind, partial(_try, local, index, site, rotary if site.rope else 0, ratio))
    return list(trials.values())


def _try(scheme: Scheme, index: int, site: hf.AttentionSite, rotary: int, ratio: int) -> None:
    device, dtype = site.placed
    with torch.no_grad():
        choose.layer_paths(
            "auto", scheme, index, scheme.on(index, device, ratio), site, rotary, dtype, device, static=False
        )
