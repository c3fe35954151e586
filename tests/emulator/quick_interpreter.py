"""python -m tests.emulator.quick_interpreter ARGUMENTS: `python ARGUMENTS` (-m MODULE, -c TEXT or FILE) without work
that Triton's interpreter does for nothing: each operation builds its types, shapes and tables anew.

Without ARGUMENTS it runs what lines of standard input ask for (tests/support/interpreted.py), each in a fork of a
process that has imported everything; so does tests.emulator.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

import kvcal_kernels
from tests.support.fork_server import exit_code


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
    _make_handles_directly()
    _compute_in_numpy()


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


RESULTS: dict[tuple[int, int, bool], tuple[Any, ...]] = {}
CONSTANTS: dict[tuple[Any, ...], tuple[Any, ...]] = {}


def _alike(self: Any, lhs: Any, rhs: Any, div_or_mod: bool = False) -> tuple[Any, Any] | None:
    """Two operands, a number maybe one of them, as tensors of the type that their result has, each in its own shape.

    None where that type is not known yet, or has to do with pointers.
    """
    kinds = type(lhs), type(rhs)
    if kinds == TENSORS:
        known = RESULTS.get((id(lhs.dtype), id(rhs.dtype), div_or_mod))
        if known is None:
            return None
        result = known[0]
        lhs = lhs if lhs.dtype is result else self.cast(lhs, result)
        return lhs, rhs if rhs.dtype is result else self.cast(rhs, result)
    if kinds not in NUMBERS:
        return None
    first = kinds[0] is not core.tensor
    number, given = (lhs, rhs) if first else (rhs, lhs)
    known = CONSTANTS.get((id(given.dtype), *kinds, number, div_or_mod))
    if known is None:
        return None
    constant, result, _ = known
    given = given if given.dtype is result else self.cast(given, result)
    return (constant, given) if first else (given, constant)


def _remember_results_types() -> None:
    """Which type two operands' result has is asked once for each pair of types, and for each number beside a type; a
    value of the wanted type is not cast.
    """
    check, cast = semantic.TritonSemantic.binary_op_type_checking_impl, semantic.TritonSemantic.cast

    def learn(self: Any, lhs: Any, rhs: Any, div_or_mod: bool, made: tuple[Any, Any]) -> None:
        """What `_alike` asks for; those that are named beside a result are held: ids stay unique."""
        kinds = type(lhs), type(rhs)
        if kinds == TENSORS and not lhs.dtype.is_ptr() and not rhs.dtype.is_ptr():
            result = self.computation_type_impl(lhs.dtype, False, rhs.dtype, False, div_or_mod)
            RESULTS[id(lhs.dtype), id(rhs.dtype), div_or_mod] = result, lhs.dtype, rhs.dtype
        elif kinds in NUMBERS:
            number, given = (lhs, rhs) if kinds[0] is not core.tensor else (rhs, lhs)
            if not given.dtype.is_ptr():
                constant, result = self.scalar_constant(number, made[0].dtype), made[0].dtype
                CONSTANTS[id(given.dtype), *kinds, number, div_or_mod] = constant, result, given.dtype

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: Any = False, allow_rhs_ptr: Any = False,
        arithmetic_check: Any = True, div_or_mod: Any = False,
    ) -> Any:  # fmt: skip
        if arithmetic_check and (both := _alike(self, lhs, rhs, div_or_mod)) is not None:
            return self.broadcast_impl_value(*both)
        made = check(
            self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )  # or says what is wrong
        if arithmetic_check:
            learn(self, lhs, rhs, div_or_mod, made)
        return made

    def cast_unless_alike(self: Any, value: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
        return value if value.dtype is dtype else cast(self, value, dtype, fp_downcast_rounding)

    semantic.TritonSemantic.binary_op_type_checking_impl = checked
    semantic.TritonSemantic.cast = cast_unless_alike


SHAPES: dict[tuple[Any, Any], tuple[int, ...] | None] = {}  # of the results of two shapes, None: that of a scalar


def _broadcast_in_numpy() -> None:
    """Operands become of one shape by one copy each, and not at all where they are."""
    broadcast = semantic.TritonSemantic.broadcast_impl_value

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
        if key not in SHAPES:
            made, _ = broadcast(self, lhs, rhs)  # says what does not go together
            SHAPES[key] = made.type.plain_shape
        shape = SHAPES[key]
        assert shape is not None
        return lhs if left == shape else widened(lhs, shape), rhs if right == shape else widened(rhs, shape)

    def expanded(self: Any, arg: Any, axis: int) -> Any:
        data = arg.data
        return interpreter.TensorHandle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), arg.dtype.scalar)

    semantic.TritonSemantic.broadcast_impl_value = broadcast_unless_alike
    interpreter.InterpreterBuilder.create_expand_dims = expanded


def _make_handles_directly() -> None:
    """What a tensor holds is not compared with its type, and has a dict of attributes where it is given one."""

    def handle(self: Any, data: Any, dtype: Any, attr: Any = NO_ATTRIBUTES) -> None:
        self.data, self.dtype = data, dtype
        if attr is not NO_ATTRIBUTES:
            self.attr = attr

    def set_attr(self: Any, key: Any, value: Any) -> None:
        self.attr = {**self.attr, key: value}

    interpreter.TensorHandle.attr = NO_ATTRIBUTES
    interpreter.TensorHandle.__init__, interpreter.TensorHandle.set_attr = handle, set_attr


NO_ATTRIBUTES: dict[Any, Any] = {}
FLOATS = {"fp16", "fp32", "fp64"}  # not bfloat16, which NumPy does not have
INTEGERS = {sign + width for sign in ("int", "uint") for width in ("8", "16", "32", "64")}
TRUTH = {"int1"}
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITS = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}
COMPARISONS = {
    "greater_than": np.greater, "greater_equal": np.greater_equal, "less_than": np.less, "less_equal": np.less_equal,
    "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip


def _compute_in_numpy() -> None:
    """Operands of one plain type go to NumPy as they are: it broadcasts without copies. All else goes the long way."""
    new = core.tensor, interpreter.TensorHandle

    def made(data: Any, dtype: Any, shape: Any) -> Any:
        tensor, handle = new
        return tensor(handle(data, dtype), dtype if shape is None else block_of(dtype, shape))

    def shape_of(self: Any, lhs: Any, rhs: Any) -> Any:
        """The shape of a result; as a side effect, operands that do not go together are an error."""
        left, right = getattr(lhs.type, "plain_shape", None), getattr(rhs.type, "plain_shape", None)
        if left == right:
            return left
        if (left, right) not in SHAPES:
            self.broadcast_impl_value(lhs, rhs)
        return SHAPES[left, right]

    def install(name: str, compute: Any, kinds: set[str], result: Any = None) -> None:
        long_way = getattr(semantic.TritonSemantic, name)

        def operation(self: Any, lhs: Any, rhs: Any, *more: Any, **named: Any) -> Any:
            both = _alike(self, lhs, rhs)
            if both is None or both[0].dtype is not both[1].dtype or both[0].dtype.name not in kinds:
                return long_way(self, lhs, rhs, *more, **named)
            one, other = both
            data = compute(one.handle.data, other.handle.data)
            return made(data, result or one.dtype, shape_of(self, one, other))

        setattr(semantic.TritonSemantic, name, operation)

    for name, compute in ARITHMETIC.items():
        install(name, compute, FLOATS | INTEGERS)
    for name, compute in BITS.items():
        install(name, compute, INTEGERS | TRUTH)
    for name, compute in COMPARISONS.items():
        install(name, compute, FLOATS | INTEGERS | TRUTH, tl.int1)
    expand, cast = semantic.TritonSemantic.expand_dims, semantic.TritonSemantic.cast

    def expand_dims(self: Any, value: Any, axis: Any) -> Any:
        if not value.type.is_block() or type(axis) is not int or axis < 0:
            return expand(self, value, axis)
        shape = value.type.plain_shape
        shape = *shape[:axis], 1, *shape[axis:]
        return made(value.handle.data.reshape(shape), value.dtype, shape)

    def is_plain(source: str, target: str) -> bool:
        """Whether a cast is one of NumPy's; from float16 to all but float32 there is a step between."""
        if target in INTEGERS:
            return source in INTEGERS | TRUTH | {"fp32", "fp64"}
        return target in FLOATS and source in FLOATS | INTEGERS | TRUTH and (source != "fp16" or target == "fp32")

    plain: dict[tuple[int, int], tuple[Any, ...]] = {}  # NumPy's type; the others are held: ids stay unique

    def cast_plainly(self: Any, value: Any, dtype: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = value.dtype, dtype.scalar
        if source is target or fp_downcast_rounding is not None:
            return cast(self, value, dtype, fp_downcast_rounding)
        key = id(source), id(target)
        if key not in plain:
            usual = not source.is_ptr() and not target.is_ptr() and is_plain(source.name, target.name)
            plain[key] = interpreter._get_np_dtype(target) if usual else None, source, target
        numpy_dtype = plain[key][0]
        if numpy_dtype is None:
            return cast(self, value, dtype, fp_downcast_rounding)
        return made(value.handle.data.astype(numpy_dtype), target, getattr(value.type, "plain_shape", None))

    semantic.TritonSemantic.expand_dims, semantic.TritonSemantic.cast = expand_dims, cast_plainly


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


IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "pytest",
    "tests.support.interpreted",
    "tests.support.schemes",
    "tests.artifacts.paths.test_fused",
)


