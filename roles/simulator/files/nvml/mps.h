/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What the stand-ins of nvidia-cuda-mps-control, nvidia-cuda-mps-server and libcuda say to each other: messages of one size over
 * sockets that keep their bounds. NVIDIA's own protocol is not published; the names of the files and what a user sees are NVIDIA's.
 */
#ifndef MPS_H
#define MPS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum { MPS_DEVICES_MAX = 32, MPS_UUID_BYTES = 48, MPS_TEXT_BYTES = 2048, MPS_PATH_BYTES = 512 };

enum mps_kind {
    MPS_UI = 1,                     /* to the daemon: here is a user interface */
    MPS_COMMAND,                    /*   one line of it */
    MPS_ANSWER,                     /* from the daemon: a piece of the answer */
    MPS_DONE,                       /*   the answer is complete */
    MPS_EXIT,                       /*   the daemon ends, with this status */
    MPS_CLIENT,                     /* to the daemon: here is a CUDA process */
    MPS_ENUMERATED,                 /*   the devices that it sees, a bit each in `value` */
    MPS_MEMORY,                     /*   what it has on device `device` from now on, in `value` bytes */
    MPS_ATTACHED,                   /* from the daemon: the server's devices, limits and percentage */
    MPS_RESULT,                     /*   a number of CUDA */
    MPS_READY,                      /* from the server: its devices */
    MPS_SHUTDOWN,                   /* to the server: end with this status */
};

struct mps_device {
    char uuid[MPS_UUID_BYTES];
    uint64_t total, limit;          /* bytes; limit 0: none */
};

struct mps_message {
    uint32_t magic, kind;
    int32_t status;
    uint32_t device, device_count;
    double percentage;
    uint64_t value;
    union {
        char text[MPS_TEXT_BYTES];
        struct mps_device devices[MPS_DEVICES_MAX];
    };
};

const char *mps_pipe_directory(void);
const char *mps_log_directory(void);
bool mps_pipe_path(const char *name, char *path, size_t size);      /* false: too long for a socket's address */
int mps_connect(const char *name);                                  /* -1: no process listens there */
bool mps_send(int descriptor, struct mps_message *message, enum mps_kind kind);
bool mps_receive(int descriptor, struct mps_message *message);      /* false: it is closed, or speaks something else */
uint64_t mps_limit(const char *text);                               /* bytes of "4096M" or "4G" */
double mps_percentage(const char *text);                            /* 0: none between 0 and 100 */
void mps_log_line(FILE *file, const char *who, const char *text);
void mps_log_to_daemon(const char *who, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
