"""Seconds of collectives on the links that they cross. Knows neither models nor layouts.

Rings for what is large: (n - 1) / n of the bytes, at the slower of a GPU's NVLink and what its group's share of the
node's network cards gives. Latency by the ring's hops; by a tree's depth where nodes are many.
"""

from __future__ import annotations

import dataclasses
import math

from service.core.plan.cluster import Cluster
from service.core.plan.stack import Stack

START_S = 10e-6
NVLINK_HOP_S = 4e-6
NIC_HOP_S = 15e-6
"""A gather among eight GPUs then starts late by 38 us, which is what all-reduces of 64 MB lack on those of 8 GB in
tables of nccl-tests; Calculon's systems have 10 and 20 us for a send."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bus:
    """What one rank of a group sends and receives a second, and the latency of one of its collectives."""

    size: int
    bandwidth: float
    latency_s: float

    def all_gather_s(self, whole: float) -> float:
        """Also of a reduce-scatter. `whole`: bytes after gathering."""
        if self.size == 1:
            return 0.0
        return whole * (self.size - 1) / self.size / self.bandwidth + self.latency_s

    def all_reduce_s(self, whole: float) -> float:
        return 2 * self.all_gather_s(whole)


def bus(cluster: Cluster, stack: Stack, size: int, stride: int) -> Bus:
    """Of a group of `size` ranks `stride` apart."""
    local = max(1, min(size, cluster.domain // stride))  # members of the group in one NVLink domain
    nvlink = _nvlink(cluster, stack)
    if size == 1 or cluster.in_domain(size, stride):
        return Bus(size, nvlink, (START_S + NVLINK_HOP_S * (size - 1)) * cluster.gpu.reached.latency)
    nic = _nic(cluster, stack, size, stride)
    domains = math.ceil(size / local)
    hops = min(domains, 4 * math.log2(domains))
    latency = START_S + NIC_HOP_S * hops + NVLINK_HOP_S * min(size - domains, 4 * local)
    return Bus(size, min(nvlink, local * nic) if local > 1 else nic, latency)


def send_s(cluster: Cluster, stack: Stack, bytes_: float, stride: int) -> float:
    """From a rank to the one `stride` further."""
    if 2 * stride <= cluster.domain:
        return bytes_ / _nvlink(cluster, stack) + START_S * cluster.gpu.reached.latency
    return bytes_ / _nic(cluster, stack, 2, stride) + NIC_HOP_S


def all_to_all_s(cluster: Cluster, stack: Stack, bytes_: float, size: int, stride: int) -> float:
    """Each rank sends `bytes_`, spread over the group, itself included."""
    if size == 1:
        return 0.0
    nvlink = _nvlink(cluster, stack)
    local = max(1, min(size, cluster.domain // stride))
    inside = bytes_ * (local - 1) / size / nvlink + START_S
    if local == size:
        return inside
    outside = bytes_ * (size - local) / size / _nic(cluster, stack, size, stride) + NIC_HOP_S
    return max(inside, outside)


def _nvlink(cluster: Cluster, stack: Stack) -> float:
    return cluster.gpu.nvlink * stack.rates.nvlink * cluster.gpu.reached.nvlink


def _nic(cluster: Cluster, stack: Stack, size: int, stride: int) -> float:
    share = 1.0 if cluster.in_rack(size, stride) else cluster.cross_rack
    return cluster.nic * stack.rates.nic * share
