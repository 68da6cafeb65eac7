/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The devices of a CUDA process: those that NVML shows to it, by CUDA's rules, limited by CUDA_VISIBLE_DEVICES.
 */
#include "cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

int cuda_control(const char *format, ...)
{
    char command[256], reply[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return nvml.control(command, reply, sizeof reply);
}

/* NVML counts cores; a multiprocessor has 64 of them on Turing and in the first Ampere (8.0), 128 later. */
static unsigned multiprocessors(const struct cuda_device *device)
{
    nvmlDeviceAttributes_t attributes;
    int major = 0, minor = 0;
    unsigned cores = 0;
    if (device->mig)
        return nvml.attributes(device->handle, &attributes) == 0 ? attributes.multiprocessorCount : 1;
    if (nvml.cores(device->handle, &cores) != 0 || nvml.capability(device->handle, &major, &minor) != 0)
        return 1;
    cores /= major < 8 || (major == 8 && minor == 0) ? 64 : 128;
    return cores ? cores : 1;
}

static void add(struct cuda_device *found, unsigned *total, unsigned gpu, nvmlDevice_t handle, bool mig)
{
    struct cuda_device *device = &found[*total];
    *device = (struct cuda_device){ .handle = handle, .gpu = gpu, .mig = mig };
    if (nvml.uuid(handle, device->uuid, sizeof device->uuid) != 0)
        return;
    device->multiprocessors = multiprocessors(device);
    ++*total;
}

/* A GPU in MIG mode is no CUDA device itself. */
unsigned cuda_find_devices(struct cuda_device *found, unsigned room)
{
    unsigned count = 0, total = 0;
    if (nvml.count(&count) != 0)
        return 0;
    for (unsigned index = 0; index < count && total < room; index++) {
        unsigned current = 0, pending = 0, slots = 0;
        nvmlDevice_t device, mig;
        if (nvml.handle(index, &device) != 0)
            continue;
        if (nvml.mig_mode(device, &current, &pending) != 0 || !current) {
            add(found, &total, index, device, false);
            continue;
        }
        nvml.mig_count(device, &slots);
        for (unsigned slot = 0; slot < slots && total < room; slot++) {
            if (nvml.mig_handle(device, slot, &mig) == 0)
                add(found, &total, index, mig, true);
        }
    }
    return total;
}

/* By number: of the GPU, which then is the first MIG device on it; or among those that the MPS server has. */
static const struct cuda_device *named(const struct cuda_device *found, unsigned count, const char *word, bool numbered_by_gpu)
{
    char *end;
    unsigned long number = strtoul(word, &end, 10);
    const bool numeric = end != word && !*end;
    for (unsigned index = 0; index < count && *word; index++) {
        if (numeric ? (numbered_by_gpu ? found[index].gpu : index) == number
                    : strncasecmp(found[index].uuid, word, strlen(word)) == 0)
            return &found[index];
    }
    return NULL;
}

/* The first word that names nothing ends the list. CUDA sees one MIG device at most, and it hides the whole GPUs. */
unsigned cuda_choose_devices(struct cuda_device *found, unsigned count, struct cuda_device *chosen, bool numbered_by_gpu)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char list[2048], *rest = list;
    unsigned total = 0;
    if (visible) {
        snprintf(list, sizeof list, "%s", visible);
        for (char *word = strsep(&rest, ","); word && total < CUDA_DEVICES_MAX; word = strsep(&rest, ",")) {
            const struct cuda_device *device = named(found, count, word, numbered_by_gpu);
            if (!device)
                break;
            chosen[total++] = *device;
        }
    } else {
        while (total < count && total < CUDA_DEVICES_MAX) {
            chosen[total] = found[total];
            total++;
        }
    }
    for (unsigned index = 0; index < count && !visible; index++) {
        if (found[index].mig) {         /* also one behind the room for devices */
            chosen[0] = found[index];
            return 1;
        }
    }
    for (unsigned index = 0; index < total; index++) {
        if (chosen[index].mig) {
            chosen[0] = chosen[index];
            return 1;
        }
    }
    return total;
}

struct cuda_device *cuda_device_at(CUdevice device)
{
    return device >= 0 && (unsigned)device < cuda_device_count ? &cuda_devices[device] : NULL;
}
