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
Typed: TypeAlias = "tuple[Signature, Codegen]"
"""Result of an intrinsic's typing function."""

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


def _typed(op: Operator, result: Callable[[Vec], Vec]) -> None:
    @type_callable(op)
    def typer(context: TypingContext) -> Callable[[types.Type, types.Type], Vec | None]:
        def typed(a: types.Type, b: types.Type) -> Vec | None:
            return result(a) if isinstance(a, Vec) and a == b else None

        return typed


def _lower(op: Operator, integer: str | None, floating: str | None) -> None:
    """Compile ``a op b`` of two vectors of one type to the named llvmlite instruction."""
    _typed(op, lambda a: a)

    @lower_builtin(op, Vec, Vec)
    def lowered(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        name = floating if isinstance(sig.args[0].dtype, types.Float) else integer
        assert name is not None
        return getattr(builder, name)(*args)


_lower(operator.add, "add", "fadd")
_lower(operator.sub, "sub", "fsub")
_lower(operator.mul, "mul", "fmul")
_lower(operator.and_, "and_", None)
_lower(operator.or_, "or_", None)
_lower(operator.xor, "xor", None)
_lower(operator.rshift, "lshr", None)
_lower(operator.lshift, "shl", None)


def _lower_compare(op: Operator, symbol: str) -> None:
    _typed(op, lambda a: Vec(types.boolean, a.lanes))

    @lower_builtin(op, Vec, Vec)
    def lowered(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
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


def _splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    _align_stack(builder)
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _splat_to(lanes: int) -> Intrinsic:
    def typed(typingctx: TypingContext, value: types.Type) -> Typed:
        result = Vec(value, lanes)

        def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
            return _splat(builder, args[0], lanes)

        return result(value), codegen

    return intrinsic(typed)


#: The scalar in all 16 lanes.
splat = _splat_to(LANES)
#: The 64-bit word in all 4 lanes.
splat_word = _splat_to(WORDS)
#: The byte, or another number, in all 32 lanes.
splat_byte = _splat_to(BYTES)


@intrinsic
def splat_like(typingctx: TypingContext, value: types.Type, vector: Vec) -> Typed:
    """Return the scalar in as many lanes as a vector has."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        return _splat(builder, args[0], vector.lanes)

    return vector(value, vector), codegen


@intrinsic
def iota(typingctx: TypingContext, start: types.Type) -> Typed:
    """Return 64-bit words start, start + 1, start + 2, start + 3."""
    result = Vec(types.uint64, WORDS)

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        base = context.cast(builder, args[0], sig.args[0], types.uint64)
        return builder.add(_splat(builder, base, WORDS), ir.Constant(result.llvm, list(range(WORDS))))

    return result(start), codegen


def _pointer(
    context: BaseContext, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value, index: ir.Value, vector: Vec
) -> ir.Value:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.llvm.as_pointer())


def _load_of(lanes: int) -> Intrinsic:
    def typed(typingctx: TypingContext, array: types.Array, index: types.Type) -> Typed:
        result = Vec(array.dtype, lanes)

        def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
            _align_stack(builder)
            at = context.cast(builder, args[1], sig.args[1], types.intp)
            pointer = _pointer(context, builder, sig.args[0], args[0], at, result)
            return builder.load(pointer, align=array.dtype.bitwidth // 8)

        return result(array, index), codegen

    return intrinsic(typed)


#: 16 elements of an array from an index on; any alignment. Likewise 4 words, 32 bytes.
load = _load_of(LANES)
load_words = _load_of(WORDS)
load_bytes = _load_of(BYTES)


def _store(streaming: bool) -> Callable[[TypingContext, types.Array, types.Type, Vec], Typed]:
    def typed(typingctx: TypingContext, array: types.Array, index: types.Type, vector: Vec) -> Typed:
        def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
            _align_stack(builder)
            at = context.cast(builder, args[1], sig.args[1], types.intp)
            pointer = _pointer(context, builder, sig.args[0], args[0], at, vector)
            instruction = builder.store(args[2], pointer, align=32 if streaming else array.dtype.bitwidth // 8)
            if streaming:
                one = ir.Constant(ir.IntType(32), 1)
                instruction.set_metadata("nontemporal", builder.module.add_metadata([one]))
            return context.get_dummy_value()

        return types.none(array, index, vector), codegen

    return typed


store = intrinsic(_store(streaming=False))
#: Store past the caches. The address must be a multiple of 32 bytes.
stream = intrinsic(_store(streaming=True))


@njit(nogil=True, inline="always")
def put(array, index, vector, streaming):
    """Store, or with `streaming` store past the caches; the kernel must then end with a `fence`."""
    if streaming:
        stream(array, index, vector)
    else:
        store(array, index, vector)


@intrinsic
def fence(typingctx: TypingContext) -> Typed:
    """Order streaming stores before all later accesses, so that no message is sent half written."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def select(typingctx: TypingContext, mask: Vec, a: Vec, b: Vec) -> Typed:
    """Return `a` in the lanes where the mask is set, else `b`."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        return builder.select(*args)

    return a(mask, a, b), codegen


@intrinsic
def absolute(typingctx: TypingContext, vector: Vec) -> Typed:
    """Return |x| of each lane."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        name = f"llvm.fabs.v{vector.lanes}f{vector.dtype.bitwidth}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector.llvm, [vector.llvm]), name)
        return builder.call(function, args)

    return vector(vector), codegen
