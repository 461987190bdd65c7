"""Fine-tune a pretrained transformer, MiniLM-L6 of 22 million parameters, to classify sentences by subject.

    source slurm/env.sh
    mpirun -n 2 python examples/pretrained.py

Marsit averages the matrices at one bit per element. Biases and norms, a thousandth of all parameters, stay in full
precision. Comments mark the lines that are new compared with a loop for one process.
"""

from __future__ import annotations

import argparse

import torch
from images import batches
from minilm import accuracy, classifier, tokenized
from torch.utils.data import DataLoader, DistributedSampler

import mpicomp
from mpicomp.torch import DistributedOptimizer, broadcast_parameters

ALGORITHMS = {  # added; the first pattern that matches a parameter's name counts
    "*.bias": mpicomp.Dense(),
    "*LayerNorm*": mpicomp.Dense(),
    "*": mpicomp.Marsit(full_precision_every=20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM-L6.")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--dense", action="store_true", help="compress nothing, for comparison")
    options = parser.parse_args()

    comm = mpicomp.Communicator()  # added: all ranks of the job
    train, test = tokenized()
    model = classifier()
    torch.manual_seed(comm.rank)  # added: each rank drops out different activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    broadcast_parameters(model, comm)  # added: all ranks start from the same model
    algorithm = mpicomp.Dense() if options.dense else ALGORITHMS
    optimizer = DistributedOptimizer(optimizer, algorithm, comm, model.named_parameters())  # added
    sampler = DistributedSampler(train, comm.size, comm.rank)  # added: each rank has its own sentences

    before = accuracy(model, test) if comm.rank == 0 else 0.0
    model.train()
    for batch in batches(DataLoader(train, batch_size=8, sampler=sampler), options.steps):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    if comm.rank == 0:
        sent = optimizer.traffic.total.bytes_sent
        after = accuracy(model, test)
        print(f"accuracy {before:.1%} before, {after:.1%} after {options.steps} steps; rank 0 sent {sent / 1e6:.0f} MB")
    comm.close()


if __name__ == "__main__":
    main()
