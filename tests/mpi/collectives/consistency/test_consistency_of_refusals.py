"""Every public collective with an argument that one rank cannot use: it raises its error, and the others quote it."""

from __future__ import annotations

import ast
import inspect
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomp
from collectives import CollectiveMismatch, Communicator
from collectives.errors import CollectiveError
from mpicomp.aggregator.algorithm import Algorithm
from mpicomp.aggregator.base import Aggregator
from tests.documents import PROJECT
from tests.mpi.lanes import TIMEOUT_S, two_ranks

torch = pytest.importorskip("torch")

import mpicomp.pipeline  # noqa: E402 - needs torch
import mpicomp.torch  # noqa: E402
from mpicomp.pipeline import PipelineStage, SplitClient, SplitServer, StageCheckpoints  # noqa: E402
from mpicomp.torch import (  # noqa: E402
    DistributedLion,
    DistributedOptimizer,
    OneBitAdam,
    OneBitLamb,
    SignMuon,
    ZeroOneAdam,
    from_deepspeed,
)
from tests.mpi.torch.ddp.hooked_models import process_group  # noqa: E402

pytestmark = [two_ranks, pytest.mark.timeout(90)]
Call = Callable[[Communicator, bool, Path], object]
"""Makes a collective call; the flag is set on the rank whose argument is unusable."""

ONES = np.ones(4, np.float32)


def linear() -> Any:
    """Return a model that is equal on all ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return model


def lazy_or_linear(bad: bool) -> Any:
    return torch.nn.Sequential(torch.nn.LazyLinear(4)) if bad else linear()


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(comm: Communicator, **options: Any) -> Any:
    """Return an optimizer after a step, and with gradients for the next one."""
    model = linear()
    optimizer = DistributedOptimizer(sgd(model), mpicomp.Dense(), comm, model.named_parameters(), **options)
    return _stepped(model, optimizer)


def one_bit(comm: Communicator, kind: Any = OneBitAdam) -> Any:
    model = linear()
    return _stepped(model, kind(model.named_parameters(), warmup_steps=2, comm=comm))


def lion(comm: Communicator, merge: Any = "vote") -> Any:
    model = linear()
    return _stepped(model, DistributedLion(model.named_parameters(), merge=merge, comm=comm))


def muon(comm: Communicator) -> Any:
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.eye_(model.weight)
    return _stepped(model, SignMuon(model.named_parameters(), comm=comm))


def _stepped(model: Any, optimizer: Any) -> Any:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    return optimizer


def aggregator(comm: Communicator) -> Any:
    return mpicomp.Marsit().start(comm, 4)


def stage(comm: Communicator, **options: Any) -> Any:
    given = {"module": torch.nn.Linear(4, 4), "micro_batches": 2, "loss": torch.nn.functional.mse_loss} | options
    return PipelineStage(given.pop("module"), comm, given.pop("micro_batches"), **given)


def checkpoints(comm: Communicator, folder: Path, **options: Any) -> Any:
    made = stage(comm)
    given = {"parts": {"module": made.module}, "every": 100} | options
    return StageCheckpoints(folder, made, given["parts"], every=given["every"])


def checkpoint_step(comm: Communicator, bad: bool, folder: Path) -> None:
    saved = checkpoints(comm, folder)
    with saved.step():
        saved._stage.step(torch.ones(4, 4), torch.ones(4, 4))
        if bad:
            raise ValueError("rank 1 has no room")


def checkpoint_load(comm: Communicator, bad: bool, folder: Path) -> None:
    path = checkpoints(comm, folder).save()
    if bad:
        (path / "replica-0-stage-1.pt").write_bytes(b"damaged")
    checkpoints(comm, folder).load()


def party(comm: Communicator, **options: Any) -> Any:
    if comm.rank == 0:
        options.pop("loss", None)
        return SplitServer(options.pop("module", torch.nn.Linear(4, 4)), comm, options.pop("clients", 1), **options)
    options.setdefault("loss", torch.nn.functional.mse_loss)
    first = options.pop("module", torch.nn.Linear(4, 4))
    return SplitClient(first, torch.nn.Linear(4, 4), comm, options.pop("clients", 1), **options)


def split_work(comm: Communicator, work: Callable[[Any], object]) -> None:
    """Let the client do its work while the server serves; both raise the error of the work."""
    made = party(comm)
    error: Exception | None = None
    with made.turn(0):
        try:
            if comm.rank == 0:
                made.serve()
            else:
                work(made)
        except mpicomp.pipeline.PipelineError as caught:
            error = caught
    assert error is not None
    raise error


def sharded(comm: Communicator) -> Any:
    """Return a model under FSDP2 on two nodes of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "shard"))
    return fully_shard(linear(), mesh=mesh["shard"])


