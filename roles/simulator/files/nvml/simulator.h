/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * State of the simulated machine, and the frame every NVML call runs in.
 */
#ifndef SIMULATOR_H
#define SIMULATOR_H

#include "nvml_types.h"

#define STATE_NAME "libnvidia-gpusim.so"
#define STATE_MAGIC 0x4D49534155504721ull
#define FUNCTION_PREFIX "nvml"
#define INTERFACE_NAME "NVML"
#define FAULT_CODE_MINIMUM 0
#define FAULT_CODE_MAXIMUM UNKNOWN

#include "common.h"

enum {
    GPUS_MAX = 32,
    PROFILES_MAX = 18,              /* distinct enum values of GPU instance profiles */
    COMPUTE_PROFILES_MAX = 9,       /* distinct enum values of compute instance profiles */
    PLACEMENTS_MAX = 16,
    INSTANCES_MAX = 15,             /* GPU instance ids are 0–14 */
    COMPUTE_INSTANCES_MAX = 8,
    MIG_INDEXES_MAX = 64,
    MEMORY_CLOCKS_MAX = 8,
    WORKLOAD_PROFILES_MAX = 32,     /* NVML has names for 25 */
    LINKS_MAX = 36,
    EVENTS_MAX = 1024,
    CPUS_MAX = 1024,
    PROFILE_NAME_MAX_BYTES = 32,
    NO_INSTANCE = -1,
};

#define NOT_TIED 0xFFFFFFFFu       /* GPU/compute instance id of what belongs to no MIG device */

enum mig_capability { MIG_NONE, MIG_PENDING, MIG_IMMEDIATE };
enum remote_type { REMOTE_GPU = 0, REMOTE_CPU = 1, REMOTE_SWITCH = 2 };   /* NVML_NVLINK_DEVICE_TYPE_* */
enum engine { ENGINE_COPY, ENGINE_DECODER, ENGINE_ENCODER, ENGINE_JPEG, ENGINE_OFA, ENGINES };

struct placements { uint32_t size, count, start[PLACEMENTS_MAX]; };

struct compute_profile {
    bool present;
    uint32_t id, slices, multiprocessors, maximum;
    char name[PROFILE_NAME_MAX_BYTES];
    struct placements placements;
};

struct profile {
    bool present, p2p, gfx;
    uint32_t id, memory, slices, multiprocessors, maximum, engines[ENGINES];
    char name[PROFILE_NAME_MAX_BYTES];
    struct placements placements;
    struct compute_profile compute[COMPUTE_PROFILES_MAX];   /* by compute instance profile enum */
};

struct memory_clock { uint32_t memory, minimum, maximum, step; };

struct nvlink { bool present, active; uint32_t version, speed; int32_t remote; struct address address; };

/* What a board is; written by load only. Strings are empty and numbers ABSENT where the description gives none. */
struct board {
    char uuid[48], name[NAME_MAX_BYTES], serial[32], part_number[32], vbios_version[32], inforom_version[32];
    char pci_path[PATH_MAX_BYTES], cpu_affinity[PATH_MAX_BYTES];
    struct address address;
    uint32_t minor, board_id, brand, architecture, capability_major, capability_minor;
    uint32_t pci_device_id, pci_subsystem_id, pci_class, pcie_generation, pcie_width;
    int32_t numa_node, coherent_numa_node, memory_bus_width, cores, module_id;
    uint64_t memory_total, memory_reserved, memory_used, bar1;              /* MiB */
    int64_t power_default, power_minimum, power_maximum, power_usage;       /* mW */
    int32_t temperature, shutdown, slowdown, memory_maximum, gpu_maximum;   /* °C */
    int32_t fans, fan_speed;
    uint32_t memory_clock_count;
    struct memory_clock memory_clocks[MEMORY_CLOCKS_MAX];
    uint32_t clocks[4], maximum_clocks[4], application_clocks[4];           /* by NVML clock type, MHz */
    uint32_t workload_profiles;                                             /* bit set; none: unsupported */
    uint32_t workload_priority[WORKLOAD_PROFILES_MAX], workload_conflicts[WORKLOAD_PROFILES_MAX];
    uint32_t remapper_banks;
    int32_t ecc;                                                            /* ABSENT: unsupported */
    bool row_remapping, page_retirement, persistence, display;
    uint32_t addressing_mode;
    struct nvlink links[LINKS_MAX];
    uint32_t fabric_state, fabric_clique, fabric_health_mask, fabric_health_summary;
    int32_t fabric_status;
    unsigned char fabric_cluster[16];
    bool platform;
    unsigned char platform_ib_guid[16];
    char platform_chassis[16];
    uint32_t platform_slot, platform_tray, platform_host, platform_peer, platform_module;
    uint32_t engines[ENGINES];
    uint32_t mig;                                                           /* enum mig_capability */
    bool mig_mode, mig_reversed;
    uint32_t memory_slices, compute_slices;
    struct profile profiles[PROFILES_MAX];                                  /* by GPU instance profile enum */
};

