"""python -m tests.emulator.quick_interpreter ARGUMENTS: `python ARGUMENTS` (-m MODULE, -c TEXT or FILE) without work
that Triton's interpreter does for nothing: each operation builds its types, shapes and tables anew.

Without ARGUMENTS it runs what lines of standard input ask for (tests/support/interpreted.py), each in a fork of a
process that has imported everything.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

import numpy as np
import triton.language as tl
from triton.language import core, semantic
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
    _call_directly()
    _remember_types()
    _remember_results_types()
    _broadcast_in_numpy()


def _call_directly() -> None:
    """A builtin of the language is called without its check that `_semantic` is given, which the interpreter gives."""

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        fn = getattr(member, "__wrapped__", member)

        def given(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return fn(*args, **kwargs)

        scope.set_attr(obj, name, given)

    interpreter._patch_attr = patch


TENSORS = core.tensor, core.tensor
NUMBERS = {(core.tensor, kind) for kind in (int, float)} | {(kind, core.tensor) for kind in (int, float)}
BLOCKS: dict[tuple[int, ...], dict[str, Any]] = {}  # what a block_type has, by the id of its element type and its shape


def block_of(element: Any, shape: tuple[int, ...]) -> Any:
    """A block type, one for all tensors of that type."""
    key = id(element), *shape
    if key not in BLOCKS:
        made = core.block_type(element, list(shape))
        BLOCKS[key]["itself"] = made  # which holds its element type: ids stay unique
    return BLOCKS[key]["itself"]


def _remember_types() -> None:
    """A block's type, its shape and its dtype in NumPy are worked out once, not for every tensor: they never change."""
    new_block, unwrap, np_dtype = core.block_type.__init__, core._unwrap_if_constexpr, interpreter._get_np_dtype
    one = core.constexpr(1), core.tuple([])
    np_dtypes: dict[str, Any] = {}
    plain = {int, core.tensor, bool, float, str, type(None)}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), *[unwrapped(size) for size in shape]
        known = BLOCKS.get(key)
        if known is None:
            new_block(self, element_ty, shape)
            self.sizes = core.constexpr(self.numel), core.tuple([core.constexpr(size) for size in self.shape])
            self.plain_shape, self.itself = key[1:], self
            known = BLOCKS[key] = self.__dict__.copy()
        self.__dict__.update(known)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else one

    def numpy_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(element, tl.pointer_type):
            return np_dtype(element)
        if element.name not in np_dtypes:
            np_dtypes[element.name] = np_dtype(element)
        return np_dtypes[element.name]

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.block_type.with_element_ty = lambda self, scalar_ty: block_of(scalar_ty, self.plain_shape)
    interpreter._get_np_dtype = numpy_dtype
    for module in (core, semantic, interpreter):
        if hasattr(module, "_unwrap_if_constexpr"):
            module._unwrap_if_constexpr = unwrapped


def _remember_results_types() -> None:
    """Which type two operands' result has is asked once for each pair of types, and for each number beside a type; a
    value of the wanted type is not cast.
    """
    check, cast = semantic.TritonSemantic.binary_op_type_checking_impl, semantic.TritonSemantic.cast
    results: dict[tuple[int, int, bool], tuple[Any, ...]] = {}
    constants: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: Any = False, allow_rhs_ptr: Any = False,
        arithmetic_check: Any = True, div_or_mod: Any = False,
    ) -> Any:  # fmt: skip
        kinds = type(lhs), type(rhs)
        if arithmetic_check and kinds == TENSORS:
            one, other = lhs.dtype, rhs.dtype
            key = id(one), id(other), div_or_mod
            known = results.get(key)
            if known is None and not one.is_ptr() and not other.is_ptr():
                result = self.computation_type_impl(one, False, other, False, div_or_mod)
                known = results[key] = result, one, other  # these are held: ids stay unique
            if known is not None:
                result = known[0]
                lhs = lhs if one is result else self.cast(lhs, result)
                rhs = rhs if other is result else self.cast(rhs, result)
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and kinds in NUMBERS:
            first = kinds[0] is not core.tensor
            number, given = (lhs, rhs) if first else (rhs, lhs)
            beside = id(given.dtype), *kinds, number, div_or_mod
            known = constants.get(beside)
            if known is None and not given.dtype.is_ptr():
                made = check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, True, div_or_mod)  # says what is too large
                result = made[0].dtype
                known = constants[beside] = self.scalar_constant(number, result), result, given.dtype
            if known is not None:
                constant, result, _ = known
                given = given if given.dtype is result else self.cast(given, result)
                return self.broadcast_impl_value(*((constant, given) if first else (given, constant)))
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def cast_unless_alike(self: Any, value: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
        return value if value.dtype is dtype else cast(self, value, dtype, fp_downcast_rounding)

    semantic.TritonSemantic.binary_op_type_checking_impl = checked
    semantic.TritonSemantic.cast = cast_unless_alike


def _broadcast_in_numpy() -> None:
    """Operands become of one shape by one copy each, and not at all where they are."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value
    shapes: dict[tuple[Any, Any], Any] = {}

    def widened(given: Any, shape: tuple[int, ...]) -> Any:
        handle = given.handle
        data = np.empty(shape, interpreter._get_np_dtype(handle.dtype))
        data[...] = handle.data
        return core.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), block_of(given.dtype, shape))

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = getattr(lhs.type, "plain_shape", None), getattr(rhs.type, "plain_shape", None)
        if left == right:
            return lhs, rhs
        key = left, right
        if key not in shapes:
            made, _ = broadcast(self, lhs, rhs)  # says what does not go together
            shapes[key] = made.type.plain_shape
        shape = shapes[key]
        return lhs if left == shape else widened(lhs, shape), rhs if right == shape else widened(rhs, shape)

    def expanded(self: Any, arg: Any, axis: int) -> Any:
        data = arg.data
        return interpreter.TensorHandle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), arg.dtype.scalar)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_unless_alike
    interpreter.InterpreterBuilder.create_expand_dims = expanded


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


IMPORTED = ("transformers.models.llama.modeling_llama", "pytest", "tests.support.interpreted", "tests.support.schemes")


def serve() -> None:
    """A line asks as JSON for arguments, an environment and two files, of standard output and errors; one with the exit
    code answers.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run_forked(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run_forked(arguments: list[str], environment: dict[str, str], *files: str) -> NoReturn:
    code = 1
    try:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY), number)
        os.environ.clear()
        os.environ.update(environment)
        run(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not on to the next line


def main() -> None:
    quicken()
    if len(sys.argv) > 1:
        run(sys.argv[1:])
    else:
        serve()


if __name__ == "__main__":
    main()
