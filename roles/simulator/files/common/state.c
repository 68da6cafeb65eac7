/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The state file: one header and two copies ("slots") of the machine.
 *
 * Generation g is in slot g & 1. A writer holds an exclusive flock, fills the other slot and publishes g + 1 with one atomic
 * store, so that a writer that ends at any instant leaves the last published generation unchanged. Waiting processes wait on
 * the low half of the same number: no second value could differ from it. A reader needs no lock and no write access: it copies
 * the slot, and uses the copy if the generation is still the same. The lock is on a file description that is opened for the
 * transaction, so that processes that were forked with an open library exclude each other too.
 */
#include "simulator.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct state_file {
    Elf64_Ehdr elf;                             /* the file name is a library's: programs that read it as a library find an empty one */
    uint64_t magic, layout;                     /* layout: the size of all data, to detect the file of another build */
    _Atomic uint64_t generation;                /* 0: nothing was ever loaded */
    _Atomic uint32_t calls[CALL_FAULTS_MAX];
    _Atomic uint64_t unfollowed;                /* bit set of devices whose files may not be what the published state says */
    struct counters counters;
    struct machine slots[2];
};

static struct {
    pthread_mutex_t mutex;
    struct state_file *file;
    bool writable;
    dev_t device;
    ino_t inode;
    int lock;                                   /* descriptor of the running transaction */
    uint64_t generation;                        /* of the private copy; 0: none */
    struct machine copy;
    uint32_t calls[CALL_FAULTS_MAX];            /* where the shared counters cannot be written */
} process = { .mutex = PTHREAD_MUTEX_INITIALIZER, .lock = -1 };

void process_lock(void) { pthread_mutex_lock(&process.mutex); }
void process_unlock(void) { pthread_mutex_unlock(&process.mutex); }

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(process_lock, process_unlock, process_unlock);
}

uint64_t now_microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

/* The file is in the directory from which the library was loaded. Called under the process lock. */
static const char *state_path(void)
{
    static char found[PATH_MAX];
    Dl_info information;
    char library[PATH_MAX], path[PATH_MAX];
    if (found[0])
        return found;
    if (!dladdr((void *)(uintptr_t)state_path, &information) || !realpath(information.dli_fname, library))
        return NULL;
    int length = snprintf(path, PATH_MAX, "%s/%s.%s", dirname(library), STATE_NAME, SIMULATOR_VERSION);
    return length > 0 && length < PATH_MAX ? strcpy(found, path) : NULL;
}

static bool header_fits(const struct state_file *file)
{
    return file->magic == STATE_MAGIC && file->layout == sizeof(struct state_file);
}

void state_close(void)
{
    if (process.file)
        munmap(process.file, sizeof(struct state_file));
    process.file = NULL;
    process.generation = 0;
}

int state_open(void)
{
    const char *path = state_path();
    struct stat status;
    if (!path || stat(path, &status) != 0 || (size_t)status.st_size < sizeof(struct state_file))
        return DRIVER_NOT_LOADED;
    if (process.file && process.device == status.st_dev && process.inode == status.st_ino)
        return SUCCESS;
    state_close();
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    process.writable = descriptor >= 0;
    if (descriptor < 0)
        descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return errno == EACCES || errno == EPERM ? NO_PERMISSION : DRIVER_NOT_LOADED;
    void *mapping = mmap(NULL, sizeof(struct state_file), PROT_READ | (process.writable ? PROT_WRITE : 0), MAP_SHARED, descriptor, 0);
    bool known = fstat(descriptor, &status) == 0;
    close(descriptor);
    if (mapping == MAP_FAILED || !known)
        return OPERATING_SYSTEM;
    process.file = mapping;
    process.device = status.st_dev;
    process.inode = status.st_ino;
    return SUCCESS;
}

uint64_t state_generation(void)
{
    return process.file && header_fits(process.file) ? atomic_load_explicit(&process.file->generation, memory_order_acquire) : 0;
}

uint64_t state_copy_generation(void) { return process.generation; }

const struct machine *state_refresh(void)
{
    for (unsigned attempt = 0; process.file && header_fits(process.file); attempt++) {
        uint64_t generation = atomic_load_explicit(&process.file->generation, memory_order_acquire);
        if (generation == 0)
            return NULL;
        if (generation == process.generation)
            return process.copy.loaded ? &process.copy : NULL;
        const struct machine *slot = &process.file->slots[generation & 1];
        process.generation = 0;
        memcpy(&process.copy, slot, machine_used_bytes(slot));
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&process.file->generation, memory_order_relaxed) == generation)
            process.generation = generation;
        else if (attempt % 16 == 15)
            nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    }
    return NULL;
}