struct compute_instance {
    uint64_t serial;                /* 0: no such instance; else unique for ever */
    uint32_t profile, start, size, mig_index;
    char uuid[48];
};

struct gpu_instance {
    uint64_t serial;
    uint32_t profile, start, size;
    struct compute_instance compute[COMPUTE_INSTANCES_MAX];                 /* by id */
};

struct process {
    struct lifetime life;
    uint32_t gpu_instance, compute_instance;
    uint64_t memory;                /* MiB */
};

/* What keeps a GPU from its fabric, or is wrong with its place there. */
enum fabric_fault { FABRIC_WELL, FABRIC_NOT_STARTED, FABRIC_JOINING, FABRIC_FAILED, FABRIC_ROUTES, FABRIC_MENDING, FABRIC_PLACE,
                    FABRIC_BANDWIDTH };

struct gpu {
    struct board board;
    uint64_t epoch;                 /* of the attachment: handles of an earlier one are invalid */
    uint32_t minor, former_minor;   /* a MIG mode change can move it, and so can a bind to another driver */
    bool lost, thermal, unplugged;  /* unplugged: not in the machine, and lost for processes that had it open */
    bool unbound;                   /* bound to another driver, or to no driver: it has no minor */
    uint32_t slowdown;              /* further reasons for slow clocks: bits of nvmlClocksEventReason… */
    uint32_t fabric_fault;          /* enum fabric_fault */
    uint32_t mig_current, mig_pending, ecc_current, ecc_pending, compute_mode, persistence, accounting, time_slice;
    int64_t power_limit;
    uint32_t locked_minimum, locked_maximum, memory_locked_minimum, memory_locked_maximum;   /* MHz, 0: not locked */
    uint32_t application_memory, application_graphics;                                       /* MHz, 0: default */
    uint32_t workload_requested;    /* bit set of workload power profiles */
    uint64_t ecc_volatile[2], ecc_aggregate[2];                             /* corrected, uncorrected */
    uint32_t remapped_correctable, remapped_uncorrectable;
    bool remap_pending, remap_failure;
    uint32_t recovery_action;
    uint32_t links_down[2];         /* bit set over LINKS_MAX */
    uint64_t attached_at;           /* µs since the epoch: start of the energy counter */
    struct gpu_instance instances[INSTANCES_MAX];                           /* by id */
    struct process processes[PROCESSES_MAX];
};

struct event {
    uint64_t sequence, type, data, epoch;
    uint32_t gpu, gpu_instance, compute_instance;
};

struct machine {
    SHARED_OF_MACHINE
    bool cap_nodes, profile_info_versions, profiles_need_mig_mode, mode_change_moves_minor, mig_reversed, confidential, clients_hold_gpus;
    bool confidential_on, protected_pcie;       /* the feature, which needs the capability, and the mode for NVSwitches without it */
    bool idle_gpus_keep_settings;
    char nvml_version[40], proc_root[PATH_MAX_BYTES];
    uint32_t cuda_version, caps_major, ready_state;
    uint32_t gpu_count;
    struct event events[EVENTS_MAX];
    struct gpu gpus[GPUS_MAX];      /* last: only the used part is copied */
};

/* call.c: the frame. */
enum accept { ACCEPT_GPU = 1, ACCEPT_MIG = 2, ACCEPT_ANY = 3, ACCEPT_LOST = 4 };

