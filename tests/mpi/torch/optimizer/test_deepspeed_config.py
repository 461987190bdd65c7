"""Configurations of DeepSpeed give the optimizers that they describe, or one error that names every key without one."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpicomp
from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp.torch import DistributedOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam, from_deepspeed
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import make_model, parameters_of, train

pytestmark = up_to_two_ranks

COMMON: dict[str, Any] = {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
IGNORED: dict[str, Any] = {"cuda_aware": True, "comm_backend_name": "nccl", "eps_inside_sqrt": True, "amsgrad": False}


def config(kind: str, blocks: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": kind, "params": params}, **(blocks or {})}


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("OneBitAdam", {"freeze_step": 3, **IGNORED}, (OneBitAdam, {"warmup_steps": 3})),
        (
            "ZeroOneAdam",
            {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 8, **IGNORED},
            (ZeroOneAdam, {"warmup_steps": 4, "variance_doubling": 2, "local_doubling": 3, "most_local_steps": 8}),
        ),
        (
            "OneBitLamb",
            {"freeze_step": 3, "max_coeff": 8.0, "min_coeff": 0.02, "coeff_beta": 0.8, "factor_max": 3.0,
             "factor_min": 0.6, "factor_threshold": 0.2, "max_grad_norm": 0.0, "bias_correction": True},
            (OneBitLamb, {"warmup_steps": 3, "max_coeff": 8.0, "min_coeff": 0.02, "coeff_beta": 0.8, "factor_max": 3.0,
                          "factor_min": 0.6, "factor_threshold": 0.2}),
        ),
        ("Adam", {"torch_adam": True}, (torch.optim.AdamW, {})),
        ("Adam", {"adam_w_mode": False, "amsgrad": True}, (torch.optim.Adam, {"amsgrad": True})),
        ("AdamW", {"bias_correction": True}, (torch.optim.AdamW, {})),
        ("SGD", {"momentum": 0.9, "nesterov": True}, (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})),
    ],
)  # fmt: skip
def test_a_type_and_its_keys_have_the_described_counterpart(
    comm: Communicator, kind: str, params: dict[str, Any], expected: tuple[Any, dict[str, Any]]
) -> None:
    made_class, options = expected
    common = {"lr": 0.01, "weight_decay": 0.1} if kind == "SGD" else COMMON
    wanted = {key: tuple(one) if isinstance(one, list) else one for key, one in {**common, **options}.items()}
    model, other = make_model(), make_model()
    optimizer = from_deepspeed(config(kind, **common, **params), model.parameters(), comm)
    if made_class in (OneBitAdam, OneBitLamb, ZeroOneAdam):
        assert type(optimizer) is made_class
        twin: Any = made_class(other.parameters(), **wanted, decoupled_weight_decay=True, comm=comm)
    else:
        assert type(optimizer.optimizer) is made_class
        twin = DistributedOptimizer(made_class(other.parameters(), **wanted), mpicomp.Dense(), comm)
    for one, its in ((model, optimizer), (other, twin)):
        train(one, its, comm, range(9))
    assert torch.equal(parameters_of(model), parameters_of(other))


@pytest.mark.parametrize(("params", "decay"), [({}, 0), ({"torch_adam": True}, 0.01)])
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_weights_decay_by_default_in_the_classes_of_torch_alone(
    comm: Communicator, kind: str, params: dict[str, Any], decay: float
) -> None:
    optimizer = from_deepspeed(config(kind, **params), make_model().parameters(), comm)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_a_path_and_a_text_are_read_like_a_dict(comm: Communicator, folder: Path) -> None:
    text = json.dumps(config("OneBitAdam", lr=0.25))
    path = folder / f"config-{comm.rank}.json"
    path.write_text(text, encoding="utf-8")
    for given in (text, path, str(path), json.loads(text)):
        assert from_deepspeed(given, make_model().parameters(), comm).param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        (config("Lion"), ["optimizer.type 'Lion' (mpicomp.torch.DistributedLion(params, lr, betas"]),
        (config("Muon"), ["optimizer.type 'Muon' (mpicomp.torch.SignMuon(matrices, lr"]),
        (config("Lamb"), ["optimizer.type 'Lamb' (LAMB without bias correction is OneBitLamb"]),
        (config("OneBitAdams"), ["optimizer.type 'OneBitAdams' (choose OneBitAdam)"]),
        (config("OneBitAdam", freeze_steps=3), ["optimizer.params.freeze_steps (freeze_step)"]),
        (
            config("OneBitAdam", amsgrad=True, max_grad_norm=1.0),
            ['amsgrad (take type "Adam"', "norm (clip by"],
        ),
        (config("Adam", bias_correction=False), ["bias_correction False (ZeroOneAdam is Adam without it)"]),
        (config("AdamW", lr="auto"), ["optimizer.params.lr 'auto' (write the value)"]),
        (config("AdamW", lr="1e-3", eps=None), ["params.lr '1e-3' (write a number)", "params.eps None (write"]),
        (config("AdamW", betas=["0.9", "0.99"]), ["params.betas ['0.9', '0.99'] (write a number)"]),
        (config("SGD", betas=[0.9, 0.99]), ["optimizer.params.betas"]),
        (
            config("AdamW", {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}, "prescale_gradients": True}),
            ["fp16 (leave it out and take bfloat16", "zero_optimization (leave it out, or take FSDP2", "prescale_grad"],
        ),
        ({"optimizer": {"type": "OneBitAdam", "parameters": {"lr": 4e-4}}}, ["optimizer.parameters (write params)"]),
        (config("OneBitAdam", torch_adam=True), ["optimizer.params.torch_adam"]),
        (config("SGD", adam_w_mode=True), ["optimizer.params.adam_w_mode"]),
        (config("SGD", {"gradient_clipping": "auto"}), ["gradient_clipping 'auto' (write the value"]),
        (config("SGD", {"bf16": {"enabled": "auto"}}), ["bf16", "(write the value"]),
        (config("SGD", {"gradient_accumulation_steps": "auto"}), ["gradient_accumulation_steps 'auto' (write the"]),
        (config("SGD", {"train_batch_size": 7}), ["train_batch_size 7 (write 8 x"]),
        (
            config("SGD", {"train_batch_size": 8, "gradient_accumulation_steps": 3}),
            ["train_batch_size 8 (write 8 x"],
        ),
        ({"optimizer": {"type": "Adam", "params": "auto"}}, ['params" of the "optimizer" block are \'auto\': write']),
        ({"train_batch_size": 8}, ['has no "optimizer" block']),
        ("{no json", ["cannot be read"]),
        ("missing.json", ["cannot be read"]),
    ],
)
def test_everything_without_counterpart_is_named_in_one_error(comm: Communicator, given: Any, texts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        from_deepspeed(given, make_model().parameters(), comm)
    for text in texts:
        assert text in str(caught.value)


def test_loss_scaling_is_off_unless_it_is_enabled(comm: Communicator) -> None:
    from_deepspeed(config("SGD", {"fp16": {}, "amp": {}, "bf16": {}}, lr=0.1), make_model().parameters(), comm)


def test_numbers_of_steps_are_whole_numbers_of_any_type(comm: Communicator) -> None:
    optimizer = from_deepspeed(config("OneBitAdam", freeze_step=1e3), make_model().parameters(), comm)
    assert isinstance(optimizer, OneBitAdam)
    for wrong in (True, 0, 1.5, float("nan"), float("inf"), "3"):
        with pytest.raises(
            ValueError, match=r"optimizer\.params\.freeze_step is .*: write a whole number of at least 1"
        ):
            from_deepspeed(config("OneBitAdam", freeze_step=wrong), make_model().parameters(), comm)


@pytest.mark.mpi(min_size=2)
def test_a_configuration_that_one_rank_cannot_take_stops_all(comm: Communicator) -> None:
    given = config("OneBitAdam", amsgrad=comm.rank == 0)
    with pytest.raises(ValueError if comm.rank == 0 else CollectiveMismatch, match=r"optimizer\.params\.amsgrad"):
        from_deepspeed(given, make_model().parameters(), comm)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ({"gradient_clipping": 0.5}, r"clip_grad_norm_\(model.parameters\(\), 0.5\)"),
        ({"gradient_accumulation_steps": 4}, "call backward\\(\\) 4 times"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "has the meaning of WarmupLR"),
        ({"bf16": {"enabled": True}}, "of model.bfloat16"),
    ],
)
def test_blocks_that_the_loop_has_to_replace_give_a_warning(
    comm: Communicator, blocks: dict[str, Any], text: str
) -> None:
    with pytest.warns(RuntimeWarning, match=text):
        from_deepspeed(config("SGD", blocks, lr=0.1), make_model().parameters(), comm)


def test_batches_that_imply_accumulation_give_a_warning(comm: Communicator) -> None:
    blocks = {"train_batch_size": 8 * comm.size * 2}
    with pytest.warns(RuntimeWarning, match="call backward\\(\\) 2 times"):
        from_deepspeed(config("SGD", blocks, lr=0.1), make_model().parameters(), comm)


@pytest.mark.parametrize(
    "blocks",
    [
        {"fp16": {"enabled": False, "loss_scale": "auto"}},
        {"zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}},
        {"wandb": {"enabled": True, "group": "auto"}},
    ],
)
def test_auto_is_passed_over_where_it_has_no_effect(comm: Communicator, blocks: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_deepspeed(config("SGD", blocks, lr=0.1), make_model().parameters(), comm)


def test_blocks_that_are_off_or_without_effect_on_training_are_passed_over(comm: Communicator) -> None:
    blocks = {
        "train_batch_size": 8 * comm.size, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "fp16": {"enabled": False}, "bf16": {"enabled": False}, "zero_optimization": {"stage": 0},
        "steps_per_print": 10, "wall_clock_breakdown": False,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_deepspeed(config("SGD", blocks, lr=0.1), nn.Linear(2, 2).parameters(), comm)
