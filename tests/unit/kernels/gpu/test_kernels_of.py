"""`kernels.of`: which kernels it gives, and what it says where there are none."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mpicomp import kernels

FAMILIES = (
    "arrays", "bucketed", "philox", "planes", "quantizer", "shared_selection", "sign", "sixteen_bits", "sparse",
    "top_k",
)  # fmt: skip
# Kernels of arrays that are in the host's memory for vectors on devices too: reports of ranks, states. Marsit uses
# kernels for blocks of many tensors on devices.
OF_HOST = {
    "shared_selection": {"unpack_pair"},
    "sign": {"add_and_clear", "encode", "subtract_result"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_gpus_have_the_kernels_of_cpus_with_their_parameters(family: str) -> None:
    on_cpu, on_gpu = (getattr(kernels.of(device), family) for device in ("cpu", "cuda"))
    assert on_gpu.__name__ == f"mpicomp.kernels.gpu.{family}"
    names = set(re.findall(r"@kernel\ndef (\w+)", Path(on_cpu.__file__).read_text())) - OF_HOST.get(family, set())
    assert names
    for name in sorted(names):
        on_host, on_device = getattr(on_cpu, name).py_func, getattr(on_gpu, name)
        on_device = getattr(on_device, "py_func", on_device)
        parameters, expected = inspect.signature(on_device).parameters, [*inspect.signature(on_host).parameters]
        assert [*parameters][: len(expected)] == expected, name
        more = [*parameters.values()][len(expected) :]
        assert all(one.default is not inspect.Parameter.empty for one in more), name


def test_what_gpus_have_no_kernels_for_is_named() -> None:
    with pytest.raises(AttributeError, match="no kernels 'rans' for this kind of device"):
        _ = kernels.of("cuda").rans


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernels for device 'mps', only for 'cpu', 'cuda'"):
        kernels.of("mps")


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_kernels_of_gpus_say_what_is_not_installed(missing: str) -> None:
    """And those of CPUs load neither."""
    script = (
        "import sys\n"
        "from mpicomp import kernels\n"
        "kernels.of('cpu')\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
        f"sys.modules[{missing!r}] = None\n"
        "try:\n"
        "    kernels.of('cuda')\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"kernels for device 'cuda' need Triton and PyTorch; no module {missing!r}"


def test_an_old_triton_is_named() -> None:
    """As an ImportError, which callers take for a reason to encode on the CPU."""
    script = (
        "import triton\n"
        "from mpicomp import kernels\n"
        "triton.__version__ = '3.3.1'\n"
        "try:\n"
        "    kernels.of('cuda')\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "kernels for device 'cuda' need Triton 3.4 or newer; 3.3.1 is installed"
