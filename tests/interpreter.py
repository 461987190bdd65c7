"""Triton's interpreter without its repeated preparation, which takes most of the time of kernels on short vectors.

Before each kernel, and before each function that a kernel calls, the interpreter searches all names of Triton's
language for functions to replace. The replacements are always the same, so that one search is enough.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace


@cache
def replace_language_once() -> None:
    """Have the interpreter replace Triton's language at its first kernel, for good. No effect without Triton."""
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    replace = interpreter._patch_lang

    @cache
    def replace_all() -> SimpleNamespace:
        replace(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = lambda function: replace_all()
