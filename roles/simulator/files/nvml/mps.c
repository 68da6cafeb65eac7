/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What every side of MPS needs: paths, messages, the forms of values, lines of a log.
 */
#include "mps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MESSAGE_MAGIC 0x4D505332u
#define DEFAULT_PIPE_DIRECTORY "/tmp/nvidia-mps"
#define DEFAULT_LOG_DIRECTORY "/var/log/nvidia-mps"

static const char *directory(const char *variable, const char *otherwise)
{
    const char *set = getenv(variable);
    return set && *set ? set : otherwise;
}

const char *mps_pipe_directory(void) { return directory("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_DIRECTORY); }
const char *mps_log_directory(void) { return directory("CUDA_MPS_LOG_DIRECTORY", DEFAULT_LOG_DIRECTORY); }

bool mps_pipe_path(const char *name, char *path, size_t size)
{
    int length = snprintf(path, size, "%s/%s", mps_pipe_directory(), name);
    return length > 0 && (size_t)length < size && (size_t)length < sizeof ((struct sockaddr_un *)0)->sun_path;
}

int mps_connect(const char *name)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (!mps_pipe_path(name, address.sun_path, sizeof address.sun_path))
        return -1;
    int descriptor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (descriptor >= 0 && connect(descriptor, (struct sockaddr *)&address, sizeof address) != 0) {
        close(descriptor);
        return -1;
    }
    return descriptor;
}

bool mps_send(int descriptor, struct mps_message *message, enum mps_kind kind)
{
    message->magic = MESSAGE_MAGIC;
    message->kind = kind;
    ssize_t sent;
    do
        sent = send(descriptor, message, sizeof *message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)sizeof *message;
}

bool mps_receive(int descriptor, struct mps_message *message)
{
    ssize_t received;
    do
        received = recv(descriptor, message, sizeof *message, 0);
    while (received < 0 && errno == EINTR);
    if (received != (ssize_t)sizeof *message || message->magic != MESSAGE_MAGIC)
        return false;
    message->text[sizeof message->text - 1] = '\0';
    return true;
}

/* As NVIDIA's daemon reads it: digits, and G or g right behind them; anything else behind them is MiB. No number is no limit. */
uint64_t mps_limit(const char *text)
{
    char *end;
    unsigned long long number = strtoull(text, &end, 10);
    return (uint64_t)number << (*end == 'G' || *end == 'g' ? 30 : 20);
}

double mps_percentage(const char *text)
{
    double value = strtod(text, NULL);
    return value > 0 && value <= 100 ? value : 0;
}

void mps_log_line(FILE *file, const char *who, const char *text)
{
    struct timeval now;
    struct tm date;
    if (!file)
        return;
    gettimeofday(&now, NULL);
    localtime_r(&now.tv_sec, &date);
    fprintf(file, "[%d-%02d-%02d %02d:%02d:%02d.%03d %s %5d] %s\n", date.tm_year + 1900, date.tm_mon + 1, date.tm_mday,
            date.tm_hour, date.tm_min, date.tm_sec, (int)(now.tv_usec / 1000), who, (int)getpid(), text);
    fflush(file);
}

/* Others than the daemon write into its pipe; without one that reads it, nowhere. */
void mps_log_to_daemon(const char *who, const char *format, ...)
{
    char path[MPS_PATH_BYTES], text[MPS_PATH_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!mps_pipe_path("log", path, sizeof path))
        return;
    int descriptor = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "w") : NULL;
    if (!file) {
        if (descriptor >= 0)
            close(descriptor);
        return;
    }
    mps_log_line(file, who, text);
    fclose(file);
}
