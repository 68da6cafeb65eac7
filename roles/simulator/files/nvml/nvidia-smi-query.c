/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * `nvidia-smi --query-gpu`: one small reader for each field.
 */
#include "nvidia-smi.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEXT 160

/* A reader writes the value (without its unit) and returns NVML's answer. */
typedef nvmlReturn_t reader(unsigned index, nvmlDevice_t device, char *text);

static nvmlReturn_t text_of(const char *function, nvmlDevice_t device, char *text)
{
    return NVML(function, (nvmlDevice_t, char *, unsigned), device, text, TEXT);
}

static nvmlReturn_t number_of(const char *function, nvmlDevice_t device, char *text, double divisor, int digits)
{
    unsigned number = 0;
    nvmlReturn_t code = NVML(function, (nvmlDevice_t, unsigned *), device, &number);
    snprintf(text, TEXT, "%.*f", digits, number / divisor);
    return code;
}

static nvmlReturn_t pci_of(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    memset(pci, 0, sizeof *pci);
    return NVML("nvmlDeviceGetPciInfo_v3", (nvmlDevice_t, nvmlPciInfo_t *), device, pci);
}

static const char *enabled(unsigned state) { return state ? "Enabled" : "Disabled"; }

static nvmlReturn_t read_index(unsigned index, nvmlDevice_t device, char *text)
{
    (void)device;
    snprintf(text, TEXT, "%u", index);
    return SUCCESS;
}
static nvmlReturn_t read_name(unsigned i, nvmlDevice_t d, char *t) { (void)i; return text_of("nvmlDeviceGetName", d, t); }
static nvmlReturn_t read_uuid(unsigned i, nvmlDevice_t d, char *t) { (void)i; return text_of("nvmlDeviceGetUUID", d, t); }
static nvmlReturn_t read_serial(unsigned i, nvmlDevice_t d, char *t) { (void)i; return text_of("nvmlDeviceGetSerial", d, t); }
static nvmlReturn_t read_vbios(unsigned i, nvmlDevice_t d, char *t) { (void)i; return text_of("nvmlDeviceGetVbiosVersion", d, t); }

static nvmlReturn_t read_count(unsigned i, nvmlDevice_t d, char *t)
{
    unsigned count = 0;
    (void)i, (void)d;
    nvmlReturn_t code = NVML("nvmlDeviceGetCount_v2", (unsigned *), &count);
    snprintf(t, TEXT, "%u", count);
    return code;
}
static nvmlReturn_t read_driver(unsigned i, nvmlDevice_t d, char *t)
{
    (void)i, (void)d;
    return NVML("nvmlSystemGetDriverVersion", (char *, unsigned), t, TEXT);
}
static nvmlReturn_t read_bus_id(unsigned i, nvmlDevice_t d, char *t)
{
    nvmlPciInfo_t pci;
    (void)i;
    nvmlReturn_t code = pci_of(d, &pci);
    snprintf(t, TEXT, "%s", pci.busId);
    for (char *letter = t; *letter; letter++)
        *letter = (char)toupper((unsigned char)*letter);
    return code;
}
static nvmlReturn_t read_device_id(unsigned i, nvmlDevice_t d, char *t)
{
    nvmlPciInfo_t pci;
    (void)i;
    nvmlReturn_t code = pci_of(d, &pci);
    snprintf(t, TEXT, "0x%08X", pci.pciDeviceId);
    return code;
}
static nvmlReturn_t memory_field(nvmlDevice_t d, char *t, int which)
{
    nvmlMemory_v2_t memory = {.version = VERSION_WORD(nvmlMemory_v2_t, 2)};
    nvmlReturn_t code = NVML("nvmlDeviceGetMemoryInfo_v2", (nvmlDevice_t, nvmlMemory_v2_t *), d, &memory);
    unsigned long long values[] = {memory.total, memory.reserved, memory.used, memory.free};
    snprintf(t, TEXT, "%llu", values[which] >> 20);
    return code;
}
static nvmlReturn_t read_memory_total(unsigned i, nvmlDevice_t d, char *t) { (void)i; return memory_field(d, t, 0); }
static nvmlReturn_t read_memory_reserved(unsigned i, nvmlDevice_t d, char *t) { (void)i; return memory_field(d, t, 1); }
static nvmlReturn_t read_memory_used(unsigned i, nvmlDevice_t d, char *t) { (void)i; return memory_field(d, t, 2); }
static nvmlReturn_t read_memory_free(unsigned i, nvmlDevice_t d, char *t) { (void)i; return memory_field(d, t, 3); }