struct call {
    const char *function;
    const struct machine *machine;  /* the private copy */
    struct machine *write;          /* the same, while writing */
    int gpu_index;                  /* place in machine->gpus */
    const struct gpu *gpu;
    struct gpu *gpu_write;
    int instance, compute;          /* ids of the addressed MIG device, GPU or compute instance, or NO_INSTANCE */
    bool locked, writing;
    int kind;                       /* of the handle, to find it again once the state is locked */
    const void *handle;
    unsigned accept;
};

nvmlReturn_t call_begin(struct call *call, const char *function);
nvmlReturn_t call_begin_device(struct call *call, const char *function, nvmlDevice_t device, unsigned accept);
nvmlReturn_t call_begin_instance(struct call *call, const char *function, nvmlGpuInstance_t instance);
nvmlReturn_t call_begin_compute(struct call *call, const char *function, nvmlComputeInstance_t instance);
nvmlReturn_t call_write(struct call *call);          /* needs privilege; call->write is valid after it */
nvmlReturn_t call_commit(struct call *call);
nvmlReturn_t call_commit_instances(struct call *call);   /* the capability tree follows */
void call_end(struct call *call);
nvmlReturn_t call_found(struct call *call, int gpu);  /* the GPU that a call without a handle has found: its faults meet the call */
nvmlReturn_t call_resolve(const struct call *call, nvmlDevice_t device, int *gpu, int *instance, int *compute);
bool initialized(void);
void follow_machine(const struct machine *machine);   /* scans the device nodes again after another machine was loaded */
nvmlReturn_t stub_answer(const char *function, nvmlReturn_t answer);

