"""ZeroOneAdam: Adam whose ranks exchange one bit per element from the start, and later not in every step."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.one_bit_adam.adam_moments import VarianceFreeze
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumMethod, MomentumOptimizer, adam_defaults, squeezing
from mpicomp.torch.one_bit_adam.zero_one_averaging import ZeroOneAveraging
from mpicomp.torch.one_bit_adam.zero_one_moments import RATE_SUM, Intervals, ZeroOneMoments


class ZeroOneAdam(MomentumOptimizer[ZeroOneAveraging]):
    """0/1 Adam: one bit per element from the first steps on, and local steps once v is frozen.

    While v is in motion, some steps take the exact mean of the gradients and update v, at intervals that double; the
    steps between them take the mean in one bit per element. Once v is frozen, each rank makes steps of its own, and the
    ranks synchronize by the sums of these, at intervals that double too. Call :meth:`synchronize` before you save or
    evaluate the model. Attributes and all other rules are those of :class:`OneBitAdam`.

    Parameters
    ----------
    params, lr, betas, eps, weight_decay
        As of ``torch.optim.AdamW``. The moments have no bias corrections.
    decoupled_weight_decay : bool
        True: weight decay as of AdamW; False: as an L2 penalty.
    warmup_steps : int
        Steps until v is frozen. Let the learning rate's warm-up end before.
    variance_doubling : int
        Updates of v until the interval between two of them doubles.
    local_doubling : int
        Steps, once v is frozen, until the interval between two synchronizations doubles.
    most_local_steps : int
        Longest interval between two synchronizations; 1: synchronize in every step.
    bits, compressor, per_node, comm, named_parameters, bucket_mb, seed
        As of :class:`OneBitAdam`.
    preconditioned : bool
        False: gradients are exchanged as they are, and steps divided by 1 / (sqrt(v) + eps), as in the paper; True:
        gradients with that factor, and steps as they are.

    Raises
    ------
    ValueError, TypeError, CollectiveMismatch
        As of :class:`OneBitAdam`.

    Notes
    -----
    Elements without any gradient up to an update of v do not move before the next one, and never move after v is
    frozen, also by weight decay; ``masked`` counts them then. NaN or infinity in the gradients of a local step counts
    as zeros there, and the next synchronization raises NonFiniteGradient on all ranks. Parameters that are added while
    local steps are made join at the next synchronization. Where all learning rates since the last synchronization are
    0, momentum starts again from zeros.

    References
    ----------
    Lu, Li, Zhang, De Sa, He, "Maximizing communication efficiency for large-scale training via 0/1 Adam", ICLR 2023
    (arXiv 2202.06009).

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import ZeroOneAdam, broadcast_parameters, require_same
    >>> def train(comm):
    ...     model = torch.nn.Linear(3, 1)
    ...     broadcast_parameters(model, comm)
    ...     options = {"warmup_steps": 2, "local_doubling": 2, "most_local_steps": 4}
    ...     optimizer = ZeroOneAdam(model.named_parameters(), lr=0.001, **options, comm=comm)
    ...     for step in range(9):
    ...         optimizer.zero_grad()
    ...         model(torch.full((8, 3), comm.rank + 1.0)).square().mean().backward()
    ...         optimizer.step()
    ...     optimizer.synchronize()
    ...     require_same(model, comm)
    ...     return optimizer.steps, optimizer.synchronizations, optimizer.frozen
    >>> mpicomp.run_local(2, train)[0]
    (9, 6, True)
    """

    @in_own_mode
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        decoupled_weight_decay: bool = True,
        bits: int = 1,
        warmup_steps: int = 100_000,
        variance_doubling: int = 16,
        local_doubling: int = 32_768,
        most_local_steps: int = 16,
        compressor: Any = None,
        per_node: Literal["auto", "shared", "ring"] | None = None,
        preconditioned: bool = False,
        comm: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ) -> None:
        def make_method() -> MomentumMethod[ZeroOneAveraging]:
            intervals = Intervals(warmup_steps, variance_doubling, local_doubling, most_local_steps)
            moments = partial(ZeroOneMoments, preconditioned=preconditioned)
            averaging = partial(ZeroOneAveraging, intervals=intervals, moments=moments)
            rule, algorithm = VarianceFreeze(warmup_steps), squeezing(bits, compressor, seed, per_node)
            return MomentumMethod(averaging, rule, algorithm, {**vars(intervals), "preconditioned": preconditioned})

        defaults = adam_defaults(lr, betas, eps, weight_decay, decoupled_weight_decay)
        self._open(params, {**defaults, RATE_SUM: 0.0}, make_method, comm, named_parameters, bucket_mb)

    @in_own_mode
    def synchronize(self) -> None:
        """Synchronize now, so that all ranks have one model; collective. Returns at once if they have.

        Raises
        ------
        NonFiniteGradient
            A local step has met NaN or infinity; names the ranks. Call it again to synchronize without it.
        CollectiveMismatch
            The ranks do not make the same call, or their options or models differ.
        """
        self._synchronizer.settle()
