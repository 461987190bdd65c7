"""Codecs of rows: matrices to bytes and back, for activations and their gradients in pipelines."""

from mpicomp.codecs.rows.full_rows import FullRows
from mpicomp.codecs.rows.level_rows import LevelRows
from mpicomp.codecs.rows.row_codec import DeltaCodec, Keys, RowCodec, Rows
from mpicomp.codecs.rows.row_quantizer import RowQuantizer
from mpicomp.codecs.rows.top_rows import TopRows

__all__ = ["DeltaCodec", "FullRows", "Keys", "LevelRows", "RowCodec", "RowQuantizer", "Rows", "TopRows"]
