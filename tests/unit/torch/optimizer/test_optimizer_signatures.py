"""Signatures of the optimizers of their own: options, order and defaults are a contract."""

from __future__ import annotations

import inspect

import pytest

import mpicomp.torch

COMMON = {"comm": None, "named_parameters": None, "bucket_mb": 25, "seed": 0}
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}
SIGNATURES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "OneBitAdam": (
        ADAM,
        {"decoupled_weight_decay": False, "bits": 1, "warmup_steps": "auto", "compressor": None, "per_node": None}
        | {"preconditioned": True, **COMMON},
    ),
    "ZeroOneAdam": (
        ADAM,
        {"decoupled_weight_decay": True, "bits": 1, "warmup_steps": 100_000, "variance_doubling": 16}
        | {"local_doubling": 32_768, "most_local_steps": 16, "compressor": None, "per_node": None}
        | {"preconditioned": False, **COMMON},
    ),
    "OneBitLamb": (
        ADAM,
        {"decoupled_weight_decay": True, "max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0}
        | {"factor_min": 0.5, "factor_threshold": 0.1, "bits": 1, "warmup_steps": "auto", "compressor": None}
        | {"per_node": None, **COMMON},
    ),
    "DistributedLion": ({"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0}, {"merge": "vote", **COMMON}),
    "SignMuon": (
        {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0},
        {"orthogonalize": False, "merge": "vote", **COMMON},
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_options_have_their_places_and_defaults(name: str) -> None:
    parameters = [*inspect.signature(getattr(mpicomp.torch, name)).parameters.values()]
    positional, keywords = SIGNATURES[name]
    assert parameters[0].name == "params"
    assert [(one.name, one.default) for one in parameters[1:]] == [*(positional | keywords).items()]
    assert [one.name for one in parameters if one.kind is one.KEYWORD_ONLY] == [*keywords]