def saved_part(bad: bool) -> Any:
    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"numbers": (lambda: 0) if bad else 3}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if bad:
                raise ValueError("rank 1 does not take it")

    return Part()


def load_saved(comm: Communicator, bad: bool, folder: Path) -> None:
    mpicomp.torch.save_checkpoint(folder, 1, {"part": saved_part(False)}, comm)
    mpicomp.torch.load_checkpoint(folder, {"part": saved_part(bad)}, comm)


def or_three(bad: bool, good: object) -> Any:
    """Return the number 3 on the rank whose argument is unusable."""
    return 3 if bad else good


X = torch.ones(4, 4)
# By the name of the call, and a word for its argument.
CASES: dict[str, Call] = {
    "Communicator topology": lambda c, bad, _: Communicator(c.mpi_comm, or_three(bad, "ring")),
    "Communicator.allreduce": lambda c, bad, _: c.allreduce("text" if bad else ONES),
    "Communicator.allreduce op": lambda c, bad, _: c.allreduce(ONES, or_three(bad, "sum")),
    "Communicator.allreduce out": lambda c, bad, _: c.allreduce(ONES, "sum", np.ones(3) if bad else None),
    "Communicator.allreduce number": lambda c, bad, _: c.allreduce(1j if bad else 1),
    "Communicator.iallreduce": lambda c, bad, _: c.iallreduce(None if bad else ONES).wait(),
    "Communicator.broadcast": lambda c, bad, _: c.broadcast("text" if bad else ONES.copy()),
    "Communicator.broadcast root": lambda c, bad, _: c.broadcast(ONES.copy(), 7 if bad else 0),
    "Communicator.broadcast root of text": lambda c, bad, _: c.broadcast(ONES.copy(), "0" if bad else 0),
    "Communicator.allgather": lambda c, bad, _: c.allgather(or_three(bad, ONES)),
    "Communicator.broadcast_object": lambda c, bad, _: c.broadcast_object((lambda: 0) if bad else 0, root=1),
    "Communicator.broadcast_object root": lambda c, bad, _: c.broadcast_object(0, None if bad else 0),
    "Communicator.allgather_object": lambda c, bad, _: c.allgather_object((lambda: 0) if bad else 0),
    "Communicator.split": lambda c, bad, _: c.split("red" if bad else 0),
    "Communicator.split key": lambda c, bad, _: c.split(0, 2**40 if bad else 0),
    "Communicator.grid": lambda c, bad, _: c.grid(row=or_three(bad, 2)),
    "Communicator.stop_requested": lambda c, bad, _: c.stop_requested(signal.SIGKILL if bad else signal.SIGUSR1),
    "Communicator.stop_requested none": lambda c, bad, _: c.stop_requested(None if bad else signal.SIGUSR1),
    "Algorithm.start": lambda c, bad, _: mpicomp.Marsit().start(c, "4" if bad else 4).aggregate(ONES),
    "Algorithm.start dtype": lambda c, bad, _: (
        mpicomp.SSDM().start(c, 4, dtype="int8" if bad else "float32").aggregate(ONES)
    ),
    "Algorithm.start vector_id": lambda c, bad, _: (
        mpicomp.SSDM().start(c, 4, vector_id="0" if bad else 0).aggregate(ONES)
    ),
    "Algorithm.start of the class": lambda c, bad, _: (
        (mpicomp.SSDM if bad else mpicomp.SSDM()).start(c, 4).aggregate(ONES)
    ),
    "Aggregator.aggregate": lambda c, bad, _: aggregator(c).aggregate(ONES[:3] if bad else ONES),
    "Aggregator.begin": lambda c, bad, _: aggregator(c).begin("text" if bad else ONES).wait(),
    "require_same": lambda c, bad, _: mpicomp.torch.require_same(lazy_or_linear(bad), c),
    "require_same meta": lambda c, bad, _: mpicomp.torch.require_same(linear().to("meta" if bad else "cpu"), c),
    "require_same number": lambda c, bad, _: mpicomp.torch.require_same({"w": or_three(bad, X)}, c),
    "require_same exclude": lambda c, bad, _: mpicomp.torch.require_same(linear(), c, exclude=["x"] if bad else ()),
    "broadcast_parameters": lambda c, bad, _: mpicomp.torch.broadcast_parameters(lazy_or_linear(bad), c),
    "broadcast_parameters root": lambda c, bad, _: mpicomp.torch.broadcast_parameters(linear(), c, 7 if bad else 0),
    "broadcast_parameters exclude": lambda c, bad, _: mpicomp.torch.broadcast_parameters(
        linear(), c, exclude=or_three(bad, "0.bias")
    ),
    "average_buffers": lambda c, bad, _: mpicomp.torch.average_buffers(
        torch.nn.LazyBatchNorm1d() if bad else torch.nn.BatchNorm1d(4), c
    ),
    "average_buffers none": lambda c, bad, _: mpicomp.torch.average_buffers(
        linear() if bad else torch.nn.BatchNorm1d(4), c
    ),
    "broadcast_optimizer_state": lambda c, bad, _: mpicomp.torch.broadcast_optimizer_state(
        or_three(bad, sgd(linear())), c
    ),
    "broadcast_optimizer_state lazy": lambda c, bad, _: mpicomp.torch.broadcast_optimizer_state(
        sgd(lazy_or_linear(bad)), c
    ),
    "DistributedOptimizer": lambda c, bad, _: DistributedOptimizer(or_three(bad, sgd(linear())), mpicomp.Dense(), c),
    "DistributedOptimizer lazy": lambda c, bad, _: DistributedOptimizer(sgd(lazy_or_linear(bad)), mpicomp.Dense(), c),
    "DistributedOptimizer algorithm": lambda c, bad, _: DistributedOptimizer(
        sgd(linear()), "dense" if bad else mpicomp.Dense(), c
    ),
    "DistributedOptimizer.step": lambda c, bad, _: wrapped(c).step(or_three(bad, None)),
    "DistributedOptimizer.step of updates": lambda c, bad, _: wrapped(c, synchronize="updates").step(
        or_three(bad, None)
    ),
    "DistributedOptimizer.synchronize": lambda c, bad, _: change_and_synchronize(wrapped(c), bad),
    "DistributedOptimizer.synchronize of updates": lambda c, bad, _: change_and_synchronize(
        wrapped(c, synchronize="updates", local_steps=3), bad
    ),
    "DistributedOptimizer.load_state_dict": lambda c, bad, _: load_own(wrapped(c), bad),
    "DistributedOptimizer.add_param_group": lambda c, bad, _: add_and_step(wrapped(c), bad),
    "DistributedOptimizer.add_param_group of updates": lambda c, bad, _: add_and_step(
        wrapped(c, synchronize="updates"), bad
    ),
    "DistributedOptimizer.join": lambda c, bad, _: next(wrapped(c).join(or_three(bad, [X]))),
    "DistributedOptimizer.join after_step": lambda c, bad, _: next(wrapped(c).join([X], or_three(bad, None))),
    "OneBitAdam": lambda c, bad, _: OneBitAdam(lazy_or_linear(bad).parameters(), comm=c),
    "OneBitAdam bits": lambda c, bad, _: OneBitAdam(linear().parameters(), bits=99 if bad else 1, comm=c),
    "OneBitAdam.step": lambda c, bad, _: one_bit(c).step(or_three(bad, None)),
    "OneBitAdam.step lr": lambda c, bad, _: set_rate(one_bit(c), "fast" if bad else 0.1).step(),
    "OneBitAdam.load_state_dict": lambda c, bad, _: load_own(one_bit(c), bad),
    "OneBitAdam.add_param_group": lambda c, bad, _: add_and_step(one_bit(c), bad),
    "OneBitLamb": lambda c, bad, _: OneBitLamb(linear().parameters(), max_coeff=-1 if bad else 1, comm=c),
    "OneBitLamb.step": lambda c, bad, _: one_bit(c, OneBitLamb).step(or_three(bad, None)),
    "OneBitLamb.load_state_dict": lambda c, bad, _: load_own(one_bit(c, OneBitLamb), bad),
    "OneBitLamb.add_param_group": lambda c, bad, _: add_and_step(one_bit(c, OneBitLamb), bad),
    "ZeroOneAdam": lambda c, bad, _: ZeroOneAdam(linear().parameters(), local_doubling=0 if bad else 1, comm=c),
    "ZeroOneAdam.step": lambda c, bad, _: one_bit(c, ZeroOneAdam).step(or_three(bad, None)),
    "ZeroOneAdam.load_state_dict": lambda c, bad, _: load_own(one_bit(c, ZeroOneAdam), bad),
    "ZeroOneAdam.add_param_group": lambda c, bad, _: add_and_step(one_bit(c, ZeroOneAdam), bad),
    "DistributedLion": lambda c, bad, _: lion(c, "sum" if bad else "vote"),
    "DistributedLion.step": lambda c, bad, _: lion(c).step(or_three(bad, None)),
    "DistributedLion.load_state_dict": lambda c, bad, _: load_own(lion(c), bad),
    "DistributedLion.add_param_group": lambda c, bad, _: add_and_step(lion(c), bad),
    "SignMuon": lambda c, bad, _: SignMuon([torch.nn.Parameter(torch.ones([4] if bad else [4, 4]))], comm=c),
    "SignMuon.step": lambda c, bad, _: muon(c).step(or_three(bad, None)),
    "SignMuon.load_state_dict": lambda c, bad, _: load_own(muon(c), bad),
    "SignMuon.add_param_group": lambda c, bad, _: add_and_step(muon(c), bad, (4, 4)),
    "from_deepspeed": lambda c, bad, _: from_deepspeed(
        {"optimizer": {"type": "Lamb" if bad else "OneBitLamb"}}, linear().parameters(), c
    ),
    "save_checkpoint": lambda c, bad, folder: mpicomp.torch.save_checkpoint(folder, 1, {"part": saved_part(bad)}, c),
    "save_checkpoint step": lambda c, bad, folder: mpicomp.torch.save_checkpoint(
        folder, 0 if bad else 1, {"part": saved_part(False)}, c
    ),
    "save_checkpoint parts": lambda c, bad, folder: mpicomp.torch.save_checkpoint(
        folder, 1, or_three(bad, {"part": saved_part(False)}), c
    ),
    "save_checkpoint folder": lambda c, bad, folder: mpicomp.torch.save_checkpoint(
        or_three(bad, folder), 1, {"part": saved_part(False)}, c
    ),
    "load_checkpoint": load_saved,
    "load_checkpoint parts": lambda c, bad, folder: mpicomp.torch.load_checkpoint(
        folder, or_three(bad, {"part": saved_part(False)}), c
    ),
    "PipelineStage": lambda c, bad, _: stage(c, module=or_three(bad, torch.nn.Linear(4, 4))),
    "PipelineStage tied": lambda c, bad, _: stage(c, tied=or_three(bad, None)),
    "PipelineStage everyone": lambda c, bad, _: stage(c, everyone=or_three(bad, None)),
    "PipelineStage schedule": lambda c, bad, _: stage(c, schedule=(lambda *_: 1 / 0) if bad else "1f1b"),
    "PipelineStage.step": lambda c, bad, _: stage(c).step(X, or_three(bad, X)),
    "PipelineStage.evaluate": lambda c, bad, _: stage(c).evaluate(X, or_three(bad, X)),
    "PipelineStage.predict": lambda c, bad, _: stage(c, module=or_error(bad)).predict(X),
    "PipelineStage.load_state_dict": lambda c, bad, _: load_own(stage(c), bad),
    "PipelineStage.load_state_dict steps": lambda c, bad, _: load_changed(stage(c), "many" if bad else 1),
    "StageCheckpoints": lambda c, bad, folder: checkpoints(c, folder, every="often" if bad else 100),
    "StageCheckpoints folder": lambda c, bad, folder: checkpoints(c, or_three(bad, folder)),
    "StageCheckpoints parts": lambda c, bad, folder: checkpoints(c, folder, parts=or_three(bad, {})),
    "StageCheckpoints.save": lambda c, bad, folder: checkpoints(c, folder, parts={"part": saved_part(bad)}).save(),
    "StageCheckpoints.load": checkpoint_load,
    "StageCheckpoints.step": checkpoint_step,
    "SplitClient": lambda c, bad, _: party(c, clients="one" if bad else 1),
    "SplitClient lazy": lambda c, bad, _: party(c, module=torch.nn.LazyLinear(4) if bad else torch.nn.Linear(4, 4)),
    "SplitClient.step": lambda c, _, __: split_work(c, lambda client: client.step(3, 3)),
    "SplitClient.predict": lambda c, _, __: split_work(c, lambda client: client.predict(3)),
    "SplitClient.turn": lambda c, bad, _: party(c).turn(7 if bad else 0).__enter__(),
    "SplitClient.load_state_dict": lambda c, bad, _: load_own(party(c), bad),
    "ddp_hook": lambda c, bad, _: mpicomp.torch.ddp_hook(or_three(bad, mpicomp.Dense()), c),
    "ddp_hook model": lambda c, bad, _: hook_of(c, bad),
    "DDPHookState.load_state_dict": lambda c, bad, _: load_own(
        mpicomp.torch.ddp_hook(mpicomp.Dense(), c, torch.nn.parallel.DistributedDataParallel(linear()))[0], bad
    ),
    "fsdp_hook": lambda c, bad, _: mpicomp.torch.fsdp_hook(or_three(bad, mpicomp.QSGD()), c, sharded(c)),
    "FSDPHook.load_state_dict": lambda c, bad, _: load_own(mpicomp.torch.fsdp_hook(mpicomp.QSGD(), c, sharded(c)), bad),
    "FSDPHook.load_checkpoint": lambda c, bad, folder: mpicomp.torch.fsdp_hook(
        mpicomp.QSGD(), c, sharded(c)
    ).load_checkpoint(or_three(bad, save_distributed(folder, c))),
    "fsdp_wire": lambda c, bad, _: mpicomp.torch.fsdp_wire(sharded(c), or_three(bad, "bfloat16")),
}
# Public calls that send nothing, or that have no argument to refuse, and the reason.
MADE_BY_ONE_RANK = "not collective: each rank for itself, and the next collective compares"
OTHERS = {
    MADE_BY_ONE_RANK: """
        Aggregator.carry Aggregator.check_state_dict Aggregator.count_step Aggregator.load_state_dict
        Aggregator.state_dict Aggregator.undo algorithm install_abort_hook load_state redistribute
        redistribute_states register_backend run_local save_state differing gpipe one_forward_one_backward
        Store Store.* MessageStore MessageStore.* FileMessageStore FileMessageStore.* Forward Forward.*
        Backward Backward.* Direct Direct.* Deltas Deltas.* Communicator.select Communicator.start_progress_thread
        DistributedOptimizer.check_state_dict DistributedOptimizer.common_model DistributedOptimizer.no_sync
        DistributedOptimizer.skip_synchronize DistributedOptimizer.state_dict DistributedOptimizer.zero_grad
        OneBitAdam.check_state_dict OneBitAdam.state_dict OneBitAdam.zero_grad OneBitLamb.check_state_dict
        OneBitLamb.state_dict OneBitLamb.zero_grad ZeroOneAdam.check_state_dict ZeroOneAdam.state_dict
        ZeroOneAdam.zero_grad DistributedLion.check_state_dict DistributedLion.state_dict DistributedLion.zero_grad
        SignMuon.check_state_dict SignMuon.state_dict SignMuon.zero_grad DDPHookState.check_state_dict
        DDPHookState.state_dict FSDPHook.remove FSDPHook.state_dict PipelineStage.state_dict PipelineStage.close
        PipelineStage.forget_messages SplitClient.state_dict SplitClient.close SplitClient.forget_messages
        SplitClient.has SplitClient.rank_of help_page
        DistributedOptimizer.diagnostics OneBitAdam.diagnostics OneBitLamb.diagnostics ZeroOneAdam.diagnostics
        DistributedLion.diagnostics SignMuon.diagnostics DDPHookState.diagnostics FSDPHook.diagnostics""",
    "between two ranks: the other one waits for a message": """
        Communicator.send Communicator.recv Communicator.isend Communicator.irecv""",
    "no argument": """
        Communicator.barrier Communicator.close PipelineStage.compare_stores PipelineStage.stores_alike
        PipelineStage.sum_tied_gradients SplitClient.compare_stores ZeroOneAdam.synchronize local_device""",
    "the same code as of SplitClient": "SplitServer SplitServer.*",
    "functions that are called after a death alone": """
        Communicator.admit DistributedOptimizer.admit OneBitAdam.admit OneBitLamb.admit ZeroOneAdam.admit
        DistributedLion.admit SignMuon.admit""",
    "for methods, optimizers and tests of ours": """
        Aggregator.let_go Aggregator.load Aggregator.make_again Aggregator.state
        Algorithm.assemble Algorithm.connect Algorithm.encodes_on_devices Algorithm.is_dense Algorithm.message_model
        Algorithm.of_gradients Algorithm.parts Algorithm.shard_alignment DDPHookState DDPHookState.average
        DDPHookState.before_forward
        DDPHookState.check_own DDPHookState.load_own DDPHookState.load_wrapped DDPHookState.own_entries
        DDPHookState.restored_point DDPHookState.wrapped_state FSDPHook PipelineStage.forget_cuts
        PipelineStage.hold_messages PipelineStage.settle_messages SplitClient.hold_messages
        SplitClient.settle_messages""",
    "made of ddp_hook, DistributedOptimizer, broadcast_parameters and files of ranks": """
        lightning.MPIStrategy lightning.MPIShardedStrategy accelerate.MPIAccelerator accelerate.SurvivingAccelerator
        transformers.MPICallback""",
}
NEED_A_GROUP = ("ddp_hook", "DDPHookState", "fsdp", "FSDPHook")


