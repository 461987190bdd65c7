"""All-reduce hook for FSDP2: shards inside a node, compressed means of the shards between nodes.

FSDP calls the hook of a module with the output of the module's reduce-scatter, in the middle of backward, and takes the
tensor as the gradient of its shard. Where nothing else happens to the tensor, a thread averages it while backward goes
on, and the mean is written at the end of backward.

An error that is raised within FSDP's own code leaves its modules half-way between two states. Errors are therefore kept
until FSDP has finished the backward; a callback of autograd's that comes after FSDP's then raises them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch import distributed as dist

from collectives import Communicator
from collectives.annotations import override
from collectives.errors import CollectiveMismatch
from collectives.execution.uncompiled import keep_uncompiled
from mpicomp.torch.buckets.bucket_queue import overlap_by_thread, worse
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.devices import call_after_backward
from mpicomp.torch.front_ends import AlgorithmChoice
from mpicomp.torch.fsdp import job_agreement
from mpicomp.torch.fsdp.group_reduction import GroupReduction
from mpicomp.torch.fsdp.parameter_groups import ParameterGroup, require_whole_model
from mpicomp.torch.fsdp.shard_states import ShardStates
from mpicomp.torch.non_copyable import NonCopyable
from mpicomp.torch.replication import require_same_values


class FSDPHook(NonCopyable):
    """State of the hooks of one model's FSDP modules. :func:`mpicomp.torch.fsdp_hook` makes it.

    ``torch.distributed.checkpoint`` saves and loads it like a model: residuals are distributed tensors that go by the
    parameters' names.

    Parameters
    ----------
    algorithm, comm
        As in :func:`mpicomp.torch.fsdp_hook`.
    groups : list of ParameterGroup
        FSDP's parameter groups.
    layout : list of list of int
        Global ranks, a row for each node, in the order of their shards.

    Attributes
    ----------
    comm : Communicator
        The communicator.
    aggregators : tuple of Aggregator
        One for each vector that has elements on this rank.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> from mpicomp.torch import fsdp_hook, register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> comm = mpicomp.Communicator()  # here of one rank: a node
    >>> model = fully_shard(torch.nn.Linear(3, 1), mesh=init_device_mesh("cpu", (1,)))
    >>> hook = fsdp_hook(mpicomp.EFSignSGD(), comm, model)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> hook.buckets, hook.aggregators[0].step
    ([['weight', 'bias']], 1)
    >>> hook.load_state_dict(hook.state_dict())
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self, algorithm: AlgorithmChoice, comm: Communicator, groups: list[ParameterGroup], layout: list[list[int]]
    ) -> None:
        self.comm = comm
        n_shards, shard = len(layout[0]), layout[comm.rank].index(dist.get_rank())
        numbers = count(shard, n_shards)
        # about in the order of gradients, as DDP numbers its buckets
        self._reductions = [GroupReduction(one, algorithm, comm, partial(next, numbers)) for one in reversed(groups)]
        vectors = [one for each in self._reductions for one in each.vectors]
        described = [one for each in self._reductions for one in each.described]
        self._states = ShardStates(vectors, layout, comm.rank, shard, described)
        self._in_background = comm.size > 1 and overlap_by_thread(comm)
        self._in_flight: list[GroupReduction] = []
        self._error: Exception | None = None
        self._in_backward = self._compared = False
        for reduction in self._reductions:
            group = reduction.group
            group.set_hook(keep_uncompiled(partial(self._average, reduction)))
            # without it the ranks' vectors would lack parameters that had no gradient, maybe others on each node
            group.module.set_reduce_scatter_unused_params(True, recurse=False)

    @property
    @override
    def reducers(self) -> Sequence[BucketReducer]:
        return [vector.reducer for vector in self._states.vectors]

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters whose shards are in each aggregator's vector, in their order."""
        return [vector.reducer.bucket.names for vector in self._states.vectors]

    def remove(self) -> None:
        """Remove the hooks from the model, whose gradients are then averaged within nodes alone."""
        for reduction in self._reductions:
            reduction.group.set_hook(None)

    # States ----------------------------------------------------------------------------------------------------------

    @in_own_mode
    def state_dict(self) -> dict[str, Any]:
        r"""Return the residuals and counters, as ``torch.distributed.checkpoint`` saves them.

        Returns
        -------
        dict
            Copies: distributed tensors of shape [nodes, \*shape of the parameter], named by entry and parameter, such
            as "residual/layer.weight"; scales and counters of each shard; and a description of the vectors.
        """
        return self._states.state_dict()

    @in_own_mode
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of a state of :meth:`state_dict` on equally many nodes and shards; collective.

        Training goes on from it to the bit, also in a new process. ``torch.distributed.checkpoint.load`` calls it.

        Parameters
        ----------
        state : dict
            Not changed.

        Raises
        ------
        ValueError
            The state is of other parameters, of another algorithm, or of other numbers of nodes and shards, or it is
            damaged. Nothing is changed then, on any rank.
        CollectiveMismatch
            Another rank raised ValueError.
        """
        self._load("FSDPHook.load_state_dict", lambda: self._states.checked(state))

    @in_own_mode
    def load_checkpoint(self, checkpoint_id: Any, key: str = "hook") -> None:
        """Load the state in a checkpoint of ``torch.distributed.checkpoint``, also on other nodes; collective.

        With other numbers of nodes or shards, residuals are cut again, and each node starts from the mean of the
        residuals; errors of owners stay with their elements. Scales come from the shard that held a tensor's first row.

        Parameters
        ----------
        checkpoint_id : str or Path
            Folder that ``torch.distributed.checkpoint.save`` wrote.
        key : str
            Name of the hook among the saved objects.

        Raises
        ------
        ValueError
            As :meth:`load_state_dict` raises it, but for the numbers of nodes and shards; or there is no such state.
        CollectiveMismatch
            Another rank raised ValueError.
        """
        call = "FSDPHook.load_checkpoint"
        # before it is read, which is collective
        keys = job_agreement.agreed(call, lambda: self._states.saved_keys(checkpoint_id, key))
        self._load(call, lambda: self._states.read(checkpoint_id, key, keys))

    def _load(self, call: str, read: Callable[[], list[dict[str, Any]]]) -> None:
        states = job_agreement.agreed(call, lambda: self._states.check(read()))
        for aggregator, state in zip(self.aggregators, states, strict=True):
            aggregator.load_state_dict(state)

    # A backward ------------------------------------------------------------------------------------------------------

    def _average(self, reduction: GroupReduction, output: Tensor) -> None:
        """Average the output of a group's reduce-scatter: the hook that FSDP calls."""
        if reduction in self._in_flight:  # a module that was used twice
            self._finish()
        later = self._in_background and reduction.group.may_end_later(output)
        try:
            if isinstance(self._error, ValueError | CollectiveMismatch):
                raise self._error  # other nodes may make no more calls in this backward
            self._check_model()
            if not reduction.begin(output):
                return
        except Exception as error:  # noqa: BLE001 - raised at the end of backward
            self._error = worse(self._error, error)
            output.fill_(float("nan"))
        self._in_flight.append(reduction)
        # which calls `_end` behind FSDP's own callback
        if not call_after_backward(self._end) or not later:
            self._finish()

    @keep_uncompiled
    def _end(self) -> None:
        """Wait for all groups, and raise the first error. Later calls of the same backward find nothing to do."""
        self._finish()
        self._in_backward = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            self._error = worse(self._error, reduction.finish())

    def _check_model(self) -> None:
        """Raise an error unless FSDP trains the parameters that the hook averages; in the first call of a backward."""
        if self._in_backward:
            return
        self._in_backward = True
        groups = [one.group for one in self._reductions]
        with self.comm.refusing("the gradients of FSDP", ValueError, where=self.comm.here):
            if not self._compared:
                require_whole_model(groups)
            # all groups at once: the other nodes' next call may be of another one than was unfrozen here
            for group in groups:
                group.require_members()
        if not self._compared:  # in the first backward, as the model may be loaded after the hook is made
            self._compared = True
            shards = {member.name: member.shard for group in groups for member in group.members}
            cure = "build the model from the same seed on all ranks, or load the same checkpoint"
            require_same_values(shards, self.comm, cure)
