"""`kvcal export`."""

from __future__ import annotations

from kvcal.cli.output import note, print_facts, print_json, print_next
from kvcal.cli.signature import Typed, command
from kvcal.commands.options import ExportOptions


@command(ExportOptions)
def export(o: ExportOptions, typed: Typed) -> None:
    """Write a new checkpoint with calibrated k_scale and v_scale of 8-bit caches, as compressed-tensors names them.

    Servers that load this convention store keys and values in 8 bits without code of ours. vLLM loads fp8, not int8.
    """
    from kvcal.commands.export import run_export

    result = run_export(o, note)
    if o.json:
        print_json(result)
    else:
        print_facts(result, wide=o.wide)
        if o.to == "fp8":
            print_next("serve", o.output, "--kv-cache-dtype", o.to, program="vllm")
        else:
            note(f"note: vLLM does not load scales for {o.to}, only for fp8; a server that does is needed")
