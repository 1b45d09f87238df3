"""What a GPU and its links can do, from their makers' data sheets: the ground that planned times stand on.

Peaks are dense (no sparsity). Link speeds are bytes per second in one direction: NVLink inside a node, and one network
adapter a GPU between nodes (400 Gb/s beside Hopper and Blackwell, 200 Gb/s beside Ampere). Real collectives reach less:
`LINK_SHARE` of it is planned with.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
LINK_SHARE = 0.8
# Of a GPU's memory, what a plan may fill: the rest is for the CUDA context, NCCL's buffers and the allocator's fragments.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class Gpu:
    """flops: floating-point operations per second by precision; fp8 0 where there is none."""

    name: str
    memory_gib: float
    bf16_flops: float
    fp8_flops: float
    memory_bandwidth: float
    nvlink: float
    network: float

    @property
    def usable_gib(self) -> float:
        return self.memory_gib * USABLE_SHARE


GPUS = {
    "a100": Gpu("A100 SXM 80 GB", 79.2, 312e12, 0.0, 2.04e12, 300e9, 25e9),
    "h100": Gpu("H100 SXM 80 GB", 79.1, 989e12, 1979e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200 SXM 141 GB", 139.8, 989e12, 1979e12, 4.8e12, 450e9, 50e9),
    "b200": Gpu("B200 180 GB", 178.0, 2250e12, 4500e12, 7.7e12, 900e9, 50e9),
}


@dataclass(frozen=True)
class Assumptions:
    """What a plan's times assume. Nothing here was measured by this project on a GPU.

    efficiency: share of the bf16 peak that a layer reaches between communications; fp8_efficiency: of the FP8 peak (its
    products are shorter, so what surrounds them weighs more). decode_efficiency: share of the memory bandwidth that decoding
    reaches. Every response has its full length.
    """

    gpu: Gpu = GPUS["h100"]
    efficiency: float = 0.45
    fp8_efficiency: float = 0.3
    decode_efficiency: float = 0.6
