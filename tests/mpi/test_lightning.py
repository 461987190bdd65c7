"""MPIStrategy and MPIShardedStrategy with the real Lightning: training, checkpoints with residuals, stops, FSDP2."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from mpicomp import QSGD, Communicator, Dense, Marsit, ScaleCom
from mpicomp.torch import require_same
from tests.mpi import integrations

integrations.require("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402

from mpicomp.lightning import MPIShardedStrategy, MPIStrategy  # noqa: E402
from mpicomp.tracking import lightning_callback  # noqa: E402

pytestmark = integrations.MARKS
reset = integrations.reset
FEATURES, CLASSES, BATCH, BATCHES = 8, 3, 4, 24


def loader(rank: int) -> DataLoader[Any]:
    """Return a rank's own batches, which are all equal: Lightning itself resumes with another one."""
    inputs = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(rank)).repeat(BATCHES, 1)
    return DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), batch_size=BATCH)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("correct", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(strategy: Any, steps: int, module: LightningModule | None = None, **options: Any) -> tuple[Any, Trainer]:
    module = Module() if module is None else module
    resumed = options.pop("ckpt_path", None)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=steps, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_train_batches=6, use_distributed_sampler=False,
        **{"num_sanity_val_steps": 0, "logger": False} | options,
    )  # fmt: skip
    trainer.fit(module, loader(trainer.global_rank), ckpt_path=resumed)
    return module, trainer


