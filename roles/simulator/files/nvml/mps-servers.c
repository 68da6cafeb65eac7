/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The server that the control daemon runs, and its clients. It serves one user at a time: clients of other users wait until all clients
 * of the current user have ended. The server and its clients are processes on the devices. The daemon reports them to the simulated
 * boards, because a server of another user does not have this permission. A daemon without it, in a container, only counts internally.
 */
#include "mps-daemon.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INSUFFICIENT_RESOURCES = 23, SERVER_MIB = 30, CLIENT_MIB = 16 };     /* chosen: what a context takes */

bool is_server(const struct daemon *daemon, int pid) { return daemon->server.pid && daemon->server.pid == pid; }

/* One command to the simulated boards; an NVML error number. */
__attribute__((format(printf, 1, 2))) static int boards(const char *format, ...)
{
    static int (*control)(const char *, char *, unsigned);
    char command[256], reply[1024];
    va_list arguments;
    if (!control) {
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (library)
            *(void **)&control = dlsym(library, "acceleratorSimulatorControl");
        if (!control)
            return -1;
    }
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    return control(command, reply, sizeof reply);
}

static unsigned long long mebibytes(uint64_t bytes) { return (bytes + (1u << 20) - 1) >> 20; }

/* In the directory of this program, or in PATH. */
static void become_server(uid_t uid, int descriptor)
{
    char self[MPS_PATH_BYTES], path[2 * MPS_PATH_BYTES], number[16];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    int kept = dup(descriptor);     /* without the flag that closes it */
    signal(SIGPIPE, SIG_DFL);
    if (kept < 0 || (geteuid() != uid && (setgroups(0, NULL) != 0 || setuid(uid) != 0)))
        _exit(1);
    snprintf(number, sizeof number, "%d", kept);
    if (length > 0) {
        self[length] = '\0';
        snprintf(path, sizeof path, "%s/nvidia-cuda-mps-server", dirname(self));
        execl(path, "nvidia-cuda-mps-server", number, (char *)NULL);
    }
    execlp("nvidia-cuda-mps-server", "nvidia-cuda-mps-server", number, (char *)NULL);
    _exit(1);
}

void server_start(struct daemon *daemon, uid_t uid)
{
    struct server *server = &daemon->server;
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        return;
    pid_t child = fork();
    if (child == 0)
        become_server(uid, pair[1]);
    close(pair[1]);
    fcntl(pair[0], F_SETFL, O_NONBLOCK);
    if (child < 0) {
        close(pair[0]);
        return;
    }
    *server = (struct server){ .pid = child, .descriptor = pair[0], .uid = uid, .percentage = daemon->percentage };
    memcpy(server->limits, daemon->limits, sizeof server->limits);
    daemon_log(daemon, "Starting new server %d for user %d", (int)child, (int)uid);
}

static bool any(const struct daemon *daemon, enum role role)
{
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        if (daemon->connections[index].role == role)
            return true;
    }
    return false;
}

/* If the server could not start, report this to the waiting clients. Clients of the server lose their connection, like those of a real server. */
static void server_gone(struct daemon *daemon)
{
    struct server *server = &daemon->server;
    struct mps_message message = { .status = CUDA_MPS_CONNECTION_FAILED };
    int status = 0;
    while (waitpid(server->pid, &status, 0) < 0 && errno == EINTR)
        continue;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    daemon_log(daemon, "Server %d exited with status %d", (int)server->pid, code);
    daemon_log(daemon, "Removed Shm file at ");
    daemon->failed |= code != 0;
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        struct connection *each = &daemon->connections[index];
        const bool failed = each->role == ROLE_WAITING && each->uid == server->uid && !server->ready;
        if (failed)
            mps_send(each->descriptor, &message, MPS_RESULT);
        if (failed || each->role == ROLE_CLIENT)
            connection_close(daemon, each);
    }
    for (unsigned device = 0; device < server->device_count; device++)
        boards("leave %s %d", server->devices[device].uuid, (int)server->pid);
    close(server->descriptor);
    *server = (struct server){ .descriptor = -1 };
}

void server_message(struct daemon *daemon)
{
    struct server *server = &daemon->server;
    struct mps_message message;
    if (!mps_receive(server->descriptor, &message) || message.kind != MPS_READY || message.device_count > MPS_DEVICES_MAX) {
        server_gone(daemon);
        return;
    }
    server->ready = true;
    server->device_count = message.device_count;
    memcpy(server->devices, message.devices, sizeof server->devices);
    for (unsigned device = 0; device < server->device_count; device++)
        boards("use %s %d %d %d", server->devices[device].uuid, (int)server->pid, SERVER_MIB, (int)getpid());
    daemon_log(daemon, "NEW SERVER %d: Ready", (int)server->pid);
}