def serve(imported: Iterable[str], prepare: Callable[[], None], run: Callable[[list[str]], None]) -> None:
    """A line asks as JSON for arguments, an environment and two files, of standard output and errors; one with the exit
    code answers.
    """
    for name in imported:
        importlib.import_module(name)
    prepare()
    gc.collect()
    gc.freeze()
    gc.disable()  # of what a program's few seconds leave little is garbage: looking for it takes a tenth of them
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run_forked(run, *json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _rewrite_kernels() -> None:
    """Rewrite every kernel's source as the interpreter needs it, once for all forks."""
    for module in pkgutil.walk_packages(kvcal_kernels.__path__, "kvcal_kernels."):
        for value in [*vars(importlib.import_module(module.name)).values()]:  # rewriting adds to them
            if isinstance(value, interpreter.InterpretedFunction) and value.fn.__module__ == module.name:
                value.rewrite()


def _run_forked(
    run: Callable[[list[str]], None], arguments: list[str], environment: dict[str, str], *files: str
) -> NoReturn:
    code = 1
    try:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY), number)
        os.environ.clear()
        os.environ.update(environment)
        run(arguments)
        code = 0
    except SystemExit as ended:
        code = exit_code(ended)
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
        serve(IMPORTED, _rewrite_kernels, run)


if __name__ == "__main__":
    main()