static nvmlReturn_t mig_field(nvmlDevice_t d, char *t, bool pending)
{
    unsigned current = 0, next = 0;
    nvmlReturn_t code = NVML("nvmlDeviceGetMigMode", (nvmlDevice_t, unsigned *, unsigned *), d, &current, &next);
    snprintf(t, TEXT, "%s", enabled(pending ? next : current));
    return code;
}
static nvmlReturn_t read_mig_current(unsigned i, nvmlDevice_t d, char *t) { (void)i; return mig_field(d, t, false); }
static nvmlReturn_t read_mig_pending(unsigned i, nvmlDevice_t d, char *t) { (void)i; return mig_field(d, t, true); }

static nvmlReturn_t ecc_field(nvmlDevice_t d, char *t, bool pending)
{
    unsigned current = 0, next = 0;
    nvmlReturn_t code = NVML("nvmlDeviceGetEccMode", (nvmlDevice_t, unsigned *, unsigned *), d, &current, &next);
    snprintf(t, TEXT, "%s", enabled(pending ? next : current));
    return code;
}
static nvmlReturn_t read_ecc_current(unsigned i, nvmlDevice_t d, char *t) { (void)i; return ecc_field(d, t, false); }
static nvmlReturn_t read_ecc_pending(unsigned i, nvmlDevice_t d, char *t) { (void)i; return ecc_field(d, t, true); }

