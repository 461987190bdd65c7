"""Models and options that the hook for DistributedDataParallel refuses, and errors in backward on all ranks."""

from __future__ import annotations

import copy
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, NonFiniteGradient
from mpicomp import Dense, DoubleSqueeze, Marsit, Relay, ScaleCom
from mpicomp.torch import ddp_hook
from tests.mpi.lanes import TIMEOUT_S, few_ranks
from tests.mpi.torch.ddp.hooked_models import SMALL_BUCKETS, VIEWS, hooked, process_group, sgd
from tests.mpi.torch.training import batch, has_grad_dtype, make_model, parameters_of, same_on_all_ranks, train

pytestmark = few_ranks


@pytest.fixture
def group(mpi_comm: MPI.Intracomm, folder: Path) -> Iterator[None]:
    """Provide DDP's process group."""
    with process_group(mpi_comm, folder):
        yield


needs_group = pytest.mark.usefixtures("group")


def refused(comm: Communicator, told: str, act: Callable[[], object], error: type[Exception] = ValueError) -> None:
    """Expect `error` on the last rank, and on the others an error that quotes it."""
    with pytest.raises(error if comm.rank == comm.size - 1 else CollectiveMismatch, match=told):
        act()


# NaN, mismatches, silence -------------------------------------------------------------------------------------------


@needs_group
@pytest.mark.parametrize("options", [{}, VIEWS, {"static_graph": True}], ids=["copies", "views", "static_graph"])
def test_nan_on_one_rank_is_told_by_backward_on_all_and_training_goes_on(
    options: dict[str, Any], comm: Communicator
) -> None:
    model, state = hooked(make_model(), DoubleSqueeze(), comm, **options, **SMALL_BUCKETS)
    optimizer = sgd(model)
    for bad in (0, 5):  # in full precision, with DDP's first buckets, and compressed
        inputs, labels = batch(comm.rank)
        if comm.rank == comm.size - 1:
            inputs[0, 0] = float("nan")
        optimizer.zero_grad()
        with pytest.raises(NonFiniteGradient, match=r"NaN or infinity in vector 0, .*, from rank") as raised:
            nn.functional.cross_entropy(model(inputs), labels).backward()
        assert raised.value.ranks == (comm.size - 1,)
        assert ("on this rank in '" in str(raised.value)) == (comm.rank == comm.size - 1)
        assert all(parameter.grad is not None and parameter.grad.isnan().all() for parameter in model.parameters())
        train(model, optimizer, comm, range(bad + 1, bad + 5))
        assert same_on_all_ranks(model, comm)
    assert len(state.aggregators) > 1


@needs_group
@pytest.mark.mpi(min_size=2)
def test_ranks_with_other_options_tell_so_in_backward(comm: Communicator) -> None:
    model, _ = hooked(make_model(), ScaleCom(rate=8 if comm.rank else 4), comm)
    with pytest.raises(CollectiveMismatch, match=r"rate=4.*rate=8"):
        train(model, sgd(model), comm, range(4))


@needs_group
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dense", [True, False])
def test_a_silent_rank_ends_backward_of_the_others(dense: bool, comm: Communicator, mpi_comm: MPI.Intracomm) -> None:
    model, _ = hooked(make_model(), Marsit(3), comm)
    train(model, sgd(model), comm, range(0 if dense else 3))
    inputs, labels = batch(comm.rank)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    comm.timeout = comm.arrival_timeout = 1.0  # not before: on a busy machine a step may take longer
    if comm.rank == 0:
        mpi_comm.barrier()
        with pytest.raises(CollectiveError):
            loss.backward()
    else:
        with pytest.raises(CollectiveTimeout, match=r"no answer from rank 0|rank 0"):
            loss.backward()
        mpi_comm.barrier()


class Alarm(Exception):
    """Raised by a signal handler."""


@needs_group
@pytest.mark.mpi(min_size=2)
def test_signals_are_handled_while_backward_waits(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, "ring", timeout=TIMEOUT_S, arrival_timeout=TIMEOUT_S)  # given up, so never closed
    model, _ = hooked(make_model(), Marsit(3), comm)
    train(model, sgd(model), comm, range(3))
    inputs, labels = batch(comm.rank)
    loss = nn.functional.cross_entropy(model(inputs), labels)

    def ring(*_: object) -> None:
        raise Alarm

    if comm.rank == 1:
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(Alarm):
                loss.backward()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    elif comm.rank:
        with pytest.raises(CollectiveTimeout, match="another rank has given up"):
            loss.backward()
    mpi_comm.barrier()  # which rank 0 has gone to at once
    if comm.rank == 0:
        with pytest.raises(CollectiveError):
            loss.backward()


# Registering --------------------------------------------------------------------------------------------------------


