"""Records of a training's communication, in writers and frameworks that stand in for the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from collectives import Communicator  # noqa: E402
from mpicomp import Relay, run_local  # noqa: E402
from mpicomp.torch import DistributedOptimizer  # noqa: E402
from mpicomp.tracking import Tracker, lightning_callback, scalars, tensorboard, trainer_callback, wandb  # noqa: E402

OF_TRAFFIC = {"mpicomp/bytes_sent", "mpicomp/seconds", "mpicomp/total_bytes_sent"}
OF_NORMS = {"mpicomp/update_norm", "mpicomp/residual_norm", "mpicomp/residual_ratio"}


def steps(comm: Communicator, after: Callable[[DistributedOptimizer, int], object], n: int = 5) -> None:
    """Train one tensor, and call `after` after each step."""
    weights = torch.nn.Parameter(torch.linspace(-1, 1, 4096))
    sgd = torch.optim.SGD([weights], lr=0.1)
    optimizer = DistributedOptimizer(sgd, Relay(16), comm, synchronize="gradients")
    optimizer.diagnostics(every=1, audit_every=2)
    for step in range(1, n + 1):
        weights.grad = weights.detach() * (1 + comm.rank)
        optimizer.step()
        after(optimizer, step)


class Writer:
    """Keeps the arguments of a writer of TensorBoard or a run of Weights & Biases, whose steps never fall."""

    def __init__(self) -> None:
        self.records: list[tuple[int, str, float]] = []
        self.axes: list[tuple[str, str]] = []
        self.step = 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.records.append((step, name, value))

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step
        self.step, number = step, values["mpicomp/step"]
        self.log_metrics({name: value for name, value in values.items() if name != "mpicomp/step"}, int(number))

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.records += [(step, name, value) for name, value in values.items()]

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))


@pytest.mark.parametrize("sink", [tensorboard, wandb])
def test_rank_0_writes_every_few_steps(sink: Any) -> None:
    writers = [Writer(), Writer()]

    def train(comm: Communicator) -> None:
        tracker = Tracker(sink(writers[comm.rank]), every=2)
        steps(comm, tracker.record)

    run_local(2, train)
    records = writers[0].records
    assert {name for step, name, _ in records if step == 2} == OF_TRAFFIC
    assert {name for step, name, _ in records if step == 4} == OF_TRAFFIC | OF_NORMS | {"mpicomp/cosine"}
    assert {step for step, _, _ in records} == {2, 4}
    assert all(isinstance(value, float) and value > 0 for _, _, value in records)
    assert writers[1].records == []


def test_tensorboard_is_written_by_a_writer_of_its_own_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def summary_writer(**options: object) -> Writer:
        made.append(options)
        return Writer()

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module(SummaryWriter=summary_writer))

    run_local(2, lambda comm: steps(comm, Tracker(tensorboard(log_dir="curves"), every=1).record))
    assert made == [{"log_dir": "curves"}]


@pytest.mark.parametrize("given", [False, True])
def test_a_run_whose_own_step_is_ahead_keeps_all_records(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Writer()
    monkeypatch.setitem(sys.modules, "wandb", module(run=run))

    def train(comm: Communicator) -> None:
        tracker = Tracker(wandb(run) if given else wandb(), every=1)

        def after(optimizer: DistributedOptimizer, step: int) -> None:
            run.step += 3  # of other curves, which are logged without a step
            tracker.record(optimizer, step)

        steps(comm, after)

    run_local(1, train)
    assert {step for step, _, _ in run.records} == {1, 2, 3, 4, 5}
    assert run.step == 15
    assert run.axes == [("mpicomp/*", "mpicomp/step")]


def test_a_record_without_a_run_is_an_error_that_names_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module(run=None))
    with pytest.raises(RuntimeError, match=r"has no run: call wandb\.init on rank 0 before the first record"):
        run_local(1, lambda comm: steps(comm, Tracker(wandb(), every=1).record))


def module(**members: object) -> ModuleType:
    """Return a module with these members."""
    made = ModuleType("stand_in")
    vars(made).update(members)
    return made


class Callback:
    """Stands for the base class of a framework's callbacks."""


