"""Vectors as Numba values: the few operations the kernels need, compiled to LLVM vector instructions.

LLVM's auto-vectoriser turns neither "16 comparisons into 16 bits" nor a counter-based generator nor streaming stores
into good code, so the kernels say what they want. A ``Vec`` lives in registers; LLVM legalises any width for
any CPU, so nothing here names an instruction set.

Lanes: floats and masks have ``LANES`` = 16; random words and packed signs are ``WORDS`` = 4 words of 64 bits, or the
same as ``BYTES`` = 32 bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

LANES = 16
WORDS = 4
BYTES = 32
STACK = 64  # bytes


class Vec(types.Type):
    """Numba type of a register vector: `lanes` values of scalar type `dtype` (boolean: a mask)."""

    def __init__(self, dtype: Any, lanes: int) -> None:
        self.dtype, self.lanes = dtype, lanes
        super().__init__(name=f"Vec({dtype}, {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        """The type it has in registers."""
        widths = {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.boolean: ir.IntType(1)}
        return ir.VectorType(widths.get(self.dtype) or ir.IntType(self.dtype.bitwidth), self.lanes)


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


MASK = Vec(types.boolean, LANES)


def _typed(op: Callable[..., Any], result: Callable[[Vec], Vec]) -> None:
    @type_callable(op)
    def typer(context: Any) -> Callable[..., Vec | None]:
        def typed(a: Any, b: Any) -> Vec | None:
            return result(a) if isinstance(a, Vec) and a == b else None

        return typed


def _lower(op: Callable[..., Any], integer: str | None, floating: str | None) -> None:
    """Let ``a op b`` on two equal vectors emit the named llvmlite instruction."""
    _typed(op, lambda a: a)

    @lower_builtin(op, Vec, Vec)
    def lowered(context: Any, builder: Any, sig: Any, args: Any) -> Any:
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


def _lower_compare(op: Callable[..., Any], symbol: str) -> None:
    _typed(op, lambda a: Vec(types.boolean, a.lanes))

    @lower_builtin(op, Vec, Vec)
    def lowered(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if isinstance(sig.args[0].dtype, types.Float):
            return builder.fcmp_ordered(symbol, *args)
        return builder.icmp_unsigned(symbol, *args)


_lower_compare(operator.ge, ">=")
_lower_compare(operator.gt, ">")
_lower_compare(operator.lt, "<")
_lower_compare(operator.eq, "==")


def _align_stack(builder: Any) -> None:
    """Let the function that is being built begin its stack frame at a multiple of `STACK`.

    LLVM spills vectors to wherever the stack happens to be: in one process of twenty a vector that a loop spills lies
    across two pages, and the loop takes four times as long.
    """
    attributes = builder.function.attributes
    attributes.alignstack = STACK
    attributes.add("nounwind")  # which all of Numba's functions are; without any name llvmlite writes no attributes


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    _align_stack(builder)
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def _splat_to(lanes: int) -> Any:
    def typed(typingctx: Any, value: Any) -> Any:
        result = Vec(value, lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
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
def iota(typingctx: Any, start: Any) -> Any:
    """64-bit words start, start + 1, start + 2, start + 3."""
    result = Vec(types.uint64, WORDS)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        base = context.cast(builder, args[0], sig.args[0], types.uint64)
        return builder.add(_splat(builder, base, WORDS), ir.Constant(result.llvm, list(range(WORDS))))

    return result(start), codegen


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any, vector: Vec) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.llvm.as_pointer())


def _load_of(lanes: int) -> Any:
    def typed(typingctx: Any, array: Any, index: Any) -> Any:
        result = Vec(array.dtype, lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
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


def _store(streaming: bool) -> Any:
    def typed(typingctx: Any, array: Any, index: Any, vector: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
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


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order streaming stores before everything after: a message is not handed over half written."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def select(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """Lane by lane `a` where the mask is set, else `b`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(mask, a, b), codegen


