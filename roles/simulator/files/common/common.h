/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Code that the simulated libraries of all vendors share. The files in this directory are compiled once for each vendor, with the
 * simulator.h in that vendor's directory. It defines the machine and the codes of the interface, and includes this file.
 *
 * Before the include, simulator.h defines the codes SUCCESS, NOT_FOUND, INVALID_ARGUMENT, NO_PERMISSION, DRIVER_NOT_LOADED,
 * OPERATING_SYSTEM and INSUFFICIENT_SIZE, and the macros STATE_NAME, STATE_MAGIC, FUNCTION_PREFIX, INTERFACE_NAME, FAULT_CODE_MINIMUM and
 * FAULT_CODE_MAXIMUM. After the include, it defines struct machine, which begins with SHARED_OF_MACHINE.
 */
#ifndef COMMON_H
#define COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))
#define MIB (1024ull * 1024ull)
#define ABSENT (-1)                /* a number the description does not give */

enum {
    NAME_MAX_BYTES = 64,
    PATH_MAX_BYTES = 256,
    ERROR_MAX_BYTES = 512,
    CALL_FAULTS_MAX = 64,
    SYMBOLS_MAX = 512,
    CALLERS_MAX = 256,
    PROCESSES_MAX = 64,
    DEVICES_MAX = 64,              /* of any vendor's machine */
    NO_DEVICE = -1,
};

struct machine;
struct address { uint32_t domain, bus, device, function; };

struct call_fault {
    bool used;
    int32_t device;                 /* NO_DEVICE: any */
    char function[64];
    int32_t code;                   /* SUCCESS: only the delay */
    double delay;                   /* s; HUGE_VAL: until the fault is cleared */
    uint32_t nth;                   /* 0: every call */
    uint64_t number;                /* of the fault, unique for ever */
};

/* Calls that were made since the machine was loaded, by symbol and by process. Whoever may write the state counts. */
struct caller { _Atomic uint64_t process, calls; };     /* process: PID namespace and PID, 0: free */

struct counters {
    _Atomic uint64_t symbols[SYMBOLS_MAX];
    struct caller callers[CALLERS_MAX];
};

/* What struct machine of every vendor begins with. */
#define SHARED_OF_MACHINE                                                                    \
    bool loaded, administrator_root;                                                         \
    char driver_version[32], dev_root[PATH_MAX_BYTES], sys_root[PATH_MAX_BYTES];             \
    uint32_t operation_delay;       /* ms */                                                 \
    uint64_t loads;                 /* machines loaded so far: another one has other devices */ \
    uint64_t faults_injected;       /* number of the newest fault of a call */               \
    uint64_t serial;                /* last serial given to an instance */                   \
    uint64_t events_written;        /* sequence of the newest event */                       \
    struct call_fault faults[CALL_FAULTS_MAX];

/* state.c: the file. Readers keep a private copy that is renewed when the generation has moved. */
int state_open(void);
void state_close(void);
const struct machine *state_refresh(void);          /* under the process lock; NULL: nothing readable */
int state_begin_write(struct machine **machine);
void state_commit(void);                            /* both of the next two */
void state_publish(void);
void state_unlock(void);
void state_abandon(void);
bool state_wait(uint64_t seen_generation, int64_t milliseconds);   /* true: moved */
uint64_t state_generation(void);
uint64_t state_copy_generation(void);                /* of what state_refresh returned last */
uint32_t state_count_call(unsigned fault);          /* number of this call since the fault was set, from 1 */
void state_reset_call_count(unsigned fault);
/* While writing: the devices, a bit set, whose files the last writers may not have made equal to the state; it outlives them. */
uint64_t state_unfollowed(void);
void state_set_unfollowed(uint64_t devices);
struct counters *state_counters(bool writable);      /* NULL: not open, or not to be written */
int state_create(void);
int state_descriptor(void);                         /* a new one, for reading, on the file that this process has mapped */
void process_lock(void);
void process_unlock(void);
uint64_t now_microseconds(void);
size_t machine_used_bytes(const struct machine *machine);   /* the vendor's: how much of it has to be copied */

/* json.c */
struct json { char *text; size_t size, used; bool cut, need_comma; };
void json_open(struct json *json, const char *key, char bracket);
void json_close(struct json *json, char bracket);
void json_text(struct json *json, const char *key, const char *value);
void json_number(struct json *json, const char *key, long long value);
void json_bool(struct json *json, const char *key, bool value);