def test_lightning_is_given_the_records_of_hook_and_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", module())
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module(Callback=Callback))
    loggers = [Writer(), Writer()]

    def train(comm: Communicator) -> None:
        callback = lightning_callback(every=2)
        assert isinstance(callback, Callback)

        def after(optimizer: DistributedOptimizer, step: int) -> None:
            strategy = SimpleNamespace(state=None, optimizers=[optimizer, torch.optim.SGD([torch.ones(1)])])
            trainer = SimpleNamespace(
                strategy=strategy, global_step=step // 2, loggers=[loggers[comm.rank]], is_global_zero=comm.rank == 0
            )  # two batches of an accumulated gradient have one step
            callback.on_train_batch_end(trainer, None, None, None, 0)

        steps(comm, after, 9)

    run_local(2, train)
    assert [step for step, name, _ in loggers[0].records if name == "mpicomp/seconds"] == [2, 4]
    assert {name for _, name, _ in loggers[0].records} == OF_TRAFFIC | OF_NORMS | {"mpicomp/cosine"}
    assert loggers[1].records == []


def test_the_trainer_logs_the_records_of_the_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", module(TrainerCallback=Callback))
    logs: list[list[set[str]]] = [[], []]

    def train(comm: Communicator) -> None:
        mpi_callback = SimpleNamespace(state=None)
        control = SimpleNamespace()

        def log(values: dict[str, float]) -> None:
            logs[comm.rank].append(set(values))
            control.should_log = False

        trainer = SimpleNamespace(log=log)
        callback = trainer_callback(trainer, mpi_callback, every=2)
        assert isinstance(callback, Callback)

        def after(optimizer: DistributedOptimizer, step: int) -> None:
            control.should_log = step != 2
            callback.on_step_end(None, SimpleNamespace(global_step=step), control)
            assert control.should_log == (step != 2)  # the Trainer's own log of this step comes next
            mpi_callback.state = optimizer

        steps(comm, after)

    run_local(2, train)
    assert logs[0] == logs[1] == [OF_TRAFFIC, OF_TRAFFIC | OF_NORMS | {"mpicomp/cosine"}]


@pytest.mark.parametrize(
    ("module", "make", "message"),
    [
        ("torch.utils.tensorboard", tensorboard, "TensorBoard (.*): pip install tensorboard"),
        ("wandb", wandb, "Weights & Biases (.*): pip install wandb"),
        ("lightning.pytorch", lightning_callback, "PyTorch Lightning (.*): pip install lightning"),
        ("transformers", lambda: trainer_callback(None, None), "Transformers (.*): pip install transformers"),
    ],
)
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    module: str, make: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="this tracker needs " + message.replace("(", r"\(").replace(")", r"\)")):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("curves",), TypeError, "write is of type str: pass a function of values and step"),
        ((print, 0), ValueError, "every is 0; choose a whole number, 1 or more"),
    ],
)
def test_trackers_refuse_wrong_arguments(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        Tracker(*arguments)


@pytest.mark.parametrize("record", [lambda owner: Tracker(print).record(owner, 3), scalars])
def test_owners_without_traffic_are_refused(record: Any) -> None:
    message = (
        "SGD has no traffic: pass an optimizer of mpicomp, such as DistributedOptimizer or OneBitAdam, the state of"
    )
    with pytest.raises(TypeError, match=message):
        record(torch.optim.SGD([torch.ones(1)]))


@pytest.mark.parametrize("make", [lightning_callback, lambda every: trainer_callback(None, None, every)])
def test_callbacks_refuse_wrong_numbers_of_steps(make: Any) -> None:
    with pytest.raises(ValueError, match="every is 0; choose a whole number"):
        make(every=0)


def test_names_begin_with_a_prefix() -> None:
    def train(comm: Communicator) -> None:
        steps(comm, lambda optimizer, _: found.append(set(scalars(optimizer, "net/"))), n=1)

    found: list[set[str]] = []
    run_local(1, train)
    assert found == [{name.replace("mpicomp/", "net/") for name in OF_TRAFFIC}]
