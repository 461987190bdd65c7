"""Common base of the optimizers whose ranks exchange momenta: groups, parameters that join, gradients, and opening."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor
from torch.optim.optimizer import ParamsT

from collectives import Communicator
from collectives.annotations import override
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import Algorithm, Dense, DoubleSqueeze, PerNode
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.buckets.bucket_reducers import BucketReducers
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.front_ends import (
    algorithms_by_name,
    given_communicator,
    names_by_parameter,
    require_bucket_size,
    warn_of_ddp,
)
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.one_bit_adam.adam_moments import VarianceFreeze, check_group
from mpicomp.torch.one_bit_adam.momentum_averaging import MomentumAveraging
from mpicomp.torch.parameters import ParameterGroup, Parameters
from mpicomp.torch.synchronizer.bucket_averaging import SynchronizerParts
from mpicomp.torch.synchronizer.parameter_changes import ParameterChanges
from mpicomp.torch.synchronizer.property_readers import refuse_distributed_checkpoint
from mpicomp.torch.synchronizer.step_agreement import open_agreement
from mpicomp.torch.synchronizer.synchronizing_optimizer import SynchronizingOptimizer

_MOST_BUCKET = 4096
_Averaging = TypeVar("_Averaging", bound=MomentumAveraging[Any])


@dataclass(frozen=True)
class MomentumMethod(Generic[_Averaging]):
    """Parts of an optimizer."""

    averaging: Callable[..., _Averaging]
    rule: VarianceFreeze
    algorithm: Algorithm
    options: Mapping[str, object]
    """Further options, which the ranks compare as text."""


class MomentumOptimizer(SynchronizingOptimizer[_Averaging]):
    """Optimizer with moments in flat vectors, dense first steps, and compressed ones once v is frozen."""

    synchronizes_ranks: ClassVar[bool] = True
    mode: ClassVar[str] = "momenta"

    def _open(
        self,
        params: ParamsT,
        defaults: ParameterGroup,
        make_method: Callable[[], MomentumMethod[_Averaging]],
        comm: Communicator | None,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        bucket_mb: float,
    ) -> None:
        """Check the arguments, on all ranks, and make buckets and synchronizer.

        `make_method` raises ValueError for options that are out of range.
        """
        name = type(self).__name__
        self.comm = given_communicator(comm, name)
        with self.comm.refusing(f"making {name}", ValueError, TypeError, where=self.comm.here):
            method = make_method()
            self.algorithm = method.algorithm
            require_bucket_size(bucket_mb)
            self._names = names_by_parameter(named_parameters)
            super().__init__(params, defaults)
            for group in self.param_groups:
                self._check_group(group)
            parameters = Parameters(self, self._names)
        warn_of_ddp(parameters.trained, [self.algorithm], self.comm)
        listed = "".join(f", {key}={value}" for key, value in method.options.items())
        text = f"{name}(algorithm={self.algorithm}{listed}, bucket_mb={bucket_mb:g})"
        agreement = open_agreement(self, self.comm, parameters.trained, text, all_options=True)
        masters = MasterWeights(self)
        changes = ParameterChanges(parameters, self, partial(algorithms_by_name, self.algorithm), masters)
        members = masters.substitute(parameters.trained)
        dense, squeezed = (
            BucketReducers(
                members, algorithms_by_name(one, members, of_gradients=False), self.comm, bucket_mb, one_by_one=True
            )
            for one in (Dense(), self.algorithm)
        )
        for reducers in (dense, squeezed):
            reducers.lay_out(range(len(members)))
        parts = SynchronizerParts(self, dense, self.comm, agreement, parameters, changes)
        self._synchronizer = method.averaging(parts, squeezed, masters, method.rule, options=text)

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
        return self._synchronizer.steps

    @property
    def frozen(self) -> bool:
        """True once v is frozen."""
        return self._synchronizer.frozen

    @property
    def reducers(self) -> Sequence[BucketReducer]:
        """Reducers of the last step, one per bucket."""
        return self._synchronizer.active

    @property
    @override
    def counted(self) -> Iterable[Aggregator]:
        return [one.aggregator for one in self._synchronizer.every_reducer]

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
        self._check_group(self.param_groups[-1])

    def _check_group(self, group: ParameterGroup) -> None:
        """Raise ValueError or TypeError unless the optimizer can take a group."""
        check_group(group, self)

    @in_own_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, 16-bit ones included: set them to None, or to zeros.

        `set_to_none` frees their memory.
        """
        super().zero_grad(set_to_none)
        self._synchronizer.drop_gradients(set_to_none)


def adam_defaults(
    lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float, decoupled_weight_decay: bool
) -> ParameterGroup:
    """Return the options of Adam by name."""
    return locals()


def squeezing(
    bits: int, compressor: Any, seed: int, per_node: Literal["auto", "shared", "ring"] | None
) -> DoubleSqueeze | PerNode:
    """Return two-pass error feedback with these options, or raise ValueError for those that are out of range."""
    squeeze = DoubleSqueeze(codec_of_bits(bits) if compressor is None else compressor, seed)
    return squeeze if per_node is None else PerNode(squeeze, per_node)


def codec_of_bits(bits: int) -> str:
    """The compressor that sends so many bits an element, with groups short enough for error feedback to be sound."""
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ValueError(f"bits is {bits!r}; choose a whole number from 1 to 8")
    if bits == 1:
        return "one-bit:bucket=32768,scale=l1"
    if bits == 2:
        return "ternary:bucket=32"
    levels = 2 ** (bits - 1) - 1
    return f"quantize:levels={levels},bucket={min(_MOST_BUCKET, 8 * levels**2 // 64 * 64)}"