int state_begin_write(struct machine **machine)
{
    const char *path = state_path();
    if (!process.file || !process.writable || !path)
        return NO_PERMISSION;
    process.lock = open(path, O_RDWR | O_CLOEXEC);
    if (process.lock < 0)
        return errno == ENOENT ? DRIVER_NOT_LOADED : NO_PERMISSION;
    while (flock(process.lock, LOCK_EX) != 0) {
        if (errno != EINTR) {
            state_abandon();
            return OPERATING_SYSTEM;
        }
    }
    if (!state_refresh() && state_generation() != 0) {
        state_abandon();
        return OPERATING_SYSTEM;
    }
    if (state_generation() == 0)
        memset(&process.copy, 0, sizeof process.copy);
    *machine = &process.copy;
    return SUCCESS;
}

/* The kernel compares 32 bits: the low half of the generation, which is its first on this architecture. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half comes first");
static void *wait_word(struct state_file *file) { return &file->generation; }

/* The new generation is there for everybody; the lock is still held. */
void state_publish(void)
{
    uint64_t generation = atomic_load_explicit(&process.file->generation, memory_order_acquire) + 1;
    memcpy(&process.file->slots[generation & 1], &process.copy, machine_used_bytes(&process.copy));
    atomic_store_explicit(&process.file->generation, generation, memory_order_release);
    process.generation = generation;
    syscall(SYS_futex, wait_word(process.file), FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void state_unlock(void)
{
    close(process.lock);
    process.lock = -1;
}

void state_commit(void)
{
    state_publish();
    state_unlock();
}

/* Discard the changes in the private copy: the next reader renews it. */
void state_abandon(void)
{
    process.generation = 0;
    if (process.lock >= 0)
        close(process.lock);
    process.lock = -1;
}

/* Called without the process lock, by a thread that holds an event set: the mapping of an initialized process stays. */
bool state_wait(uint64_t seen_generation, int64_t milliseconds)
{
    struct state_file *file = process.file;
    if (!file || state_generation() != seen_generation)
        return true;
    struct timespec time = { .tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000 };
    if (syscall(SYS_futex, wait_word(file), FUTEX_WAIT, (uint32_t)seen_generation, &time, NULL, 0) != 0 && errno != EAGAIN
        && errno != ETIMEDOUT && errno != EINTR)
        nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);   /* no waiting on this mapping here: look now and then */
    return state_generation() != seen_generation;
}

uint32_t state_count_call(unsigned fault)
{
    if (process.writable)
        return atomic_fetch_add(&process.file->calls[fault], 1) + 1;
    return ++process.calls[fault];
}

void state_reset_call_count(unsigned fault)
{
    atomic_store(&process.file->calls[fault], 0);
}

uint64_t state_unfollowed(void) { return atomic_load(&process.file->unfollowed); }

void state_set_unfollowed(uint64_t devices) { atomic_store(&process.file->unfollowed, devices); }

struct counters *state_counters(bool writable)
{
    return process.file && header_fits(process.file) && (process.writable || !writable) ? &process.file->counters : NULL;
}

int state_descriptor(void)
{
    const char *path = state_path();
    return process.file && path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
}

/* Create the file, or convert the file of another build. The inode stays the same for processes that have mapped it. */
int state_create(void)
{
    const char *path = state_path();
    if (!path)
        return OPERATING_SYSTEM;
    int descriptor = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor < 0)
        return NO_PERMISSION;
    struct stat status;
    int result = OPERATING_SYSTEM;
    if (flock(descriptor, LOCK_EX) == 0 && fchmod(descriptor, 0644) == 0 && fstat(descriptor, &status) == 0
        && ((size_t)status.st_size >= sizeof(struct state_file) || ftruncate(descriptor, sizeof(struct state_file)) == 0)) {
        struct state_file *file = mmap(NULL, sizeof *file, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (file != MAP_FAILED) {
            if (!header_fits(file)) {
                atomic_store(&file->generation, 0);
                memset(file, 0, sizeof *file);
                file->elf = (Elf64_Ehdr){ .e_ident = { ELFMAG0, ELFMAG1, ELFMAG2, ELFMAG3, ELFCLASS64, ELFDATA2LSB, EV_CURRENT },
                                          .e_type = ET_DYN, .e_machine = EM_X86_64, .e_version = EV_CURRENT,
                                          .e_ehsize = sizeof(Elf64_Ehdr), .e_phentsize = sizeof(Elf64_Phdr),
                                          .e_shentsize = sizeof(Elf64_Shdr) };
                file->layout = sizeof *file;
                file->magic = STATE_MAGIC;
            }
            munmap(file, sizeof *file);
            result = SUCCESS;
        }
    }
    close(descriptor);
    return result;
}