/* text.c */
bool parse_unsigned(const char *text, uint64_t maximum, uint64_t *value);
bool parse_signed(const char *text, int64_t minimum, int64_t maximum, int64_t *value);
bool parse_address(const char *text, struct address *address);
bool parse_uuid_bytes(const char *text, unsigned char bytes[16]);
void format_address(const struct address *address, char text[32]);          /* 00000000:1B:00.0 */
void format_address_legacy(const struct address *address, char text[16]);   /* 0000:1B:00.0 */
void format_address_sysfs(const struct address *address, char text[16]);    /* 0000:1b:00.0 */
bool same_address(const struct address *one, const struct address *other);
void copy_text(char *target, size_t size, const char *text);
void cpu_list_to_mask(const char *list, unsigned long *mask, unsigned words);

/* counters.c */
extern const char *const symbol_names[];             /* in the order of strcmp; made by the Makefile */
extern const unsigned symbol_count;
void count_call(const char *function);
void count_nothing_yet(void);
void counters_show(struct json *json);

/* nodes.c: what this process may do and open. */
bool openable(const char *path, int flags);
bool has_administration_capability(void);
bool administrator(const struct machine *machine);
/* A character device, or a plain file where those cannot be made; one that is there stays. */
void make_device_node(const char *path, unsigned major_number, unsigned minor_number, unsigned mode);
/* A device that sysfs knows, of that PCI vendor, and that another driver, or none, holds is not this driver's. */
bool held_by_driver(const struct machine *machine, const struct address *address, const char *vendor, const char *driver);

/* lifetimes.c: processes that were registered as users of something. */
struct lifetime {
    uint32_t pid;                   /* 0: free */
    uint64_t started, pid_namespace;/* of the real process; started 0: no such process */
    uint32_t holder;                /* another process with which this entry ends; 0: no other process */
    uint64_t holder_started;
};
bool lifetime_lasts(const struct lifetime *life);
void process_identity(uint32_t pid, uint64_t *started, uint64_t *pid_namespace);

/* locks.c: bytes far behind the end of the state file. A process locks them while it has a device open. The kernel releases its locks
 * when it ends. */
void locks_enter(void);
void locks_leave(void);
bool lock_byte(long long byte);
void unlock_byte(long long byte);
bool byte_locked(long long byte);                    /* by others than this process */
long long locked_in(long long first, long long length);   /* the first byte that others have locked there, or -1 */

/* faults.c: faults of calls. */
int faults_take(const struct machine **machine, const char *function, int device, bool only_of_device);
bool pass_operation(const struct machine **machine);

struct fault {
    int words;
    char **word;                    /* after the device and the kind of fault */
    struct machine *machine;
    int index;                      /* of the device; NO_DEVICE for a call without one */
    char *error;
    size_t size;
};
struct fault_kind { const char *name; bool (*apply)(struct fault *fault); };
extern const struct fault_kind fault_kinds[];        /* the vendor's; the last has no name */
bool refuse(struct fault *fault, const char *found, const char *expected);
bool word_number(struct fault *fault, int index, uint64_t maximum, const char *what, uint64_t *value);
bool fault_call(struct fault *fault);
int control_fault(int words, char **word, struct json *json, char *error, size_t size);
void clear_call_faults(struct machine *machine, const bool chosen[DEVICES_MAX], bool all);
void show_call_faults(struct json *json, const struct machine *machine, const char *device_key);

/* commands.c: the private control symbol. */
struct command {
    const char *name;
    int (*run)(int words, char **word, struct json *json, char *error, size_t size);
    int words_min, words_max;
    const char *usage;
};
extern const struct command commands[];              /* the vendor's; the last has no name */
enum { COMMAND_WORDS_MAX = 16 };
int begin_control_write(struct machine **machine, char *error, size_t size);
int run_event_count(int words, char **word, struct json *json, char *error, size_t size);
int run_calls(int words, char **word, struct json *json, char *error, size_t size);
/* The vendor's. */
unsigned machine_devices(const struct machine *machine);
bool find_devices(const struct machine *machine, const char *selection, bool chosen[DEVICES_MAX], char *error, size_t size);
const char *code_text(int code);

/* description.c: the machine as text. */
bool machine_parse(const char *path, struct machine *machine, char *error, size_t size);

#endif
