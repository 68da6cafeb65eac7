/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * A CUDA process as a client of MPS. It needs only the directory of the daemon's sockets, also in a container. The
 * connection exists until the process ends for any reason; forked children, which cannot use CUDA, do not keep it open.
 *
 * The lower of the server's limit and the process's limit applies. A server's default memory limit is not enforced on MIG
 * devices, as users of R5xx drivers report for real boards; the limit in the process's environment variable is enforced.
 */
#include "cuda.h"
#include "mps.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

static int daemon_socket = -1;
static double percentage = 100;

bool cuda_under_mps(void) { return daemon_socket >= 0; }

/* The daemon or the server has ended. The daemon closes the connection when the server ends. */
bool cuda_mps_broken(void)
{
    char byte;
    const ssize_t heard = recv(daemon_socket, &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT);
    return heard == 0 || (heard < 0 && errno != EAGAIN && errno != EINTR);
}

unsigned cuda_mps_share(unsigned multiprocessors)
{
    double share = ceil(multiprocessors * percentage / 100 - 1e-9);
    return share < 1 ? 1 : (unsigned)share;
}

/* What CUDA_MPS_PINNED_DEVICE_MEM_LIMIT says of a device, as "0=4096M,1=2G" or with a UUID; 0: nothing. */
static unsigned long long own_limit(unsigned ordinal, const char *uuid)
{
    const char *set = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    char list[2048], *rest = list;
    snprintf(list, sizeof list, "%s", set ? set : "");
    for (char *pair = strsep(&rest, ","); pair; pair = strsep(&rest, ",")) {
        char *value = strchr(pair, '='), *end;
        if (!value)
            continue;
        *value++ = '\0';
        unsigned long number = strtoul(pair, &end, 10);
        if (end != pair && !*end ? number == ordinal : strcasecmp(pair, uuid) == 0)
            return mps_limit(value);
    }
    return 0;
}

static unsigned long long lower(unsigned long long one, unsigned long long other)
{
    return !one || (other && other < one) ? other : one;
}

/* Of the server's devices those that this process sees, in the server's order. */
static void take_devices(const struct mps_message *server, struct cuda_device *found, unsigned count)
{
    static struct cuda_device served[MPS_DEVICES_MAX];
    const char *own = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    unsigned total = 0;
    for (unsigned device = 0; device < server->device_count && device < MPS_DEVICES_MAX; device++) {
        for (unsigned index = 0; index < count; index++) {
            if (strcasecmp(found[index].uuid, server->devices[device].uuid) != 0)
                continue;
            served[total] = found[index];
            served[total].server_device = device;
            served[total].limit = found[index].mig ? 0 : server->devices[device].limit;
            total++;
            break;
        }
    }
    cuda_device_count = cuda_choose_devices(served, total, cuda_devices, false);
    for (unsigned index = 0; index < cuda_device_count; index++)
        cuda_devices[index].limit = lower(cuda_devices[index].limit, own_limit(index, cuda_devices[index].uuid));
    percentage = server->percentage;
    if (own && mps_percentage(own) > 0 && mps_percentage(own) < percentage)
        percentage = mps_percentage(own);
}

static int introduce(struct cuda_device *found, unsigned count)
{
    struct mps_message message = { 0 };
    if (!mps_send(daemon_socket, &message, MPS_CLIENT) || !mps_receive(daemon_socket, &message))
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    if (message.kind != MPS_ATTACHED)
        return message.kind == MPS_RESULT && message.status ? message.status : CUDA_ERROR_MPS_CONNECTION_FAILED;
    take_devices(&message, found, count);
    message.value = 0;
    for (unsigned index = 0; index < cuda_device_count; index++)
        message.value |= 1ull << cuda_devices[index].server_device;
    if (!mps_send(daemon_socket, &message, MPS_ENUMERATED) || !mps_receive(daemon_socket, &message) || message.kind != MPS_RESULT)
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    if (message.status)
        return message.status;
    return cuda_device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static void hang_up(void)
{
    if (daemon_socket >= 0)
        close(daemon_socket);
    daemon_socket = -1;
}

/* A directory without a daemon is ignored. The answer can take long: until the clients of another user have ended. */
int cuda_mps_connect(struct cuda_device *found, unsigned count, bool *connected)
{
    daemon_socket = mps_connect("control");
    if (daemon_socket < 0)
        return CUDA_SUCCESS;
    int code = introduce(found, count);
    if (code != CUDA_SUCCESS) {
        hang_up();
        cuda_device_count = 0;
    }
    *connected = code == CUDA_SUCCESS;
    return code;
}

int cuda_mps_memory(const struct cuda_device *device, unsigned long long bytes)
{
    struct mps_message message = { .device = device->server_device, .value = bytes };
    if (!mps_send(daemon_socket, &message, MPS_MEMORY) || !mps_receive(daemon_socket, &message) || message.kind != MPS_RESULT)
        return CUDA_ERROR_MPS_RPC_FAILURE;
    return message.status;
}

void cuda_contexts_forget(void)
{
    hang_up();
    cuda_ready = 0;
    cuda_device_count = 0;
}
