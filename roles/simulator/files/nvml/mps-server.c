/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * nvidia-cuda-mps-server: holds a context on each of its devices as long as the control daemon that started it wants, and lives.
 */
#include "mps.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

enum { COMPUTE_MODE_ATTRIBUTE = 20, MODE_PROHIBITED = 2 };

static const char help[] = "Server of simulated MPS: its control daemon starts it.\n";

#define CUDA(name, types, ...) ((int (*) types)symbol(library, name))(__VA_ARGS__)

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found)
        exit(1);
    return found;
}

/* Open every device. In prohibited mode no process may open the device, so it stays closed. */
static bool open_devices(void *library, struct mps_message *message)
{
    int count = 0;
    if (CUDA("cuInit", (unsigned), 0) != 0 || CUDA("cuDeviceGetCount", (int *), &count) != 0)
        return false;
    for (int device = 0; device < count && device < MPS_DEVICES_MAX; device++) {
        struct mps_device *each = &message->devices[device];
        char name[96] = "";
        void *context;
        size_t total = 0;
        int mode = 0;
        CUDA("cuDeviceGetName", (char *, int, int), name, sizeof name, device);
        mps_log_to_daemon("Server", "Creating server context on device %d (%s)", device, name);
        if (CUDA("cuDeviceGetAttribute", (int *, int, int), &mode, COMPUTE_MODE_ATTRIBUTE, device) != 0
            || CUDA("acceleratorSimulatorDeviceName", (char *, int, int), each->uuid, sizeof each->uuid, device) != 0
            || CUDA("cuDeviceTotalMem_v2", (size_t *, int), &total, device) != 0
            || (mode != MODE_PROHIBITED && CUDA("cuCtxCreate_v2", (void **, unsigned, int), &context, 0, device) != 0))
            return false;
        each->total = total;
        message->device_count++;
    }
    return message->device_count > 0;
}

int main(int argc, char **argv)
{
    static struct mps_message message;
    char *end;
    if (argc == 2 && !strcmp(argv[1], "--help")) {
        fputs(help, stdout);
        return 0;
    }
    long daemon = argc == 2 ? strtol(argv[1], &end, 10) : -1;
    if (daemon < 0 || *end)
        return 1;
    prctl(PR_SET_PDEATHSIG, SIGKILL);   /* a daemon that ends closes its socket, which is seen below; this one cannot be missed */
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    /* A server must not become a client. */
    if (!library || setenv("CUDA_MPS_PIPE_DIRECTORY", "/dev/null", 1) != 0 || !open_devices(library, &message)
        || !mps_send((int)daemon, &message, MPS_READY))
        return 1;
    return mps_receive((int)daemon, &message) && message.kind == MPS_SHUTDOWN ? message.status : 1;
}