@needs_group
@pytest.mark.mpi(min_size=2)
def test_a_communicator_in_another_order_than_the_process_group_is_refused_on_all_ranks(
    mpi_comm: MPI.Intracomm,
) -> None:
    with Communicator(mpi_comm.Split(0, -mpi_comm.rank)) as comm:
        told = r"this is rank \d of \d in DDP's process group; give ddp_hook a communicator of the same ranks"
        with pytest.raises((ValueError, CollectiveMismatch), match=told):
            ddp_hook(Dense(), comm)


@needs_group
@pytest.mark.mpi(min_size=2)
def test_a_communicator_of_fewer_ranks_is_refused(mpi_comm: MPI.Intracomm) -> None:
    with (
        Communicator(mpi_comm.Split(mpi_comm.rank)) as alone,
        pytest.raises(ValueError, match=rf"rank 0 of 1: this is rank {mpi_comm.rank} of {mpi_comm.size} in DDP's"),
    ):
        ddp_hook(Dense(), alone, DistributedDataParallel(make_model()))


@needs_group
def test_a_method_that_needs_a_copy_of_the_model_is_refused_at_once(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="gradients have no copy of the model"):
        ddp_hook(Relay(residual="copy"), comm)
    comm.barrier()


@needs_group
def test_a_second_hook_is_refused(comm: Communicator) -> None:
    model, _ = hooked(make_model(), Dense(), comm)
    with pytest.raises(ValueError, match="the model has a communication hook already"):
        ddp_hook(Dense(), comm, model)
    train(model, sgd(model), comm, range(3))
    assert same_on_all_ranks(model, comm)


@needs_group
@has_grad_dtype
def test_gradients_of_another_type_than_their_parameter_are_refused_by_name(comm: Communicator) -> None:
    model = DistributedDataParallel(make_model())
    if comm.rank == comm.size - 1:
        model.module[2].bias.grad_dtype = torch.float64
    refused(
        comm, "parameter '2.bias' is of torch.float32 and its gradient of torch", lambda: ddp_hook(Dense(), comm, model)
    )


@needs_group
def test_gradients_without_a_bucket_are_refused_with_the_cure(comm: Communicator) -> None:
    """PyTorch's reducer in Python calls hooks in this way."""
    model = DistributedDataParallel(make_model())
    state, hook = ddp_hook(Dense(), comm, model)
    parameter = next(model.parameters())
    with pytest.raises(RuntimeError, match='"python_reducer": leave it at True, or compile without'):
        hook(state, (torch.zeros_like(parameter), parameter))


@needs_group
def test_a_state_registered_on_two_models_is_refused(comm: Communicator) -> None:
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    state, hook = ddp_hook(Dense(), comm)
    for model in models:
        model.register_comm_hook(state, hook)
    train(models[0], sgd(models[0]), comm, range(1))
    with pytest.raises(RuntimeError, match="DDP brought a gradient of another model; call ddp_hook once for each"):
        train(models[1], sgd(models[1]), comm, range(1))


@needs_group
def test_a_state_whose_backward_was_cut_off_is_refused(comm: Communicator) -> None:
    net = make_model()
    options = {**SMALL_BUCKETS, "find_unused_parameters": True}  # several buckets from the first iteration on
    model, state = hooked(net, Dense(), comm, **options)
    inputs, _ = batch(comm.rank)

    def cut_off(_: object) -> None:
        raise Alarm

    net[0].weight.register_hook(cut_off)
    with pytest.raises(Alarm):
        model(inputs).sum().backward()
    del model
    gc.collect()  # whose hooks on the parameters go with it
    again = DistributedDataParallel(net, **options)
    again.register_comm_hook(state, ddp_hook(Dense(), comm)[1])
    with pytest.raises(RuntimeError, match=r"DDP brought bucket 0 where bucket 2 was due; .* model and hook again"):
        again(inputs).sum().backward()


@needs_group
def test_what_cannot_be_averaged_is_refused_with_its_name(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="the model is a Sequential; wrap it in DistributedDataParallel first"):
        ddp_hook(Dense(), comm, make_model())
    with pytest.raises(ValueError, match="choices by parameters' names also the model"):
        ddp_hook({"*": Dense()}, comm)
    model = DistributedDataParallel(make_model())
    with pytest.raises(ValueError, match=r"no pattern among '\*\.bias' fits '0\.weight'"):
        ddp_hook({"*.bias": Dense()}, comm, model)
    complex_numbers = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"parameter 'weight' is a .*complex64; freeze it before wrapping the model"):
        ddp_hook(Dense(), comm, DistributedDataParallel(complex_numbers))
    sparse, _ = hooked(nn.Embedding(4, 3, sparse=True), Dense(), comm)
    with pytest.raises(ValueError, match=r"the gradient of 'weight' is sparse.*build its layer with sparse=False"):
        sparse(torch.tensor([1])).sum().backward()


@needs_group
def test_what_one_rank_refuses_reaches_all(comm: Communicator) -> None:
    model = DistributedDataParallel(make_model())
    choice: Any = {"*": Dense()} if comm.rank < comm.size - 1 else {"*.bias": Dense()}
    refused(comm, "no pattern among", lambda: ddp_hook(choice, comm, model))


