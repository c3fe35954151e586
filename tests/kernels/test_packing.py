"""Bit packing: round trip, size, and the order of fields in words that the fused kernels rely on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcal_kernels.packing import pack, packed_bytes, planes, unpack

BITS = range(1, 17)


def random_codes(bits: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    return torch.randint(0, 1 << bits, shape, generator=generator, dtype=code_dtype(bits))


def code_dtype(bits: int) -> torch.dtype:
    return torch.uint8 if bits <= 8 else torch.int32


def hexes(packed: torch.Tensor) -> str:
    return " ".join(f"{byte:02x}" for byte in packed.tolist())


@given(st.integers(1, 16).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(0, (1 << b) - 1), min_size=1))))
def test_round_trip_of_any_count(drawn: tuple[int, list[int]]) -> None:
    bits, values = drawn
    packed = pack(torch.tensor(values), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(len(values), bits),)
    codes = unpack(packed, bits, len(values))
    assert codes.dtype == code_dtype(bits)
    assert codes.tolist() == values


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [*range(1, 70), 80, 96, 127, 128, 160])
def test_every_width_and_count(bits: int, count: int) -> None:
    codes = random_codes(bits, 2, 1, 3, count)
    packed = pack(codes, bits)
    assert packed.shape == (2, 1, 3, packed_bytes(count, bits))
    assert torch.equal(unpack(packed, bits, count), codes)


@pytest.mark.parametrize("bits", BITS)
def test_nothing_is_wasted_where_words_fill(bits: int) -> None:
    for count in range(8, 257, 8):  # the narrowest plane of a byte word holds eight fields
        assert packed_bytes(count, bits) * 8 == count * bits
    for count in range(1, 8):  # less than one word of padding a plane
        assert packed_bytes(count, bits) * 8 < count * bits + 8 * len(planes(bits))


@pytest.mark.parametrize("bits", BITS)
def test_every_bit_carries_one_bit_of_one_code(bits: int) -> None:
    count = 16
    codes = random_codes(bits, count)
    packed = pack(codes, bits)
    seen = set()
    for byte in range(len(packed)):
        for bit in range(8):
            flipped = packed.clone()
            flipped[byte] ^= 1 << bit
            change = unpack(flipped, bits, count) ^ codes
            where = change.nonzero().flatten().tolist()
            assert len(where) == 1, f"byte {byte} bit {bit} belongs to codes {where}"
            seen.add((where[0], int(change[where[0]])))
    assert seen == {(element, 1 << plane) for element in range(count) for plane in range(bits)}


@pytest.mark.parametrize("bits", BITS)
def test_all_codes_of_a_width(bits: int) -> None:
    codes = torch.arange(1 << bits)
    assert torch.equal(unpack(pack(codes, bits), bits, 1 << bits), codes.to(code_dtype(bits)))


def test_order_of_four_bits_by_hand() -> None:
    # 8 codes = 2 words of 16 bits: word 0 holds elements 0, 2, 4, 6 from its lowest bits up, word 1 the odd ones
    assert hexes(pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4)) == "31 75 42 86"


def test_order_of_three_bits_by_hand() -> None:
    # codes 0..7 twice. Two-bit plane (code >> 1): both words read 0 1 2 3 0 1 2 3 = e4 e4; one-bit plane: 0101... =
    # aaaa
    assert hexes(pack(torch.arange(16) % 8, 3)) == "e4 e4 e4 e4 aa aa"


def test_order_where_only_bytes_fill_by_hand() -> None:
    # 6 codes of 4 bits are 24 bits, no whole number of 16-bit words: 3 bytes, byte i holds elements i and i + 3
    assert hexes(pack(torch.tensor([1, 2, 3, 4, 5, 6]), 4)) == "41 52 63"


@pytest.mark.parametrize("bits", range(9, 17))
def test_wide_codes_are_an_upper_byte_and_a_narrow_code(bits: int) -> None:
    """So whoever reads 1 to 8 bits reads these too: two runs, one after the other."""
    codes = random_codes(bits, 3, 24)
    upper, lower = codes >> (bits - 8), codes & ((1 << (bits - 8)) - 1)
    assert torch.equal(pack(codes, bits), torch.cat([pack(upper, 8), pack(lower, bits - 8)], -1))


def test_order_of_twelve_bits_by_hand() -> None:
    # four codes: their upper bytes as they are, then one 16-bit word of their lower four bits
    assert hexes(pack(torch.tensor([0x123, 0x456, 0x789, 0xABC]), 12)) == "12 45 78 ab 63 c9"


def test_fields_of_one_unpacking_step_are_consecutive() -> None:
    """Field j of all words is elements j * W to j * W + W - 1: the "split" order that needs no permute."""
    codes = random_codes(2, 64)
    words = pack(codes, 2).view(torch.int16).int() & 0xFFFF  # 8 words of 8 fields
    for j in range(8):
        assert torch.equal((words >> 2 * j) & 3, codes[8 * j : 8 * j + 8].int())


def test_planes_and_widths_that_do_not_exist() -> None:
    byte = [[1], [2], [2, 1], [4], [4, 1], [4, 2], [4, 2, 1], [8]]
    assert [planes(bits) for bits in BITS] == byte + [[8, *rest] for rest in byte]
    for bits in (0, 17, -1):
        with pytest.raises(ValueError, match="1 to 16"):
            pack(torch.zeros(8, dtype=torch.uint8), bits)