static nvmlReturn_t read_persistence(unsigned i, nvmlDevice_t d, char *t)
{
    unsigned mode = 0;
    (void)i;
    nvmlReturn_t code = NVML("nvmlDeviceGetPersistenceMode", (nvmlDevice_t, unsigned *), d, &mode);
    snprintf(t, TEXT, "%s", enabled(mode));
    return code;
}
static nvmlReturn_t read_compute_mode(unsigned i, nvmlDevice_t d, char *t)
{
    static const char *const names[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    unsigned mode = 0;
    (void)i;
    nvmlReturn_t code = NVML("nvmlDeviceGetComputeMode", (nvmlDevice_t, unsigned *), d, &mode);
    snprintf(t, TEXT, "%s", names[mode & 3]);
    return code;
}
static nvmlReturn_t read_capability(unsigned i, nvmlDevice_t d, char *t)
{
    int major = 0, minor = 0;
    (void)i;
    nvmlReturn_t code = NVML("nvmlDeviceGetCudaComputeCapability", (nvmlDevice_t, int *, int *), d, &major, &minor);
    snprintf(t, TEXT, "%d.%d", major, minor);
    return code;
}
static nvmlReturn_t read_temperature(unsigned i, nvmlDevice_t d, char *t)
{
    unsigned degrees = 0;
    (void)i;
    nvmlReturn_t code = NVML("nvmlDeviceGetTemperature", (nvmlDevice_t, unsigned, unsigned *), d, 0u, &degrees);
    snprintf(t, TEXT, "%u", degrees);
    return code;
}
static nvmlReturn_t read_power_draw(unsigned i, nvmlDevice_t d, char *t) { (void)i; return number_of("nvmlDeviceGetPowerUsage", d, t, 1000, 2); }
static nvmlReturn_t read_power_limit(unsigned i, nvmlDevice_t d, char *t) { (void)i; return number_of("nvmlDeviceGetPowerManagementLimit", d, t, 1000, 2); }
static nvmlReturn_t read_power_default(unsigned i, nvmlDevice_t d, char *t) { (void)i; return number_of("nvmlDeviceGetPowerManagementDefaultLimit", d, t, 1000, 2); }
static nvmlReturn_t read_power_enforced(unsigned i, nvmlDevice_t d, char *t) { (void)i; return number_of("nvmlDeviceGetEnforcedPowerLimit", d, t, 1000, 2); }
static nvmlReturn_t power_bound(nvmlDevice_t d, char *t, bool maximum)
{
    unsigned low = 0, high = 0;
    nvmlReturn_t code = NVML("nvmlDeviceGetPowerManagementLimitConstraints", (nvmlDevice_t, unsigned *, unsigned *), d, &low, &high);
    snprintf(t, TEXT, "%.2f", (maximum ? high : low) / 1000.0);
    return code;
}
static nvmlReturn_t read_power_minimum(unsigned i, nvmlDevice_t d, char *t) { (void)i; return power_bound(d, t, false); }
static nvmlReturn_t read_power_maximum(unsigned i, nvmlDevice_t d, char *t) { (void)i; return power_bound(d, t, true); }

static nvmlReturn_t clock_field(const char *function, nvmlDevice_t d, char *t, unsigned kind)
{
    unsigned clock = 0;
    nvmlReturn_t code = NVML(function, (nvmlDevice_t, unsigned, unsigned *), d, kind, &clock);
    snprintf(t, TEXT, "%u", clock);
    return code;
}
static nvmlReturn_t read_clock_graphics(unsigned i, nvmlDevice_t d, char *t) { (void)i; return clock_field("nvmlDeviceGetClockInfo", d, t, 0); }
static nvmlReturn_t read_clock_sm(unsigned i, nvmlDevice_t d, char *t) { (void)i; return clock_field("nvmlDeviceGetClockInfo", d, t, 1); }
static nvmlReturn_t read_clock_memory(unsigned i, nvmlDevice_t d, char *t) { (void)i; return clock_field("nvmlDeviceGetClockInfo", d, t, 2); }
static nvmlReturn_t read_clock_maximum(unsigned i, nvmlDevice_t d, char *t) { (void)i; return clock_field("nvmlDeviceGetMaxClockInfo", d, t, 1); }

static nvmlReturn_t utilization(nvmlDevice_t d, char *t, bool memory)
{
    nvmlUtilization_t rates = {0, 0};
    nvmlReturn_t code = NVML("nvmlDeviceGetUtilizationRates", (nvmlDevice_t, nvmlUtilization_t *), d, &rates);
    snprintf(t, TEXT, "%u", memory ? rates.memory : rates.gpu);
    return code;
}
static nvmlReturn_t read_utilization_gpu(unsigned i, nvmlDevice_t d, char *t) { (void)i; return utilization(d, t, false); }
static nvmlReturn_t read_utilization_memory(unsigned i, nvmlDevice_t d, char *t) { (void)i; return utilization(d, t, true); }

static const struct field {
    const char *name, *unit;
    reader *read;
} fields[] = {
    {"index", "", read_index}, {"count", "", read_count}, {"name", "", read_name}, {"gpu_name", "", read_name},
    {"uuid", "", read_uuid}, {"gpu_uuid", "", read_uuid}, {"serial", "", read_serial}, {"gpu_serial", "", read_serial},
    {"driver_version", "", read_driver}, {"vbios_version", "", read_vbios}, {"pci.bus_id", "", read_bus_id},
    {"gpu_bus_id", "", read_bus_id}, {"pci.device_id", "", read_device_id}, {"compute_cap", "", read_capability},
    {"memory.total", "MiB", read_memory_total}, {"memory.reserved", "MiB", read_memory_reserved},
    {"memory.used", "MiB", read_memory_used}, {"memory.free", "MiB", read_memory_free},
    {"mig.mode.current", "", read_mig_current}, {"mig.mode.pending", "", read_mig_pending},
    {"ecc.mode.current", "", read_ecc_current}, {"ecc.mode.pending", "", read_ecc_pending},
    {"persistence_mode", "", read_persistence}, {"compute_mode", "", read_compute_mode},
    {"temperature.gpu", "", read_temperature}, {"power.draw", "W", read_power_draw}, {"power.limit", "W", read_power_limit},
    {"power.default_limit", "W", read_power_default}, {"power.min_limit", "W", read_power_minimum},
    {"power.max_limit", "W", read_power_maximum}, {"enforced.power.limit", "W", read_power_enforced},
    {"clocks.gr", "MHz", read_clock_graphics}, {"clocks.sm", "MHz", read_clock_sm}, {"clocks.mem", "MHz", read_clock_memory},
    {"clocks.max.sm", "MHz", read_clock_maximum}, {"utilization.gpu", "%", read_utilization_gpu},
    {"utilization.memory", "%", read_utilization_memory},
};

#define MAXIMUM_FIELDS 64

struct request {
    const struct field *fields[MAXIMUM_FIELDS];
    unsigned count;
    bool header, units;
};

static const struct field *find_field(const char *name)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (!strcmp(fields[i].name, name))
            return &fields[i];
    fail(SUCCESS, "Field \"%s\" is not a valid field to query; `nvidia-smi --help-query-gpu` lists them", name);
}

