"""Codecs for methods with error feedback, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from mpicomp.codecs.base import Codec
from mpicomp.codecs.clipping import Clipping
from mpicomp.codecs.options import require
from mpicomp.codecs.quantizer import Quantizer, Ternary
from mpicomp.codecs.scaled_sign import OneBit, TwoMeans
from mpicomp.codecs.top_k import RandomSparsification, TopK

_WORDS = {"True": True, "False": False, "None": None}

COMPRESSORS: Mapping[str, Callable[..., Codec]] = MappingProxyType(
    {
        "one-bit": OneBit,
        "two-means": TwoMeans,
        "quantize": Quantizer,
        "ternary": Ternary,
        "clip": Clipping,
        "top-k": TopK,
        "random-sparsification": RandomSparsification,
    }
)
"""Maker of each codec for error feedback, by its name."""


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
    ['clip', 'one-bit', 'quantize']
    """
    if not isinstance(name_or_instance, str):
        fits = isinstance(name_or_instance, Codec) and not isinstance(name_or_instance, type)
        require(fits, "compressor", "a codec of mpicomp.codecs or the name of one", name_or_instance)
        return name_or_instance
    name, _, rest = name_or_instance.partition(":")
    if name not in COMPRESSORS:
        raise ValueError(f"there is no compressor {name!r}: choose one of {', '.join(COMPRESSORS)}")
    options = dict(_option(text, name_or_instance) for text in rest.split(",")) if rest else {}
    try:
        return COMPRESSORS[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"compressor {name_or_instance!r}: {error}") from error


def _option(text: str, whole: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"compressor {whole!r}: write options as name=value, not {text!r}")
    if value in _WORDS:
        return name, _WORDS[value]
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            pass
    return name, value
