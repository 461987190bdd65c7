"""The files that a step passes are those whose functions are called."""

from __future__ import annotations

from apps.performance.step_path import called
from mpicomp import Communicator, Marsit


def test_a_warm_step_of_marsit_passes_the_driver_and_no_kernel(comm: Communicator) -> None:
    files = called(Marsit(), comm, 1000)
    order = list(files)
    assert order.index("mpicomp/aggregator/base.py") < order.index("mpicomp/aggregator/step.py")
    assert "mpicomp/feedback/sign_residual.py" in files
    assert not [path for path in files if "kernels" in path or not path.startswith(("collectives/", "mpicomp/"))]


def test_functions_are_listed_up_to_the_call_of_mpi(comm: Communicator) -> None:
    functions = list(called(Marsit(), comm, 1000, functions=True))
    assert functions.index("mpicomp/aggregator/base.py Aggregator.aggregate") < functions.index(
        "collectives/execution/call.py Call.wait"
    )
