"""Checkpoints of training in replicas: model, optimizer, residuals and all else of every rank, in one folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectives import Communicator
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.consistency.descriptions import fingerprint
from collectives.quoting import one_line, shown
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.codecs.options import whole
from mpicomp.torch.state.redistribution import redistribute_states
from mpicomp.torch.state.schema import STATE_KEY, State
from mpicomp.torch.state.step_folder import (
    Stateful,
    checkpoints,
    newest_of_all,
    on_all_ranks,
    read_manifest,
    read_state,
    step_of,
    write,
)


def save_checkpoint(folder: str | PathLike[str], step: int, parts: Mapping[str, Stateful], comm: Communicator) -> Path:
    """Write the parts of all ranks to one checkpoint, which is complete or absent; collective.

    The two newest checkpoints are kept, and earlier ones removed once this one is complete. Entries that are equal to
    those of rank 0, such as a model's parameters, are written once.

    Parameters
    ----------
    folder : str or PathLike
        On a file system that all ranks see; made if it is missing.
    step : int
        Number of steps so far, from 1 to 10^15 - 1, by which checkpoints are ordered. The same on all ranks.
    parts : dict of str to objects with ``state_dict`` and ``load_state_dict``
        Model, optimizer, state of a hook, scheduler and all else that a step changes, by name; the same names on all
        ranks. PyTorch's random state of the CPU is saved, too.
    comm : Communicator
        Communicator of the ranks that train.

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    OSError
        A rank cannot write, an argument cannot be used (a ValueError of one rank), or a part has DTensors; on all
        ranks. So it is where the folder has a checkpoint of this step or of a later one, perhaps of another run that
        has saved meanwhile. Earlier checkpoints are untouched.
    CollectiveMismatch
        The ranks differ in `step` or in the parts' names.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import DistributedOptimizer, broadcast_parameters, load_checkpoint, save_checkpoint
    >>> def train(comm, folder, last):
    ...     model = torch.nn.Linear(3, 1)
    ...     broadcast_parameters(model, comm)
    ...     sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    ...     optimizer = DistributedOptimizer(sgd, mpicomp.LocalTopK(rate=3), comm, model.named_parameters())
    ...     parts = {"model": model, "optimizer": optimizer}
    ...     first = load_checkpoint(folder, parts, comm)  # 0 without a checkpoint
    ...     for step in range(first, last):
    ...         optimizer.zero_grad()
    ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
    ...         optimizer.step()
    ...     save_checkpoint(folder, last, parts, comm)
    ...     return first, optimizer.synchronizations
    >>> folder = mkdtemp()
    >>> mpicomp.run_local(3, lambda comm: train(comm, folder, last=4))
    [(0, 4), (0, 4), (0, 4)]
    >>> mpicomp.run_local(2, lambda comm: train(comm, folder, last=6))
    [(4, 6), (4, 6)]
    """
    require_communicator(comm, "save_checkpoint", "save_checkpoint(folder, step, parts, comm)", parts)
    size, here = comm.size, comm.here

    def gather(one: object) -> list[Any]:
        found = comm.allgather_object(one)
        if len(found) != size:
            raise OSError(
                f"{here}: a rank has died while the checkpoint of step {step} was written, which may be complete: save "
                "after the next step"
            )
        return found

    def collect() -> tuple[Path, dict[str, State], dict[str, dict[str, str]]]:
        if not whole(step, 1, 10**15 - 1):
            raise ValueError(f"step is {shown(step)}: pass the number of steps so far, from 1 to 10^15 - 1")
        later = [one for one in checkpoints(Path(folder)) if step_of(one) > step]
        if later:
            raise ValueError(f"{later[-1]} is of a later step: load it, remove it, or name another folder")
        states = {}
        for name in _names(parts):
            try:
                states[name] = parts[name].state_dict()
            except Exception as error:
                raise ValueError(f"part {name!r} has no state ({type(error).__name__}: {one_line(error)})") from error
        return Path(folder), states, {name: _digests(name, state) for name, state in states.items()}

    path, states, digests = on_all_ranks(gather, here, OSError, collect)
    step = int(step)  # JSON takes no integer of NumPy
    text = f"save_checkpoint of step {step} with {', '.join(sorted(states))}"
    comm.agree(fingerprint(text), lambda: text)
    first = comm.broadcast_object(digests) if size > 1 else {}
    same = {
        name: [key for key, one in found.items() if comm.rank and first[name].get(key) == one]
        for name, found in digests.items()
    }
    own = {name: {key: state[key] for key in state if key not in same[name]} for name, state in states.items()}
    state = {"parts": own, "same": same, "random": torch.get_rng_state()}
    return write(gather, here, OSError, path, step, (comm.rank, 0), lambda: state, (size, 1), (), set())


def load_checkpoint(folder: str | PathLike[str], parts: Mapping[str, Stateful], comm: Communicator) -> int:
    """Go on from the newest checkpoint of `save_checkpoint`, if there is one; collective.

    As many ranks as before go on to the bit. On another number of ranks, optimizers and hooks of this library begin
    with the states that `redistribute_states` makes, and all other parts with those of rank 0.

    Parameters
    ----------
    folder, parts, comm
        As of `save_checkpoint`.

    Returns
    -------
    int
        Number of steps that the checkpoint has; 0 without a checkpoint.

    Raises
    ------
    ValueError
        The checkpoint has other parts or is damaged, the ranks see different folders, or a part does not take its
        state; on all ranks. In the last case other parts may have taken theirs.

    Examples
    --------
    `save_checkpoint` has a loop that resumes. A new model and optimizer, on all ranks:

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import load_checkpoint
    >>> mpicomp.run_local(2, lambda comm: load_checkpoint(mkdtemp(), {"model": torch.nn.Linear(3, 1)}, comm))
    [0, 0]
    """
    require_communicator(comm, "load_checkpoint", "load_checkpoint(folder, parts, comm)", parts)
    gather, here = comm.allgather_object, comm.here
    path, names = on_all_ranks(gather, here, ValueError, lambda: (Path(folder), _names(parts)))
    newest = newest_of_all(gather, here, ValueError, path)
    if newest is None:
        return 0
    states, random = on_all_ranks(gather, here, ValueError, lambda: _read(newest, names, comm))
    for name in names:  # in one order on all ranks: some load together
        load = partial(parts[name].load_state_dict, states[name])
        on_all_ranks(gather, f"{here}: part {name!r}", ValueError, load)
    if random is not None:
        torch.set_rng_state(random)
    return step_of(newest)


def _names(parts: Mapping[str, Stateful]) -> list[str]:
    """Return the parts' names in the order in which all ranks load them."""
    if wrong := [name for name in parts if not isinstance(name, str)]:
        raise ValueError(f"the name of a part is {shown(wrong[0])}: let it be a text")
    return sorted(parts)


