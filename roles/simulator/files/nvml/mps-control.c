/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * nvidia-cuda-mps-control: the control daemon (-d in the background, -f in the foreground) and, without these, its user interface.
 * Words, files and exit codes are those of NVIDIA's program, release 535; tests/oracles/mps_test.py compares the two.
 */
#include "mps-daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static const char help[] =
    "Control daemon of simulated MPS, in place of NVIDIA's.\n"
    "-d: in the background; -f: in the foreground; -M, -multiuser-server besides: one server for all users; neither: sends commands from standard input to the daemon that runs.\n";

/* Sends the lines of the standard input and prints the answers, until the daemon or the input ends. */
static int user_interface(void)
{
    struct mps_message message = { .kind = MPS_UI };
    char line[MPS_TEXT_BYTES];
    int daemon = mps_connect("control");
    if (daemon < 0 || !mps_send(daemon, &message, MPS_UI)) {
        fputs("Cannot find MPS control daemon process\n", stderr);
        return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        memset(&message, 0, sizeof message);
        memcpy(message.text, line, sizeof line);
        bool told = mps_send(daemon, &message, MPS_COMMAND) && mps_receive(daemon, &message);
        for (; told && message.kind == MPS_ANSWER; told = mps_receive(daemon, &message))
            fputs(message.text, stdout);
        fflush(stdout);
        if (!told) {
            fputs("Cannot send command to MPS control daemon process\n", stderr);
            return 1;
        }
        if (message.kind == MPS_EXIT)
            return message.status;
    }
    close(daemon);
    return 0;
}

static int listen_at(const char *name, mode_t mode)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    if (!mps_pipe_path(name, address.sun_path, sizeof address.sun_path))
        return -1;
    int descriptor = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    unlink(address.sun_path);                       /* of a daemon that ended; who runs holds the lock */
    if (descriptor >= 0 && bind(descriptor, (struct sockaddr *)&address, sizeof address) == 0 && chmod(address.sun_path, mode) == 0
        && listen(descriptor, SOMAXCONN) == 0)
        return descriptor;
    if (descriptor >= 0)
        close(descriptor);
    return -1;
}

static FILE *open_log(const char *name)
{
    char path[MPS_PATH_BYTES];
    int length = snprintf(path, sizeof path, "%s/%s", mps_log_directory(), name);
    return length > 0 && (size_t)length < sizeof path ? fopen(path, "ae") : NULL;
}

/* Read and written here, so that it does not end with the last process that writes into it. */
static int open_pipe(void)
{
    char path[MPS_PATH_BYTES];
    if (!mps_pipe_path("log", path, sizeof path) || (mkfifo(path, 0777) != 0 && errno != EEXIST) || chmod(path, 0777) != 0)
        return -1;
    return open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
}

static bool make_log_directory(void)
{
    if ((mkdir(mps_log_directory(), 0700) == 0 || errno == EEXIST) && access(mps_log_directory(), W_OK | X_OK) == 0)
        return true;
    printf("Warning: Failed writing log files to directory [%s]. No logs will be available.\n", mps_log_directory());
    return false;
}

static void open_logs(struct daemon *daemon, bool foreground)
{
    if (foreground) {
        daemon->control_log = daemon->server_log = stdout;
        return;
    }
    umask(022);
    daemon->control_log = open_log("control.log");
    daemon->server_log = open_log("server.log");
    umask(0);
}

/* Open the directory, the lock of the running daemon, and the sockets. Return false after printing the reason of a failure. */
static bool open_files(struct daemon *daemon, bool logs)
{
    char path[MPS_PATH_BYTES];
    struct stat status;
    if (!mps_pipe_path("control_privileged", path, sizeof path) || stat(mps_pipe_directory(), &status) != 0
        || !S_ISDIR(status.st_mode) || access(mps_pipe_directory(), W_OK | X_OK) != 0) {
        printf("Cannot access CUDA_MPS_PIPE_DIRECTORY=%s\n", mps_pipe_directory());
        return false;
    }
    mps_log_to_daemon("Other", "Using log directory: %s", mps_log_directory());
    mps_pipe_path("control_lock", path, sizeof path);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0 || flock(lock, LOCK_EX | LOCK_NB) != 0) {
        puts("An instance of this daemon is already running");
        return false;
    }
    daemon->control = listen_at("control", 0666);
    daemon->privileged = listen_at("control_privileged", 0755);
    daemon->pipe = logs ? open_pipe() : -1;
    if (daemon->control < 0 || daemon->privileged < 0) {
        printf("Cannot access CUDA_MPS_PIPE_DIRECTORY=%s\n", mps_pipe_directory());
        return false;
    }
    return true;
}

static int control_daemon(bool foreground, bool multi_user)
{
    static struct daemon daemon = { .control = -1, .privileged = -1, .pipe = -1, .percentage = 100, .server.descriptor = -1 };
    daemon.multi_user = multi_user;
    umask(0);
    mkdir(mps_pipe_directory(), 0777);
    bool logs = make_log_directory();
    if (!open_files(&daemon, logs))
        return 1;
    if (logs || foreground)
        open_logs(&daemon, foreground);
    fflush(stdout);
    if (!foreground) {
        pid_t child = fork();
        if (child != 0)
            return child < 0;       /* the child listens already: its sockets are open since before */
        int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
        setsid();
        if (chdir("/") != 0 || nothing < 0)
            return 1;
        for (int each = STDIN_FILENO; each <= STDERR_FILENO; each++)
            dup2(nothing, each);
        close(nothing);
    }
    return daemon_run(&daemon);
}

int main(int argc, char **argv)
{
    /* With more words it is the user interface, whatever they are, but for the one of newer drivers. */
    const bool multi_user = argc == 3 && (!strcmp(argv[2], "-M") || !strcmp(argv[2], "-multiuser-server"));
    const char *option = argc == 2 || multi_user ? argv[1] : "";
    if (!strcmp(option, "-h") || !strcmp(option, "--help")) {
        fputs(help, stdout);
        return 0;
    }
    if (!strcmp(option, "-d") || !strcmp(option, "-f"))
        return control_daemon(option[1] == 'f', multi_user);
    return user_interface();
}