@intrinsic
def to_bits(typingctx: Any, mask: Any) -> Any:
    """The lanes of a mask as the low bits of a uint64, lane 0 lowest."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.bitcast(args[0], ir.IntType(mask.lanes)), ir.IntType(64))

    return types.uint64(mask), codegen


@intrinsic
def count(typingctx: Any, counts: Any, mask: Any) -> Any:
    """Integers plus 1 in the lanes where the mask is set."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sub(args[0], builder.sext(args[1], counts.llvm))

    return counts(counts, mask), codegen


@intrinsic
def bit_count(typingctx: Any, word: Any) -> Any:
    """How many bits of a uint64 are 1."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(word), codegen


@intrinsic
def to_mask(typingctx: Any, word: Any, shift: Any) -> Any:
    """Bits shift .. shift + 15 of a uint64 as a mask."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shifted = builder.lshr(args[0], context.cast(builder, args[1], sig.args[1], types.uint64))
        return builder.bitcast(builder.trunc(shifted, ir.IntType(LANES)), MASK.llvm)

    return MASK(word, shift), codegen


@intrinsic
def absolute(typingctx: Any, vector: Any) -> Any:
    """|x| per lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.fabs.v{vector.lanes}f{vector.dtype.bitwidth}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector.llvm, [vector.llvm]), name)
        return builder.call(function, args)

    return vector(vector), codegen


@intrinsic
def widen(typingctx: Any, vector: Any) -> Any:
    """float32 or float64 lanes as float64 lanes."""
    result = Vec(types.float64, vector.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if vector.dtype == types.float64 else builder.fpext(args[0], result.llvm)

    return result(vector), codegen


@intrinsic
def fold(typingctx: Any, vector: Any) -> Any:
    """Sum of all lanes, halves first: (l0 + l8), ... then (l0 + l4), ...: one order on every machine."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes = args[0], vector.lanes
        add = builder.fadd if isinstance(vector.dtype, types.Float) else builder.add
        while lanes > 1:
            lanes //= 2
            i32 = ir.IntType(32)
            low = ir.Constant(ir.VectorType(i32, lanes), list(range(lanes)))
            high = ir.Constant(ir.VectorType(i32, lanes), list(range(lanes, 2 * lanes)))
            value = add(builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high))
        return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

    return vector.dtype(vector), codegen


@intrinsic
def to_integers(typingctx: Any, value: Any) -> Any:
    """The bits of a float, or of float lanes, as unsigned integers of the same width."""
    floats = value.dtype if isinstance(value, Vec) else value
    words = {types.float32: types.uint32, types.float64: types.uint64}[floats]
    result = Vec(words, value.lanes) if isinstance(value, Vec) else words

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], result.llvm if isinstance(result, Vec) else ir.IntType(words.bitwidth))

    return result(value), codegen


@intrinsic
def greatest(typingctx: Any, vector: Any) -> Any:
    """Largest of unsigned lanes."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value, lanes, i32 = args[0], vector.lanes, ir.IntType(32)
        while lanes > 1:
            lanes //= 2
            halves = [ir.Constant(ir.VectorType(i32, lanes), list(range(k, k + lanes))) for k in (0, lanes)]
            low, high = (builder.shuffle_vector(value, value, half) for half in halves)
            value = builder.select(builder.icmp_unsigned(">", low, high), low, high)
        return builder.extract_element(value, ir.Constant(i32, 0))

    return vector.dtype(vector), codegen


@intrinsic
def lane(typingctx: Any, low: Any, high: Any, index: Any) -> Any:
    """Lane `index` of the two vectors in a row."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.trunc(context.cast(builder, args[2], sig.args[2], types.intp), ir.IntType(32))
        every = ir.Constant(ir.VectorType(ir.IntType(32), 2 * low.lanes), list(range(2 * low.lanes)))
        return builder.extract_element(builder.shuffle_vector(args[0], args[1], every), at)

    return low.dtype(low, high, index), codegen


def _reinterpret(dtype: Any, lanes: int) -> Any:
    def typed(typingctx: Any, vector: Any) -> Any:
        result = Vec(dtype, lanes)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], result.llvm)

        return result(vector), codegen

    return intrinsic(typed)


#: The same 256 bits as 32 bytes, as 4 words.
as_bytes = _reinterpret(types.uint8, BYTES)
as_words = _reinterpret(types.uint64, WORDS)


