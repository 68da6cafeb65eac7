/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The parts of the libcuda stand-in: devices, contexts with their memory, and the connection to MPS.
 */
#ifndef CUDA_H
#define CUDA_H

#include "nvml_types.h"

#include <stdbool.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_NOT_SUPPORTED = 801, CUDA_ERROR_MPS_CONNECTION_FAILED = 805, CUDA_ERROR_MPS_RPC_FAILURE = 806,
    CUDA_ERROR_UNKNOWN = 999,
};
enum { CUDA_DEVICES_MAX = 32, CUDA_CANDIDATES_MAX = 512 };

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct context *CUcontext;

struct cuda_device {
    nvmlDevice_t handle;
    unsigned gpu;                               /* NVML's index */
    bool mig;
    char uuid[48];
    unsigned multiprocessors;                   /* of the whole device */
    unsigned long long limit;                   /* bytes for this process; 0: what the device has */
    unsigned long long used;                    /* bytes of this process */
    unsigned contexts;
    unsigned server_device;                     /* its number with the MPS server */
};

struct cuda_nvml {
    int (*init)(void);
    int (*version)(int *version);
    int (*count)(unsigned *count);
    int (*handle)(unsigned index, nvmlDevice_t *device);
    int (*mig_mode)(nvmlDevice_t device, unsigned *current, unsigned *pending);
    int (*mig_count)(nvmlDevice_t device, unsigned *count);
    int (*mig_handle)(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig);
    int (*uuid)(nvmlDevice_t device, char *uuid, unsigned length);
    int (*name)(nvmlDevice_t device, char *name, unsigned length);
    int (*memory)(nvmlDevice_t device, nvmlMemory_t *memory);
    int (*attributes)(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes);
    int (*cores)(nvmlDevice_t device, unsigned *cores);
    int (*capability)(nvmlDevice_t device, int *major, int *minor);
    int (*compute_mode)(nvmlDevice_t device, unsigned *mode);
    int (*control)(const char *command, char *reply, unsigned reply_size);
};

extern struct cuda_nvml nvml;
extern struct cuda_device cuda_devices[CUDA_DEVICES_MAX];
extern unsigned cuda_device_count;
extern int cuda_ready;

/* cuda_devices.c */
unsigned cuda_find_devices(struct cuda_device *found, unsigned room);           /* all that NVML shows to this process */
unsigned cuda_choose_devices(struct cuda_device *found, unsigned count, struct cuda_device *chosen, bool numbered_by_gpu);
struct cuda_device *cuda_device_at(CUdevice device);                             /* NULL: it does not exist */
int cuda_control(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* cuda_mps.c */
int cuda_mps_connect(struct cuda_device *found, unsigned count, bool *connected);   /* sets the devices when it did */
bool cuda_under_mps(void);
bool cuda_mps_broken(void);
unsigned cuda_mps_share(unsigned multiprocessors);
int cuda_mps_memory(const struct cuda_device *device, unsigned long long bytes);

/* cuda_context.c */
void cuda_contexts_forget(void);                                                /* in a forked child */
unsigned long long cuda_total_memory(const struct cuda_device *device);

#endif
