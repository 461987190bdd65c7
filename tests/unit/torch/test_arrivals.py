"""Gradients are told one at a time, whichever threads backward has."""

from __future__ import annotations

import threading
import time

import torch

from mpicomp.torch.arrivals import Arrivals, listen


class Listener:
    """Takes long over each gradient, and notes how many it is told of at once."""

    def __init__(self) -> None:
        self.arrivals = Arrivals(["a", "b"], 1)
        self.told = self.most = self.now = 0

    def gradient_came(self, position: int) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.05)
        self.now -= 1
        self.told += 1


def test_gradients_of_two_threads_are_told_one_after_the_other() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    listener = Listener()
    listen(listener, parameters)
    threads = [threading.Thread(target=lambda one=one: one.sum().backward()) for one in parameters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (listener.told, listener.most) == (2, 1)