def weights(module: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def test_without_a_method_ddp_takes_the_steps_of_a_single_process(comm: Communicator) -> None:
    strategy = MPIStrategy(comm=comm)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": comm.size, "rank": comm.rank}
    module, trainer = fit(strategy, 4)
    assert (trainer.world_size, trainer.global_rank, trainer.global_step) == (comm.size, comm.rank, 4)
    alone = Module()
    optimizer, everyones = alone.configure_optimizers(), [loader(rank) for rank in range(comm.size)]
    for _, *batches in zip(range(4), *everyones, strict=False):
        optimizer.zero_grad()
        sum(alone.training_step(batch, 0) / comm.size for batch in batches).backward()
        optimizer.step()
    torch.testing.assert_close(weights(module), weights(alone))


WAYS: dict[str, dict[str, Any]] = {
    "hook": {"algorithm": ScaleCom(rate=4)},
    "optimizer": {"algorithm": ScaleCom(rate=4), "synchronize": "optimizer"},
    "updates": {
        "algorithm": Marsit(full_precision_every=5), "synchronize": "optimizer",
        "optimizer_options": {"local_steps": 2},
    },
}  # fmt: skip
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@every_way
def test_training_goes_on_from_a_checkpoint_to_the_bit(way: dict[str, Any], comm: Communicator, folder: Path) -> None:
    straight, _ = fit(MPIStrategy(comm=comm, **way), 12)
    require_same(straight, comm)
    path = folder / "last.ckpt"
    _, trainer = fit(MPIStrategy(comm=comm, **way), 6, callbacks=[SaveAtEnd(path)])
    assert {one.name for one in folder.iterdir()} == {
        "last.ckpt", *(f"last.ckpt.rank{rank}-of-{comm.size}" for rank in range(comm.size)),
    }  # fmt: skip
    link = folder.parent / f"{folder.name} link"
    if comm.rank == 0:
        link.symlink_to(path)
    comm.barrier()
    module, _ = fit(MPIStrategy(comm=comm, **way), 12, ckpt_path=link)
    assert torch.equal(weights(module), weights(straight))
    trainer.strategy.remove_checkpoint(path)
    comm.barrier()
    assert not list(folder.iterdir())


class SaveAtEnd(Callback):
    def __init__(self, path: Path | str) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.mpi(min_size=3)
def test_residuals_are_redistributed_over_another_number_of_ranks(comm: Communicator, folder: Path) -> None:
    path = folder / "last.ckpt"
    fit(MPIStrategy(ScaleCom(rate=4), comm), 6, callbacks=[SaveAtEnd(path)])
    for file in folder.glob("*-of-3"):  # as if two ranks had written the same residuals
        if comm.rank == 0:
            saved = torch.load(file, weights_only=True)
            for state in saved["states"]:
                state["mpicomp"]["ranks"] = 2
            torch.save(saved, file.with_name(file.name.replace("-of-3", "-of-2")))
    comm.barrier()
    if comm.rank == 0:
        for name in ("rank0-of-3", "rank1-of-3", "rank2-of-3", "rank2-of-2"):
            (folder / f"last.ckpt.{name}").unlink()
    comm.barrier()
    module, trainer = fit(MPIStrategy(ScaleCom(rate=4), comm), 8, ckpt_path=path)
    assert trainer.global_step == 8
    require_same(module, comm)


def test_a_checkpoint_without_residuals_is_a_warning(comm: Communicator, folder: Path) -> None:
    path = folder / "last.ckpt"
    fit(MPIStrategy(Dense(), comm), 4, callbacks=[SaveAtEnd(path)])
    comm.barrier()
    (folder / f"last.ckpt.rank{comm.rank}-of-{comm.size}").unlink()
    comm.barrier()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(MPIStrategy(Dense(), comm), 6, ckpt_path=path)
    told = [str(one.message) for one in seen if "has no files of ranks" in str(one.message)]
    assert len(told) == (comm.rank == 0)


@every_way
def test_models_are_equal_when_they_are_evaluated(way: dict[str, Any], comm: Communicator) -> None:
    equal: list[int] = []

    class Compare(Callback):
        def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
            require_same(module, comm)
            equal.append(trainer.global_step)

    module = Module()
    trainer = Trainer(
        strategy=MPIStrategy(comm=comm, **way), accelerator="cpu", max_steps=6, logger=False, callbacks=[Compare()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        val_check_interval=3,
    )  # fmt: skip
    trainer.fit(module, loader(comm.rank), loader(comm.rank))
    assert equal == [3, 6]


@every_way
def test_gradients_accumulate(way: dict[str, Any], comm: Communicator) -> None:
    module, trainer = fit(MPIStrategy(comm=comm, **way), 3, accumulate_grad_batches=2, gradient_clip_val=0.5)
    assert trainer.global_step == 3
    require_same(module, comm)


def test_all_loggers_have_the_curves_once_for_each_step(comm: Communicator, folder: Path) -> None:
    loggers = [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "curves")]
    strategy = MPIStrategy(ScaleCom(rate=4), comm, synchronize="optimizer")
    fit(strategy, 5, accumulate_grad_batches=2, log_every_n_steps=1, logger=loggers, callbacks=[lightning_callback(2)])
    for logger in loggers:
        logger.finalize("success")
    comm.barrier()
    curves = integrations.curves(folder)
    assert [step for step, _ in curves["mpicomp/bytes_sent"]] == [2, 4]
    assert [step for step, _ in curves["loss"]] == [0, 1, 2, 3, 4]
    (table,) = folder.rglob("metrics.csv")
    assert "mpicomp/total_bytes_sent" in table.read_text()


class Signal(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_on_one_rank_saves_and_stops_all(comm: Communicator, folder: Path) -> None:
    path = folder / "stopped.ckpt"
    strategy = MPIStrategy(ScaleCom(rate=4), comm, stop_checkpoint=path)
    _, trainer = fit(strategy, 20, callbacks=[Signal()])
    assert trainer.global_step == 4
    assert torch.load(path, weights_only=False)["global_step"] == 3
    assert len(list(folder.glob("stopped.ckpt.rank*"))) == comm.size


def test_a_stop_waits_for_the_accumulated_gradient_and_for_no_minimum(comm: Communicator, folder: Path) -> None:
    class Early(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *rest: Any) -> None:
            if rest[-1] == 0 and trainer.is_global_zero:
                os.kill(os.getpid(), signal.SIGUSR1)

    strategy = MPIStrategy(ScaleCom(rate=4), comm, stop_checkpoint=folder / "stopped.ckpt")
    _, trainer = fit(
        strategy, 20, callbacks=[Early()], accumulate_grad_batches=2, min_epochs=3, min_steps=10,
    )  # fmt: skip
    assert torch.load(folder / "stopped.ckpt", weights_only=False)["global_step"] == 1
    assert trainer.global_step == 2
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_batch_of_a_second_fit_stops(number: int, comm: Communicator) -> None:
    fit(MPIStrategy(ScaleCom(rate=4), comm), 2)

    class AtSetup(Callback):
        def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
            if trainer.is_global_zero and number == signal.SIGUSR1:
                os.kill(os.getpid(), number)

        def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
            if trainer.is_global_zero and number == signal.SIGTERM:
                os.kill(os.getpid(), number)

    _, trainer = fit(MPIStrategy(ScaleCom(rate=4), comm), 20, callbacks=[AtSetup()])
    assert trainer.global_step == 1


def test_residuals_are_saved_after_fit_too(comm: Communicator, folder: Path) -> None:
    _, trainer = fit(MPIStrategy(ScaleCom(rate=4), comm), 4)
    trainer.save_checkpoint(folder / "final.ckpt")
    comm.barrier()
    assert len(list(folder.glob("final.ckpt.rank*"))) == comm.size
    fit(MPIStrategy(ScaleCom(rate=4), comm), 6, ckpt_path=folder / "final.ckpt")


def test_a_checkpoint_after_the_communicator_is_closed_has_no_old_residuals(comm: Communicator, folder: Path) -> None:
    _, trainer = fit(MPIStrategy(ScaleCom(rate=4)), 4, callbacks=[SaveAtEnd(folder / "final.ckpt")])
    comm.barrier()
    assert len(list(folder.iterdir())) == comm.size + 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.save_checkpoint(folder / "final.ckpt")
        trainer.save_checkpoint(folder / "final.ckpt")
    comm.barrier()
    assert [one.name for one in folder.iterdir()] == ["final.ckpt"]
    assert sum("without residuals" in str(one.message) for one in seen) == (comm.rank == 0)


def test_optimizers_draw_numbers_of_their_own(comm: Communicator) -> None:
    class Two(Module):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[place].parameters(), lr=0.1) for place in (0, 2)]

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
            self.manual_backward(super().training_step(batch, 0))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    strategy = MPIStrategy(QSGD(seed=5), comm, synchronize="optimizer")
    fit(strategy, 4, Two())
    seeds = [one.algorithm.seed for optimizer in strategy.optimizers for one in optimizer.aggregators]
    assert seeds == [5, 6]


