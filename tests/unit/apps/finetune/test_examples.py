"""The examples that are made from the standard library, and how they are split."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from apps.finetune import examples
from apps.finetune.examples import DISTINCT_WORDS, LABELS, MOST, TEST, VALIDATION, Example, functions, split, words
from apps.launch import PROJECT


def test_no_two_examples_begin_with_the_same_words_in_any_part() -> None:
    found = examples.load()
    every = [*found.train, *found.validation, *found.test]
    beginnings = {tuple(one.text.split()[:DISTINCT_WORDS]) for one in every}
    assert len(beginnings) == len(every) > 4000


def test_every_label_has_as_many_test_examples_and_more_to_train() -> None:
    found = examples.load()
    for label in range(len(LABELS)):
        of_label = [sum(one.label == label for one in part) for part in (found.test, found.validation, found.train)]
        assert of_label[:2] == [TEST, VALIDATION]
        assert TEST + VALIDATION < sum(of_label) <= MOST
    assert len(found.test) >= 1000


def test_the_split_depends_on_the_texts_alone() -> None:
    every = [Example(f"text {number}", number % len(LABELS)) for number in range(MOST * len(LABELS))]
    shuffled = random.Random(1).sample(every, len(every))
    assert split(shuffled) == split(every)


def test_another_process_makes_the_same_examples() -> None:
    script = "from apps.finetune import examples; print(examples.load().digest())"
    command = [sys.executable, "-c", script]
    env = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == examples.load().digest()


def test_a_label_with_too_few_texts_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="has 1 functions about concurrency, and more than 165 are needed: install"):
        split([Example("one", 0)])


def test_functions_are_those_of_modules_and_classes_but_not_those_within_functions() -> None:
    nested, method, late = (
        "def a():\n    def inner(): pass",
        "    async def c(self):\n        return 1",
        "    def d(): 2",
    )
    source = f"{nested}\nclass B:\n{method}\nif a:\n{late}\n"
    assert sorted(functions(source)) == [method, late, nested]


def test_words_are_cut_out_of_names() -> None:
    assert words("def _run_once(self, SSLContext, readLine2):") == "def run once self ssl context read line"
