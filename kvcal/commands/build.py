"""`kvcal build`: build what changed (build_plan.py, build_passes.py) and hold it to its gates."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import KVCalError, UsageError
from kvcal_artifacts.files import lock

from ..pipeline.build_recipe import BuildRecipe, Entry
from ..pipeline.gates import Check, recalled, worth_keeping
from ..pipeline.lock_file import Lock, Planned
from ..report.outputs import check_output
from .build_passes import opened_model, run_all
from .build_plan import BuildPass, Planner, plan_passes
from .common import Say, refuse_idle
from .evaluation import run_eval
from .gpus import gpus_of
from .workbench import raise_first

REPORTS = ("junit", "summary")  # options that say where gates are reported


@contextmanager
def only_build(folder: Path) -> Iterator[None]:
    """Refuse a second build into the same folder while the first runs."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if lock(handle, wait=False) is False:
            raise KVCalError(f"{folder}: another `kvcal build` is at work there; wait for it")
        yield
    finally:
        os.close(handle)


def check_taken(dry_run: bool, gates: bool, gpus: str | None, typed: Collection[str]) -> None:
    """Raise UsageError for the first option (`typed`) that such a build has no use for."""
    if dry_run:
        idle = ("jobs", "gpus", *(("gates",) if gates else ()), *REPORTS)  # --no-gates says what happens anyway
        refuse_idle(typed, idle, "bundles that are built", "with --dry-run nothing is; leave out it or that")
    if not gates:
        refuse_idle(typed, REPORTS, "gates that are held", "leave out it or --no-gates")
    if gpus is not None and "jobs" in typed:
        raise UsageError("--jobs and --gpus: each of the GPUs has one process; leave --jobs out")


def run_build(
    recipe: BuildRecipe,
    say: Say,
    *,
    dry_run: bool = False,
    jobs: int = 1,
    gpus: str | None = None,
    share: bool = True,
    gates: bool = True,
    typed: Collection[str] = (),
) -> dict[str, Any]:
    """Build what changed and hold it to its gates; rows of bundles, and checks. dry_run: only say what would be done.
    gpus: `gpus_of` reads it; each has a process, instead of so many `jobs`.

    typed: names of the options that somebody gave; UsageError for one that nothing takes.
    """
    check_taken(dry_run, gates, gpus, typed)
    devices = None if gpus is None else _devices(gpus, recipe)
    lock = Lock.read(recipe.lock)
    planner = Planner(recipe, lock)
    plans = planner.plan()
    todo = plan_passes([plan for plan in plans if plan.why is not None], share)
    if dry_run:
        return _summary(recipe, plans, todo, [], "build")
    _make_folder(recipe.output)
    check_output(recipe.lock, "output in the recipe")
    for plan in plans:
        if plan.why is not None:
            check_output(plan.path, "output in the recipe")
    with only_build(recipe.output):
        by_name = {plan.entry.name: plan for plan in plans}

        def written(name: str, sha256: str, size: int) -> None:
            plan = by_name[name]
            row = {"file": plan.entry.file, "sha256": sha256, "bytes": size, "key": plan.key, "inputs": plan.inputs}
            lock.bundles[name] = row
            lock.write()

        for gone in lock.keep_only(list(by_name)):
            say(f"note: {gone} is no longer in the recipe; its file, if any, stays")
        run_all(todo, jobs, say, written, devices)
        opened_model.cache_clear()  # gates load the model for themselves
        checks = gate_checks(recipe, planner, lock, say) if gates else []
        lock.write()
    return _summary(recipe, plans, todo, checks, "built") | {"lock": str(recipe.lock)}


def _devices(gpus: str, recipe: BuildRecipe) -> list[str]:
    """The GPUs; UsageError for a bundle whose recipe names a GPU itself."""
    for entry in recipe.entries:
        if not entry.parts and entry.built.device.startswith("cuda:"):
            raise UsageError(
                f"--gpus {gpus}: {entry.name} has device {entry.built.device}, and each process sees one GPU; give "
                'device = "cuda", or leave it out'
            )
    return gpus_of(gpus)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KVCalError(f"{folder}: cannot be made ({error.strerror}); give another output in the recipe") from error
    check_output(folder / "x")


def _summary(
    recipe: BuildRecipe, plans: Sequence[Planned], todo: Sequence[BuildPass], checks: list[Check], done: str
) -> dict[str, Any]:
    order = [entry.name for entry in recipe.entries]
    number = {plan.entry.name: index for index, work in enumerate(todo, 1) for plan in work.plans}
    rows = [
        {
            "name": plan.entry.name,
            "method": plan.entry.method,
            "file": str(plan.path),
            "action": "up to date" if plan.why is None else done,
            "why": plan.why,
            "pass": number.get(plan.entry.name),
        }
        for plan in sorted(plans, key=lambda plan: order.index(plan.entry.name))
    ]
    return {
        "recipe": str(recipe.path),
        "bundles": rows,
        "gates": checks,
        "passed": all(check.passed for check in checks),
    }


def gate_checks(recipe: BuildRecipe, planner: Planner, lock: Lock, say: Say) -> list[Check]:
    """Checks of every bundle with gates, from the lock file where nothing changed; raises when the others are done."""
    checks_of: dict[str, list[Check]] = {}
    missing: dict[str, list[Entry]] = {}
    keys: dict[str, str] = {}
    failed: dict[str, KVCalError] = {}
    for entry in recipe.entries:
        if not entry.gates:
            lock.gates.pop(entry.name, None)
            continue
        keys[entry.name] = planner.gate_key(entry, lock.bundles[entry.name]["sha256"])
        row = lock.gates.get(entry.name, {})
        earlier = recalled(entry.name, entry.gates, row["checks"]) if row.get("key") == keys[entry.name] else None
        if earlier is None:
            missing.setdefault(entry.model, []).append(entry)
        else:
            checks_of[entry.name] = earlier
    for model, entries in missing.items():
        say(f"gates of {', '.join(entry.name for entry in entries)}")
        paths = [recipe.output / entry.file for entry in entries]
        options = replace(recipe.evaluation[model], bundles=paths)
        result = run_eval(options, say, {entry.name: entry.gates for entry in entries})
        failed |= result["failed"]
        for entry in entries:
            checks_of[entry.name] = [check for check in result["gates"] if check.name == entry.name]
            lock.gates.pop(entry.name, None)
            if entry.name not in failed and worth_keeping(checks_of[entry.name]):
                records = [check.as_dict() for check in checks_of[entry.name]]
                lock.gates[entry.name] = {"key": keys[entry.name], "checks": records}
        lock.write()
    raise_first(failed)
    return [check for entry in recipe.entries if entry.gates for check in checks_of[entry.name]]
