"""A short time slice for a thread that must answer messages soon, while others compute on its core.

Linux (from 6.12 on) shares a core by deadlines: who asks for shorter slices is let in sooner, and has no more of the
core than before. That needs no privilege. https://docs.kernel.org/scheduler/sched-eevdf.html
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SLICE_S = 0.0001  # the shortest that Linux grants; a thread has about 3 ms without
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355}  # numbers of the system call
_KEEP_POLICY = 0x08
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, utilization from and to
_LAYOUT = "=IIQiIQQQII"


def shorten_slices() -> bool:
    """Ask for short slices for the calling thread; False where the system has no way to ask, or refuses."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return False
    nice, size = os.getpriority(os.PRIO_PROCESS, 0), struct.calcsize(_LAYOUT)  # both calls mean the calling thread by 0
    wanted = struct.pack(_LAYOUT, size, 0, _KEEP_POLICY, nice, 0, int(SLICE_S * 1e9), 0, 0, 0, 0)
    system_call = ctypes.CDLL(None).syscall
    return bool(system_call(ctypes.c_long(number), ctypes.c_long(0), wanted, ctypes.c_ulong(0)) == 0)