def _digests(name: str, state: State) -> dict[str, str]:
    """Return digests of the tensors in a part's state that may be equal on all ranks, by their keys."""
    found = {}
    for key, one in state.items():
        if type(one).__name__ == "DTensor":
            raise ValueError(
                f"{key!r} of part {name!r} is a DTensor, of which this rank holds a part only: save models of "
                "fully_shard by torch.distributed.checkpoint"
            )
        if isinstance(one, Tensor) and one.layout == torch.strided:
            digest = hashlib.blake2b(tensor_bytes(one).cpu().numpy().data, digest_size=16)
            found[key] = f"{one.dtype}{list(one.shape)} {digest.hexdigest()}"
    return found


def _read(path: Path, names: list[str], comm: Communicator) -> tuple[dict[str, State], Tensor | None]:
    """Return the states of the parts for this rank, and its random state if as many ranks have written it."""
    (ranks, _), _ = read_manifest(path)
    goes_on = ranks == comm.size
    first, mine = (read_state(path, (rank, 0)) for rank in (0, comm.rank if goes_on else 0))
    if sorted(mine["parts"]) != names:
        raise ValueError(f"{path} has the parts {sorted(mine['parts'])}, not {names}: name the same")
    states = {}

    def whole_state(one: State, name: str) -> State:
        return {**{key: first["parts"][name][key] for key in one["same"][name]}, **one["parts"][name]}

    for name in names:
        states[name] = whole_state(mine, name)
        if STATE_KEY in states[name] and not goes_on:
            everyones = [whole_state(read_state(path, (rank, 0)), name) for rank in range(ranks)]
            states[name] = redistribute_states(everyones, comm.size)[comm.rank]
    return states, mine["random"] if goes_on else None
