"""Pipeline parallelism with compressed activations.

``schedule.py`` says which micro-batch a stage takes next, as data; ``simulate.py`` proves it. ``store.py`` describes
what keeps the last message of every example, ``memory_store.py`` and ``file_store.py`` do so.
"""

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
from mpicomp.pipeline.stamps import differing
from mpicomp.pipeline.store import Store

__all__ = [
    "SCHEDULES",
    "Action",
    "Backward",
    "FileMessageStore",
    "Forward",
    "MessageStore",
    "Schedule",
    "ScheduleError",
    "Store",
    "differing",
    "gpipe",
    "one_forward_one_backward",
]
