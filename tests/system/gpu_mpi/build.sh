#!/usr/bin/env bash
# Build a CUDA-aware Open MPI from Debian's source package, without a CUDA toolkit: Open MPI wants no more than cuda.h,
# which the wheel nvidia-cuda-runtime-cu12 brings, and opens the driver's library at run time.
#
#   tests/system/gpu_mpi/build.sh PREFIX [JOBS]
#
# It needs a C compiler, make, perl, apt and pip, no Fortran and no root; nothing outside PREFIX and a temporary folder
# is written. PYTHON names the Python whose pip downloads the wheel, TMPDIR where to build (700 MB).
set -euo pipefail

prefix=$(realpath -m "${1:?usage: $0 PREFIX [JOBS]}")
jobs=${2:-$(nproc)}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# apt with folders of its own, so that neither its sources nor its lists change, and nobody has to be root
mkdir -p apt/lists/partial apt/cache/archives/partial
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}")
cat >apt/debian.sources <<EOF
Types: deb-src
URIs: http://deb.debian.org/debian
Suites: $release
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
EOF
own=(-o Dir::Etc::SourceList="$work/apt/debian.sources" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User=)
apt-get "${own[@]}" -qq update
apt-get "${own[@]}" -qq --download-only source openmpi # unpacking it with dpkg-source would take dpkg-dev
"$python" -m pip download --quiet --no-deps --dest wheel nvidia-cuda-runtime-cu12
"$python" -m zipfile -e wheel/*.whl cuda
mkdir source build
tar -xf openmpi_*.orig.tar.xz -C source --strip-components=1
mkdir -p "$prefix"

cd build
../source/configure --prefix="$prefix" --with-cuda="$work/cuda/nvidia/cuda_runtime" \
    --with-hwloc=internal --with-libevent=internal --with-pmix=internal --without-verbs --without-ucx --without-ofi \
    --without-psm --without-psm2 --enable-mpi-fortran=no --disable-mpi-cxx --disable-oshmem --disable-man-pages \
    --disable-mpi-java --enable-mca-no-build=io-romio321,coll-hcoll CFLAGS="-O2" | tee "$prefix/configure.log"
grep -q "CUDA support: yes" "$prefix/configure.log"
make -j"$jobs" >"$prefix/make.log" 2>&1 || { tail -n 40 "$prefix/make.log" && exit 1; }
make install >>"$prefix/make.log" 2>&1
"$prefix/bin/ompi_info" --parsable --all | grep "mpi_built_with_cuda_support:value:true"