/* force: at once, whoever it serves, and then it has not ended well. */
void server_shut_down(struct daemon *daemon, bool force)
{
    struct server *server = &daemon->server;
    struct mps_message message = { .status = any(daemon, ROLE_CLIENT) };
    if (!server->pid)
        return;
    server->closing = true;
    if (force && (!server->ready || !mps_send(server->descriptor, &message, MPS_SHUTDOWN)))
        kill(server->pid, SIGKILL);
}

void server_attach(struct daemon *daemon, struct connection *client)
{
    const struct server *server = &daemon->server;
    struct mps_message message = { .percentage = server->percentage, .device_count = server->device_count };
    memcpy(message.devices, server->devices, sizeof message.devices);
    for (unsigned device = 0; device < server->device_count; device++)
        message.devices[device].limit = server->limits[device];
    client->role = ROLE_CLIENT;
    if (!mps_send(client->descriptor, &message, MPS_ATTACHED))
        connection_close(daemon, client);
}

static struct connection *next_waiting(struct daemon *daemon)
{
    struct connection *first = NULL;
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        struct connection *each = &daemon->connections[index];
        if (each->role == ROLE_WAITING && (!first || each->number < first->number))
            first = each;
    }
    return first;
}

void server_settle(struct daemon *daemon)
{
    struct server *server = &daemon->server;
    struct connection *waiting = next_waiting(daemon);
    struct mps_message message = { .status = 0 };
    for (; waiting && daemon->quitting; waiting = next_waiting(daemon))
        connection_close(daemon, waiting);
    while (waiting && server->pid && server->ready && !server->closing && waiting->uid == server->uid) {
        server_attach(daemon, waiting);
        waiting = next_waiting(daemon);
    }
    if (waiting && !server->pid)
        server_start(daemon, waiting->uid);
    else if (waiting && server->ready && waiting->uid != server->uid)
        server->closing = true;     /* in the order of arrival: no new client of the previous user comes first */
    if (server->pid && server->ready && server->closing && !any(daemon, ROLE_CLIENT))
        mps_send(server->descriptor, &message, MPS_SHUTDOWN);
}

/* Return whether the device has this much memory for this client in addition to the others. */
static bool fits(struct daemon *daemon, const struct connection *client, unsigned device, uint64_t bytes)
{
    const struct server *server = &daemon->server;
    int code = boards("use %s %d %llu %d", server->devices[device].uuid, (int)client->pid, mebibytes(bytes) + CLIENT_MIB,
                      (int)getpid());
    if (code == 0 || code == INSUFFICIENT_RESOURCES)
        return code == 0;
    unsigned long long sum = mebibytes(bytes) + CLIENT_MIB + SERVER_MIB;
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        const struct connection *each = &daemon->connections[index];
        if (each->role == ROLE_CLIENT && each != client && each->devices & 1u << device)
            sum += mebibytes(each->memory[device]) + CLIENT_MIB;
    }
    return sum <= server->devices[device].total >> 20;
}

bool client_message(struct daemon *daemon, struct connection *client, struct mps_message *message)
{
    const struct server *server = &daemon->server;
    message->status = 0;
    if (message->kind == MPS_ENUMERATED && !client->devices) {
        for (unsigned device = 0; device < server->device_count; device++) {
            if (!(message->value >> device & 1))
                continue;
            client->devices |= 1u << device;
            if (!fits(daemon, client, device, 0))
                message->status = CUDA_OUT_OF_MEMORY;
        }
    } else if (message->kind == MPS_MEMORY && message->device < server->device_count && client->devices & 1u << message->device) {
        if (fits(daemon, client, message->device, message->value))
            client->memory[message->device] = message->value;
        else
            message->status = CUDA_OUT_OF_MEMORY;
    } else {
        return false;
    }
    return mps_send(client->descriptor, message, MPS_RESULT);
}

void client_forget(struct daemon *daemon, struct connection *client)
{
    const struct server *server = &daemon->server;
    for (unsigned device = 0; device < server->device_count; device++) {
        if (client->devices & 1u << device)
            boards("leave %s %d", server->devices[device].uuid, (int)client->pid);
    }
}
