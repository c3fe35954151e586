"""`kvcal card`, `kvcal push` and `kvcal pull`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.files import read_text, write_together

from ..bundles.card import Card, make_card
from ..bundles.paths import bundle_at
from ..bundles.publish import pull, push
from ..pipeline.spec import DefaultsOf, OptionsOf
from ..report.outputs import check_output
from .bundles import file_sha256
from .options import CardOptions, PullOptions, PushOptions
from .reproduce import check_command


def run_card(o: CardOptions, defaults_of: DefaultsOf, options_of: OptionsOf) -> dict[str, Any]:
    """The card's text; with --output it is written, and its plots next to it."""
    if o.output is not None:
        if str(o.output) == "-":
            raise UsageError("--output -: leave --output out to print the card, or give a file name")
        check_output(o.output)  # before the bundle is read
    card = _card(o, o.repo, defaults_of, options_of)
    files: dict[Path, bytes] = {}
    if o.output is not None:
        files = {o.output: card.text.encode(), **{o.output.parent / name: p for name, p in card.plots.items()}}
        write_together(files)
    return {"bundle": str(o.bundle), "card": card.text, "files": [str(path) for path in files]}


def _card(o: CardOptions | PushOptions, repo: str | None, defaults_of: DefaultsOf, options_of: OptionsOf) -> Card:
    path = o.bundle
    bundle = bundle_at(path)
    evaluation = None if o.evaluation is None else _evaluation(o.evaluation)
    return make_card(
        bundle,
        file_sha256(path),
        repo=repo,
        evaluation=evaluation,
        licence=o.license,
        defaults_of=defaults_of,
        check=lambda was: check_command(was, defaults_of, options_of),
    )


def _evaluation(path: Path) -> dict[str, Any]:
    try:
        evaluation = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"--eval {path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--eval {path}: not JSON ({error}); give what `kvcal eval --json` printed") from error
    if not isinstance(evaluation, dict):
        raise UsageError(f"--eval {path}: not what `kvcal eval --json` prints")
    return evaluation


def run_push(o: PushOptions, defaults_of: DefaultsOf, options_of: OptionsOf) -> dict[str, object]:
    """What was pushed and the commit that holds it."""
    card = _card(o, o.repo, defaults_of, options_of)
    return asdict(push(o.bundle, o.repo, card, branch=o.branch, message=o.message, private=o.private))


def run_pull(o: PullOptions) -> dict[str, object]:
    """What was pulled, and from which commit."""
    folder = Path(o.output)
    pulled = pull(o.repo, folder, revision=o.revision, file=o.file, sha256=o.sha256)
    return {"bundle": str(folder / pulled.file), **asdict(pulled)}
