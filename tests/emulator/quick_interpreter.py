"""python -m tests.emulator.quick_interpreter ARGUMENTS: `python ARGUMENTS` (-m MODULE, -c TEXT or FILE) without work
that Triton's interpreter does for nothing: attention_cases then take 25 in place of 66 s.
"""

from __future__ import annotations

import dataclasses
import runpy
import sys
from typing import Any

from triton.runtime import interpreter


def quicken() -> None:
    """Patches the language for a call of a function once a launch and module, not at every call; leaves out checks of
    integer overflow, which without `debug` report nothing.
    """
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: dict[int, Any] = {}  # by the module's names

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def once(fn: Any) -> Any:
        key = id(fn.__globals__)
        if key not in patched:
            patched[key] = patch(fn)
        return patched[key]

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, once
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def run(arguments: list[str]) -> None:
    """python ARGUMENTS"""
    option, *rest = arguments
    if option == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif option == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *rest]
        runpy.run_path(option, run_name="__main__")


def main() -> None:
    quicken()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
