"""Vectors as Numba values: the few operations of the kernels, compiled to LLVM vector instructions.

LLVM's auto-vectoriser makes no good code of "16 comparisons into 16 bits", of a counter-based generator or of streaming
stores, so the kernels use vectors explicitly. A ``Vec`` lives in registers. LLVM legalises any width for any CPU, so
nothing here names an instruction set.

Lanes: floats and masks have ``LANES`` = 16; random words and packed signs are ``WORDS`` = 4 words of 64 bits, or the
same as ``BYTES`` = 32 bytes. Conversions, masks and reductions are in `mpicomp.kernels.cpu.lanes`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.datamodel import DataModelManager
    from numba.core.typing.context import BaseContext as TypingContext
    from numba.core.typing.templates import Signature

Intrinsic: TypeAlias = Any
"""Function for kernels; Numba compiles its calls."""
Operator: TypeAlias = Callable[[Any, Any], object]
Values: TypeAlias = Sequence[ir.Value]
Codegen: TypeAlias = "Callable[[BaseContext, ir.IRBuilder, Signature, Values], ir.Value]"
"""Function that emits the code of a call."""

LANES = 16
WORDS = 4
BYTES = 32
STACK = 64  # bytes


class Vec(types.Type):
    """Numba type of a register vector: `lanes` values of scalar type `dtype` (boolean: a mask)."""

    def __init__(self, dtype: types.Type, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vec({dtype}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        """LLVM type of the vector."""
        widths = {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.boolean: ir.IntType(1)}
        return ir.VectorType(widths.get(self.dtype) or ir.IntType(self.dtype.bitwidth), self.lanes)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: DataModelManager, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


def _type(op: Operator, result: Callable[[Vec], Vec]) -> None:
    @type_callable(op)
    def typer(context: TypingContext) -> Callable[[types.Type, types.Type], Vec | None]:
        def type_call_of(a: types.Type, b: types.Type) -> Vec | None:
            return result(a) if isinstance(a, Vec) and a == b else None

        return type_call_of


def _lower(op: Operator, integer: str | None, floating: str | None) -> None:
    """Compile ``a op b`` of two vectors of one type to the named llvmlite instruction."""
    _type(op, lambda a: a)

    @lower_builtin(op, Vec, Vec)
    def lower(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        name = floating if isinstance(sig.args[0].dtype, types.Float) else integer
        assert name is not None
        return getattr(builder, name)(*args)


_lower(operator.add, "add", "fadd")
_lower(operator.sub, "sub", "fsub")
_lower(operator.mul, "mul", "fmul")
_lower(operator.truediv, None, "fdiv")
_lower(operator.and_, "and_", None)
_lower(operator.or_, "or_", None)
_lower(operator.xor, "xor", None)
_lower(operator.rshift, "lshr", None)
_lower(operator.lshift, "shl", None)


def _lower_compare(op: Operator, symbol: str) -> None:
    _type(op, lambda a: Vec(types.boolean, a.lanes))

    @lower_builtin(op, Vec, Vec)
    def lower(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        if isinstance(sig.args[0].dtype, types.Float):
            return builder.fcmp_ordered(symbol, *args)
        return builder.icmp_unsigned(symbol, *args)


_lower_compare(operator.ge, ">=")
_lower_compare(operator.gt, ">")
_lower_compare(operator.lt, "<")
_lower_compare(operator.eq, "==")


def _align_stack(builder: ir.IRBuilder) -> None:
    """Align the stack frame of the function being built to `STACK`.

    LLVM spills vectors to the stack without regard to alignment. In one process of twenty, a vector that a loop spills
    would lie across two pages, and the loop would take four times as long.
    """
    attributes = builder.function.attributes
    attributes.alignstack = STACK
    attributes.add("nounwind")  # true of all functions of Numba; llvmlite writes no attributes unless one has a name


def instruction(result: Callable[..., types.Type]) -> Callable[[Codegen], Intrinsic]:
    """Make an intrinsic of a function that emits code; `result` returns the result's type for types of arguments."""

    def make(codegen: Codegen) -> Intrinsic:
        def type_call(typingctx: TypingContext, *arguments: types.Type) -> tuple[Signature, Codegen]:
            return result(*arguments)(*arguments), codegen

        # Numba folds the arguments of a call by this signature, without the typing context.
        own, named = signature(type_call), signature(result).parameters.values()
        typed: Any = type_call
        typed.__signature__ = own.replace(parameters=[own.parameters["typingctx"], *named])
        return intrinsic(typed)

    return make


