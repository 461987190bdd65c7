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

from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.one_bit_adam.adam_moments import AdamMoments, VarianceFreeze
from mpicomp.torch.one_bit_adam.momentum_averaging import MomentumAveraging
from mpicomp.torch.one_bit_adam.momentum_optimizer import MomentumMethod, MomentumOptimizer, adam_defaults, squeezing


class OneBitAdam(MomentumOptimizer[MomentumAveraging[AdamMoments]]):
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
        ``model.named_parameters()``: names for error messages and states. None: those in `params`, if all differ.
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
        averaging = partial(MomentumAveraging, moments=partial(AdamMoments, preconditioned=preconditioned))
        options = {"warmup_steps": warmup_steps, "preconditioned": preconditioned}

        def make_method() -> MomentumMethod[MomentumAveraging[AdamMoments]]:
            rule = VarianceFreeze(warmup_steps)
            return MomentumMethod(averaging, rule, squeezing(bits, compressor, seed, per_node), options)

        defaults = adam_defaults(lr, betas, eps, weight_decay, decoupled_weight_decay)
        self._open(params, defaults, make_method, comm, named_parameters, bucket_mb)
