"""The GPUs of this node as NVML tells them: a port with what is asked for, and its adapter to nvidia-ml-py.

Knows no policy: what a reading means is `findings`'. nvidia-ml-py is imported when it is needed; a machine without it,
without a driver or without a GPU is `Unavailable`, which says why.

Meanings and numbers: NVML API reference, docs.nvidia.com/deploy/nvml-api (device queries, field values, NvLink
methods, event handling methods, clocks event reasons). The recovery action is field 230,
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: 0 none, 1 reset the GPU, 2 reboot the node, 3 end all peer-to-peer traffic,
4 drain and reset, 5 recover the IMEX domain, 6 reset the bus, 7 reboot the system. What a device or driver doesn't
support is None, never 0.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger("phalanx.health")

MOST_EVENTS = 64  # of one call


class Unavailable(Exception):
    """NVML can't be asked on this machine; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    index: int  # NVML's, by PCI address
    uuid: str
    pci: str  # domain:bus:device.function in hexadecimal


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One NVLink of a device."""

    number: int
    up: bool
    errors: int | None = None  # replays, recoveries and bad flits since they were last cleared


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One device at one moment."""

    index: int
    lost: bool = False  # it does not answer on its bus; the rest is None then
    recovery_action: int | None = None
    ecc_volatile: int | None = None  # uncorrected errors since the driver was loaded
    ecc_aggregate: int | None = None  # uncorrected errors of the device's life
    remap_pending: bool | None = None  # rows of memory wait for a reset
    remap_failed: bool | None = None
    links: tuple[Link, ...] = ()
    pcie_width: int | None = None  # lanes
    pcie_width_max: int | None = None  # that device and slot can have
    slowdowns: frozenset[str] = frozenset()  # hw_thermal, sw_thermal, power_brake


@dataclasses.dataclass(frozen=True, slots=True)
class XidEvent:
    index: int | None
    xid: int


class Nvml(Protocol):
    """What is asked of a node's GPUs. Any call may take long while a device is dying."""

    def devices(self) -> tuple[Device, ...]: ...

    def read(self, index: int) -> Reading: ...

    def pids(self, index: int) -> frozenset[int]:
        """Processes that hold the device, as this process's pid namespace numbers them."""
        ...

    def xids(self) -> list[XidEvent]:
        """Xids since the last call, the oldest first; listening begins with the first call. Never waits."""
        ...


def connect() -> Nvml:
    """Unavailable where there is no NVML, or no GPU."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        raise Unavailable("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
        asked = Pynvml(pynvml)
    except pynvml.NVMLError as error:
        raise Unavailable(f"NVML does not start: {error}") from None
    if not asked.devices():
        raise Unavailable("this node has no NVIDIA GPU")
    return asked


class Pynvml:
    """Nvml by nvidia-ml-py."""

    def __init__(self, pynvml: Any) -> None:
        self.nvml = pynvml
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self.handles = dict(enumerate(handles))
        self.known = tuple(
            Device(index, _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
            for index, handle in self.handles.items()
        )
        self.events: Any = None

    def devices(self) -> tuple[Device, ...]:
        return self.known

    def read(self, index: int) -> Reading:
        nvml, handle = self.nvml, self.handles[index]
        try:
            remapped = self._ask(nvml.nvmlDeviceGetRemappedRows, handle)
            return Reading(
                index=index,
                recovery_action=self._ask(self._field, handle, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
                ecc_volatile=self._ask(self._uncorrected, handle, nvml.NVML_VOLATILE_ECC),
                ecc_aggregate=self._ask(self._uncorrected, handle, nvml.NVML_AGGREGATE_ECC),
                remap_pending=bool(remapped[2]) if remapped else None,
                remap_failed=bool(remapped[3]) if remapped else None,
                links=self._links(handle),
                pcie_width=self._ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
                pcie_width_max=self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
                slowdowns=self._slowdowns(handle),
            )
        except nvml.NVMLError_GpuIsLost:
            return Reading(index, lost=True)
        except nvml.NVMLError_ResetRequired:
            return Reading(index, recovery_action=nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET)

    def pids(self, index: int) -> frozenset[int]:
        nvml, handle = self.nvml, self.handles[index]
        return frozenset(process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    def xids(self) -> list[XidEvent]:
        if self.events is None:
            self.events = self._listen()
        found: list[XidEvent] = []
        while len(found) < MOST_EVENTS:
            try:
                event = self.nvml.nvmlEventSetWait(self.events, 0)
            except (self.nvml.NVMLError_Timeout, self.nvml.NVMLError_GpuIsLost):
                break
            found.append(XidEvent(self._index(event.device), int(event.eventData)))
        return found

    def _listen(self) -> Any:
        events = self.nvml.nvmlEventSetCreate()
        for index, handle in self.handles.items():
            try:
                self.nvml.nvmlDeviceRegisterEvents(handle, self.nvml.nvmlEventTypeXidCriticalError, events)
            except self.nvml.NVMLError as error:
                log.warning("GPU %d tells no Xid events: %s", index, error)
        return events

    def _index(self, handle: Any) -> int | None:
        try:
            return int(self.nvml.nvmlDeviceGetIndex(handle))
        except self.nvml.NVMLError:
            return None

    def _links(self, handle: Any) -> tuple[Link, ...]:
        nvml = self.nvml
        kinds = (
            nvml.NVML_NVLINK_ERROR_DL_REPLAY,
            nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
            nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
        )
        links = []
        for number in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._ask(nvml.nvmlDeviceGetNvLinkState, handle, number)
            if state is None:  # links are numbered from 0: there are no more
                break
            errors = [self._ask(nvml.nvmlDeviceGetNvLinkErrorCounter, handle, number, kind) for kind in kinds]
            told = [count for count in errors if count is not None]
            links.append(Link(number, bool(state), sum(told) if told else None))
        return tuple(links)

    def _slowdowns(self, handle: Any) -> frozenset[str]:
        nvml = self.nvml
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:
            reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0  # older drivers
        bits = {
            "hw_thermal": nvml.nvmlClocksEventReasonHwThermalSlowdown,
            "sw_thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
            "power_brake": nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        }
        return frozenset(name for name, bit in bits.items() if reasons & bit)

    def _uncorrected(self, handle: Any, counter: int) -> Any:
        return self.nvml.nvmlDeviceGetTotalEccErrors(handle, self.nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, counter)

    def _field(self, handle: Any, field: int) -> Any:
        (answer,) = self.nvml.nvmlDeviceGetFieldValues(handle, [field])
        return answer.value.uiVal if answer.nvmlReturn == self.nvml.NVML_SUCCESS else None

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """None for what can't be told; a device that is lost or waits for a reset is no such case."""
        try:
            return question(*arguments)
        except (self.nvml.NVMLError_GpuIsLost, self.nvml.NVMLError_ResetRequired):
            raise
        except self.nvml.NVMLError:
            return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
