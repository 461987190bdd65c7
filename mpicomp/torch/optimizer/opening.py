"""Making of the synchronizer of a DistributedOptimizer from its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.algorithms.per_island import Islands
from mpicomp.algorithms.per_node import Local
from mpicomp.torch.buckets.bucket_queue import overlap_by_thread
from mpicomp.torch.buckets.bucket_reducers import SMALLEST_ALONE_MB, SMALLEST_MB, BucketReducers
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name
from mpicomp.torch.local_steps.fragments import FragmentPlan, Fragments
from mpicomp.torch.local_steps.island_groups import IslandGroup
from mpicomp.torch.local_steps.islands import IslandGradients, between_islands
from mpicomp.torch.local_steps.local_updates import LocalUpdates
from mpicomp.torch.local_steps.outer_step import OuterStep
from mpicomp.torch.master_weights import MasterWeights
from mpicomp.torch.optimizer.gradient_averaging import GradientAveraging
from mpicomp.torch.optimizer.options import Options, skips_nonfinite
from mpicomp.torch.parameters import NamedParameter, Parameters
from mpicomp.torch.synchronizer.bucket_averaging import SynchronizerParts
from mpicomp.torch.synchronizer.parameter_changes import ParameterChanges
from mpicomp.torch.synchronizer.step_agreement import open_agreement
from mpicomp.torch.synchronizer.synchronizer import Synchronizer


def open_synchronizer(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    parameters: Parameters,
    choice: AlgorithmChoice,
    algorithms: Mapping[str, Algorithm],
    options: Options,
    outer: torch.optim.Optimizer | None,
    fragment_of: Mapping[str, int],
    islands: Communicator | IslandGroup | None,
) -> Synchronizer:
    """Return the synchronizer of a mode; collective. The arguments are checked, and `choice` made the `algorithms`."""
    members, of_gradients = parameters.trained, options.synchronize == "gradients"
    agreement = open_agreement(optimizer, comm, members, str(options), of_gradients, outer)
    overlap = options.overlap
    # of a model on a device backward calls hooks in a thread of its own, and calls need one thread
    on_device = any(member.parameter.device.type != "cpu" for member in members)
    if overlap and (comm.size > 1 or on_device):
        overlap = overlap_by_thread(comm, on_device) or not on_device
    masters = None if of_gradients else MasterWeights(optimizer)
    outer_step = None
    if masters is not None:
        agreement.members = masters.substitute(members)
        if outer is not None:
            masters.replace_in(outer)
            outer_step = OuterStep(outer, agreement.members)
    parted, island, local = _open_islands(comm, islands, options)
    plan = FragmentPlan(options.local_steps, options.fragments, options.delay, options.blend)
    fixed = "which delay= and blend= do not allow: make both optimizers again" if plan.keeps_local else ""

    def algorithms_of(joining: Sequence[NamedParameter]) -> Mapping[str, Algorithm]:
        found = algorithms_by_name(choice, joining, of_gradients)
        options.check(joining, found)
        return between_islands(found, parted, local)

    changes = ParameterChanges(parameters, optimizer, algorithms_of, masters, outer_step, fixed)
    if plan.delay and comm.size > 1:
        overlap_by_thread(comm, on_device)
    one_by_one, between = not overlap and not plan.keeps_local, between_islands(algorithms, parted, local)
    least_mb = SMALLEST_ALONE_MB if one_by_one else SMALLEST_MB
    reducers = BucketReducers(agreement.members, between, comm, options.bucket_mb, one_by_one, fragment_of, least_mb)
    passes = options.backward_passes_per_step
    parts = SynchronizerParts(optimizer, reducers, comm, agreement, parameters, changes, overlap, passes)
    if masters is None:
        return GradientAveraging(parts)
    fragments = Fragments(plan, reducers.fragment_of, comm)
    return LocalUpdates(parts, masters, fragments, outer_step, island, skips_nonfinite(algorithms))


def _open_islands(
    comm: Communicator, islands: Communicator | IslandGroup | None, options: Options
) -> tuple[Islands | None, IslandGradients | None, Local]:
    """Return the islands, the means of their gradients, and the way of updates within them; collective."""
    if islands is None:
        return None, None, "auto"
    if isinstance(islands, Communicator):
        parted = Islands.of(comm, islands)
        return parted, IslandGradients(comm, parted, options.bucket_mb), "auto"
    parted = islands.open(comm)
    # two groups of NCCL must not be in use at once, as by updates under way and the gradients of later steps
    way = "auto" if options.delay else islands.way_of(comm, parted)
    return parted, IslandGradients(comm, parted, options.bucket_mb, islands), way
