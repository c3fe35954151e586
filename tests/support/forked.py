"""Functions in a fork of the testing process, for what changes a process for good: a fresh one imports for 5 s."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable

from tests import conftest


def printed(main: Callable[[], object]) -> str:
    """What a function prints in a fork, in which `torch.empty` is torch's own again. CUDA works in no fork."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            code = 1
            try:
                conftest._patches.undo()
                sys.stdout, sys.stderr = out, errors
                main()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                errors.flush()
                os._exit(code)  # not into pytest
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        assert ended == 0, errors.read()
        return out.read()
