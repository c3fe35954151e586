"""Groups of kv heads as separate places in a search of bits by layer (sensitivity.py).

Each codec is measured for each group alone, all other heads and layers exact. The KL of a side is the sum of those of
its groups. A layer's side may then be stored in every assignment of codecs to its groups that no other beats in both
bytes and KL. Such an assignment has the name of a codec by kv head ("1xhiggs-4+2xhiggs-2"), so that a knapsack over
sides, `--per-layer` and bundles need nothing new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kvcal_artifacts.codecs import Role, Shape
from kvcal_artifacts.errors import UsageError
from kvcal_artifacts.scheme import Scheme

from ..capture.ranks import ALONE, Ranks
from ..methods.registry import NEXT, codec_maker
from ..report.progress import progress
from .knapsack import Option
from .sensitivity import EXACT, ROLES, Place, Schemes, Store, check_length, kls_alone

if TYPE_CHECKING:
    from ..models.structure import CausalLM


class HeadGroup(NamedTuple):
    """The kv heads `first` to `last`, both counted, of one layer's keys or values."""

    layer: int
    role: Role
    first: int
    last: int

    def __str__(self) -> str:
        heads = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.layer}:{self.role}s:heads {heads}"


@dataclass(frozen=True)
class _Assigned:
    """Codecs of a side's first groups. parts: how many heads each has, from head 0 on."""

    size: int
    cost: float
    parts: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.parts)


def name_of(parts: Sequence[tuple[int, str]]) -> str:
    """The name of the codec that stores so many heads in each of these, from head 0 on; of one part that part's."""
    return NEXT.join(f"{heads}x{codec}" for heads, codec in parts) if len(parts) > 1 else parts[0][1]


def divided(heads: int, count: int) -> list[tuple[int, int]]:
    """The first and last head of each of `count` groups, of sizes that differ by at most one, larger ones first.

    Raises UsageError where there are fewer heads than groups.
    """
    if count > heads:
        raise UsageError(f"--head-groups {count}: the model's layers have {heads} kv heads; give at most {heads}")
    edges = [-(-heads * number // count) for number in range(count + 1)]
    return [(start, stop - 1) for start, stop in itertools.pairwise(edges)]


def group_sensitivities(
    model: CausalLM,
    ids: Tensor,
    codecs: Sequence[str],
    schemes: Schemes,
    store: Store,
    count: int,
    ranks: Ranks = ALONE,
) -> dict[HeadGroup, list[Option]]:
    """Each codec's bytes a block and its KL on token windows ids (N, T), all else exact, for each of `count` groups of
    heads of each compressed layer and side. ranks: the processes that share these. Raises UsageError where windows are
    too short to pack a block, and for more groups than heads.
    """
    exact = schemes.exact
    check_length(exact, ids)
    shapes = {place: _shape(schemes, place) for place in itertools.product(exact.compressed, ROLES)}
    groups = [HeadGroup(*place, *edges) for place, shape in shapes.items() for edges in divided(shape.heads, count)]
    labels = {f"codecs-{group.layer}-{group.role}-{group.first}-{group.last}": group for group in groups}

    def alone(label: str) -> dict[str, Scheme]:
        group = labels[label]
        heads = shapes[group.layer, group.role].heads
        return {name: schemes.alone(group.layer, group.role, _alone(name, group, heads)) for name in codecs}

    options: dict[HeadGroup, list[Option]] = {}
    with progress("Measuring codecs", total=len(groups)) as advance:
        for label, kls in kls_alone(model, ids, list(labels), alone, codecs, store, ranks):
            group = labels[label]
            part = replace(shapes[group.layer, group.role], heads=group.last - group.first + 1)
            options[group] = [Option(name, _bytes(name, part, group.role), kls[name]) for name in codecs]
            advance()
    return options


def by_side(groups: Mapping[HeadGroup, Sequence[Option]], schemes: Schemes) -> dict[Place, list[Option]]:
    """The options of each compressed layer and side, of its groups together: see `joined`."""
    places: dict[Place, list[Sequence[Option]]] = {}
    heads: dict[Place, list[int]] = {}
    for group, options in groups.items():
        place = group.layer, group.role
        places.setdefault(place, []).append(options)
        heads.setdefault(place, []).append(group.last - group.first + 1)
    result = {}
    for place, options_of in places.items():
        shape, role = _shape(schemes, place), place[1]

        def size(codec: str, count: int, shape: Shape = shape, role: Role = role) -> int:
            return _bytes(codec, replace(shape, heads=count), role)

        result[place] = joined(options_of, heads[place], size)
    return result


def joined(groups: Sequence[Sequence[Option]], heads: Sequence[int], size: Callable[[str, int], int]) -> list[Option]:
    """Options of one side: each codec for all heads, then the assignments of codecs to groups that no other beats.

    groups: the options of each group, of the same codecs, from head 0 on; heads: how many each has. size: the bytes of
    a codec for so many heads, which neighbours with one codec share: a norm or scale may be of several heads.
    """
    codecs = [option.name for option in groups[0]]
    costs = [{option.name: option.cost for option in options} for options in groups]
    best: list[list[_Assigned]] = [[_Assigned(0, 0.0)]]
    for stop in range(1, len(groups) + 1):
        grown = []
        for start, codec in itertools.product(range(stop), codecs):
            count = sum(heads[start:stop])
            bytes_, cost = size(codec, count), sum(one[codec] for one in costs[start:stop])
            for below in best[start]:
                if not below.parts or below.parts[-1][1] != codec:
                    grown.append(_Assigned(below.size + bytes_, below.cost + cost, (*below.parts, (count, codec))))
        best.append(_undominated(grown))
    every = sum(heads)
    plain = [Option(codec, size(codec, every), sum(one[codec] for one in costs)) for codec in codecs]
    return plain + [Option(one.name, one.size, one.cost) for one in best[-1] if len(one.parts) > 1]


def _undominated(assigned: Iterable[_Assigned]) -> list[_Assigned]:
    """Those that no other beats in bytes and cost; of equal ones the one of fewest parts."""
    result: list[_Assigned] = []
    for one in sorted(assigned, key=lambda one: (one.size, one.cost, len(one.parts))):
        if not result or one.cost < result[-1].cost:
            result.append(one)
    return result


def _alone(codec: str, group: HeadGroup, heads: int) -> str:
    """The name of the codec that stores this group in `codec` and the other heads exactly."""
    parts = [(group.first, EXACT), (group.last - group.first + 1, codec), (heads - 1 - group.last, EXACT)]
    return name_of([part for part in parts if part[0]])


def _shape(schemes: Schemes, place: Place) -> Shape:
    layer, role = place
    pair = schemes.exact.layers[layer]
    assert pair is not None
    return (pair.key if role == "key" else pair.value).shape


def _bytes(codec: str, shape: Shape, role: Role) -> int:
    return codec_maker(codec)(shape, role).block_bytes()
