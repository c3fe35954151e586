"""`from kvcal.models import ...`: the names that scripts use, without torch until one of them is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import kvcal.models
from kvcal.models import loading, names, tokenizers


def test_names_are_those_of_the_modules() -> None:
    assert kvcal.models.load_model is loading.load_model
    assert kvcal.models.LoadedModel is loading.LoadedModel
    assert kvcal.models.resolve is names.resolve
    assert kvcal.models.ModelSource is names.ModelSource
    assert kvcal.models.load_tokenizer is tokenizers.load_tokenizer
    for name in kvcal.models.__all__:
        assert getattr(kvcal.models, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        importlib.import_module("kvcal.models").__getattr__("weight")


def test_the_package_loads_no_torch() -> None:
    told = "import sys, kvcal.models; assert 'torch' not in sys.modules; from kvcal.models import resolve"
    subprocess.run([sys.executable, "-c", told], check=True, timeout=60)
