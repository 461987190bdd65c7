"""Codecs by name: compressors of methods with error feedback, and codecs of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from mpicomp.codecs.base import Codec
from mpicomp.codecs.clipping import Clipping
from mpicomp.codecs.levels import Levels
from mpicomp.codecs.options import require
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.codecs.random_sparsification import RandomSparsification
from mpicomp.codecs.rows import FullRows, LevelRows, RowCodec, RowQuantizer, TopRows
from mpicomp.codecs.scaled_sign import OneBit, TwoMeans
from mpicomp.codecs.ternary import Ternary
from mpicomp.codecs.top_k import TopK

_Made = TypeVar("_Made")
_WORDS = {"True": True, "False": False, "None": None}

COMPRESSORS: Mapping[str, Callable[..., Codec]] = MappingProxyType(
    {
        "one-bit": OneBit,
        "two-means": TwoMeans,
        "quantize": Quantizer,
        "ternary": Ternary,
        "clip": Clipping,
        "levels": Levels,
        "top-k": TopK,
        "random-sparsification": RandomSparsification,
    }
)
"""Maker of each codec for error feedback, by its name."""
ROW_CODECS: Mapping[str, Callable[..., RowCodec]] = MappingProxyType(
    {"full": FullRows, "quantize": RowQuantizer, "levels": LevelRows, "top": TopRows}
)
"""Maker of each codec of rows, by its name."""


def compressor(name_or_instance: str | Codec) -> Codec:
    """Return the codec of a name, or the instance itself.

    Options follow a colon, separated by commas: ``"one-bit:bucket=512,scale=l1"``. Integers, numbers, True, False and
    None are recognized; other values are text.

    Parameters
    ----------
    name_or_instance : str or Codec

    Returns
    -------
    Codec

    Raises
    ------
    ValueError
        The argument is neither a codec nor the name of one, or an option is unknown or out of range.

    Examples
    --------
    >>> from mpicomp.codecs import COMPRESSORS, compressor
    >>> compressor("top-k:rate=50")
    TopK(rate=50, chunk=None, double=False)
    >>> sorted(COMPRESSORS)[:3]
    ['clip', 'levels', 'one-bit']
    """
    if not isinstance(name_or_instance, str):
        fits = isinstance(name_or_instance, Codec) and not isinstance(name_or_instance, type)
        require(fits, "compressor", "a codec of mpicomp.codecs or the name of one", name_or_instance)
        return name_or_instance
    return _make_codec(COMPRESSORS, "compressor", name_or_instance)


def row_codec(name_or_instance: str | RowCodec) -> RowCodec:
    """Return the codec of rows of a name, with options as in `compressor`, or the instance itself.

    Parameters
    ----------
    name_or_instance : str or RowCodec

    Returns
    -------
    RowCodec

    Raises
    ------
    ValueError
        There is no codec of this name, or an option is unknown or out of range.

    Examples
    --------
    >>> from mpicomp.codecs import ROW_CODECS, row_codec
    >>> row_codec("levels:levels=16,bucket=64")
    LevelRows(levels=16, bucket=64)
    >>> sorted(ROW_CODECS)
    ['full', 'levels', 'quantize', 'top']
    """
    if isinstance(name_or_instance, str):
        return _make_codec(ROW_CODECS, "row codec", name_or_instance)
    return name_or_instance


def _make_codec(makers: Mapping[str, Callable[..., _Made]], kind: str, text: str) -> _Made:
    """Return the codec that a name with options stands for."""
    name, _, rest = text.partition(":")
    if name not in makers:
        raise ValueError(f"there is no {kind} {name!r}: choose one of {', '.join(makers)}")
    options = dict(_option(option, f"{kind} {text!r}") for option in rest.split(",")) if rest else {}
    try:
        return makers[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind} {text!r}: {error}") from error


def _option(text: str, codec: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{codec}: write options as name=value, not {text!r}")
    if value in _WORDS:
        return name, _WORDS[value]
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value
