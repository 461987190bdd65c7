"""Pipeline parallelism with compressed activations.

``schedule.py`` lists the micro-batches that a stage takes, as data; ``simulate.py`` proves it. ``store.py`` is the
interface of stores, which keep the last message of every example in memory or in files (``message_stores.py``,
``store_file.py``, ``store_thread.py``); ``store_rows.py`` has bytes, stamps and checksums of rows. ``coding.py`` and
``activations.py`` code rows. ``cut.py`` is one end of a cut between stages, and makes steps of its holder transactions;
``messages.py`` has its messages, ``tensors.py`` their tensors. ``slice_step.py`` is a batch on its way through a stage,
``agreement.py`` has the agreements of ranks around a step. ``stage.py`` is a stage, ``tied.py`` has weights that stages
share. ``stage_checkpoints.py`` saves all stages after the same step, also after a death. ``split_learning.py`` has
server and clients of split learning, ``turns.py`` their turns.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicomp.pipeline.activations import Deltas as Deltas
    from mpicomp.pipeline.activations import Direct as Direct
    from mpicomp.pipeline.agreement import PipelineError as PipelineError
    from mpicomp.pipeline.message_stores import FileMessageStore as FileMessageStore
    from mpicomp.pipeline.message_stores import MessageStore as MessageStore
    from mpicomp.pipeline.schedule import SCHEDULES as SCHEDULES
    from mpicomp.pipeline.schedule import Action as Action
    from mpicomp.pipeline.schedule import Backward as Backward
    from mpicomp.pipeline.schedule import Forward as Forward
    from mpicomp.pipeline.schedule import Schedule as Schedule
    from mpicomp.pipeline.schedule import ScheduleError as ScheduleError
    from mpicomp.pipeline.schedule import gpipe as gpipe
    from mpicomp.pipeline.schedule import one_forward_one_backward as one_forward_one_backward
    from mpicomp.pipeline.split_learning import SplitClient as SplitClient
    from mpicomp.pipeline.split_learning import SplitServer as SplitServer
    from mpicomp.pipeline.stage import PipelineStage as PipelineStage
    from mpicomp.pipeline.stage_checkpoints import StageCheckpoints as StageCheckpoints
    from mpicomp.pipeline.stage_checkpoints import StageLost as StageLost
    from mpicomp.pipeline.store import Store as Store
    from mpicomp.pipeline.store_rows import differing as differing

# Loaded at their first use: schedules and stores need neither torch nor MPI.
_NAMES = {
    "activations": "Deltas Direct",
    "agreement": "PipelineError",
    "message_stores": "FileMessageStore MessageStore",
    "schedule": "SCHEDULES Action Backward Forward Schedule ScheduleError gpipe one_forward_one_backward",
    "split_learning": "SplitClient SplitServer",
    "stage": "PipelineStage",
    "stage_checkpoints": "StageCheckpoints StageLost",
    "store": "Store",
    "store_rows": "differing",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"mpicomp.pipeline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
