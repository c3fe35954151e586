"""What `kvcal recommend` measures next and chooses, on figures made up for the purpose."""

from __future__ import annotations

import shlex

import pytest

from docs.check import parse_problem
from kvcal.methods.data_free import PRESETS
from kvcal.search.limit import Limit
from kvcal.search.recommendation import (
    LADDER,
    MEASURED,
    Figures,
    choose,
    reason,
    reference,
    to_fit,
    to_measure,
)
from kvcal_artifacts.errors import GateFailed, UsageError

ROWS = [
    Figures("wide", 8.5, 1e-5, 1e-5, 1e-6),
    Figures("four", 4.5, 0.004, 0.006, 0.001),
    Figures("naive-4", 4.5, 0.02, 0.03, 0.001, naive=True),
    Figures("three", 3.1, 0.008, 0.0095, 0.001),
    Figures("naive-3", 3.5, 0.1, 0.2, 0.01, naive=True),
]


def test_fewest_bits_within_a_kl_count_the_standard_error() -> None:
    chosen, second = choose(ROWS, Limit(kl=0.01))  # three: 0.0095 + 0.001 is above
    assert chosen.name == "four" and second is not None and second.name == "wide"
    chosen, second = choose(ROWS, Limit(kl=0.011))
    assert chosen.name == "three" and second is not None and second.name == "four"


def test_smallest_kl_within_bits() -> None:
    chosen, second = choose(ROWS, Limit(bits=4.5))
    assert [chosen.name, second and second.name] == ["four", "three"]
    assert "runner-up: three, KL 0.0095 ± 0.001 at 3.10 bits" in reason(chosen, second, Limit(bits=4.5), 5)


def test_a_kernel_decides_between_even_kls() -> None:
    limit = Limit(bits=4.5)
    slow = Figures("slow", 2.2, 0.003, 0.0060, 0.001)
    fast, faster = (
        Figures(name, 4.0, 0.003, kl, 0.001, kernel=True) for name, kl in (("fast", 0.0062), ("far", 0.007))
    )
    chosen, second = choose([slow, fast, faster], limit)
    assert [chosen.name, second and second.name] == ["fast", "slow"]
    assert reason(chosen, second, limit, 3).endswith(
        "slow, KL 0.006 ± 0.001 at 2.20 bits, which is even but has no kernel"
    )
    chosen, second = choose([slow, faster], limit)  # 17 % more is not even
    assert [chosen.name, second and second.name] == ["slow", "far"]
    assert "even" not in reason(chosen, second, limit, 2)


def test_nothing_within_the_limit_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(GateFailed, match="the best, wide, has a KL of 1e-05"):
        choose(ROWS, Limit(kl=1e-6))
    with pytest.raises(UsageError, match=r"smallest scheme of the ladder, three, takes 3.10 bits per value"):
        to_measure(ROWS, Limit(bits=2))


def test_the_reference_is_naive_and_no_smaller() -> None:
    by_name = {row.name: row for row in ROWS}
    assert reference(ROWS, by_name["three"]) is by_name["naive-3"]
    assert reference(ROWS, by_name["four"]) is by_name["naive-4"]
    assert reference(ROWS, by_name["wide"]) is None


def unmeasured(*figures: tuple[str, float, float]) -> list[Figures]:
    return [Figures(*row) for row in figures]


def test_of_bits_the_best_forecasts_are_measured_once() -> None:
    rows = unmeasured(*((f"s{n}", 4.0, 0.1 * n) for n in range(9)), ("large", 5.0, 0.0))
    limit = Limit(bits=4.0)
    assert [row.name for row in to_measure(rows, limit)] == [f"s{n}" for n in range(MEASURED)]
    rows[0] = Figures("s0", 4.0, 0.0, 0.5)
    assert to_measure(rows, limit) == []


def test_of_a_kl_smaller_schemes_are_measured_until_one_is_within() -> None:
    rows = unmeasured(("two", 2.0, 0.025), ("three", 3.0, 0.02), ("eight", 8.0, 0.001), ("bad", 1.0, 9.0))
    limit = Limit(kl=0.01)
    assert [row.name for row in to_measure(rows, limit)] == ["two", "three", "eight"]
    measured = [Figures("two", 2.0, 0.025, 0.03), Figures("three", 3.0, 0.02, 0.009), *rows[2:]]
    assert to_measure(measured, limit) == []  # eight takes more bits than three, bad is forecast to be far off
    worse = [Figures("two", 2.0, 0.025, 0.03), Figures("three", 3.0, 0.02, 0.02), Figures("eight", 8.0, 0.001, 0.02)]
    assert [row.name for row in to_measure([*worse, rows[3]], limit)] == ["bad"]  # a forecast may be wrong


def test_only_what_may_be_chosen_is_fitted() -> None:
    names = {rung.name for rung in to_fit(LADDER, [], Limit(bits=3.2))}
    assert names == {"transform-3", "aqua-transform-3", "aqua-kv"}
    rows = unmeasured(("small", 2.25, 0.001), ("large", 9.0, 0.0))
    assert {rung.name for rung in to_fit(LADDER, rows, Limit(kl=0.01))} == {
        "transform-2", "aqua-transform-2", "aqua-kv",
    }  # fmt: skip
    assert len(to_fit(LADDER, unmeasured(("small", 2.0, 0.9)), Limit(kl=0.01))) == 6  # nothing is good enough


@pytest.mark.parametrize("limit", [{"bits": 0}, {"kl": float("nan")}, {"kl": float("inf")}, {"bits": 3, "kl": 0.1}])
def test_an_odd_limit_is_refused(limit: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="--max-"):
        Limit(**limit)


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_every_rung_has_a_command_that_parses(rung: object) -> None:
    command = rung.command("tiny", " --text a.txt --windows 8")  # type: ignore[attr-defined]
    assert parse_problem(shlex.split(command)[1:]) is None


def test_names_of_the_ladder_are_their_own() -> None:
    assert len({rung.name for rung in LADDER}) == len(LADDER)
    assert all(rung.method is PRESETS[rung.name] for rung in LADDER if rung.name in PRESETS)
    assert all(bool(rung.least) == rung.learned for rung in LADDER)
