"""Pipeline parallelism with compressed activations.

``schedule.py`` lists the micro-batches that a stage takes, as data; ``simulate.py`` proves it. ``store.py`` is the
interface of stores, which keep the last message of every example in memory (``memory_store.py``) or in files
(``file_store.py``, ``store_file.py``, ``store_thread.py``); ``store_rows.py`` has bytes, stamps and checksums of rows.
``coding.py`` and ``activations.py`` code rows. ``cut.py`` is one end of a cut between stages, ``messages.py`` its
messages, ``tensors.py`` their tensors. ``slice_step.py`` is a batch on its way through a stage, ``cut_holder.py`` makes
its steps transactions, ``agreement.py`` has the agreements of ranks around a step. ``stage.py`` is a stage, ``tied.py``
has weights that stages share. ``split_learning.py`` has server and clients of split learning, ``turns.py`` their turns.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicomp.pipeline.activations import Deltas, Direct
    from mpicomp.pipeline.agreement import PipelineError
    from mpicomp.pipeline.file_store import FileMessageStore
    from mpicomp.pipeline.memory_store import MessageStore
    from mpicomp.pipeline.schedule import (
        SCHEDULES,
        Action,
        Backward,
        Forward,
        Schedule,
        ScheduleError,
        gpipe,
        one_forward_one_backward,
    )
    from mpicomp.pipeline.split_learning import SplitClient, SplitServer
    from mpicomp.pipeline.stage import PipelineStage
    from mpicomp.pipeline.store import Store
    from mpicomp.pipeline.store_rows import differing

# Loaded at their first use: schedules and stores need neither torch nor MPI.
_HOMES = {
    "SCHEDULES": "schedule",
    "Action": "schedule",
    "Backward": "schedule",
    "Deltas": "activations",
    "Direct": "activations",
    "FileMessageStore": "file_store",
    "Forward": "schedule",
    "MessageStore": "memory_store",
    "PipelineError": "agreement",
    "PipelineStage": "stage",
    "Schedule": "schedule",
    "ScheduleError": "schedule",
    "SplitClient": "split_learning",
    "SplitServer": "split_learning",
    "Store": "store",
    "differing": "store_rows",
    "gpipe": "schedule",
    "one_forward_one_backward": "schedule",
}

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "Deltas",
    "Direct",
    "FileMessageStore",
    "Forward",
    "MessageStore",
    "PipelineError",
    "PipelineStage",
    "Schedule",
    "ScheduleError",
    "SplitClient",
    "SplitServer",
    "Store",
    "differing",
    "gpipe",
    "one_forward_one_backward",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mpicomp.pipeline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
