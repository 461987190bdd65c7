"""Operations on whole vectors: conversion of lanes, masks, reductions, shuffles and table lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mpicomp.kernels.cpu.simd import BYTES, LANES, WORDS, Intrinsic, Values, Vec, instruction

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

Emit: TypeAlias = Callable[[ir.IRBuilder, ir.Value, ir.Type], ir.Value]
"""Emits the conversion of a value to a type."""


def _conversion(result: Callable[..., Vec], emit: Emit) -> Intrinsic:
    """Make the conversion of a vector to a type; see `instruction`."""

    @instruction(result)
    def convert(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        return emit(builder, args[0], sig.return_type.llvm)

    return convert


def _widen(builder: ir.IRBuilder, value: ir.Value, result: ir.Type) -> ir.Value:
    return value if value.type == result else builder.fpext(value, result)


def _narrow(builder: ir.IRBuilder, value: ir.Value, result: ir.Type) -> ir.Value:
    return value if value.type == result else builder.fptrunc(value, result)


def _to_uint32(builder: ir.IRBuilder, value: ir.Value, result: ir.Type) -> ir.Value:
    convert = builder.zext if isinstance(value.type.element, ir.IntType) else builder.fptosi
    return convert(value, result)


#: float32 or float64 lanes as float64 lanes.
widen = _conversion(lambda vector: Vec(types.float64, vector.lanes), _widen)
#: float64 lanes rounded to the number's float type.
narrow = _conversion(lambda vector, like: Vec(like, vector.lanes), _narrow)
#: Unsigned integers as float64 lanes.
to_float64 = _conversion(lambda vector: Vec(types.float64, vector.lanes), ir.IRBuilder.uitofp)
#: Signed integers as lanes of the number's float type.
to_floats = _conversion(lambda vector, like: Vec(like, vector.lanes), ir.IRBuilder.sitofp)
#: Bytes, or float64 from 0 to 2^31 rounded down, as lanes of 32 bits.
to_uint32 = _conversion(lambda vector: Vec(types.uint32, vector.lanes), _to_uint32)
#: The low byte of each lane.
to_uint8 = _conversion(lambda vector: Vec(types.uint8, vector.lanes), ir.IRBuilder.trunc)
#: The same 256 bits as 32 bytes, as 4 words.
as_bytes = _conversion(lambda vector: Vec(types.uint8, BYTES), ir.IRBuilder.bitcast)
as_words = _conversion(lambda vector: Vec(types.uint64, WORDS), ir.IRBuilder.bitcast)
#: 8 words as 16 unsigned numbers of 32 bits, each word's low half first.
as_lanes = _conversion(lambda vector: Vec(types.uint32, LANES), ir.IRBuilder.bitcast)


@instruction(lambda mask: types.uint64)
def to_bits(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return the lanes of a mask as the low bits of a uint64, lane 0 lowest."""
    return builder.zext(builder.bitcast(args[0], ir.IntType(sig.args[0].lanes)), ir.IntType(64))


def _emit_mask(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    mask = sig.return_type
    shifted = builder.lshr(args[0], context.cast(builder, args[1], sig.args[1], types.uint64))
    return builder.bitcast(builder.trunc(shifted, ir.IntType(mask.lanes)), mask.llvm)


#: Bits shift .. shift + 15 of a uint64 as a mask; likewise 32 bits, from shift on.
to_mask = instruction(lambda word, shift: Vec(types.boolean, LANES))(_emit_mask)
to_byte_mask = instruction(lambda word, shift: Vec(types.boolean, BYTES))(_emit_mask)


@instruction(lambda counts, mask: counts)
def count(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Add 1 to integers in the lanes where the mask is set."""
    return builder.sub(args[0], builder.sext(args[1], sig.return_type.llvm))


@instruction(lambda word: types.uint64)
def bit_count(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Count the bits of a uint64 that are 1."""
    return builder.ctpop(args[0])


def _integers_of(value: types.Type) -> types.Type:
    words = {types.float32: types.uint32, types.float64: types.uint64}
    return Vec(words[value.dtype], value.lanes) if isinstance(value, Vec) else words[value]


@instruction(_integers_of)
def to_integers(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return the bits of a float, or of float lanes, as unsigned integers of the same width."""
    result = sig.return_type
    return builder.bitcast(args[0], result.llvm if isinstance(result, Vec) else ir.IntType(result.bitwidth))


@instruction(lambda word, like: like)
def from_bits(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return the float of type `like` with the bits of an unsigned integer of the same width."""
    return builder.bitcast(args[0], args[1].type)


def _shuffle(order: list[int]) -> Intrinsic:
    """Make the selection of lanes from two vectors of one type, joined."""

    @instruction(lambda low, high: Vec(low.dtype, len(order)))
    def shuffle(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
        return builder.shuffle_vector(*args, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))

    return shuffle


#: Two vectors of 4 words as one of 8.
join = _shuffle([*range(2 * WORDS)])
#: The first halves of two vectors of 8 words, and their second halves.
first_halves = _shuffle([0, 1, 2, 3, 8, 9, 10, 11])
second_halves = _shuffle([4, 5, 6, 7, 12, 13, 14, 15])


@instruction(lambda low, high, index: low.dtype)
def lane(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return lane `index` of two vectors, joined."""
    lanes = 2 * sig.args[0].lanes
    at = builder.trunc(context.cast(builder, args[2], sig.args[2], types.intp), ir.IntType(32))
    every = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(lanes)))
    return builder.extract_element(builder.shuffle_vector(args[0], args[1], every), at)


def _reduce(
    builder: ir.IRBuilder, value: ir.Value, lanes: int, join: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Reduce all lanes, halves first, in one order on every machine: (l0, l8), ... then (l0, l4), ..."""
    i32 = ir.IntType(32)
    while lanes > 1:
        lanes //= 2
        halves = [ir.Constant(ir.VectorType(i32, lanes), list(range(k, k + lanes))) for k in (0, lanes)]
        value = join(*(builder.shuffle_vector(value, value, half) for half in halves))
    return builder.extract_element(value, ir.Constant(i32, 0))


@instruction(lambda vector: vector.dtype)
def fold(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return the sum of all lanes, halves first."""
    add = builder.fadd if isinstance(sig.return_type, types.Float) else builder.add
    return _reduce(builder, args[0], sig.args[0].lanes, add)


@instruction(lambda vector: vector.dtype)
def greatest(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return the largest of unsigned lanes."""

    def larger(low: ir.Value, high: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_unsigned(">", low, high), low, high)

    return _reduce(builder, args[0], sig.args[0].lanes, larger)


@instruction(lambda table, index: index)
def lookup(context: BaseContext, builder: ir.IRBuilder, sig: Signature, args: Values) -> ir.Value:
    """Return table[index[i]] of each byte; the table is 16 bytes, twice in a row; indices are below 16."""
    i32 = ir.IntType(32)
    half = ir.VectorType(ir.IntType(8), 16)
    shuffle = ir.FunctionType(half, [half, half])
    features = context.codegen().magic_tuple()[2]
    machine = builder.module.triple
    if "+avx2" in features:
        full = sig.return_type.llvm
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
