"""OneBitAdam: Adam whose ranks exchange their momenta in one bit per element, or a few.

    steps 1 .. T   Adam on the dense mean of the gradients; then v is frozen, with its bias correction, as w
    later          m_rank = b1 m + (1 - b1) g_rank
                   m <- DoubleSqueeze(w m_rank) / w                 the same on all ranks
                   x <- x - lr (m / (1 - b1^t)) w,                  w = 1 / (sqrt(v / (1 - b2^T)) + eps)

Adam's v is not linear in the gradients, so an error that compression made in one step cannot be made up for in a later
one. Once v is a constant, Adam is momentum SGD with fixed factors, and error feedback works.

Departures from the paper: the ranks exchange w m_rank where the paper has m_rank (``preconditioned=False``), and one
bit is scaled by the mean magnitude where the paper keeps the length. An element's compressed momentum has the magnitude
of its neighbours', and where its v is much smaller than theirs the step becomes many times too long. w m_rank has
nearly one magnitude everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from mpicomp.algorithms import Algorithm, Dense, DoubleSqueeze, PerNode
from mpicomp.torch.bucket_reducers import BucketReducer, BucketReducers
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.front_ends import algorithms_by_name, given_communicator, names_by_parameter, require_bucket_size
from mpicomp.torch.optimizer.adam_moments import ParameterGroup, VarianceFreeze, check_group
from mpicomp.torch.optimizer.momentum_averaging import MomentumAveraging
from mpicomp.torch.optimizer.parameter_changes import ParameterChanges
from mpicomp.torch.optimizer.step_agreement import open_agreement
from mpicomp.torch.optimizer.synchronizer import SynchronizerParts
from mpicomp.torch.optimizer.synchronizing_optimizer import SynchronizingOptimizer, refuse_distributed_checkpoint
from mpicomp.torch.parameters import MasterWeights, Parameters

_MOST_BUCKET = 4096


class OneBitAdam(SynchronizingOptimizer[MomentumAveraging]):
    """Adam that synchronizes the ranks by compressed momenta; not to be wrapped in `DistributedOptimizer`.

    Every rank builds the same model, calls :func:`broadcast_parameters` once, makes this optimizer and trains on its
    own data. ``step`` communicates. Parameter groups may differ in all of Adam's options; learning-rate schedulers take
    it like any optimizer. Memory: three vectors of the model's length and, once v is frozen, DoubleSqueeze's residuals.

    Parameters
    ----------
    params : iterable
        Parameters, named parameters or groups, as of any torch optimizer, on the CPU or a GPU. Frozen ones
        (``requires_grad=False``) are left out until they are unfrozen.
    lr, betas, eps, weight_decay
        As of ``torch.optim.Adam``.
    decoupled_weight_decay : bool
        True: weight decay as of AdamW; False: as an L2 penalty.
    bits : int
        1 to 8, of each element that is exchanged once v is frozen: signs with a scale, or 2^bits - 1 random levels.
    warmup_steps : int or "auto"
        Steps of dense Adam before v is frozen, or "auto": until v is stable (`VarianceFreeze`), which takes more
        than 1 / (1 - beta2) steps from the end of the learning rate's warm-up.
    compressor : Codec or str, optional
        A codec of `mpicomp.codecs` or its name, in place of the one that `bits` means.
    per_node : "auto", "shared" or "ring", optional
        Exchange first moments exactly within a node, in this way of `mpicomp.PerNode`, and compressed between nodes.
        None: compressed among all ranks.
    preconditioned : bool
        True: momenta are exchanged with the factor w; False: without, as in the paper.
    comm : Communicator, optional
        None makes one on all ranks of the job. Closing it, also as ``optimizer.comm``, is the caller's.
    named_parameters : iterable of (str, Tensor), optional
        ``model.named_parameters()``: names for error messages.
    bucket_mb : float
        Largest bucket in MiB. A tensor larger than that has its own.
    seed : int
        Seed of random levels; equal on all ranks. Two optimizers on one communicator need different ones.

    Attributes
    ----------
    comm : Communicator
        The communicator.
    steps : int
        Steps so far.
    frozen : bool
        True once v is frozen.
    algorithm : Algorithm
        Method that averages momenta.

    Raises
    ------
    ValueError, TypeError
        An option is out of range, a parameter is not a floating-point tensor on the CPU or a GPU, or nothing is to be
        trained; the other ranks then raise CollectiveMismatch.
    CollectiveMismatch
        The ranks' options differ, or their parameters in name, shape or dtype; at a step, in value.

    Notes
    -----
    A missing gradient counts as zeros. 16-bit parameters are moved as float32 masters. `eps` and beta2 have no effect
    once v is frozen. Elements whose gradients were all zero before that never move afterwards, but for decoupled weight
    decay; ``masked`` counts them.

    The moments are in ``state_dict()``; ``state`` stays empty.

    References
    ----------
    Tang, Gan, Awan, Rajbhandari, Li, Lian, Liu, Zhang, He, "1-bit Adam: communication efficient large-scale training
    with Adam's convergence speed", ICML 2021 (arXiv 2102.02888).

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import OneBitAdam, broadcast_parameters, require_same
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 1)
    ...     broadcast_parameters(model, comm)
    ...     optimizer = OneBitAdam(model.named_parameters(), lr=0.01, warmup_steps=2, comm=comm)
    ...     for step in range(4):
    ...         optimizer.zero_grad()
    ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
    ...         optimizer.step()
    ...     require_same(model, comm)
    ...     return optimizer.steps, optimizer.frozen, optimizer.masked
    >>> mpicomp.run_local(2, train)[0]
    (4, True, 0)
    """

    synchronizes_ranks: ClassVar[bool] = True
    mode: ClassVar[str] = "momenta"

    @in_own_mode
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        decoupled_weight_decay: bool = False,
        bits: int = 1,
        warmup_steps: int | Literal["auto"] = "auto",
        compressor: Any = None,
        per_node: Literal["auto", "shared", "ring"] | None = None,
        preconditioned: bool = True,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ) -> None:
        self.comm = given_communicator(comm, "OneBitAdam")
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }  # fmt: skip
        with self.comm.refusing("making OneBitAdam", ValueError, TypeError, where=self.comm.here):
            rule = VarianceFreeze(warmup_steps)
            self.algorithm: Algorithm = DoubleSqueeze(_by_bits(bits) if compressor is None else compressor, seed)
            if per_node is not None:
                self.algorithm = PerNode(self.algorithm, per_node)
            require_bucket_size(bucket_mb)
            super().__init__(params, defaults)
            for group in self.param_groups:
                check_group(group)
            parameters = Parameters(self, names_by_parameter(named_parameters))
        options = (
            f"OneBitAdam(algorithm={self.algorithm}, warmup_steps={warmup_steps}, preconditioned={preconditioned}, "
            f"bucket_mb={bucket_mb:g})"
        )
        agreement = open_agreement(self, self.comm, parameters.trained, options, all_options=True)
        masters = MasterWeights(self)
        changes = ParameterChanges(parameters, self, partial(algorithms_by_name, self.algorithm), masters)
        members = masters.substitute(parameters.trained)
        dense, squeezed = (
            BucketReducers(members, algorithms_by_name(one, members), self.comm, bucket_mb, one_by_one=True)
            for one in (Dense(), self.algorithm)
        )
        for reducers in (dense, squeezed):
            reducers.lay_out(range(len(members)))
        parts = SynchronizerParts(self, dense, self.comm, agreement, parameters, changes)
        self._synchronizer = MomentumAveraging(parts, squeezed, masters, rule, preconditioned, options)

    @property
    @in_own_mode
    def param_groups(self) -> list[ParameterGroup]:
        """Parameter groups. Read behind backward, float32 copies of 16-bit parameters have their gradients."""
        if (synchronizer := self.__dict__.get("_synchronizer")) is not None:
            synchronizer.show_gradients()
        groups: list[ParameterGroup] = self.__dict__["param_groups"]  # where torch updates them, too
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[ParameterGroup]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def state(self) -> Any:
        """An empty mapping: the moments are in ``state_dict()``."""
        refuse_distributed_checkpoint(self.comm)
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._synchronizer.synchronizations

    @property
    def frozen(self) -> bool:
        """True once v is frozen."""
        return self._synchronizer.frozen

    @property
    def reducers(self) -> Sequence[BucketReducer]:
        """Reducers of the last step, one per bucket."""
        return self._synchronizer.active

    @property
    def masked(self) -> int:
        """Elements that never move because v was 0 there when it was frozen."""
        return sum(moments.masked.numel() for moments in self._synchronizer.moments)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Refused: a GradScaler would skip a step on the one rank that finds infinities in its gradients."""
        self._synchronizer.prepare_for_scaler()
        return False

    @in_own_mode
    def add_param_group(self, param_group: ParameterGroup) -> None:
        """Add a parameter group while the optimizer trains, on all ranks before the same step.

        Its parameters take part from the next step on, with moments of zero and steps of their own: their v is frozen
        after as many steps as that of the first parameters. Make their values equal on all ranks before:
        :func:`broadcast_parameters`. For frozen parameters that the optimizer holds ``requires_grad_(True)`` suffices.

        Parameters
        ----------
        param_group : dict
            As torch optimizers take it. Its ``params`` may be pairs of name and parameter.

        Raises
        ------
        ValueError, TypeError
            An option is out of range, a parameter cannot be synchronized, or its name is another one's. The optimizer
            is as before then. Where ranks add different parameters, the next step raises CollectiveMismatch on all.
        """
        if hasattr(self, "_synchronizer"):
            self._synchronizer.add_group(param_group, self._add_checked)
        else:
            super().add_param_group(param_group)

    def _add_checked(self, param_group: ParameterGroup) -> None:
        super().add_param_group(param_group)
        check_group(self.param_groups[-1])

    @in_own_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, 16-bit ones included: set them to None, or to zeros.

        `set_to_none` frees their memory.
        """
        super().zero_grad(set_to_none)
        self._synchronizer.drop_gradients(set_to_none)


def _by_bits(bits: int) -> str:
    """The compressor that sends so many bits an element, with groups short enough for error feedback to be sound."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; choose a whole number from 1 to 8")
    if bits == 1:
        return "one-bit:bucket=32768,scale=l1"
    if bits == 2:
        return "ternary:bucket=32"
    levels = 2 ** (bits - 1) - 1
    return f"quantize:levels={levels},bucket={min(_MOST_BUCKET, 8 * levels**2 // 64 * 64)}"
