/* A driver's library with two GPUs, as far as the adapter asks: the first is worn, the second as STUB_SECOND says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int ret;
enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, TIMEOUT = 10, LOST = 15, RESET = 16 };
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type; ret result; unsigned long long value; } field_value;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_data;
typedef struct { unsigned pid; unsigned long long memory; unsigned gi, ci; } process_info;

static char gpus[2];
static int listening, events;
static int index_of(void *device) { return (int)((char *)device - gpus); }
static ret second(void *device) {
  const char *says = getenv("STUB_SECOND");
  if (index_of(device) == 0 || !says) return OK;
  return atoi(says);
}

ret nvmlInitWithFlags(unsigned flags) { return OK; }
ret nvmlDeviceGetCount_v2(unsigned *count) { *count = getenv("STUB_NONE") ? 0 : 2; return OK; }
ret nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = gpus + index; return OK; }
ret nvmlDeviceGetIndex(void *device, unsigned *index) { *index = index_of(device); return OK; }
ret nvmlDeviceGetUUID(void *device, char *text, unsigned size) { snprintf(text, size, "GPU-%d", index_of(device)); return OK; }
ret nvmlDeviceGetPciInfo_v3(void *device, pci_info *info) {
  memset(info, 0, sizeof *info);
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", 0x3B + index_of(device));
  return OK;
}
ret nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  *corrected = 0, *uncorrected = 1, *pending = 1, *failed = 0;
  return second(device);
}
ret nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
  for (int i = 0; i < count; i++) {
    values[i].result = values[i].field != 230 ? INVALID : index_of(device) == 1 && getenv("STUB_OLD") ? UNSUPPORTED : OK;
    values[i].value = index_of(device) == 0 ? 4 : 0;
  }
  return second(device);
}
ret nvmlDeviceGetTotalEccErrors(void *device, unsigned type, unsigned counter, unsigned long long *count) {
  if (index_of(device) == 1) return UNSUPPORTED;
  *count = type == 1 ? (counter == 0 ? 2 : 7) : 99;
  return OK;
}
ret nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *up) {
  if (index_of(device) == 1 || link > 1) return INVALID;
  *up = link == 0;
  return OK;
}
ret nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, unsigned counter, unsigned long long *count) {
  if (link == 1) return UNSUPPORTED;
  *count = counter + 1;
  return OK;
}
ret nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *width) { *width = 8; return OK; }
ret nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *width) { *width = 16; return OK; }
ret nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons) {
  *reasons = index_of(device) == 0 ? 0x48 : 0x1;
  return OK;
}
ret nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_info *infos) {
  if (index_of(device) == 1) { *count = 0; return OK; }
  if (!infos || *count < 1) { *count = 1; return 7; }
  infos[0].pid = 4711, *count = 1;
  return OK;
}
ret nvmlEventSetCreate(void **set) { *set = &events; return OK; }
ret nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
  listening += types == 8;
  return OK;
}
ret nvmlEventSetWait_v2(void *set, event_data *data, unsigned timeout_ms) {
  if (listening < 2 || events >= 2) return TIMEOUT;
  memset(data, 0, sizeof *data);
  data->device = gpus + 1, data->type = 8, data->data = events++ ? 45 : 79;
  return OK;
}