def test_a_gradient_scaler_is_refused(comm: Communicator) -> None:
    precision = Precision()
    precision.scaler = object()
    with pytest.raises(ValueError, match=r"use bf16, as in precision='bf16-mixed'"):
        fit(MPIStrategy(Dense(), comm), 2, plugins=[precision])


class Sharded(Module):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)


def full_weights(module: nn.Module) -> Tensor:
    return torch.cat([one.full_tensor().detach().flatten() for one in module.parameters()])


def test_fsdp2_takes_the_steps_of_ddp_and_goes_on_from_a_checkpoint(comm: Communicator, folder: Path) -> None:
    plain, _ = fit(MPIStrategy(comm=comm), 8)
    sharded, _ = fit(MPIShardedStrategy(comm), 8, Sharded())
    torch.testing.assert_close(full_weights(sharded), weights(plain))
    fit(MPIShardedStrategy(comm), 4, Sharded(), callbacks=[SaveAtEnd(folder / "sharded.ckpt")])
    resumed, trainer = fit(MPIShardedStrategy(comm), 8, Sharded(), ckpt_path=folder / "sharded.ckpt")
    assert trainer.global_step == 8
    assert torch.equal(full_weights(resumed), full_weights(sharded))


def test_residuals_are_not_saved_elsewhere_than_in_folders(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"memory://last.ckpt is not in a file system, where each rank can write"):
        fit(MPIStrategy(Dense(), comm), 2, callbacks=[SaveAtEnd("memory://last.ckpt")])


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="synchronize is 'sum': choose 'ddp' or 'optimizer'"):
        MPIStrategy(Dense(), synchronize="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="synchronize='optimizer' needs an algorithm, such as"):
        MPIStrategy(synchronize="optimizer")
    with pytest.raises(ValueError, match="are of DistributedOptimizer: pass synchronize='optimizer' too"):
        MPIStrategy(Dense(), optimizer_options={"local_steps": 2})


def test_exchanges_of_some_ranks_or_of_gradients_are_refused_among_survivors() -> None:
    comm: Any = SimpleNamespace(recovery=object(), here="rank 0 of 2")
    strategy, tensor = MPIStrategy(Dense(), comm), torch.ones(1, requires_grad=True)
    for exchange in (strategy.reduce, strategy.all_gather):
        with pytest.raises(ValueError, match="group= cannot be a part of the ranks where on_failure='regroup'"):
            exchange(tensor, group=object())
    with pytest.raises(ValueError, match=r"all_gather\(sync_grads=True\) has no gradient where on_failure='regroup'"):
        strategy.all_gather(tensor, sync_grads=True)


def test_the_earlier_name_of_an_option_is_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="average= has become synchronize="):
        strategy = MPIStrategy(Dense(), average="optimizer")
    assert strategy._wraps_optimizers


def test_the_program_of_the_page_runs() -> None:
    integrations.run_block("mpicomp.lightning")
