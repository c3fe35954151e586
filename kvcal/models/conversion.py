"""Which tensors of a checkpoint make which parameters of a model: Transformers' renaming and conversion, name by
name.

Checkpoints on the hub are often older than the code that reads them: Mixtral's hold one tensor for each expert, its
class has one for all. `from_pretrained` converts a whole model; here one parameter is made at a time, by the same
rules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvcal_artifacts.errors import ModelUnavailable

from .hub import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Read = Callable[[str], Tensor]  # the name of a tensor in the checkpoint -> the tensor, or a meta tensor of its shape


@dataclass
class Origin:
    """Which tensors become a parameter. parts: (source pattern, tensor's name) in order. first: the parameter that
    Transformers files them under. converter: None where the only part is the parameter.
    """

    first: str
    converter: Any | None = None  # a WeightConverter, which also takes functions where it is typed to take futures
    parts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.parts]

    def make(self, read: Read, model: PreTrainedModel) -> dict[str, Tensor]:
        """Parameters by name. Raises what the conversion raises where parts are missing or do not fit together."""
        if self.converter is None:
            return {self.first: read(self.names[0])}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.parts:
            converter.add_tensor(self.first, name, pattern, lambda name=name: read(name))
        converted = converter.convert(self.first, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in converted.items()}


class Origins:
    """Origins of all parameters of a model (maybe on the meta device) in a checkpoint with tensors of these names."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = get_model_conversion_mapping(model)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        state, prefix = model.state_dict(), model.base_model_prefix
        self._model, self._of = model, dict[str, Origin]()
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:
                target, pattern = name, None
            if pattern is None:
                self._of.setdefault(target, Origin(target, None, [(name, name)]))
                continue
            converter = of_pattern[pattern]
            origin = self._of.setdefault(target, Origin(target, converter))
            origin.parts.append((pattern, name))
            for other in converter.target_patterns[1:]:
                self._of.setdefault(target.replace(converter.target_patterns[0], other), origin)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __getitem__(self, name: str) -> Origin:
        return self._of[name]

    def check_names(self, label: str) -> None:
        """Raises ModelUnavailable, naming the first, where tensors that the model asks for are missing, or there are
        layers that it does not have. What Transformers excuses on load is excused here.
        """
        expected = self._model.state_dict().keys()
        tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        tied_names = tied.keys() | {first for name, first in tied.items() if name in self}
        report: Any = SimpleNamespace(  # what Transformers' method reads of its report
            missing_keys=expected - self._of.keys() - tied_names, unexpected_keys=self._of.keys() - expected
        )
        self._model._adjust_missing_and_unexpected_keys(report)
        check_complete(
            label, report.missing_keys, [n for target in report.unexpected_keys for n in self._of[target].names]
        )

    def check(self, label: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raises ModelUnavailable for a parameter that these tensors do not make, or not in its shape.

        shapes: a tensor's name -> the file it lies in, and its shape.
        """

        def meta(name: str) -> Tensor:
            return torch.empty(shapes[name][1], device="meta", dtype=torch.float32)

        expected: dict[str, Tensor] = self._model.state_dict()
        converted: dict[str, Tensor] = {}
        for name, parameter in expected.items():
            if name not in self:
                continue  # the load itself says which are missing: some are computed from others
            origin = self[name]
            if name not in converted:
                try:
                    converted |= origin.make(meta, self._model)
                except Exception as error:  # whatever an operation of Transformers raises on tensors that do not fit
                    raise ModelUnavailable(self.misfit(label, origin, shapes, one_line(error))) from error
            check_shape(label, name, converted.pop(name, None), parameter, origin, shapes)

    @staticmethod
    def misfit(label: str, origin: Origin, shapes: Mapping[str, tuple[str, tuple[int, ...]]], why: str) -> str:
        """Tensors that cannot be made one parameter; named is the first whose shape differs from most of its kind."""
        odd = odd_one(origin, shapes)
        file, shape = shapes[odd]
        return (
            f"{label}: {file}: {odd} has shape {shape}, which does not fit the others that make {origin.first} "
            f"({len(origin.parts)} tensors; {why})"
        )


def check_complete(label: str, missing: Collection[str], surplus: Collection[str]) -> None:
    """Raises ModelUnavailable for parameters that no tensor makes, or tensors of layers that make no parameter.

    Transformers fills what is missing with random numbers and prints a table.
    """
    if missing:
        raise ModelUnavailable(
            f"{label}: its weights lack {min(missing)} ({len(missing)} in all), which its config.json asks for"
        )
    if layers := sorted(name for name in surplus if ".layers." in name):
        raise ModelUnavailable(
            f"{label}: its weights hold {layers[0]} ({len(layers)} in all), which its config.json does not ask for"
        )


def odd_one(origin: Origin, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """The first tensor whose shape is not the commonest under its pattern, else the first."""
    for pattern in dict.fromkeys(pattern for pattern, _ in origin.parts):
        names = [name for other, name in origin.parts if other == pattern]
        sizes = [shapes[name][1] for name in names]
        common = max(sizes, key=sizes.count)
        for name in names:
            if shapes[name][1] != common:
                return name
    return origin.names[0]


def check_shape(
    label: str,
    name: str,
    tensor: Tensor | None,
    like: Tensor,
    origin: Origin,
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Raises ModelUnavailable where a parameter is not made in the shape that the config asks for."""
    if tensor is not None and tensor.shape == like.shape:
        return
    odd = odd_one(origin, shapes)
    file, shape = shapes[odd]
    whole = f"{file}: {odd} has shape {shape}"
    if origin.converter is not None:
        got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
        whole = f"{whole}; with {len(origin.parts) - 1} others it makes {name} of {got}"
    raise ModelUnavailable(f"{label}: {whole}, its config.json asks for {tuple(like.shape)}")
