"""Tests of PyTorch's sources that fail as they must, and why."""

from __future__ import annotations

_GLOO = "test_c10d_gloo.ProcessGroupGlooTest"
_COMPILER = "test_c10d_gloo.CompilerTest"

KNOWN_OF_SOURCES = {
    "compares the name of the group with Gloo's": (
        "test_c10d_common.ProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends",
        "test_c10d_gloo.GlooProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends",
    ),
    "awaits a process of its own, which no other test has used": (
        "test_c10d_common.LocalRankTest.testWithoutEnv",
        "test_c10d_common.PythonProcessGroupExtensionTest.test_is_backend_available",
    ),
    "uses what the installed PyTorch has removed": (
        f"{_COMPILER}.test_allgather_work_wait_cpu",
        f"{_COMPILER}.test_allreduce_work_wait_cpu",
        f"{_COMPILER}.test_broadcast_work_wait_cpu",
        f"{_COMPILER}.test_consecutive_comm_work_wait_cpu",
        f"{_COMPILER}.test_nested_comm_tensor_wrapping",
        f"{_COMPILER}.test_scatter_work_wait_cpu",
        f"{_GLOO}.test_round_robin",
        f"{_GLOO}.test_round_robin_create_destroy",
    ),
    "needs GPUs, and does not look for them": (
        "test_c10d_spawn_gloo.DistributedDataParallelSingleProcessTest.test_cuda",
        "test_c10d_spawn_gloo.DistributedDataParallelSingleProcessTest.test_rnn",
    ),
    "fails with Gloo on the same ranks": ("test_c10d_gloo.TimeoutTest.test_default_store_timeout_gloo",),
    "passes several tensors in a list, which is refused": (
        f"{_GLOO}.test_allgather_basics",
        f"{_GLOO}.test_allgather_noncontiguous_input",
        f"{_GLOO}.test_allreduce_basics",
        f"{_GLOO}.test_broadcast_basics",
        f"{_GLOO}.test_sparse_allreduce_basics",
    ),
    "awaits the words of Gloo's errors": (
        f"{_GLOO}.test_allgather_checks",
        f"{_GLOO}.test_allgather_coalesced_checks",
        f"{_GLOO}.test_allreduce_checks",
        f"{_GLOO}.test_allreduce_coalesced_checks",
        f"{_GLOO}.test_broadcast_checks",
        f"{_GLOO}.test_gather_checks",
        f"{_GLOO}.test_reduce_checks",
        f"{_GLOO}.test_scatter_checks",
        f"{_GLOO}.test_sparse_allreduce_checks",
    ),
}
