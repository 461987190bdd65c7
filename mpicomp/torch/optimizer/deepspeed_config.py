"""Optimizers from the configuration files of DeepSpeed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from collectives.caller_warning import warn_caller
from collectives.quoting import nearest, one_line, shown
from mpicomp.algorithms import Dense
from mpicomp.torch.front_ends import given_communicator
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumOptimizer
from mpicomp.torch.one_bit_adam.one_bit_adam import OneBitAdam
from mpicomp.torch.one_bit_adam.one_bit_lamb import OneBitLamb
from mpicomp.torch.one_bit_adam.zero_one_adam import ZeroOneAdam
from mpicomp.torch.optimizer.distributed_optimizer import DistributedOptimizer

_BETAS = {"betas": "betas", "eps": "eps"}
_ADAM = {**_BETAS, "amsgrad": "amsgrad"}
_FREEZE = {**_BETAS, "freeze_step": "warmup_steps"}
_INTERVALS = {
    **_BETAS, "var_freeze_step": "warmup_steps", "var_update_scaler": "variance_doubling",
    "local_step_scaler": "local_doubling", "local_step_clipper": "most_local_steps",
}  # fmt: skip
_WHOLE = {*_FREEZE.values(), *_INTERVALS.values()} - {*_BETAS.values()}
_COEFFICIENTS = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
# the class, its names for DeepSpeed's keys, and defaults of DeepSpeed that differ
_METHODS: dict[str, tuple[type, Mapping[str, str], Mapping[str, Any]]] = {
    "onebitadam": (OneBitAdam, _FREEZE, {"warmup_steps": 100_000, "decoupled_weight_decay": True}),
    "zerooneadam": (ZeroOneAdam, _INTERVALS, {"local_doubling": 32_678}),
    "onebitlamb": (OneBitLamb, {**_FREEZE, **{key: key for key in _COEFFICIENTS}}, {"warmup_steps": 100_000}),
    "adam": (torch.optim.Adam, _ADAM, {"weight_decay": 0.0}),
    "adamw": (torch.optim.AdamW, _ADAM, {"weight_decay": 0.0}),
    "sgd": (torch.optim.SGD, {key: key for key in ("momentum", "dampening", "nesterov")}, {}),
}
_CURES = {
    "max_grad_norm": "clip by torch.nn.utils.clip_grad_norm_ before step()",
    "amsgrad": 'take type "Adam" or "AdamW"',
}
_NEAREST = {
    "lamb": "LAMB without bias correction is OneBitLamb whose freeze_step is never reached",
    "lion": "mpicomp.torch.DistributedLion(params, lr, betas, weight_decay, comm=comm), whose ranks merge signs",
    "muon": "mpicomp.torch.SignMuon(matrices, lr, comm=comm), or torch.optim.Muon in DistributedOptimizer",
}
# keys that DeepSpeed reads and ignores, or that have a counterpart elsewhere
_WITHOUT_EFFECT = ("eps_inside_sqrt", "cuda_aware", "comm_backend_name", "set_grad_none", "fused")
_OFF_BY_DEFAULT = ("fp16", "bf16", "amp")
_OFF = (None, False, 0, 0.0)
_SAME_BLOCKS = frozenset((
    "optimizer", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print", "wall_clock_breakdown",
    "dump_state", "tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger", "memory_breakdown",
    "activation_checkpointing", "aio", "checkpoint", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "disable_allgather", "seq_parallel_communication_data_type", "$schema",
))  # fmt: skip
_IN_THE_LOOP = {
    "gradient_clipping": "call torch.nn.utils.clip_grad_norm_(model.parameters(), {value}) before step()",
    "gradient_accumulation_steps": "call backward() {value} times, of losses divided by {value}, before step()",
    "scheduler": "make the scheduler of torch.optim.lr_scheduler that has the meaning of {value}",
    "bf16": "make the optimizer of the parameters of model.bfloat16(), which have float32 masters",
}
"""Cures of blocks that a training loop has to replace."""
_REFUSED = {
    "fp16": "leave it out and take bfloat16, which needs no loss scaling",
    "amp": "leave it out and take bfloat16, which needs no loss scaling",
    "zero_optimization": "leave it out, or take FSDP2 with mpicomp.torch.fsdp_hook, which shards the states",
}


def from_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any],
    params: ParamsT,
    comm: Communicator | None = None,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
) -> DistributedOptimizer | MomentumOptimizer[Any]:
    """Make the optimizer that the ``optimizer`` block of a DeepSpeed configuration describes.

    Types ``OneBitAdam``, ``ZeroOneAdam`` and ``OneBitLamb`` give the optimizers of these names; ``Adam``, ``AdamW`` and
    ``SGD`` those of ``torch.optim``, in `DistributedOptimizer` with dense sums. Blocks that your training loop has to
    replace (gradient_clipping, gradient_accumulation_steps, scheduler, bf16) give a warning with the cure; others that
    change the training, such as fp16 and zero_optimization, are refused.

    Parameters
    ----------
    config : path, str or mapping
        A JSON file, its text, or its content.
    params : iterable
        Parameters or groups, as of any torch optimizer.
    comm : Communicator, optional
        None makes one on all ranks of the job.
    named_parameters : iterable of (str, Tensor), optional
        ``model.named_parameters()``: names for error messages and states.

    Returns
    -------
    DistributedOptimizer, OneBitAdam, ZeroOneAdam or OneBitLamb
        Its ``step`` synchronizes the ranks.

    Raises
    ------
    ValueError
        Keys have no counterpart (names all of them, with the nearest thing), or the configuration cannot be read; the
        other ranks then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' optimizers differ.

    Notes
    -----
    As in DeepSpeed, type ``Adam`` is AdamW unless ``adam_w_mode`` is false, the weight decay is 0 unless it is given,
    and the 1-bit optimizers decouple it. `OneBitAdam` has bias corrections, which DeepSpeed's lacks.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import from_deepspeed
    >>> config = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 1000}}}
    >>> with mpicomp.Communicator() as comm:
    ...     optimizer = from_deepspeed(config, torch.nn.Linear(3, 1).parameters(), comm)
    >>> type(optimizer).__name__, optimizer.param_groups[0]["lr"]
    ('OneBitAdam', 0.0004)
    """
    comm = given_communicator(comm, "from_deepspeed")
    with comm.refusing("from_deepspeed", ValueError, TypeError, where=comm.here):
        read = _read(config)
        warnings, problems = _check_blocks(read, comm.size)
        kind, options = _translate(read.get("optimizer"), problems)
        if problems:
            raise ValueError(f"the DeepSpeed configuration has keys without counterpart: {'; '.join(problems)}")
        made = None if issubclass(kind, MomentumOptimizer) else kind(params, **options)
    for warning in warnings:
        warn_caller(f"{comm.here}: the DeepSpeed configuration has {warning}")
    if made is None:
        return cast("MomentumOptimizer[Any]", kind(params, **options, comm=comm, named_parameters=named_parameters))
    return DistributedOptimizer(made, Dense(), comm, named_parameters)


def _read(config: object) -> Mapping[str, Any]:
    """Return the content of a configuration."""
    if isinstance(config, str | os.PathLike):
        is_text = isinstance(config, str) and config.lstrip().startswith("{")
        try:
            config = json.loads(str(config) if is_text else Path(config).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"the DeepSpeed configuration cannot be read ({one_line(error)}); pass JSON") from None
    if not isinstance(config, Mapping):
        raise TypeError(f"the DeepSpeed configuration is {shown(config)}: pass a JSON file, its text or a dict")
    return config


def _check_blocks(config: Mapping[str, Any], ranks: int) -> tuple[list[str], list[str]]:
    """Return warnings and problems of the blocks besides the optimizer's."""
    warnings, problems = [], []
    batch, micro = (config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    passes = config.get("gradient_accumulation_steps")
    if isinstance(batch, int) and isinstance(micro, int) and micro > 0:
        passes = batch // (micro * ranks) if passes is None else passes
        if passes != "auto" and batch != micro * ranks * passes:
            problems.append(f"train_batch_size {batch} (write {micro} x {ranks} ranks x gradient_accumulation_steps)")
    for key, value in {**config, "gradient_accumulation_steps": passes}.items():
        in_use = _is_on(key, value)
        if key in _REFUSED and in_use:
            problems.append(f"{key} ({_REFUSED[key]})")
        elif in_use and not _is_ignored(key) and "auto" in (value.values() if isinstance(value, Mapping) else (value,)):
            problems.append(f"{key} {shown(value)} (write the value instead of 'auto')")
        elif key in _IN_THE_LOOP and in_use:
            text = value.get("type") if isinstance(value, Mapping) else value
            warnings.append(f"{key}, which your loop has to replace: {_IN_THE_LOOP[key].format(value=text)}")
        elif key not in _SAME_BLOCKS and key not in _IN_THE_LOOP and key not in _REFUSED and in_use:
            problems.append(f"{key} (leave it out)")
    return warnings, problems


def _is_ignored(key: str) -> bool:
    return key in _SAME_BLOCKS and not key.startswith("train_")


def _is_on(key: str, value: Any) -> bool:
    """Return True if a block has an effect."""
    if isinstance(value, Mapping) and key != "scheduler":
        if key == "zero_optimization":
            return bool(value.get("stage"))
        return value.get("enabled", key not in _OFF_BY_DEFAULT) is not False
    return value not in (_OFF if key != "gradient_accumulation_steps" else (*_OFF, 1))


def _translate(block: object, problems: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return class and options of an optimizer block; append keys without counterpart to `problems`."""
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise ValueError(
            'the DeepSpeed configuration has no "optimizer" block with a "type": add '
            '{"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.001}}}'
        )
    given, name = block.get("params") or {}, block["type"].lower()
    problems += [f"optimizer.{key} (write params)" for key in block if key not in ("type", "params", "legacy_fusion")]
    if not isinstance(given, Mapping):
        raise ValueError(f'the "params" of the "optimizer" block are {shown(given)}: write {{"lr": 0.001}}')
    given = dict(given)
    if name not in _METHODS:
        types = [kind.__name__ for kind, _, _ in _METHODS.values()]
        cure = _NEAREST.get(name, f"choose {nearest(block['type'], types) or ', '.join(types)}")
        problems.append(f"optimizer.type {block['type']!r} ({cure})")
        return OneBitAdam, {}
    kind, names, defaults = _METHODS[name]
    options = dict(defaults)
    if name in ("adam", "adamw"):
        if given.pop("adam_w_mode", True):
            kind = torch.optim.AdamW
        if given.pop("torch_adam", False):
            options = {}  # classes of torch have its defaults
    known = {**names, "lr": "lr", "weight_decay": "weight_decay"}
    for key, value in given.items():
        if value == "auto":
            problems.append(f"optimizer.params.{key} 'auto' (write the value)")
        elif key in known:
            if known[key] in _WHOLE:
                options[known[key]] = _whole_number(key, value)
            elif any(one is None or isinstance(one, str) for one in (value if isinstance(value, list) else [value])):
                problems.append(f"optimizer.params.{key} {shown(value)} (write a number)")  # YAML reads 1e-3 as a text
            else:
                options[known[key]] = tuple(value) if isinstance(value, list) else value
        elif key == "bias_correction":
            if not value and not issubclass(kind, MomentumOptimizer):  # DeepSpeed's 1-bit optimizers ignore it
                problems.append(f"optimizer.params.{key} {value!r} (ZeroOneAdam is Adam without it)")
        elif key not in _WITHOUT_EFFECT and value not in _OFF:
            cure = _CURES.get(key) or nearest(key, [*known]) or "leave it out"
            problems.append(f"optimizer.params.{key} ({cure})")
    return kind, options


def _whole_number(key: str, value: object) -> int:
    """Return a number of steps, which JSON may write as a float, such as 1e3."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < math.inf or value % 1:
        raise ValueError(f"optimizer.params.{key} is {shown(value)}: write a whole number of at least 1")
    return int(value)
