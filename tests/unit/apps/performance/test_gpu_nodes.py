"""Predicted steps on nodes of GPUs: the page has the program's table, which follows links, models and figures."""

from __future__ import annotations

import re

import pytest

from apps.performance import gpu_nodes
from apps.performance.gpu_nodes import (
    MODELS,
    Cluster,
    Gpu,
    Step,
    choose,
    exchange_s,
    overlapped_s,
    read_measured,
    steps,
)
from mpicomp import Dense, Relay

H100 = read_measured()
SMALL, MIDDLE, LARGE = MODELS


def test_the_page_has_the_table_that_the_program_makes(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(
        r"<!-- begin gpu-nodes -->\n(.*?)<!-- end gpu-nodes -->", gpu_nodes.PAGE.read_text(), re.DOTALL
    )
    assert gpu_nodes.main([]) == 0
    assert capsys.readouterr().out.strip() == block.strip(), "python -m apps.performance.gpu_nodes --publish"


def test_the_figures_are_those_of_the_page_of_measurements() -> None:
    rows = (
        "| norms, quantize and pack; unpack and dequantize | 400; 300 | 0.61; 0.42 |\n"
        "| forward and backward of a GPT of 86 million parameters | <= 3 % | 73 % (20.0 and 36.0 ms; 134 % before) |\n"
    )
    found = read_measured(rows)
    assert found == pytest.approx((4e-12, 3e-12, 1e-3))
    with pytest.raises(ValueError, match=r"performance-gpu.md has no row of the quantizer's kernels, or none of the"):
        read_measured("")


@pytest.mark.parametrize("rate", gpu_nodes.RATES)
def test_a_dense_sum_fills_the_link_of_a_node(rate: float) -> None:
    cluster, n = Cluster(), 1_000_000_000
    bytes_of_a_node = 2 * 4 * n * (cluster.nodes - 1) / cluster.nodes
    at_least = bytes_of_a_node / (rate * 1e9 / 8)
    assert at_least < exchange_s(Dense(), cluster.job(n, rate), H100) < 1.15 * at_least + 0.06  # and inside of nodes


def test_four_bits_take_about_an_eighth_of_the_time_on_slow_links() -> None:
    job = Cluster().job(LARGE.parameters, 1)
    assert 6 < exchange_s(Dense(), job, H100) / exchange_s(Relay(16), job, H100) < 8


def test_slower_kernels_and_hosts_make_a_step_longer() -> None:
    def relay(gpu: Gpu) -> float:
        return [*steps(Cluster(), SMALL, 100, gpu)][2].seconds

    assert relay(H100) < relay(H100._replace(encode_s=1e-9)) < relay(H100._replace(encode_s=1e-9, bucket_s=1.0))


def test_an_exchange_is_hidden_behind_backward_as_far_as_it_goes() -> None:
    assert overlapped_s(0.3, 0.1) == pytest.approx(0.3)
    assert overlapped_s(0.3, 0.5) == pytest.approx(0.1 + 0.5)
    assert overlapped_s(0.3, 0.1, host_s=0.05) == pytest.approx(0.35)


def test_a_model_that_fills_the_gpu_has_no_local_steps() -> None:
    ways = {model.name: [one.way for one in steps(Cluster(), model, 10, H100)] for model in MODELS}
    assert ways["1 B"][-2:] == ['Dense(wire="bfloat16"), 10 local steps', "Relay(), 10 local steps"]
    assert ways["7 B"] == ["float32", "bfloat16", "Relay(16)"]


@pytest.mark.parametrize(
    ("seconds", "way"),
    [((1.0, 0.9, 0.8, 0.7), "bfloat16"), ((4.0, 2.0, 1.2, 1.0), "Relay(16)"), ((9.0, 5.0, 3.0, 2.0), "local")],
)
def test_the_first_way_that_is_near_computing_is_chosen_else_the_fastest(seconds: tuple[float, ...], way: str) -> None:
    found = [Step(*pair) for pair in zip(("float32", "bfloat16", "Relay(16)", "local"), seconds, strict=True)]
    assert choose(found, 1.0).way == way


def test_another_cluster_has_another_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_nodes.main(["--nodes", "2", "--gpus", "8", "--tokens", "32768", "--tflops", "200"]) == 0
    printed = capsys.readouterr().out
    assert "| 1 Gbit/s | 7 B | 6.88 s |" in printed
    with pytest.raises(SystemExit):
        gpu_nodes.main(["--nodes", "0"])
