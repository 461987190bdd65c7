"""Every method in the forms that differ in their state, traffic or draws, for tests of promises of all methods."""

from __future__ import annotations

from typing import Any

from mpicomp import (
    ECQSGD,
    EF21,
    QSGD,
    SSDM,
    Auto,
    CascadingSSDM,
    Dense,
    DoubleSqueeze,
    EFSignSGD,
    LocalTopK,
    MajorityVote,
    Marsit,
    MemSGD,
    OneBitSGD,
    PowerSGD,
    RandomK,
    Relay,
    ScaleCom,
    SparseLoCo,
    TernGrad,
    TopKSGD,
    TrueTopK,
)
from mpicomp.aggregator.registration import REGISTERED

METHODS: dict[str, Any] = {
    "dense": Dense(),
    "dense, float16": Dense(wire="float16"),
    "dense, bfloat16": Dense(wire="bfloat16"),
    "cascading": CascadingSSDM(),
    "cascading, normalised": CascadingSSDM(normalise=True),
    "marsit": Marsit(2),
    "marsit, full precision": Marsit(1),
    "marsit, never dense": Marsit(None, clip=0.5),
    "marsit, automatic gamma": Marsit(None, gamma="auto"),
    "marsit, paper": Marsit(4, residual="paper"),
    "marsit, paper, never dense": Marsit(None, residual="paper", global_step=0.5),
    "marsit, no residual": Marsit(7, compensation=False),
    "marsit, stateless": Marsit(None, compensation=False, global_step=1.0),
    "marsit, two winners": Marsit(3, winners=2),
    "majority": MajorityVote(),
    "ef-signsgd": EFSignSGD(),
    "ef-signsgd, buckets": EFSignSGD(bucket=300),
    "ssdm": SSDM(),
    "ssdm, momentum": SSDM(momentum=0.9, scale="norm", coding="elias"),
    "qsgd": QSGD(),
    "qsgd, entropy-coded": QSGD(norm="l2", bucket=100, coding="entropy"),
    "ecq-sgd": ECQSGD(alpha=0.1),
    "terngrad": TernGrad(),
    "terngrad, unclipped": TernGrad(bucket=100, clip=None),
    "one-bit-sgd": OneBitSGD(),
    "double-squeeze": DoubleSqueeze(),
    "double-squeeze, sparse": DoubleSqueeze("random-sparsification:p=0.3"),
    "mem-sgd": MemSGD("top-k:rate=10"),
    "mem-sgd, one bit": MemSGD(),
    "local top-k": LocalTopK(10),
    "local top-k, masked momentum": LocalTopK(10, momentum=0.9, masking=True),
    "top-k sgd": TopKSGD(10),
    "power-sgd": PowerSGD(2, start_step=1),
    "power-sgd, at once": PowerSGD(1, start_step=0),
    "relay": Relay(),
    "relay, 16 levels": Relay(16, bucket=64),
    "relay, entropy-coded": Relay(coding="entropy"),
    "scalecom": ScaleCom(10, chunk=70, beta=0.4, warmup_steps=2),
    "scalecom, masked momentum": ScaleCom(10, momentum=0.9, masking=True),
    "scalecom, exact": ScaleCom(10, exact=True),
    "random-k": RandomK(10),
    "true top-k": TrueTopK(10, chunk=30),
    "sparse-loco": SparseLoCo(),
    "sparse-loco, float32": SparseLoCo(10, 70, bits=32, decay=1.0, alpha=0.5),
    "ef21": EF21("top-k:rate=10"),
    "ef21, both ways": EF21("one-bit:scale=l1,bucket=500", eta=0.5, both_ways=True),
    # on trial: three dense steps and three compressed ones, before anything depends on time
    "auto": Auto(DoubleSqueeze(), trial_steps=2),
    "auto, marsit": Auto(Marsit(2), trial_steps=2),
}
# methods that are not listed, such as a young one of mpicomp.contrib, in the forms of their registration
METHODS |= {
    f"{one.name} {options}": one.kind(**options)
    for one in REGISTERED.values()
    if one.kind not in {type(method) for method in METHODS.values()}
    for options in one.forms
}


def must_be_restored(method: Any, step: int) -> bool:
    """Return whether NaN at a step spoils the method's state, so that an earlier state has to be loaded.

    Where the very first step is one-bit, the ranks measure before they touch anything.
    """
    if not isinstance(method, Marsit) or not method.compensation:
        return False
    return step > 0 or method.full_precision_every is not None or method.global_step != "auto"
