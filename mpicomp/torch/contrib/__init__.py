"""Young optimizers, one file each, with few trainings behind them: proven ones move to `mpicomp.torch.optimizer`.

They are made, saved and tested like all others.
"""
