"""`kvcal card`, `kvcal push` and `kvcal pull`."""

from __future__ import annotations

from kvcal.cli.output import line, print_facts, print_json, print_next, prose
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import CardOptions, PullOptions, PushOptions


@command(CardOptions)
def card(o: CardOptions, typed: Typed) -> None:
    """Write a bundle's model card: metadata, tables, plots, and the commands that make it again."""
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.publish import run_card

    result = run_card(o, defaults_of, options_of)
    if o.json:
        print_json(result)
    else:
        for place in result["files"]:
            line(place)
        if result["files"]:
            print_next("push", o.bundle, o.repo or "ORG/NAME")
        else:
            prose(result["card"].rstrip())


@command(PushOptions)
def push(o: PushOptions, typed: Typed) -> None:
    """Publish a bundle with its card and plots on the Hugging Face hub, in one commit. Needs HF_TOKEN."""
    from kvcal.cli.defaults import defaults_of, options_of
    from kvcal.commands.publish import run_push

    result = run_push(o, defaults_of, options_of)
    if o.json:
        print_json(result)
    else:
        print_facts(result, wide=o.wide)
        print_next("pull", o.repo)


@command(PullOptions)
def pull(o: PullOptions, typed: Typed) -> None:
    """Fetch a bundle with its card and plots from the hub.

    Every hash is checked, the commit is printed and recorded.
    """
    from kvcal.commands.publish import run_pull

    result = run_pull(o)
    if o.json:
        print_json(result)
    else:
        print_facts(result, wide=o.wide)
        print_next("eval", result["bundle"])