@intrinsic
def lookup(typingctx: Any, table: Any, index: Any) -> Any:
    """table[index[i]] per byte; the table is 16 bytes, twice in a row; indices are below 16."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        half = ir.VectorType(ir.IntType(8), 16)
        shuffle = ir.FunctionType(half, [half, half])
        features = context.codegen().magic_tuple()[2]
        machine = builder.module.triple
        if "+avx2" in features:
            full = table.llvm
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(full, [full, full]), "llvm.x86.avx2.pshuf.b"
            )
            return builder.call(function, args)
        name = None
        if "+ssse3" in features:
            name = "llvm.x86.ssse3.pshuf.b.128"
        elif machine.startswith(("aarch64", "arm64")):
            name = "llvm.aarch64.neon.tbl1.v16i8"
        halves = [ir.Constant(ir.VectorType(i32, 16), list(range(k, k + 16))) for k in (0, 16)]
        tables, indices = ([builder.shuffle_vector(v, v, h) for h in halves] for v in args)
        if name is not None:
            function = cgutils.get_or_insert_function(builder.module, shuffle, name)
            found = [builder.call(function, pair) for pair in zip(tables, indices, strict=True)]
        else:
            found = []
            for one, at in zip(tables, indices, strict=True):
                value = ir.Constant(half, ir.Undefined)
                for lane in range(16):
                    position = builder.zext(builder.extract_element(at, ir.Constant(i32, lane)), i32)
                    byte = builder.extract_element(one, position)
                    value = builder.insert_element(value, byte, ir.Constant(i32, lane))
                found.append(value)
        return builder.shuffle_vector(*found, ir.Constant(ir.VectorType(i32, 32), list(range(32))))

    return index(table, index), codegen


@intrinsic
def as_lanes(typingctx: Any, low: Any, high: Any) -> Any:
    """Two vectors of 4 words as 16 unsigned numbers of 32 bits, each word's low half first."""
    result = Vec(types.uint32, LANES)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        every = ir.Constant(ir.VectorType(ir.IntType(32), 2 * WORDS), list(range(2 * WORDS)))
        return builder.bitcast(builder.shuffle_vector(*args, every), result.llvm)

    return result(low, high), codegen


@intrinsic
def to_float64(typingctx: Any, vector: Any) -> Any:
    """Unsigned integers as float64 lanes."""
    result = Vec(types.float64, vector.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.uitofp(args[0], result.llvm)

    return result(vector), codegen


@intrinsic
def to_byte_mask(typingctx: Any, word: Any, shift: Any) -> Any:
    """Bits shift .. shift + 31 of a uint64 as a mask of 32 lanes."""
    result = Vec(types.boolean, BYTES)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shifted = builder.lshr(args[0], context.cast(builder, args[1], sig.args[1], types.uint64))
        return builder.bitcast(builder.trunc(shifted, ir.IntType(BYTES)), result.llvm)

    return result(word, shift), codegen


@intrinsic
def to_floats(typingctx: Any, vector: Any, like: Any) -> Any:
    """Signed integers as lanes of `like`'s float type."""
    result = Vec(like, vector.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], result.llvm)

    return result(vector, like), codegen


@intrinsic
def to_uint32(typingctx: Any, vector: Any) -> Any:
    """Bytes, or float64 from 0 to 2^31 without what is behind the point, as lanes of 32 bits."""
    result = Vec(types.uint32, vector.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        convert = builder.fptosi if isinstance(vector.dtype, types.Float) else builder.zext
        return convert(args[0], result.llvm)

    return result(vector), codegen


@intrinsic
def to_uint8(typingctx: Any, vector: Any) -> Any:
    """The low byte of each lane."""
    result = Vec(types.uint8, vector.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.trunc(args[0], result.llvm)

    return result(vector), codegen


@intrinsic
def narrow(typingctx: Any, vector: Any, like: Any) -> Any:
    """float64 lanes rounded to `like`'s float type."""
    result = Vec(like, vector.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if like == types.float64 else builder.fptrunc(args[0], result.llvm)

    return result(vector, like), codegen