void list_query_fields(void)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        printf("%s%s%s%s\n", fields[i].name, *fields[i].unit ? " [" : "", fields[i].unit, *fields[i].unit ? "]" : "");
}

static void print_row(unsigned index, nvmlDevice_t device, void *context)
{
    const struct request *request = context;
    for (unsigned i = 0; i < request->count; i++) {
        char text[TEXT] = "";
        const struct field *field = request->fields[i];
        nvmlReturn_t code = field->read(index, device, text);
        if (code == NOT_SUPPORTED)
            snprintf(text, sizeof text, "[N/A]");
        else if (code == GPU_IS_LOST)
            snprintf(text, sizeof text, "[GPU is lost]");
        else if (code == NO_PERMISSION)
            snprintf(text, sizeof text, "[Insufficient Permissions]");
        else if (code != SUCCESS)
            snprintf(text, sizeof text, "[Unknown Error]");
        bool unit = code == SUCCESS && request->units && *field->unit;
        printf("%s%s%s%s", i ? ", " : "", text, unit ? " " : "", unit ? field->unit : "");
    }
    putchar('\n');
}

void read_format(const struct options *options, const char *query_option, bool *header, bool *units)
{
    char format[128];
    bool csv = false;
    snprintf(format, sizeof format, "%s", options->format ? options->format : "");
    for (char *save, *word = strtok_r(format, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        if (!strcmp(word, "csv")) csv = true;
        else if (!strcmp(word, "noheader")) *header = false;
        else if (!strcmp(word, "nounits")) *units = false;
        else fail(SUCCESS, "--format=%s is not known; csv, noheader and nounits are", word);
    }
    if (!csv)
        fail(SUCCESS, "%s needs --format=csv[,noheader][,nounits]", query_option);
}

void query(const struct options *options)
{
    struct request request = {.header = true, .units = true};
    char list[1024];
    snprintf(list, sizeof list, "%s", options->value);
    for (char *save, *word = strtok_r(list, ", ", &save); word; word = strtok_r(NULL, ", ", &save)) {
        if (request.count == MAXIMUM_FIELDS)
            fail(SUCCESS, "at most %d fields can be asked for at once", MAXIMUM_FIELDS);
        request.fields[request.count++] = find_field(word);
    }
    read_format(options, "--query-gpu", &request.header, &request.units);
    if (request.header) {
        for (unsigned i = 0; i < request.count; i++) {
            const struct field *field = request.fields[i];
            printf("%s%s", i ? ", " : "", field->name);
            if (request.units && *field->unit)
                printf(" [%s]", field->unit);
        }
        putchar('\n');
    }
    for_each_gpu(options->gpus, print_row, &request);
}
