"""Rows of what cannot be measured: a script that reads the rows sees what is missing and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ..models.geometry import Geometry
from .layer import Case
from .operation import Operation
from .peers import DTYPE_NAMES
from .rows import Row
from .schemes import Benched


def omitted_rows(
    measured: Collection[Row],
    model: str,
    geometry: Geometry,
    schemes: Sequence[Benched],
    operations: Sequence[Operation],
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    device_name: str,
    new: int = 1,
) -> Iterator[Row]:
    """A row with `refused` and no figure for each scheme and operation that `measured`, of one shape (batch, length),
    lacks. An operation that is `alone` has its row without a scheme, and gets none here.
    """
    there = {(row.operation, row.scheme) for row in measured}
    for one in schemes:
        case = Case(one, geometry, *shape, device, dtype, new=new)
        for operation in operations:
            if operation.alone or (operation.name, one.name) in there:
                continue
            if (why := operation.refuses(case)) is not None:
                yield Row(
                    operation=operation.name,
                    scheme=one.name,
                    model=model,
                    batch=case.batch,
                    length=case.length,
                    microseconds=None,
                    stored_bits=one.stored_bits,
                    fraction_of_copy=None,
                    ratio_to_fp16=None,
                    fp16_backend=None,
                    projected=False,
                    device=device_name,
                    path="none",
                    refused=why,
                    dtype=DTYPE_NAMES[dtype],
                    queries=new if operation.of_calls else None,
                    **one.settings,
                )
