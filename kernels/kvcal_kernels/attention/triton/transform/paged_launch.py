"""Launches of the attention kernel over pages of the transform codec."""

from __future__ import annotations

import torch
from torch import Tensor

from ....layout import Basis, PageForm, TransformBlocks, TransformForm
from ...plan import Launch
from ..launch import LOG2E, Workspace
from ..paged_launch import Pages, PreparedLaunch, launched
from .launch import constants_of, launch_of, ring_bytes, settings
from .paged import paged_kernel


def attend_pages(
    q: Tensor,
    pages: Tensor,
    form: PageForm,
    table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    scaling: float,
    keys: Basis,
    values: Basis,
    queries: int,
    blocks: int = 0,
    launch: Launch | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `reference.attend_pages` as `..paged_launch.attend_pages` does, which says what the arguments are."""
    if q.data_ptr() % 4 or q.stride(0) % 2:  # lanes load two numbers at a time
        q = q.clone(memory_format=torch.contiguous_format)
    assert isinstance(form.keys, TransformForm) and isinstance(form.values, TransformForm)
    call = Pages(q, pages, form, table, lengths, starts, queries, blocks)
    behind = constants_of(_bare(form.keys, keys), _bare(form.values, values))

    def prepare() -> PreparedLaunch:
        assert isinstance(form.keys, TransformForm) and isinstance(form.values, TransformForm)
        chosen = launch or launch_of(form.keys, form.values, call.ratio * queries, q.device)
        constants = settings(form.keys, form.values, pages.shape[1], call.ratio, queries, chosen)
        return PreparedLaunch(call, paged_kernel, constants, chosen, ring_bytes(constants), behind, 1)

    return launched(call, out, workspace, launch, prepare, behind, scaling * LOG2E)


def _bare(form: TransformForm, basis: Basis) -> TransformBlocks:
    """Return no blocks of a form: what `constants_of` reads of them is their form and basis."""
    return TransformBlocks(form, (), basis.decoder, basis)
