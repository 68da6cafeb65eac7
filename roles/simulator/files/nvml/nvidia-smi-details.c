/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * `nvidia-smi -q`: the part of the vendor program's output that programs parse: names, modes, and place in the fabric of each GPU.
 */
#include "nvidia-smi.h"

#include <stdio.h>
#include <string.h>

enum { NAME_WIDTH = 38, TEXT_BYTES = 96 };

static void row(unsigned depth, const char *name, nvmlReturn_t code, const char *value)
{
    printf("%*s%-*s: %s\n", (int)depth * 4, "", NAME_WIDTH - (int)depth * 4 + 4, name,
           code == SUCCESS ? value : code == NOT_SUPPORTED ? "N/A" : nvml_text(code));
}

static void text_row(const char *name, const char *function, nvmlDevice_t device)
{
    char text[TEXT_BYTES] = "";
    nvmlReturn_t code = NVML(function, (nvmlDevice_t, char *, unsigned), device, text, sizeof text);
    row(1, name, code, text);
}

static void mode_row(const char *name, const char *function, nvmlDevice_t device)
{
    unsigned mode = 0;
    nvmlReturn_t code = NVML(function, (nvmlDevice_t, unsigned *), device, &mode);
    row(1, name, code, mode ? "Enabled" : "Disabled");
}

static void modes_rows(const char *name, const char *function, nvmlDevice_t device)
{
    unsigned current = 0, pending = 0;
    nvmlReturn_t code = NVML(function, (nvmlDevice_t, unsigned *, unsigned *), device, &current, &pending);
    printf("    %s\n", name);
    row(2, "Current", code, current ? "Enabled" : "Disabled");
    row(2, "Pending", code, pending ? "Enabled" : "Disabled");
}

/* Two bits of a GPU's health in its fabric: 1 that it is so, 2 that it is not. */
static void health_row(const char *name, nvmlReturn_t code, unsigned bits, const char *so, const char *not_so)
{
    row(3, name, code, bits == 1 ? so : bits == 2 ? not_so : "N/A");
}

static void health_rows(nvmlReturn_t code, unsigned mask, unsigned summary)
{
    static const char *const summaries[] = {"N/A", "Healthy", "Unhealthy", "Limited Capacity"};
    static const char *const configurations[] = {"N/A", "None", "Incorrect SysGUID", "Incorrect Chassis SN", "No Partition",
                                                 "Insufficient Nvlinks", "Incompatible GPU FW", "Invalid Location", "GPU State Invalid"};
    unsigned configuration = mask >> 8 & 0xF;
    if (configuration >= sizeof configurations / sizeof *configurations)
        configuration = 0;
    puts("        Health");
    row(3, "Summary", code, summaries[summary & 3]);
    health_row("Bandwidth", code, mask & 3, "Degraded", "Full");
    health_row("Route Recovery in progress", code, mask >> 2 & 3, "True", "False");
    health_row("Route Unhealthy", code, mask >> 4 & 3, "True", "False");
    health_row("Access Timeout Recovery", code, mask >> 6 & 3, "True", "False");
    row(3, "Incorrect Configuration", code, configurations[configuration]);
}

static void fabric_rows(nvmlDevice_t device)
{
    static const char *const states[] = {"N/A", "Not Started", "In Progress", "Completed"};
    nvmlGpuFabricInfo_v3_t fabric = {.version = VERSION_WORD(nvmlGpuFabricInfo_v3_t, 3)};
    nvmlReturn_t code = NVML("nvmlDeviceGetGpuFabricInfoV", (nvmlDevice_t, nvmlGpuFabricInfo_v3_t *), device, &fabric);
    bool joined = code == SUCCESS && fabric.state == 3;
    char clique[16], cluster[TEXT_BYTES] = "";
    snprintf(clique, sizeof clique, "%u", fabric.cliqueId);
    for (unsigned at = 0, used = 0; at < sizeof fabric.clusterUuid; at++)
        used += (unsigned)snprintf(cluster + used, sizeof cluster - used, "%s%02x", at == 4 || at == 6 || at == 8 || at == 10 ? "-" : "",
                                   fabric.clusterUuid[at]);
    puts("    Fabric");
    row(2, "State", code, states[fabric.state & 3]);
    row(2, "Status", code, !joined ? "N/A" : fabric.status == SUCCESS ? "Success" : nvml_text(fabric.status));
    row(2, "CliqueId", code, joined ? clique : "N/A");
    row(2, "ClusterUUID", code, joined ? cluster : "N/A");
    health_rows(code, joined ? fabric.healthMask : 0, joined ? fabric.healthSummary : 0);
}

static void print_gpu(unsigned index, nvmlDevice_t device, void *context)
{
    nvmlPciInfo_t pci;
    (void)index, (void)context;
    memset(&pci, 0, sizeof pci);
    NVML("nvmlDeviceGetPciInfo_v3", (nvmlDevice_t, nvmlPciInfo_t *), device, &pci);
    printf("\nGPU %s\n", pci.busId);
    text_row("Product Name", "nvmlDeviceGetName", device);
    mode_row("Persistence Mode", "nvmlDeviceGetPersistenceMode", device);
    modes_rows("MIG Mode", "nvmlDeviceGetMigMode", device);
    text_row("Serial Number", "nvmlDeviceGetSerial", device);
    text_row("GPU UUID", "nvmlDeviceGetUUID", device);
    text_row("VBIOS Version", "nvmlDeviceGetVbiosVersion", device);
    modes_rows("ECC Mode", "nvmlDeviceGetEccMode", device);
    fabric_rows(device);
}

void print_details(const struct options *options)
{
    char driver[TEXT_BYTES] = "", text[TEXT_BYTES];
    int cuda = 0;
    unsigned count = 0;
    nvmlReturn_t code = NVML("nvmlSystemGetDriverVersion", (char *, unsigned), driver, sizeof driver);
    puts("\n==============NVSMI LOG==============\n");
    row(0, "Driver Version", code, driver);
    code = NVML("nvmlSystemGetCudaDriverVersion_v2", (int *), &cuda);
    snprintf(text, sizeof text, "%d.%d", cuda / 1000, cuda % 1000 / 10);
    row(0, "CUDA Version", code, text);
    code = NVML("nvmlDeviceGetCount_v2", (unsigned *), &count);
    snprintf(text, sizeof text, "%u", count);
    row(0, "Attached GPUs", code, text);
    for_each_gpu(options->gpus, print_gpu, NULL);
}
