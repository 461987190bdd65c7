"""The Trainer of Hugging Face Transformers over MPI: DDP over the backend "mpicomp", with a hook that compresses.

    source slurm/env.sh
    mpirun -n 2 python examples/trainer.py

Comments mark the lines that change in a Trainer program over Gloo.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch.distributed as dist
from minilm import accuracy, classifier, tokenized
from transformers import Trainer, TrainerCallback, TrainingArguments

import mpicomp
from mpicomp.torch import ddp_hook, register_backend


class Compression(TrainerCallback):
    """Average the gradients of a Trainer by a method of mpicomp."""

    def __init__(self, trainer: Trainer, algorithm: Any, comm: mpicomp.Communicator) -> None:
        self.trainer, self.algorithm, self.comm = trainer, algorithm, comm

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Register the hook with the Trainer's DistributedDataParallel, which exists by now."""
        model = self.trainer.model_wrapped
        self.state, hook = ddp_hook(self.algorithm, self.comm, model)
        model.register_comm_hook(self.state, hook)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM-L6 with the Trainer.")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    options = parser.parse_args()

    register_backend()  # added
    dist.init_process_group("mpicomp")  # added: the Trainer uses the existing process group
    comm = mpicomp.Communicator()  # added
    train, test = tokenized()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, ddp_find_unused_parameters=False,
        max_steps=options.steps, per_device_train_batch_size=8, learning_rate=3e-4,
    )  # fmt: skip
    trainer = Trainer(classifier(), arguments, train_dataset=train)
    trainer.add_callback(Compression(trainer, mpicomp.ScaleCom(rate=8), comm))  # added
    trainer.train()

    if trainer.is_world_process_zero():
        print(f"accuracy {accuracy(trainer.model, test):.1%} after {trainer.state.global_step} steps")
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