def test_a_process_group_is_needed(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group\(\) first"):
        ddp_hook(Dense(), comm)


# States -------------------------------------------------------------------------------------------------------------


@needs_group
def test_states_that_do_not_fit_are_refused_on_all_ranks_and_change_nothing(comm: Communicator) -> None:
    model, state = hooked(make_model(), DoubleSqueeze(), comm)
    optimizer = sgd(model)
    train(model, optimizer, comm, range(4))
    good = copy.deepcopy(state.state_dict())
    own = good["mpicomp"]
    last = comm.rank == comm.size - 1
    wrong: dict[str, dict[str, Any]] = {
        r"the state is that of rank \d of 9; every rank loads its own": {"ranks": 9},
        r"the state has 'x', which this model lacks; this model has '0\.bias'": {"buckets": [["x"]]},
        "another number of buckets than of aggregators": {"aggregators": []},
        "is not one of": {"aggregators": [{**own["aggregators"][0], "method": "QSGD"}]},
        "the state's iterations is -1": {"iterations": -1},
    }
    for told, changed in wrong.items():
        bad = {"mpicomp": {**own, **changed}}
        refused(comm, told, lambda bad=bad: state.load_state_dict(bad if last else good))
    refused(comm, "load a result of state_dict of a hook's", lambda: state.load_state_dict(own if last else good))
    state.load_state_dict(good)
    before = parameters_of(model)
    train(model, optimizer, comm, range(4, 6))
    assert not torch.equal(parameters_of(model), before)
    assert state.aggregators[0].step == 5
    assert same_on_all_ranks(model, comm)
    if comm.size > 1:
        with pytest.raises(CollectiveMismatch, match="restoring a DDP hook after 7 iterations"):
            state.load_state_dict({"mpicomp": {**own, "iterations": 7 if last else 4}})


@needs_group
def test_a_state_with_parameters_that_ddp_does_not_bring_is_refused_in_backward(comm: Communicator) -> None:
    whole, state = hooked(make_model(), Dense(), comm)
    train(whole, sgd(whole), comm, range(3))
    net = make_model()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    net[0].requires_grad_(True)  # which DDP does not notice, nor a hook that is made afterwards
    fresh, hook = ddp_hook(Dense(), comm, model)
    model.register_comm_hook(fresh, hook)
    fresh.load_state_dict(state.state_dict())
    with pytest.raises(RuntimeError, match="DDP has not brought the gradients of all parameters that the state has"):
        train(model, sgd(model), comm, range(1))


@needs_group
def test_a_parameter_that_ddp_does_not_average_is_named_in_backward(comm: Communicator) -> None:
    net = make_model()
    net[0].requires_grad_(False)
    model, _ = hooked(net, Dense(), comm)
    train(model, sgd(model), comm, range(3))
    net[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"rank \d.*: parameter '0\.weight' was frozen when .* wrap the module again"):
        train(model, sgd(model), comm, range(3, 4))


@needs_group
def test_a_model_that_is_wrapped_again_goes_on_with_the_residuals_of_before(comm: Communicator) -> None:
    """The old model goes the way that it goes where the new one stays frozen."""
    nets = [nn.ModuleDict({"old": make_model(), "new": make_model(1)}) for _ in range(2)]
    states = []
    for net, unfreezes in zip(nets, (True, False), strict=True):
        net.requires_grad_(False)["old"].requires_grad_(True)
        model, state = hooked(_Added(net), DoubleSqueeze(), comm)
        optimizer = sgd(model)
        train(model, optimizer, comm, range(5))
        net["new"].requires_grad_(unfreezes)
        model, again = hooked(model.module, DoubleSqueeze(), comm)
        again.load_state_dict(state.state_dict())
        train(model, optimizer, comm, range(5, 9))
        states.append(again)
    assert torch.equal(parameters_of(nets[0]["old"]), parameters_of(nets[1]["old"]))
    assert not torch.equal(parameters_of(nets[0]["new"]), parameters_of(nets[1]["new"]))
    assert same_on_all_ranks(nets[0], comm)
    assert [one.step for one in states[0].aggregators] == [8, 4]
    fresh = hooked(_Added(nets[0]), DoubleSqueeze(), comm)[1]
    fresh.load_state_dict(states[0].state_dict())
    assert fresh.buckets == states[0].buckets


class _Added(nn.Module):
    """The old model's results, to which the new one's are added and subtracted: both have gradients of their own."""

    def __init__(self, net: nn.ModuleDict) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        results = [one(inputs) for one in self.net.values()]
        return results[0] + (results[1] - results[1].detach())


@needs_group
def test_states_need_the_names_of_the_model(comm: Communicator) -> None:
    state, _ = ddp_hook(Dense(), comm)
    told = r"states go by the parameters' names; pass the model: ddp_hook\(algorithm, comm, model\)"
    with pytest.raises(ValueError, match=told):
        state.state_dict()
    with pytest.raises(ValueError, match=told):
        state.load_state_dict({})
