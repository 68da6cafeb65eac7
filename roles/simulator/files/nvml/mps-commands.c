/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The commands of the control daemon's user interface. Their answers, to the oddest input, are those of NVIDIA's daemon.
 */
#include "mps-daemon.h"

#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct request {
    struct daemon *daemon;
    struct connection *from;
    const char *words;              /* behind the command's name */
    FILE *text;                     /* of the answer */
};

/* A line of the answer is a line of the log as well. */
__attribute__((format(printf, 2, 3))) static void answer(const struct request *request, const char *format, ...)
{
    char text[MPS_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    daemon_log(request->daemon, "%s", text);
    fprintf(request->text, "%s\n", text);
}

/* The server whose PID is the first word; without one there, the answer says so. */
static struct server *server_of(const struct request *request, int *pid)
{
    *pid = 0;
    sscanf(request->words, "%d", pid);
    if (is_server(request->daemon, *pid))
        return &request->daemon->server;
    answer(request, "Server %d not found", *pid);
    return NULL;
}

static bool rules(const struct connection *connection, uid_t owner)
{
    return connection->uid == 0 || connection->uid == owner;
}

static void show_limit(const struct request *request, uint64_t limit)
{
    if (limit >> 30)
        answer(request, "%lldG", (long long)(limit >> 30));
    else
        answer(request, "%lldM", (long long)(limit >> 20));
}

static void set_percentage(const struct request *request, const char *text, double *percentage)
{
    double wanted = mps_percentage(text);
    if (wanted > 0)
        *percentage = wanted;
    else
        daemon_log(request->daemon, "Invalid percentage, expected between (0.0, 100.0]");
    answer(request, "%.1f", *percentage);
}

static bool valid_device(const struct request *request, int device)
{
    if (device >= 0 && device < MPS_DEVICES_MAX)
        return true;
    daemon_log(request->daemon, "Invalid device ordinal!");
    return false;
}

static void get_server_list(const struct request *request)
{
    if (request->daemon->server.pid)
        answer(request, "%d", (int)request->daemon->server.pid);
}

static void start_server(const struct request *request)
{
    unsigned uid;
    if (sscanf(request->words, " -uid %u", &uid) != 1)
        answer(request, "A user id (UID) is required to start a new server");
    else if (!rules(request->from, uid))
        answer(request, "Insufficient privileges for UID %u", (unsigned)request->from->uid);
    else if (!request->daemon->server.pid)
        server_start(request->daemon, uid);
}

static void shutdown_server(const struct request *request)
{
    int pid, read = 0;
    char option[8] = "";
    struct server *server = server_of(request, &pid);
    if (!server)
        return;
    if (!rules(request->from, server->uid)) {
        answer(request, "Insufficient privileges for UID %u", (unsigned)request->from->uid);
        return;
    }
    sscanf(request->words, "%d%n", &pid, &read);
    sscanf(request->words + read, "%7s", option);
    server_shut_down(request->daemon, !strcmp(option, "-f"));
}

static void get_client_list(const struct request *request)
{
    int pid;
    if (!server_of(request, &pid))
        return;
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        const struct connection *each = &request->daemon->connections[index];
        if (each->role == ROLE_CLIENT)
            answer(request, "%d", (int)each->pid);
    }
}

/* Each device of the server, with the clients that have enumerated it. */
static void get_device_client_list(const struct request *request)
{
    const struct server *server = &request->daemon->server;
    int pid = 0;
    sscanf(request->words, "%d", &pid);
    if (pid && !server_of(request, &pid))
        return;
    for (unsigned device = 0; server->pid && device < server->device_count; device++) {
        answer(request, "%s", server->devices[device].uuid);
        for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
            const struct connection *each = &request->daemon->connections[index];
            if (each->role == ROLE_CLIENT && each->devices & 1u << device)
                answer(request, "%d", (int)each->pid);
        }
    }
}

static void get_default_percentage(const struct request *request) { answer(request, "%.1f", request->daemon->percentage); }

