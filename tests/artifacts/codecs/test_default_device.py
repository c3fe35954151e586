"""Codecs are the same bytes whatever torch makes tensors on, and of, by default.

`meta` stands in for a GPU: a tensor made there by mistake has no data, or meets one of the CPU and fails. Every codec's
configurations are those of test_codecs.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvcal.evaluate.codec_contract import Subject
from kvcal.evaluate.codec_contract.subject import tensors_by_name
from kvcal_artifacts.codecs import Shape, state_of
from tests.artifacts.codecs.test_codecs import cases
from tests.support.defaults import DEFAULTS, default, same

