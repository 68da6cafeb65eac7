/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The control daemon: who is connected, and the server that it runs.
 */
#ifndef MPS_DAEMON_H
#define MPS_DAEMON_H

#include "mps.h"

#include <time.h>

enum { CONNECTIONS_MAX = 256, CUDA_OUT_OF_MEMORY = 2, CUDA_MPS_CONNECTION_FAILED = 805 };

enum role { ROLE_NONE, ROLE_NEW, ROLE_UI, ROLE_WAITING, ROLE_CLIENT };

struct connection {
    enum role role;
    int descriptor;
    pid_t pid;
    uid_t uid;
    uint64_t number;                            /* who came earlier has a lower one */
    bool awaits_end;                            /* a user interface that has asked for it */
    uint32_t devices;                           /* bits: of the server's devices those that a client sees */
    uint64_t memory[MPS_DEVICES_MAX];           /* bytes that it has there */
};

struct server {
    pid_t pid;                                  /* 0: no server */
    int descriptor;
    uid_t uid;
    bool ready, closing;                        /* closing: takes no more clients and ends after the last */
    double percentage;
    uint64_t limits[MPS_DEVICES_MAX];           /* bytes, 0: none */
    uint32_t device_count;
    struct mps_device devices[MPS_DEVICES_MAX];
};

struct daemon {
    int control, privileged, pipe;
    FILE *control_log, *server_log;
    double percentage;
    uint64_t limits[MPS_DEVICES_MAX];
    int priority;
    bool multi_user;                            /* all clients are root's */
    bool failed;                                /* a server has ended badly */
    bool quitting, hurried;
    struct timespec deadline;                   /* hurried: servers that still run then are ended */
    uint64_t connected;                         /* connections so far */
    struct server server;
    struct connection connections[CONNECTIONS_MAX];
};

int daemon_run(struct daemon *daemon);
void daemon_log(struct daemon *daemon, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* mps-commands.c */
void command_run(struct daemon *daemon, struct connection *connection, const char *line);

/* mps-servers.c */
void server_start(struct daemon *daemon, uid_t uid);
void server_message(struct daemon *daemon);         /* it has said something, or has ended */
void server_shut_down(struct daemon *daemon, bool force);
void server_attach(struct daemon *daemon, struct connection *client);
void server_settle(struct daemon *daemon);          /* starts, fills, and ends servers for the waiting clients */
bool client_message(struct daemon *daemon, struct connection *client, struct mps_message *message);
void client_forget(struct daemon *daemon, struct connection *client);
void connection_close(struct daemon *daemon, struct connection *connection);
bool is_server(const struct daemon *daemon, int pid);

#endif