static void set_default_percentage(const struct request *request)
{
    set_percentage(request, request->words, &request->daemon->percentage);
}

static void get_percentage(const struct request *request)
{
    int pid;
    const struct server *server = server_of(request, &pid);
    if (server)
        answer(request, "%.1f", server->percentage);
}

static void set_server_percentage(const struct request *request)
{
    int pid, read = 0;
    struct server *server = server_of(request, &pid);
    if (!server)
        return;
    sscanf(request->words, "%d%n", &pid, &read);
    set_percentage(request, request->words + read, &server->percentage);
}

static void get_default_limit(const struct request *request)
{
    int device = 0;
    sscanf(request->words, "%d", &device);
    if (!valid_device(request, device))
        return;
    if (request->daemon->limits[device])
        show_limit(request, request->daemon->limits[device]);
    else
        daemon_log(request->daemon, "No default pinned memory limit set for the device!");
}

/* Without a number of a device it is device 0, and without a value that limit goes: so does NVIDIA's. */
static void set_limit(const struct request *request, const char *words, uint64_t *limits)
{
    int device = 0;
    char value[64] = "";
    sscanf(words, "%d %63s", &device, value);
    if (valid_device(request, device))
        limits[device] = mps_limit(value);
}

static void set_default_limit(const struct request *request) { set_limit(request, request->words, request->daemon->limits); }

static void get_server_limit(const struct request *request)
{
    int pid, device = 0;
    const struct server *server = server_of(request, &pid);
    if (!server)
        return;
    sscanf(request->words, "%d %d", &pid, &device);
    if (valid_device(request, device) && server->limits[device])
        show_limit(request, server->limits[device]);
}

static void set_server_limit(const struct request *request)
{
    int pid, read = 0;
    struct server *server = server_of(request, &pid);
    if (!server)
        return;
    sscanf(request->words, "%d%n", &pid, &read);
    set_limit(request, request->words + read, server->limits);
}

static void get_priority(const struct request *request) { answer(request, "%d", request->daemon->priority); }

static void set_priority(const struct request *request)
{
    int priority = 0;
    sscanf(request->words, "%d", &priority);
    if (priority == 0 || priority == 1)
        request->daemon->priority = priority;
    else
        answer(request, "Invalid priority value - must be 0 or 1!");
}

static void terminate_client(const struct request *request)
{
    int pid, client = 0, unused;
    if (!server_of(request, &pid)) {
        answer(request, "Server %d not found!", pid);
        answer(request, "1");
        return;
    }
    sscanf(request->words, "%d %d", &unused, &client);
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        struct connection *each = &request->daemon->connections[index];
        if (each->role == ROLE_CLIENT && each->pid == client && rules(request->from, each->uid)) {
            connection_close(request->daemon, each);
            answer(request, "0");
            return;
        }
    }
    answer(request, "Invalid process %d!", client);
    answer(request, "1");
}

static void show_process(const struct request *request, const struct connection *client, unsigned device)
{
    const int width = MPS_UUID_BYTES;
    char path[64], command[64] = "";
    struct stat status;
    snprintf(path, sizeof path, "/proc/%u/cmdline", (unsigned)client->pid);
    FILE *file = fopen(path, "re");
    if (file) {
        command[fread(command, 1, sizeof command - 1, file)] = '\0';
        fclose(file);
    }
    snprintf(path, sizeof path, "/proc/%u/ns/pid", (unsigned)client->pid);
    const unsigned long long name_space = stat(path, &status) == 0 ? status.st_ino : 0;
    const struct server *server = &request->daemon->server;
    answer(request, "%-10d%-10d%-15d%-*s%-15llu%-15s", (int)client->pid, (int)client->number, (int)server->pid, width,
           server->devices[device].uuid, name_space, command);
}

