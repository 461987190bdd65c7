"""Run the examples in the docstrings of codecs."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import walk_packages

import pytest

import mpicomp.codecs

MODULES = sorted(found.name for found in walk_packages(mpicomp.codecs.__path__, "mpicomp.codecs."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_show(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0
