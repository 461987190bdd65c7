"""Decorator that compiles a kernel with Numba at its first call, once for all processes of a machine."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from numba import njit
from numba.core import sigutils
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

from mpicomp.kernels.cache_folder import CACHE

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

Function: TypeAlias = Callable[..., Any]


class _KernelCache(_Cache):
    """Store of a function's compiled forms, with Numba's interface: a file for each, in the folder of `CACHE`.

    Numba's own cache has an index besides these files. It is rewritten without a lock, so that two processes may give
    one name to two forms.
    """

    def __init__(self, function: Function) -> None:
        self.name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"

    @property
    def cache_path(self) -> str:
        return str(CACHE.places[0])

    def file_of(self, signature: Signature) -> str:
        """Return the name of the file of one compiled form; the folder stands for all else that it depends on."""
        return f"{self.name}-{hashlib.sha256(str(signature).encode()).hexdigest()[:20]}.nbc"

    def load_overload(self, sig: Signature, target_context: BaseContext) -> CompileResult | None:
        target_context.refresh()
        content = CACHE.read(self.file_of(sig))
        if content is None:
            return None
        try:
            signature, reduced = pickle.loads(content)
            if signature != str(sig):
                return None
            return CompileResult._rebuild(target_context, *reduced)
        except Exception:  # noqa: BLE001 - a truncated file is written again
            return None

    def save_overload(self, sig: Signature, data: CompileResult) -> None:
        CACHE.write(self.file_of(sig), dumps((str(sig), data._reduce())))

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        pass

    def flush(self) -> None:
        pass


def kernel(function: Function) -> Any:
    """Compile a function when it is first called with arguments of some types; it releases the interpreter's lock.

    Of the processes that share a cache one compiles, while the others wait for it.
    """
    dispatcher = njit(nogil=True)(function)
    cache = dispatcher._cache = _KernelCache(function)
    compile_or_load = dispatcher.compile

    def compile_once(sig: Signature) -> Any:
        arguments, _ = sigutils.normalize_signature(sig)
        if tuple(arguments) in dispatcher.overloads:
            return compile_or_load(sig)
        file = cache.file_of(sig)
        with global_compiler_lock, CACHE.only_one(cache.name, lambda: CACHE.has(file)):
            return compile_or_load(sig)

    dispatcher.compile = compile_once
    return dispatcher