def _splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    _align_stack(builder)
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _emit_splat(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    return _splat(builder, args[0], sig.return_type.lanes)


#: The scalar in all 16 lanes.
splat = instruction(lambda value: Vec(value, LANES))(_emit_splat)
#: The 64-bit word in all 4 lanes.
splat_word = instruction(lambda value: Vec(value, WORDS))(_emit_splat)
#: The byte, or another number, in all 32 lanes.
splat_byte = instruction(lambda value: Vec(value, BYTES))(_emit_splat)
#: The scalar in as many lanes as a vector, the second argument, has.
splat_like = instruction(lambda value, vector: vector)(_emit_splat)


@instruction(lambda start: Vec(types.uint64, WORDS))
def iota(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return 64-bit words start, start + 1, start + 2, start + 3."""
    base = context.cast(builder, args[0], sig.args[0], types.uint64)
    return builder.add(_splat(builder, base, WORDS), ir.Constant(sig.return_type.llvm, list(range(WORDS))))


def _pointer(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values, vector: Vec) -> ir.Value:
    """Emit the address of the vector in the array, the first argument, from the index on, the second one."""
    _align_stack(builder)
    index = context.cast(builder, args[1], sig.args[1], types.intp)
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [index]), vector.llvm.as_pointer())


def _emit_load(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    pointer = _pointer(context, builder, sig, args, sig.return_type)
    return builder.load(pointer, align=sig.args[0].dtype.bitwidth // 8)


#: 16 elements of an array from an index on; any alignment. Likewise 4 words, 32 bytes.
load = instruction(lambda array, index: Vec(array.dtype, LANES))(_emit_load)
load_words = instruction(lambda array, index: Vec(array.dtype, WORDS))(_emit_load)
load_bytes = instruction(lambda array, index: Vec(array.dtype, BYTES))(_emit_load)


@instruction(lambda array, index, vector: types.none)
def store(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Overwrite the elements of an array from an index on; any alignment."""
    builder.store(args[2], _pointer(context, builder, sig, args, sig.args[2]), align=sig.args[0].dtype.bitwidth // 8)
    return context.get_dummy_value()


@instruction(lambda array, index, vector: types.none)
def stream(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Store past the caches. The address must be a multiple of 32 bytes."""
    stored = builder.store(args[2], _pointer(context, builder, sig, args, sig.args[2]), align=32)
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    return context.get_dummy_value()


@njit(nogil=True, inline="always")
def put(array, index, vector, streaming):
    """Store, or with `streaming` store past the caches; the kernel must then end with a `fence`."""
    if streaming:
        stream(array, index, vector)
    else:
        store(array, index, vector)


@instruction(lambda: types.none)
def fence(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Order streaming stores before all later accesses, so that no message is sent half written."""
    builder.fence("seq_cst")
    return context.get_dummy_value()


@instruction(lambda mask, a, b: a)
def select(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return `a` in the lanes where the mask is set, else `b`."""
    return builder.select(*args)


@instruction(lambda vector: vector)
def absolute(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return |x| of each lane."""
    vector = sig.return_type
    name = f"llvm.fabs.v{vector.lanes}f{vector.dtype.bitwidth}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector.llvm, [vector.llvm]), name)
    return builder.call(function, args)


@instruction(lambda array, index: types.none)
def prefetch(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Load the cache line of an element ahead; the index may be out of range."""
    index = context.cast(builder, args[1], sig.args[1], types.intp)
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer, number, number, number]), "llvm.prefetch.p0i8"
    )
    builder.call(function, [builder.bitcast(builder.gep(data, [index]), pointer), *map(number, (0, 3, 1))])
    return context.get_dummy_value()