def or_error(bad: bool) -> Any:
    """Return a module, which fails on the rank whose argument is unusable."""

    class Failing(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            if bad:
                raise ValueError("rank 1 cannot compute")
            return super().forward(x)

    return Failing(4, 4)


def change_and_synchronize(optimizer: Any, bad: bool) -> None:
    if optimizer.mode == "updates":
        optimizer.step()
    if bad:
        parameter = optimizer.optimizer.param_groups[0]["params"][0]
        parameter.grad, parameter.data = None, torch.ones(4, 5)
    optimizer.synchronize()


def load_own(owner: Any, bad: bool) -> None:
    state = owner.state_dict()
    owner.load_state_dict(or_three(bad, state))


def load_changed(owner: Any, steps: object) -> None:
    owner.load_state_dict({**owner.state_dict(), "steps": steps})


def set_rate(optimizer: Any, rate: object) -> Any:
    optimizer.param_groups[0]["lr"] = rate
    return optimizer


def add_and_step(optimizer: Any, bad: bool, shape: tuple[int, ...] = (2,)) -> None:
    parameter = torch.nn.UninitializedParameter() if bad else torch.nn.Parameter(torch.ones(shape))
    optimizer.add_param_group({"params": [("more", parameter)]})
    optimizer.step()


def hook_of(comm: Communicator, bad: bool) -> None:
    model = torch.nn.parallel.DistributedDataParallel(linear())
    mpicomp.torch.ddp_hook(mpicomp.Dense(), comm, model.module if bad else model)


def save_distributed(folder: Path, comm: Communicator) -> Path:
    from torch.distributed import checkpoint

    checkpoint.save({"hook": mpicomp.torch.fsdp_hook(mpicomp.QSGD(), comm, sharded(comm))}, checkpoint_id=folder / "d")
    return folder / "d"


# Public calls ---------------------------------------------------------------------------------------------------------


def methods_of(cls: type) -> set[str]:
    """Return the public functions of a class and of its bases of ours."""
    ours = [one for one in cls.__mro__ if one.__module__.split(".")[0] in ("mpicomp", "collectives")]
    names = {name for one in ours for name in vars(one) if not name.startswith("_")}
    return {f"{cls.__name__}.{name}" for name in names if callable(getattr(cls, name, None))}


def public_calls() -> set[str]:
    """Return the names of all public functions, classes and methods."""
    found = methods_of(Aggregator) | methods_of(Algorithm)
    modules: tuple[ModuleType, ...] = (mpicomp, mpicomp.torch, mpicomp.pipeline)
    for one in (getattr(module, name) for module in modules for name in module.__all__):
        if inspect.isclass(one) and not issubclass(one, BaseException | Algorithm):
            listed = {f"Communicator.{name}" for name in dir(one) if callable(getattr(one, name))}
            found |= {one.__name__} | (methods_of(one) if one is not Communicator else listed)
        elif inspect.isfunction(one):
            found.add(one.__name__)
    for module in ("lightning", "accelerate", "transformers"):  # which are not installed everywhere
        nodes = ast.parse((PROJECT / "mpicomp" / f"{module}.py").read_text()).body
        found |= {f"{module}.{one.name}" for one in nodes if isinstance(one, ast.ClassDef) and one.name[0] != "_"}
    return {name for name in found if not name.rpartition(".")[2].startswith("_")}


def test_the_walk_has_every_public_call() -> None:
    """Add a case for a new collective to `CASES`; name in `OTHERS` why a call needs none."""
    walked = {name.split(" ")[0] for name in CASES}
    known = {name for names in OTHERS.values() for name in names.split()}
    missing = {name for name in public_calls() - walked - known if not {f"{name.rpartition('.')[0]}.*", name} & known}
    assert missing == set()
    assert {name for name in (walked | known) - public_calls() if not name.endswith("*")} == set()


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group(request: pytest.FixtureRequest, mpi_comm: MPI.Intracomm, folder: Path) -> Iterator[None]:
    """Make a default process group for the calls that need one."""
    if not request.node.callspec.params["name"].startswith(NEED_A_GROUP):
        yield
        return
    with process_group(mpi_comm, folder):
        yield


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", CASES)
def test_a_rank_with_an_unusable_argument_reports_it_to_the_others(name: str, comm: Communicator, folder: Path) -> None:
    error: Exception | None = None
    start = time.perf_counter()
    try:
        CASES[name](comm, comm.rank == 1, folder)
    except Exception as caught:  # noqa: BLE001 - compared below
        error = caught
    seconds = time.perf_counter() - start
    (there, theirs, _), (own, text, _) = comm.allgather_object((type(error).__name__, str(error), seconds))
    assert seconds < TIMEOUT_S / 2
    if there in ("PipelineError", "OSError", "ValueError") and own == there:  # by agreement: all raise one error
        assert theirs.split(": ", 1)[-1] == text.split(": ", 1)[-1]
    elif name == "Communicator topology":
        assert (there, own) == ("CollectiveMismatch", "TypeError")
    elif name == "average_buffers none":
        assert there == own == "CollectiveMismatch"
    else:
        assert there in ("CollectiveMismatch", "PipelineError"), (there, theirs)
        assert own in ("TypeError", "ValueError", "RuntimeError"), (own, text)
        assert text.rpartition(": ")[2][:60] in theirs
    assert "rank 1" in theirs or "stage 1" in theirs or "client 0" in theirs, theirs
    assert not isinstance(error, CollectiveError) or isinstance(error, CollectiveMismatch)
    comm.barrier()  # the communicator can be used further


def test_a_lazy_model_is_named_with_the_cure(comm: Communicator) -> None:
    with pytest.raises((ValueError, CollectiveMismatch), match=r"'0\.weight' has no shape .* run a forward first"):
        mpicomp.torch.require_same(lazy_or_linear(comm.rank == 1), comm)
