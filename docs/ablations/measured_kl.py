"""The KL that `kvcal plan` expects: taken from recorded measurements, never typed by hand.

    python docs/ablations/measured_kl.py [--check]

Reads docs/ablations/guard/*.json (all models by one protocol) and, for schemes that these lack,
docs/ablations/methods-*.json of models with real weights. docs/ablations/served/*.json has what `kvcal eval --json`
said of bundles without windows, as servers pack every token. Writes kvcal/bench/planning/measured_kl.json; --check
writes nothing and fails where the file is another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parent
OUTPUT = HOME.parents[1] / "kvcal" / "bench" / "planning" / "measured_kl.json"
MODEL_TYPES = {"smollm2-135m": "llama", "qwen2.5-coder-0.5b": "qwen2", "gemma-3-270m": "gemma3_text"}
RENAMED = {"aqua-kv (default)": "aqua-kv"}  # rows of bundles; others of bundles are no scheme by a name
METHODS = ("methods-smollm2-135m.json", "methods-qwen25-coder-05b.json")


def rows_of_guard() -> Iterator[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    """(model, how it was measured, scheme, row)."""
    for path in sorted((HOME / "guard").glob("*.json")):
        measured = json.loads(path.read_text())
        settings = measured["settings"]
        how = {name: settings[name] for name in ("text", "windows", "length", "dtype")}
        how |= {"measured": measured["measured"], "file": f"docs/ablations/guard/{path.name}"}
        for row in measured["rows"]:
            name = RENAMED.get(row["name"], row["name"])
            if " " not in name:
                yield settings["model"], how, name, row


def rows_of_methods() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(model, scheme, row) of presets and pairs of codecs at their usual windows; a row names its file."""
    for file in METHODS:
        measured = json.loads((HOME / file).read_text())
        for text, row in measured["rows"].items():
            what = json.loads(text)
            if what["options"] or "keep" in what or "command" in what:
                continue
            name = what.get("preset") or f"{what['keys']}+{what['values']}"
            yield (
                measured["settings"]["model"],
                name,
                {
                    "kl": row["kl"],
                    "kl_se": row.get("kl_se"),
                    "bits": row["bits_per_value"],
                    "file": f"docs/ablations/{file}",
                },
            )


def rows_of_served() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(model, scheme, row), every token packed."""
    for path in sorted((HOME / "served").glob("*.json")):
        measured = json.loads(path.read_text())
        for run in measured["runs"]:
            for row in run["rows"]:
                se = row["kl_se"] if run["windows"] > 1 else None
                yield measured["model"], row["name"], {"kl": row["kl"], "kl_se": se, "bits": row["bits_per_value"]}


def collected() -> dict[str, Any]:
    models: dict[str, Any] = {}
    schemes: dict[str, dict[str, Any]] = {}
    for model, how, name, row in rows_of_guard():
        models[model] = {"model_type": MODEL_TYPES[model], **how}
        schemes.setdefault(name, {})[model] = {"kl": row["kl"], "kl_se": row.get("kl_se"), "bits": row["bits"]}
    from_guard = set(schemes)  # measured on all models in one way
    for model, name, row in rows_of_methods():
        if name not in from_guard:
            schemes.setdefault(name, {})[model] = row
    served: dict[str, Any] = {}
    for model, name, row in rows_of_served():
        served.setdefault(name, {})[model] = row
    return {"models": models, "schemes": dict(sorted(schemes.items())), "served": dict(sorted(served.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = json.dumps(collected(), indent=1) + "\n"
    if check and text != OUTPUT.read_text():
        sys.exit(f"{OUTPUT.name} is not what the recorded files give; run docs/ablations/measured_kl.py")
    if not check:
        OUTPUT.write_text(text)


if __name__ == "__main__":
    main()
