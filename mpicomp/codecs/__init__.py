"""Codecs: values to bytes and back, one file a family."""

from mpicomp.codecs.base import Codec, Draw, Mergeable
from mpicomp.codecs.buckets import Bucketed
from mpicomp.codecs.clipping import Clipping
from mpicomp.codecs.compressors import COMPRESSORS, compressor
from mpicomp.codecs.counts import Counts
from mpicomp.codecs.elias import Elias
from mpicomp.codecs.one_bit import OneBit, TwoMeans
from mpicomp.codecs.quantizer import Quantizer, Ternary
from mpicomp.codecs.sign import Sign
from mpicomp.codecs.sparse import RandomSparsification, TopK
from mpicomp.codecs.stochastic_sign import StochasticSign

__all__ = [
    "COMPRESSORS",
    "Bucketed",
    "Clipping",
    "Codec",
    "Counts",
    "Draw",
    "Elias",
    "Mergeable",
    "OneBit",
    "Quantizer",
    "RandomSparsification",
    "Sign",
    "StochasticSign",
    "Ternary",
    "TopK",
    "TwoMeans",
    "compressor",
]