#define CALL(begin, ...)                                                                     \
    struct call call __attribute__((cleanup(call_end)));                                     \
    do {                                                                                     \
        nvmlReturn_t begin_result = begin(&call, __func__, ##__VA_ARGS__);                   \
        if (begin_result != SUCCESS)                                                         \
            return begin_result;                                                             \
    } while (0)
#define DEVICE_CALL(device, accept) CALL(call_begin_device, device, accept)
/* The same function under an older or a newer name. */
#define ALIAS(name, target, ...) EXPORT nvmlReturn_t name(__VA_ARGS__) __attribute__((alias(#target)))
#define REQUIRE(condition, otherwise)                                                        \
    do {                                                                                     \
        if (!(condition))                                                                    \
            return (otherwise);                                                              \
    } while (0)
#define WRITE_CALL()                                                                         \
    do {                                                                                     \
        nvmlReturn_t write_result = call_write(&call);                                       \
        if (write_result != SUCCESS)                                                         \
            return write_result;                                                             \
    } while (0)

/* handle.c */
nvmlDevice_t handle_of_gpu(const struct machine *machine, int gpu);
nvmlDevice_t handle_of_mig(const struct machine *machine, int gpu, int instance, int compute);
nvmlGpuInstance_t handle_of_instance(const struct machine *machine, int gpu, int instance);
nvmlComputeInstance_t handle_of_compute(const struct machine *machine, int gpu, int instance, int compute);
nvmlReturn_t handle_resolve_device(const struct machine *machine, nvmlDevice_t handle, int *gpu, int *instance, int *compute);
nvmlReturn_t handle_resolve_instance(const struct machine *machine, nvmlGpuInstance_t handle, int *gpu, int *instance);
nvmlReturn_t handle_resolve_compute(const struct machine *machine, nvmlComputeInstance_t handle, int *gpu, int *instance, int *compute);

/* visibility.c: what this process may see. */
bool monitor(const struct machine *machine);
bool control_node_openable(const struct machine *machine);
void visibility_scan(const struct machine *machine);
bool mig_visible(const struct machine *machine, int gpu, int instance, int compute);
unsigned mig_index_seen(const struct machine *machine, int gpu, int instance, int compute);
unsigned visible_count(void);
int visible_gpu(unsigned index);                     /* NVML index of this process -> place, or NO_INSTANCE */
int visible_index(int gpu);

/* capabilities.c: the proc tree and the nodes of instances. */
unsigned capability_minor_instance(const struct gpu *gpu, int instance);
unsigned capability_minor_compute(const struct gpu *gpu, int instance, int compute);
void capability_path(const struct machine *machine, int gpu, int instance, int compute, char *path, size_t size);
void capabilities_commit(const struct machine *machine);   /* commits, and makes the tree equal to the state, where it may */
void capabilities_commit_bound(const struct machine *machine, const bool *gpus);   /* after the driver has got or lost these GPUs */
void capabilities_commit_of(const struct machine *machine, int gpu);   /* the same where only one GPU has changed */

/* mig.c: rules of partitioning; no I/O. */
const struct profile *profile_by_id(const struct board *board, unsigned id, unsigned *enumeration);
const struct compute_profile *compute_profile_by_id(const struct profile *profile, unsigned id, unsigned *enumeration);
bool placement_listed(const struct placements *placements, unsigned start, unsigned size);
bool placement_free(const struct gpu *gpu, unsigned start, unsigned size);
bool engines_free(const struct gpu *gpu, const struct profile *profile);
unsigned instances_of_profile(const struct gpu *gpu, unsigned profile);
unsigned remaining_instances(const struct gpu *gpu, const struct profile *profile, unsigned enumeration);
nvmlReturn_t choose_placement(const struct gpu *gpu, const struct profile *profile, unsigned enumeration, unsigned *start);
nvmlReturn_t check_placement(const struct gpu *gpu, const struct profile *profile, unsigned enumeration, unsigned start, unsigned size);
int instance_id(const struct board *board, unsigned start, unsigned size);
bool compute_placement_free(const struct gpu_instance *instance, unsigned start, unsigned size);
unsigned remaining_compute(const struct gpu_instance *instance, const struct compute_profile *profile, unsigned enumeration);
bool any_instance(const struct gpu *gpu);
bool any_compute(const struct gpu_instance *instance);
unsigned free_mig_index(const struct gpu *gpu);
void mig_device_name(const struct gpu *gpu, int instance, int compute, char *name, size_t size);
void mig_uuid(const struct gpu *gpu, int instance, int compute, char uuid[48]);

/* clients.c: the processes that have a GPU or an instance open; their locks end with them. */
void client_enter(const struct machine *machine, bool attach);      /* the first initialization of a process */
void client_leave(void);
void settle_idle_gpus(void);                         /* what GPUs without a client have lost; after the last client, and before the next */
void client_of_gpu(int gpu);
bool fabric_manager_runs(void);                      /* it has a separate lock */
void client_of_instance(const struct machine *machine, int gpu, int instance, int compute);
bool gpu_has_clients(int gpu);                       /* others than this process */
bool instance_has_clients(const struct machine *machine, int gpu, int instance, int compute);
bool context_enter(const struct machine *machine, int gpu, int instance, int compute);  /* false: the compute mode forbids it */
void context_leave(const struct machine *machine, int gpu, int instance, int compute);

/* life.c: what resets and power do to a GPU. */
bool gpu_holds_minor(const struct gpu *gpu, unsigned minor);
void gpu_take_minor(struct machine *machine, struct gpu *gpu);
void gpu_power_on(struct gpu *gpu, bool first);
void gpu_reset(struct machine *machine, struct gpu *gpu);
bool gpu_has_settings(const struct gpu *gpu);        /* that it loses when the driver deinitializes it */
void gpu_deinitialize(struct gpu *gpu);
void gpu_apply_mig_mode(struct machine *machine, struct gpu *gpu, unsigned mode);

/* processes.c */
bool process_alive(const struct process *process);
bool gpu_in_use(const struct gpu *gpu);
bool instance_in_use(const struct gpu *gpu, int instance, int compute);
uint64_t used_memory(const struct gpu *gpu, int instance);   /* MiB */

/* api_power.c, api_topology.c: the field values that belong to them. */
bool power_field(const struct gpu *gpu, nvmlFieldValue_t *field);
void link_field(const struct gpu *gpu, nvmlFieldValue_t *field);

/* events.c */
void event_add(struct machine *machine, int gpu, uint64_t type, uint64_t data, uint32_t instance, uint32_t compute);

nvmlReturn_t answer_text(char *target, unsigned size, const char *text);    /* call.c; INSUFFICIENT_SIZE where it does not fit */
const char *nvmlErrorString(nvmlReturn_t result);

/* control_*.c */
nvmlReturn_t control_show(struct json *json);
nvmlReturn_t control_use(int words, char **word, struct json *json, char *error, size_t size);
nvmlReturn_t control_leave(int words, char **word, struct json *json, char *error, size_t size);
nvmlReturn_t control_context(int words, char **word, struct json *json, char *error, size_t size);

#endif
