# In a repository of Spack's, as packages/py_mpicomp/package.py. Until there is an archive to download, give Spack the
# sources: spack develop --path /path/to/mpicomp py-mpicomp@0.1.0
# ruff: noqa: D100, RUF012
from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpicomp(PythonPackage):
    """Gradient all-reduce over plain MPI that sends one bit per element instead of 32."""

    homepage = "https://arxiv.org/abs/2204.06787"

    license("Apache-2.0")

    version("0.1.0")

    variant("torch", default=False, description="Install PyTorch for mpicomp.torch")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.26:", type="build")
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-numba@0.62:", type=("build", "run"))
    depends_on("py-xxhash@3.5:", type=("build", "run"))
    depends_on("py-numpy@2.1:", type=("build", "run"))
    depends_on("py-torch@2.5:", when="+torch", type=("build", "run"))

    import_modules = ["collectives", "mpicomp"]
