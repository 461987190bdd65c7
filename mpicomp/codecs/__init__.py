"""Codecs: values to bytes and back, one file a family."""

from mpicomp.codecs.base import Codec, Draw, Mergeable
from mpicomp.codecs.bucketed import Bucketed
from mpicomp.codecs.clipping import Clipping
from mpicomp.codecs.elias_counts import Elias
from mpicomp.codecs.levels import Levels
from mpicomp.codecs.quantizer import Quantizer
from mpicomp.codecs.random_sparsification import RandomSparsification
from mpicomp.codecs.registry import COMPRESSORS, ROW_CODECS, compressor, row_codec
from mpicomp.codecs.rows import FullRows, LevelRows, RowQuantizer, TopRows
from mpicomp.codecs.scaled_sign import OneBit, TwoMeans
from mpicomp.codecs.shared_selection import SharedSelection
from mpicomp.codecs.sign import Sign
from mpicomp.codecs.sparse_levels import SparseLevels
from mpicomp.codecs.stochastic_sign import StochasticSign
from mpicomp.codecs.ternary import Ternary
from mpicomp.codecs.top_k import TopK
from mpicomp.codecs.vote_counts import Counts

__all__ = [
    "COMPRESSORS", "ROW_CODECS", "Bucketed", "Clipping", "Codec", "Counts", "Draw", "Elias", "FullRows", "LevelRows",
    "Levels", "Mergeable", "OneBit", "Quantizer", "RandomSparsification", "RowQuantizer", "SharedSelection", "Sign",
    "SparseLevels", "StochasticSign", "Ternary", "TopK", "TopRows", "TwoMeans", "compressor", "row_codec",
]  # fmt: skip
