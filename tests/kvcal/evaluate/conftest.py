"""lm-eval reads its 13,000 task files once for all tests, not once for each of its managers: that takes 7 s."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_tasks_are_indexed_once() -> Iterator[None]:
    if importlib.util.find_spec("lm_eval") is None:
        yield
        return
    from lm_eval import tasks
    from lm_eval.tasks._index import TaskIndex

    build, own = TaskIndex.build, Path(tasks.__file__).parent

    @cache
    def of_lm_eval() -> dict[str, Any]:
        return build([own])

    def indexed(paths: Iterable[Path], **options: Any) -> dict[str, Any]:
        first, *others = paths
        return of_lm_eval() | build(others, **options) if first == own else build([first, *others], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "build", staticmethod(indexed))
        yield
