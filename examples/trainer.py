"""The Trainer of Hugging Face Transformers over MPI, with a callback that compresses gradients.

    source slurm/env.sh
    mpirun -n 2 python examples/trainer.py

Comments mark the lines that change in a Trainer program over Gloo.
"""

from __future__ import annotations

import argparse
import tempfile

from minilm import accuracy, classifier, tokenized
from transformers import Trainer, TrainingArguments

import mpicomp
from mpicomp.transformers import MPICallback


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM-L6 with the Trainer.")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    options = parser.parse_args()

    algorithm = mpicomp.Dense() if options.dense else mpicomp.QSGD(levels=7)  # added: four bits per element
    callback = MPICallback(algorithm)  # added; before TrainingArguments
    train, test = tokenized()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(), save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, ddp_find_unused_parameters=False, logging_steps=5, logging_first_step=True,
        max_steps=options.steps, per_device_train_batch_size=8, learning_rate=3e-4,
    )  # fmt: skip
    trainer = Trainer(classifier(), arguments, train_dataset=train)
    callback.attach(trainer)  # added
    trainer.train()

    if trainer.is_world_process_zero():
        sent = callback.state.traffic.total.bytes_sent
        found = accuracy(trainer.model, test)
        print(f"accuracy {found:.1%} after {trainer.state.global_step} steps; rank 0 sent {sent / 1e6:.0f} MB")
    callback.close()  # added


if __name__ == "__main__":
    main()
