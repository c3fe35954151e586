"""Attention masks: which new columns are tokens, and whether old ones are still what they were when they came."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import hf
from ..errors import KVCalError
from ..hf import Mask
from ..storage.eviction import EvictingLedger
from ..storage.ledger import Ledger
from .forward import Forward


def full_mask(mask: Mask, past: int, is_static: bool) -> Tensor | None:
    """The mask of full attention among the model's masks, by columns if it can be read so.

    That holds for 4-D ones that generate() makes for caches that compile, and that a vision-language model makes
    outside its decoder, by kinds of layers.
    """
    by_kind = isinstance(mask, Mapping)
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention")
    wide = mask is not None and mask.ndim == 4 and not hf.capturing()
    if (is_static or by_kind) and mask is not None and wide:
        real = hf.real_columns(mask, past, mask.shape[2])
        mask = mask if real is None else real
    return mask


class MaskHistory:
    """What earlier masks said of the columns that a cache stores, on the device of the masks.

    It is read from the ledger where a call without a mask, a crop or a selection of rows came between. Where tokens are
    evicted masks are not compared: the ledger hides what the mask does.
    """

    def __init__(self) -> None:
        self._columns: Tensor | None = None

    def forget(self) -> None:
        self._columns = None

    def extend(self, forward: Forward, past: int, query: int) -> None:
        """Add the columns of a call that has begun."""
        if forward.mask is None or forward.custom_mask or self._columns is None:
            self._columns = None
        else:
            self._columns = torch.cat([self._columns, forward.mask[:, past : past + query].bool()], 1)

    def extend_by_steps(self, count: int) -> None:
        """Add columns of steps that the device did by itself; all of them are real."""
        if self._columns is not None:
            self._columns = torch.nn.functional.pad(self._columns, (0, count), value=True)

    def new_columns(self, forward: Forward, ledger: Ledger | EvictingLedger, query: int) -> Tensor | None:
        """Which new columns are real tokens, (B, query) bool on the CPU; None if all are.

        It also tells the forward whether the mask hides old ones.
        """
        mask, past = forward.mask, ledger.columns
        if mask is None or forward.custom_mask:
            return None
        if mask.shape[1] < past + query:
            raise KVCalError(
                f"attention_mask has {mask.shape[1]} columns, needs {past + query} (cached plus new); "
                "give the mask of the whole sequence"
            )
        new, same = mask[:, past : past + query].bool(), self._same_old(mask[:, :past].bool(), ledger)
        answer = torch.cat([new, same.expand(len(new), 1)], 1).to("cpu")  # one wait for the device
        forward.hides_old = not bool(answer[:, -1].all())
        return answer[:, :-1]

    def _same_old(self, old: Tensor, ledger: Ledger | EvictingLedger) -> Tensor:
        """Whether the mask says of old columns what it said when they came: 0-d bool."""
        if not old.shape[1] or isinstance(ledger, EvictingLedger) or len(old) != ledger.batch:
            return torch.ones((), dtype=torch.bool, device=old.device)
        columns = self._columns
        if columns is None or columns.shape != old.shape or columns.device != old.device:
            columns = self._columns = ledger.valid.to(old.device)
        return (old == columns).all()
