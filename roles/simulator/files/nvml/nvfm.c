// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors
// libnvfm.so.1: the client library of the fabric manager. It passes each call on to the simulated fabric manager
// (accelerator_simulator/fabric_manager.py) as one line over its socket, and reads the answer.
//
// Facts: names, structures, return values and their meaning are of NVIDIA's Fabric Manager User Guide ("Fabric Manager SDK"). The
// protocol between the library and the fabric manager is not public; the one here is the simulator's own:
//   request   "list\n", "activate <id>\n", "deactivate <id>\n", "set <id> <id>...\n"
//   answer    "<return value>\n"; after 0 for "list" one line for each partition, "partition <id> <active> <GPUs>", each followed by lines for its
//             GPUs, "gpu <physical id> <uuid or -> <PCI address> <available links> <most links> <MB/s>", and at the end "end\n"
#include <arpa/inet.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "nvfm.h"

#define EXPORT __attribute__((visibility("default")))
#define ANSWER_SECONDS 60

struct connection {
    int descriptor;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized;

static int is_initialized(void)
{
    pthread_mutex_lock(&lock);
    int now = initialized;
    pthread_mutex_unlock(&lock);
    return now;
}

EXPORT int fmLibInit(void)
{
    pthread_mutex_lock(&lock);
    int before = initialized;
    initialized = 1;
    pthread_mutex_unlock(&lock);
    return before ? FM_ST_IN_USE : FM_ST_SUCCESS;
}

EXPORT int fmLibShutdown(void)
{
    pthread_mutex_lock(&lock);
    int before = initialized;
    initialized = 0;
    pthread_mutex_unlock(&lock);
    return before ? FM_ST_SUCCESS : FM_ST_UNINITIALIZED;
}

static int connect_unix(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path))
        return -1;
    strcpy(address.sun_path, path);
    int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (descriptor >= 0 && connect(descriptor, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

static int connect_internet(const char *text)
{
    char host[FM_MAX_STR_LENGTH];
    snprintf(host, sizeof(host), "%s", text);
    char *colon = strchr(host, ':');
    int port = FM_CMD_PORT_NUMBER;
    if (colon != NULL) {
        *colon = '\0';
        port = atoi(colon + 1);
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)port)};
    if (port <= 0 || port > 65535 || inet_pton(AF_INET, host, &address.sin_addr) != 1)
        return -2;
    int descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (descriptor >= 0 && connect(descriptor, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

EXPORT int fmConnect(fmConnectParams_t *parameters, fmHandle_t *handle)
{
    if (!is_initialized())
        return FM_ST_UNINITIALIZED;
    if (parameters == NULL || handle == NULL || memchr(parameters->addressInfo, '\0', FM_MAX_STR_LENGTH) == NULL)
        return FM_ST_BADPARAM;
    if (parameters->version != fmConnectParams_version)
        return FM_ST_VERSION_MISMATCH;
    int descriptor = parameters->addressIsUnixSocket ? connect_unix(parameters->addressInfo)
                                                     : connect_internet(parameters->addressInfo);
    if (descriptor == -2)
        return FM_ST_BADPARAM;
    if (descriptor < 0)
        return FM_ST_CONNECTION_NOT_VALID;
    struct timeval seconds = {.tv_sec = ANSWER_SECONDS};
    setsockopt(descriptor, SOL_SOCKET, SO_RCVTIMEO, &seconds, sizeof(seconds));
    struct connection *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        close(descriptor);
        return FM_ST_GENERIC_ERROR;
    }
    made->descriptor = descriptor;
    *handle = made;
    return FM_ST_SUCCESS;
}

EXPORT int fmDisconnect(fmHandle_t handle)
{
    struct connection *connection = handle;
    if (connection == NULL)
        return FM_ST_BADPARAM;
    close(connection->descriptor);
    free(connection);
    return FM_ST_SUCCESS;
}

static int read_line(int descriptor, char *line, size_t size)
{
    size_t length = 0;
    while (length + 1 < size) {
        ssize_t got = read(descriptor, line + length, 1);
        if (got != 1)
            return -1;
        if (line[length] == '\n')
            break;
        length++;
    }
    line[length] = '\0';
    return 0;
}

// Sends a request and returns the return value of the answer.
static int ask(fmHandle_t handle, const char *request)
{
    struct connection *connection = handle;
    char line[256];
    if (!is_initialized())
        return FM_ST_UNINITIALIZED;
    if (connection == NULL)
        return FM_ST_BADPARAM;
    if (send(connection->descriptor, request, strlen(request), MSG_NOSIGNAL) != (ssize_t)strlen(request) ||
        read_line(connection->descriptor, line, sizeof(line)) != 0)
        return FM_ST_CONNECTION_NOT_VALID;
    return atoi(line);
}

EXPORT int fmGetSupportedFabricPartitions(fmHandle_t handle, fmFabricPartitionList_t *list)
{
    if (list == NULL)
        return FM_ST_BADPARAM;
    if (list->version != fmFabricPartitionList_version)
        return FM_ST_VERSION_MISMATCH;
    int answer = ask(handle, "list\n");
    if (answer != FM_ST_SUCCESS)
        return answer;
    struct connection *connection = handle;
    fmFabricPartitionInfo_t *partition = NULL;
    char line[256];
    list->numPartitions = 0;
    for (;;) {
        unsigned first, second, third, fourth;
        char uuid[FM_UUID_BUFFER_SIZE], address[FM_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
        if (read_line(connection->descriptor, line, sizeof(line)) != 0)
            return FM_ST_CONNECTION_NOT_VALID;
        if (strcmp(line, "end") == 0)
            break;
        if (sscanf(line, "partition %u %u", &first, &second) == 2 && list->numPartitions < FM_MAX_FABRIC_PARTITIONS) {
            partition = &list->partitionInfo[list->numPartitions++];
            memset(partition, 0, sizeof(*partition));
            partition->partitionId = first;
            partition->isActive = second;
        } else if (sscanf(line, "gpu %u %79s %31s %u %u %u", &first, uuid, address, &second, &third, &fourth) == 6 &&
                   partition != NULL && partition->numGpus < FM_MAX_NUM_GPUS) {
            fmFabricPartitionGpuInfo_t *gpu = &partition->gpuInfo[partition->numGpus++];
            gpu->physicalId = first;
            snprintf(gpu->uuid, sizeof(gpu->uuid), "%s", strcmp(uuid, "-") == 0 ? "" : uuid);
            snprintf(gpu->pciBusId, sizeof(gpu->pciBusId), "%s", address);
            gpu->numNvLinksAvailable = second;
            gpu->maxNumNvLinks = third;
            gpu->nvlinkLineRateMBps = fourth;
        } else {
            return FM_ST_GENERIC_ERROR;
        }
    }
    list->maxNumPartitions = list->numPartitions;
    return FM_ST_SUCCESS;
}

static int change(fmHandle_t handle, const char *word, fmFabricPartitionId_t partition)
{
    char request[64];
    snprintf(request, sizeof(request), "%s %u\n", word, partition);
    return ask(handle, request);
}

EXPORT int fmActivateFabricPartition(fmHandle_t handle, fmFabricPartitionId_t partition)
{
    return change(handle, "activate", partition);
}

EXPORT int fmDeactivateFabricPartition(fmHandle_t handle, fmFabricPartitionId_t partition)
{
    return change(handle, "deactivate", partition);
}

EXPORT int fmSetActivatedFabricPartitions(fmHandle_t handle, fmActivatedFabricPartitionList_t *list)
{
    if (list == NULL || list->numPartitions > FM_MAX_FABRIC_PARTITIONS)
        return FM_ST_BADPARAM;
    if (list->version != fmActivatedFabricPartitionList_version)
        return FM_ST_VERSION_MISMATCH;
    char request[16 * (FM_MAX_FABRIC_PARTITIONS + 1)] = "set";
    size_t length = strlen(request);
    for (unsigned i = 0; i < list->numPartitions; i++)
        length += (size_t)snprintf(request + length, sizeof(request) - length, " %u", list->partitionIds[i]);
    snprintf(request + length, sizeof(request) - length, "\n");
    return ask(handle, request);
}
