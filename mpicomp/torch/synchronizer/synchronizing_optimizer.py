"""Common base of the optimizers: they synchronize in ``step`` by a synchronizer, which owns their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

from collectives.annotations import override
from collectives.recovery.admission import StateTransfer
from collectives.recovery.newcomers import admit_by, is_waiting
from mpicomp.aggregator.base import Aggregator
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.non_copyable import NonCopyable
from mpicomp.torch.state.redistribution import redistribute_states
from mpicomp.torch.state.schema import State
from mpicomp.torch.synchronizer.synchronizer import Phase, Synchronizer

_Synchronizer = TypeVar("_Synchronizer", bound=Synchronizer)


class SynchronizingOptimizer(NonCopyable, torch.optim.Optimizer, Generic[_Synchronizer]):
    """Optimizer whose state is that of its synchronizer."""

    _synchronizer: _Synchronizer

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One aggregator per bucket, as in the last step; none before the buckets are laid out."""
        return self._synchronizer.aggregators

    @property
    @override
    def reducers(self) -> Sequence[BucketReducer]:
        return self._synchronizer.every_reducer

    @property
    def synchronizations(self) -> int:
        """Synchronizations so far."""
        return self._synchronizer.synchronizations

    @property
    def models_differ(self) -> bool:
        """Flag: the ranks' models differ now, because local steps were made since the last synchronization."""
        return self._synchronizer.models_differ

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @in_own_mode
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make an optimizer step, and a synchronization if one is due.

        The step of `OneBitAdam` is the same on all ranks; one that raises leaves parameters, moments and residuals as
        they were.

        Parameters
        ----------
        closure : callable, optional
            Reevaluates the model and returns the loss, as for the wrapped optimizer; `OneBitAdam` calls it once.

        Returns
        -------
        float or None
            Result of the wrapped optimizer: the loss of `closure` on this rank.

        Raises
        ------
        ValueError
            A gradient is sparse, a parameter was changed in form since the optimizer was made or cannot join (names
            it), or a group's option is out of range.
        NonFiniteGradient
            A rank has NaN or infinity; names the ranks, and this rank's parameters. The ranks' models are equal.
        RuntimeError
            A gradient was changed after it had been sent, or all were dropped by `zero_grad`. No rank makes the step.
        CollectiveMismatch
            The ranks do not make the same call, another rank raised ValueError or RuntimeError, or the optimizers
            differ in class, options or new parameters, or the models in value. No rank makes the step; if it was to
            synchronize, the model is now the common one.
        CollectiveError
            A rank does not answer.
        """
        return self._synchronizer.step(closure)

    @in_own_mode
    def state_dict(self) -> State:
        """Return the torch optimizer's state plus this rank's residuals and counters, under the key "mpicomp".

        Every rank has a state of its own, of tensors, numbers and texts. After local steps it holds the common model
        too. The state of `OneBitAdam` holds the moments.

        Returns
        -------
        dict
            For ``torch.save``, one file per rank.

        Raises
        ------
        RuntimeError
            Gradients have been sent during backward, and the step has not taken them.

        Examples
        --------
        >>> import io
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> def save_and_load(comm):
        ...     model, file = torch.nn.Linear(3, 1), io.BytesIO()  # a file of this rank
        ...     optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), mpicomp.Dense(), comm)
        ...     torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        ...     file.seek(0)
        ...     saved = torch.load(file, weights_only=True)
        ...     optimizer.check_state_dict(saved["optimizer"])
        ...     optimizer.load_state_dict(saved["optimizer"])
        ...     return optimizer.synchronizations
        >>> mpicomp.run_local(1, save_and_load)
        [0]
        """
        self._require_nothing_sent("state_dict")
        return self._synchronizer.state_dict()

    @in_own_mode
    def check_state_dict(self, state_dict: State) -> None:
        """Check a state that is not to be loaded yet; not collective.

        Parameters
        ----------
        state_dict : dict
            As from :meth:`state_dict`.

        Raises
        ------
        ValueError
            As `load_state_dict` would on this rank.
        """
        self._synchronizer.check_state_dict(state_dict)

    @in_own_mode
    def load_state_dict(self, state_dict: State) -> None:
        """Restore a state of :meth:`state_dict`, on the same rank of as many ranks; collective.

        Load the model before or after. Parameters that the state has are added or unfrozen before, if they were after
        the optimizer was made.

        Parameters
        ----------
        state_dict : dict
            This rank's; not changed.

        Raises
        ------
        ValueError
            The state was not made by an optimizer of this class and mode, with these options and parameters, or it is
            damaged. Nothing is changed then, on any rank; the other ranks raise CollectiveMismatch.
        CollectiveMismatch
            Another rank raised ValueError, or the ranks' states are of different synchronizations.
        RuntimeError
            Gradients have been sent during backward, and the step has not taken them.
        """
        self._require_nothing_sent("load_state_dict")
        self._synchronizer.load_state_dict(state_dict)

    @in_own_mode
    def admit(self, model: torch.nn.Module, state: Callable[[], Any], load: Callable[[Any], object]) -> int:
        """Let ranks that wait take the places of dead ones, see `Communicator.admit`; collective, between two steps.

        A newcomer copies the model and this optimizer's state, with empty residuals. While local steps are made, or
        gradients have been sent, nobody is admitted.

        Parameters
        ----------
        model : torch.nn.Module
            Its `state_dict` is copied, and buffers that are not persistent.
        state, load : callable
            Return and take everything else that the next step depends on, such as its number and a learning-rate
            scheduler's state.

        Returns
        -------
        int
            Number of ranks that joined.

        Raises
        ------
        ValueError
            On a newcomer whose model or options differ from the members'; these go on without it.
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        SystemExit
            On a rank that waits, once the members have ended.

        Examples
        --------
        >>> import torch
        >>> import mpicomp
        >>> from mpicomp.torch import DistributedOptimizer
        >>> with mpicomp.Communicator() as comm:
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), mpicomp.Dense(), comm)
        ...     optimizer.admit(model, lambda: {"step": 3}, lambda saved: None)
        0
        """
        synchronizer = self._synchronizer

        def take(saved: Any, states: list[State]) -> None:
            model.load_state_dict(saved[0])
            with torch.no_grad():
                for name, buffer in _left_out(model).items():
                    buffer.copy_(saved[1][name])
            self.load_state_dict(redistribute_states(states, 1)[0])
            load(saved[2])

        if is_waiting(self.comm):
            synchronizer.reducers.rehearse()
        is_ready = not synchronizer.models_differ and synchronizer.phase is not Phase.SENT
        transfer = StateTransfer(
            lambda: (model.state_dict(), _left_out(model), state()), take, self.state_dict, is_ready
        )
        n_joined = admit_by(self.comm, transfer)
        if n_joined:
            synchronizer.compare_next()
        return n_joined

    def _require_nothing_sent(self, call: str, more: str = "") -> None:
        if self._synchronizer.phase is Phase.SENT:
            after = "step" if self._synchronizer.mode == "updates" else "synchronize"
            raise RuntimeError(
                f"{self.comm.here}: {call}() between backward() and step(), when gradients have been sent; call it "
                f"after step() or before backward(){more}; after a backward() that was cut off, call {after}() first"
            )


def _left_out(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a model's state leaves out, by name: newcomers may have drawn others."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}
