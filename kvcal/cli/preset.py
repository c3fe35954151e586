"""`kvcal preset`."""

from __future__ import annotations

from kvcal.cli.output import note, print_facts, print_json, print_next
from kvcal.cli.signature import Typed, command
from kvcal.pipeline.options import PresetOptions


@command(PresetOptions)
def preset(o: PresetOptions, typed: Typed) -> None:
    """Write a bundle for a method that needs no data: KIVI, SQuat, MixKVQ, InnerQ, TurboQuant, HIGGS, uniform, FP8, or
    any of their codecs together.
    """
    from kvcal.commands.preset import run_preset
    from kvcal.pipeline.scheme_file import with_recipe

    result = run_preset(with_recipe(o, typed), note, typed)
    if o.json:
        print_json(result)
    else:
        print_facts(result, wide=o.wide)
        print_next("eval", result["bundle"], "--model", o.model)