static void show_processes(const struct request *request)
{
    const struct server *server = &request->daemon->server;
    int pid = 0;
    char option = '\0';
    sscanf(request->words, " -%c %d", &option, &pid);
    if (option == 'p' && !is_server(request->daemon, pid)) {
        answer(request, "Server %d not found", pid);
        answer(request, "Server %d not found", pid);
        fputc('\n', request->text);
        return;
    }
    if (!server->pid) {
        answer(request, "Server not found");
        return;
    }
    answer(request, "%-10s%-10s%-15s%-*s%-15s%-15s", "PID", "ID", "SERVER", MPS_UUID_BYTES, "DEVICE", "NAMESPACE", "COMMAND");
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        const struct connection *each = &request->daemon->connections[index];
        for (unsigned device = 0; each->role == ROLE_CLIENT && device < server->device_count; device++) {
            if (each->devices & 1u << device)
                show_process(request, each, device);
        }
    }
}

/* The answer is the daemon's end, which comes after that of its server. */
static void quit(const struct request *request)
{
    struct daemon *daemon = request->daemon;
    unsigned seconds;
    char option = '\0';
    if (!rules(request->from, geteuid())) {
        answer(request, "Not enough privilege to execute quit command");
        return;
    }
    if (sscanf(request->words, " -%c %u", &option, &seconds) == 2 && option == 't') {
        daemon_log(daemon, "quit command issued with timeout of %u", seconds);
        clock_gettime(CLOCK_MONOTONIC, &daemon->deadline);
        daemon->deadline.tv_sec += seconds;
        daemon->hurried = true;
    }
    daemon->quitting = true;
    request->from->awaits_end = true;
    server_shut_down(daemon, false);
}

static const struct {
    const char *name;
    void (*run)(const struct request *request);
} commands[] = {
    { "get_server_list", get_server_list },
    { "start_server", start_server },
    { "shutdown_server", shutdown_server },
    { "get_client_list", get_client_list },
    { "get_device_client_list", get_device_client_list },
    { "get_default_active_thread_percentage", get_default_percentage },
    { "set_default_active_thread_percentage", set_default_percentage },
    { "get_active_thread_percentage", get_percentage },
    { "set_active_thread_percentage", set_server_percentage },
    { "get_default_device_pinned_mem_limit", get_default_limit },
    { "set_default_device_pinned_mem_limit", set_default_limit },
    { "get_device_pinned_mem_limit", get_server_limit },
    { "set_device_pinned_mem_limit", set_server_limit },
    { "get_default_client_priority", get_priority },
    { "set_default_client_priority", set_priority },
    { "terminate_client", terminate_client },
    { "ps", show_processes },
    { "quit", quit },
};

/* In pieces; who does not take them is let go. */
static void reply(struct daemon *daemon, struct connection *connection, const char *text, size_t length)
{
    struct mps_message message = { 0 };
    bool sent = true;
    for (size_t done = 0; sent && done < length; done += sizeof message.text - 1) {
        snprintf(message.text, sizeof message.text, "%s", text + done);
        sent = mps_send(connection->descriptor, &message, MPS_ANSWER);
    }
    if (!sent || (!connection->awaits_end && !mps_send(connection->descriptor, &message, MPS_DONE)))
        connection_close(daemon, connection);
}

void command_run(struct daemon *daemon, struct connection *connection, const char *line)
{
    char name[64] = "";
    int read = 0;
    char *text = NULL;
    size_t length = 0;
    sscanf(line, "%63s%n", name, &read);
    const struct request request = { .daemon = daemon, .from = connection, .words = line + read,
                                     .text = open_memstream(&text, &length) };
    if (!request.text) {
        connection_close(daemon, connection);
        return;
    }
    daemon_log(daemon, "Cmd:%s", line);
    if (daemon->quitting && strcmp(name, "quit") != 0) {
        answer(&request, "The MPS control daemon is shutting down");
    } else {
        size_t index = 0;
        while (index < sizeof commands / sizeof commands[0] && strcmp(commands[index].name, name) != 0)
            index++;
        if (index < sizeof commands / sizeof commands[0])
            commands[index].run(&request);
        else
            answer(&request, "Unknown command \"%s\"", name);
    }
    fclose(request.text);
    reply(daemon, connection, text, length);
    free(text);
}
