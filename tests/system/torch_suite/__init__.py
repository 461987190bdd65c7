"""PyTorch's own tests of process groups, which its wheel contains, run against the backend "mpicomp".

``python -m tests.system.torch_suite`` runs them on 3 ranks; ``--backend gloo`` runs them with Gloo, to compare.
"""
