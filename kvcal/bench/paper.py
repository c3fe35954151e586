"""What the papers report, to print next to ours. In µs unless named otherwise."""

from __future__ import annotations

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
PARTS = ("K", "V", "total")

# InnerQ Table 4: fused dequantise-GEMV, one layer of Llama-3.1-8B, batch 1, Jetson Xavier NX.
TABLE_4: dict[str, dict[str, tuple[int, ...]]] = {
    "fp16": {
        "K": (76, 147, 291, 576, 1148, 2291, 4593),
        "V": (76, 148, 291, 597, 1172, 2347, 4922),
        "total": (153, 295, 582, 1174, 2320, 4638, 9516),
    },
    "kivi-2": {
        "K": (39, 72, 138, 270, 535, 1063, 2120),
        "V": (40, 73, 139, 273, 538, 1079, 2210),
        "total": (79, 146, 278, 543, 1074, 2142, 4331),
    },
    "turboquant-4-3": {
        "K": (34, 62, 118, 230, 453, 901, 1796),
        "V": (40, 78, 149, 286, 563, 1126, 2250),
        "total": (75, 140, 267, 516, 1017, 2027, 4046),
    },
    "innerq-base": {
        "K": (30, 53, 99, 192, 378, 749, 1492),
        "V": (34, 65, 120, 228, 443, 883, 1784),
        "total": (64, 118, 220, 420, 822, 1633, 3276),
    },
    "innerq-hybrid": {
        "K": (30, 53, 99, 192, 378, 749, 1492),
        "V": (33, 59, 110, 214, 423, 842, 1688),
        "total": (63, 112, 210, 406, 801, 1591, 3180),
    },
    "innerq-small": {
        "K": (30, 53, 99, 192, 378, 749, 1492),
        "V": (32, 57, 109, 211, 416, 826, 1644),
        "total": (62, 110, 208, 403, 795, 1575, 3136),
    },
}
# Bits per value where the paper counts others than are stored here: norms of TurboQuant in float32, ours are float16.
TABLE_4_BITS = {"turboquant-4-3": {"K": 4.25, "V": 3.25, "total": 3.75}}
FIT_LENGTHS = (1024, 16384)

# InnerQ Table 5: quantisation of the tokens that leave the window, µs a decode step, keys and values.
TABLE_5: dict[str, tuple[float, ...]] = {
    "kivi-2": (1.0, 21.1),
    "turboquant-4-3": (15.9, 16.1),
    "innerq-base": (17.3, 1.0),
    "innerq-hybrid": (17.3, 1.4),
    "innerq-small": (17.3, 0.9),
}

# InnerQ Table 6: share of symmetric groups in % -> length -> µs of the values' product (Equation 5).
TABLE_6 = {
    99: {1024: 59.0, 4096: 214.4, 16384: 841.9, 32768: 1685.4},
    90: {1024: 61.2, 4096: 218.6, 16384: 849.0, 32768: 1701.5},
    50: {1024: 65.3, 4096: 231.2, 16384: 900.1, 32768: 1800.7},
    1: {1024: 65.9, 4096: 233.1, 16384: 910.1, 32768: 1814.9},
}

# VQKV Table 3: longest generation of Llama-3.1-8B in float32 on an A100 of 40 GB.
VQKV_LONGEST = {"full": 25841, "vqkv": 52096}

# MixKVQ Table 7 (R1-Qwen-7B): share of a layer's time in %, and calls in % of the decode steps.
MIXKVQ_SHARES = {"channel-selection": (2.17, 3.13), "attention": (64.62, 100.0), "mlp": (33.21, 100.0)}
