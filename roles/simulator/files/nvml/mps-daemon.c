/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The control daemon's loop: one thread that waits for connections, for what they say, for the server and for the pipe of the logs.
 * Nothing that it does waits for another process.
 */
#include "mps-daemon.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void daemon_log(struct daemon *daemon, const char *format, ...)
{
    char text[MPS_TEXT_BYTES + 64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    mps_log_line(daemon->control_log, "Control", text);
}

static void refuse(struct daemon *daemon, int descriptor)
{
    daemon_log(daemon, "Unable to accept connection");
    close(descriptor);
}

static void accept_connection(struct daemon *daemon, int listener)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    int descriptor = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (descriptor < 0)
        return;
    daemon_log(daemon, "Accepting connection...");
    if (getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
        refuse(daemon, descriptor);
        return;
    }
    if (listener == daemon->privileged && peer.uid != 0 && peer.uid != geteuid()) {
        daemon_log(daemon, "Unable to accept priviliged connection from other user");
        close(descriptor);
        return;
    }
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        struct connection *connection = &daemon->connections[index];
        if (connection->role != ROLE_NONE)
            continue;
        *connection = (struct connection){ .role = ROLE_NEW, .descriptor = descriptor, .pid = peer.pid,
                                           .uid = daemon->multi_user ? 0 : peer.uid,
                                           .number = ++daemon->connected };
        return;
    }
    refuse(daemon, descriptor);
}

void connection_close(struct daemon *daemon, struct connection *connection)
{
    if (connection->role == ROLE_UI && !connection->awaits_end)
        daemon_log(daemon, "UI closed");
    if (connection->role == ROLE_CLIENT)
        client_forget(daemon, connection);
    close(connection->descriptor);
    connection->role = ROLE_NONE;
}

static void introduce(struct daemon *daemon, struct connection *connection, const struct mps_message *message)
{
    if (message->kind == MPS_UI) {
        connection->role = ROLE_UI;
        daemon_log(daemon, "NEW UI");
    } else if (message->kind == MPS_CLIENT && !daemon->quitting) {
        connection->role = ROLE_WAITING;
        const struct server *server = &daemon->server;
        const bool served = server->pid && server->ready && !server->closing && server->uid == connection->uid;
        daemon_log(daemon, "NEW CLIENT %d from user %d: %s", (int)connection->pid, (int)connection->uid,
                   served ? "Server already exists" : "Server is not ready, push client to pending list");
    } else if (message->kind == MPS_CLIENT) {
        daemon_log(daemon, "The MPS control daemon is shutting down");
        connection_close(daemon, connection);
    } else {
        daemon_log(daemon, "Unknown type of connection");
        connection_close(daemon, connection);
    }
}

static void hear(struct daemon *daemon, struct connection *connection)
{
    struct mps_message message;
    if (!mps_receive(connection->descriptor, &message))
        connection_close(daemon, connection);
    else if (connection->role == ROLE_NEW)
        introduce(daemon, connection, &message);
    else if (connection->role == ROLE_UI && message.kind == MPS_COMMAND)
        command_run(daemon, connection, message.text);
    else if (connection->role != ROLE_CLIENT || !client_message(daemon, connection, &message))
        connection_close(daemon, connection);
}

/* What servers and others write of themselves is a line as it stands. */
static void drain_pipe(const struct daemon *daemon)
{
    char text[4096];
    for (ssize_t length; (length = read(daemon->pipe, text, sizeof text)) > 0;) {
        if (daemon->server_log) {
            fwrite(text, 1, (size_t)length, daemon->server_log);
            fflush(daemon->server_log);
        }
    }
}

static int milliseconds_left(const struct daemon *daemon)
{
    struct timespec now;
    if (!daemon->hurried)
        return -1;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long left = (daemon->deadline.tv_sec - now.tv_sec) * 1000ll + (daemon->deadline.tv_nsec - now.tv_nsec) / 1000000;
    return left < 0 ? 0 : left > 60000 ? 60000 : (int)left + 1;
}

static int end(struct daemon *daemon)
{
    struct mps_message message = { .status = daemon->failed };
    char path[MPS_PATH_BYTES];
    if (daemon->pipe >= 0) {
        drain_pipe(daemon);
        if (mps_pipe_path("log", path, sizeof path))
            unlink(path);
    }
    daemon_log(daemon, "Exit with status %d", message.status);
    for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
        const struct connection *each = &daemon->connections[index];
        if (each->role == ROLE_UI && each->awaits_end)
            mps_send(each->descriptor, &message, MPS_EXIT);
    }
    return message.status;
}

static void set_from_environment(struct daemon *daemon)
{
    const char *percentage = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), *priority = getenv("CUDA_MPS_CLIENT_PRIORITY");
    if (percentage && mps_percentage(percentage) > 0)
        daemon->percentage = mps_percentage(percentage);
    else if (percentage)
        daemon_log(daemon, "%s should be between (0.0, 100.0]", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    if (priority && (!strcmp(priority, "0") || !strcmp(priority, "1")))
        daemon->priority = *priority - '0';
    else if (priority)
        daemon_log(daemon, "%s should be between [0,1]", "CUDA_MPS_CLIENT_PRIORITY");
}

int daemon_run(struct daemon *daemon)
{
    static struct pollfd waits[CONNECTIONS_MAX + 4];
    signal(SIGPIPE, SIG_IGN);
    daemon_log(daemon, "Starting control daemon using socket %s/control", mps_pipe_directory());
    daemon_log(daemon, "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=%s", mps_pipe_directory());
    set_from_environment(daemon);
    for (;;) {
        server_settle(daemon);
        if (daemon->quitting && !daemon->server.pid)
            return end(daemon);
        waits[0] = (struct pollfd){ .fd = daemon->control, .events = POLLIN };
        waits[1] = (struct pollfd){ .fd = daemon->privileged, .events = POLLIN };
        waits[2] = (struct pollfd){ .fd = daemon->pipe, .events = POLLIN };
        waits[3] = (struct pollfd){ .fd = daemon->server.pid ? daemon->server.descriptor : -1, .events = POLLIN };
        for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
            const struct connection *each = &daemon->connections[index];
            waits[4 + index] = (struct pollfd){ .fd = each->role == ROLE_NONE ? -1 : each->descriptor, .events = POLLIN };
        }
        if (poll(waits, sizeof waits / sizeof waits[0], milliseconds_left(daemon)) < 0 && errno != EINTR)
            return 1;
        if (daemon->hurried && milliseconds_left(daemon) == 0) {
            daemon->hurried = false;
            server_shut_down(daemon, true);
        }
        if (waits[2].revents)
            drain_pipe(daemon);
        if (waits[3].revents)
            server_message(daemon);
        for (unsigned index = 0; index < CONNECTIONS_MAX; index++) {
            /* The end of the server has closed its clients since. New connections in their entries are handled below. */
            if (waits[4 + index].revents && daemon->connections[index].role != ROLE_NONE)
                hear(daemon, &daemon->connections[index]);
        }
        for (unsigned listener = 0; listener < 2; listener++) {
            if (waits[listener].revents)
                accept_connection(daemon, waits[listener].fd);
        }
    }
}
