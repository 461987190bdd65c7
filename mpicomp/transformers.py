"""The Trainer of Hugging Face Transformers over MPI: a callback that compresses, saves residuals and stops in time."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.annotations import override
from mpicomp.torch import DDPHookState, ddp_hook
from mpicomp.torch.front_ends import AlgorithmChoice
from mpicomp.torch.process_group.joining import join_process_group, leave_process_group
from mpicomp.torch.process_group.survivors import OnFailure, open_communicator
from mpicomp.torch.state.rank_files import load_beside, remove_beside, save_beside

try:
    from accelerate import DistributedType
    from transformers import ProgressCallback, Trainer, TrainerCallback

    from mpicomp.accelerate import RANK_FILES, SurvivingAccelerator, share_order
except ImportError as error:
    raise ImportError(f"mpicomp.transformers needs Transformers ({error}): pip install transformers[torch]") from error

_log = logging.getLogger("mpicomp")


class MPICallback(TrainerCallback):
    """Callback that runs a Trainer over MPI, with gradients averaged by a method of mpicomp.

    Make it before the TrainingArguments, which count the ranks, and attach it to the Trainer. Residuals are saved on
    each rank in the Trainer's checkpoints, and restored with them, also on another number of ranks. A signal that
    requests a stop on any rank saves a checkpoint and ends the training on all.

    Parameters
    ----------
    algorithm : Algorithm, mapping or callable, optional
        Method, or methods by patterns of parameters' names, as for `ddp_hook`. None: gradients are averaged in full
        precision by PyTorch's DDP over MPI.
    comm : Communicator, optional
        All ranks; None makes one, which `close` closes.
    on_failure : "raise" or "regroup"
        Option of the communicator that the callback makes: after the death of a rank raise `PeerFailure`, or go on with
        the others; see `mpicomp help faults`.
    resume_from : str or Path, optional
        The folder that ``train(resume_from_checkpoint=...)`` is given, if it lies outside of the Trainer's
        ``output_dir``.

    Attributes
    ----------
    comm : Communicator
    state : DDPHookState or None
        State of the hook since training began; None where the Trainer makes no DistributedDataParallel.

    Examples
    --------
    >>> import mpicomp
    >>> from transformers import TrainingArguments
    >>> from mpicomp.transformers import MPICallback
    >>> with MPICallback(mpicomp.Relay()) as callback:
    ...     arguments = TrainingArguments(use_cpu=True, report_to="none")
    ...     arguments.world_size
    1
    """

    def __init__(
        self,
        algorithm: AlgorithmChoice | None = None,
        comm: Communicator | None = None,
        resume_from: str | Path | None = None,
        *,
        on_failure: OnFailure = "raise",
    ) -> None:
        join_process_group()
        self._owns_comm = comm is None
        self.comm = open_communicator(comm, on_failure, algorithm)
        self.algorithm, self.resume_from = algorithm, resume_from
        self.state: DDPHookState | None = None
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> Trainer:
        """Add the callback to a Trainer, whose DistributedDataParallel it needs; return the Trainer."""
        self._trainer = trainer
        trainer.add_callback(self)
        return trainer

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._trainer is None:
            raise RuntimeError(
                f"{self.comm.here}: the callback does not know its Trainer: write callback.attach(trainer) instead of "
                "callbacks=[callback]"
            )
        self.comm.stop_requested()  # notes signals from now on
        wrapped: Any = self._trainer.model_wrapped
        model = getattr(wrapped, "_orig_mod", wrapped)  # of a compiled model
        if not isinstance(model, DistributedDataParallel):
            if self.comm.size > 1:
                raise RuntimeError(
                    f"{self.comm.here}: the Trainer does not train together with the other ranks: make MPICallback "
                    "before TrainingArguments, and without GPUs pass use_cpu=True to these"
                )
            return
        if self.algorithm is None:
            return
        if getattr(self._trainer.accelerator, "scaler", None) is not None:
            raise ValueError(
                f"{self.comm.here}: the gradient scaler of fp16=True lets gradients overflow, which the method "
                "refuses: use bf16=True"
            )
        if self.comm.recovery is not None:
            self._go_over_communicator(self._trainer, others["train_dataloader"])
        if not getattr(model, "_comm_hooks", ()):  # train() again keeps DistributedDataParallel and its hook
            self.state, hook = ddp_hook(self.algorithm, self.comm, model)
            model.register_comm_hook(self.state, hook)
        if state.global_step and self.state is not None:
            folder = self._folder(args, state) if self.resume_from is None else Path(self.resume_from)
            if not load_beside(folder / RANK_FILES, [self.state], self.comm) and self.comm.rank == 0:
                _log.warning("%s has no files of ranks: the residuals of %s start at zero", folder, self.algorithm)

    def _go_over_communicator(self, trainer: Any, loader: Any) -> None:
        """Let the Trainer's own exchanges be among survivors."""
        if trainer.args.average_tokens_across_devices:
            raise ValueError(
                f"{self.comm.here}: with average_tokens_across_devices=True the Trainer multiplies losses by a number "
                "of ranks that a death changes: pass False to TrainingArguments, or on_failure='raise'"
            )
        accelerator = trainer.accelerator
        accelerator.comm, accelerator.__class__ = self.comm, SurvivingAccelerator
        share_order(loader, self.comm)
        trainer.model.should_save_on_this_rank = bool  # by is_main_process, not by the rank in the process group
        # else each log, and the end, gather the ranks' losses and operations over the process group
        trainer.args.distributed_state.distributed_type = DistributedType.NO

    @override
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if not control.should_training_stop and self.comm.stop_requested():
            control.should_training_stop = control.should_save = True
        if isinstance(accelerator := getattr(self._trainer, "accelerator", None), SurvivingAccelerator):
            accelerator.adopt_numbers()
            self._appoint_first(state)
        return control

    def _appoint_first(self, state: Any) -> None:
        """Let the first survivor, and the first of each node, write logs, as the Trainer decides when it begins."""
        trainer: Any = self._trainer
        is_new = trainer.is_world_process_zero() and not state.is_world_process_zero
        state.is_local_process_zero = trainer.is_local_process_zero()
        state.is_world_process_zero = trainer.is_world_process_zero()
        for one in trainer.callback_handler.callbacks if is_new else ():
            if isinstance(one, ProgressCallback):
                one.on_train_begin(trainer.args, state, trainer.control)  # makes the bar
            elif hasattr(one, "_initialized"):
                one._initialized = False  # of trackers such as W&B: the next log sets them up, on this rank too

    @override
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        path = self._folder(args, state) / RANK_FILES
        if self.state is not None and not args.save_only_model:
            save_beside(path, [self.state], self.comm)
        elif self.comm.rank == 0:
            remove_beside(path)  # of an earlier checkpoint

    def _folder(self, args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"

    def close(self) -> None:
        """Close the communicator if the callback made it, and end the process group; collective."""
        if self._owns_comm:
            self.comm.close()
        leave_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:  # other ranks may be in another call after an error
            self.close()
