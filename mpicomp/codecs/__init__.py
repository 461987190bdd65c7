"""Codecs: values to bytes and back, one file a family."""

from mpicomp.codecs.base import Codec, Draw, Mergeable
from mpicomp.codecs.counts import Counts
from mpicomp.codecs.elias import Elias
from mpicomp.codecs.sign import Sign
from mpicomp.codecs.stochastic_sign import StochasticSign

__all__ = ["Codec", "Counts", "Draw", "Elias", "Mergeable", "Sign", "StochasticSign"]
