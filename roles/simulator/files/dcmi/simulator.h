/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * State of the simulated machine with NPUs, and the frame every DCMI call runs in.
 */
#ifndef SIMULATOR_H
#define SIMULATOR_H

#include "dcmi_types.h"

/* Answers of the interface. */
enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = -8001,
    NO_PERMISSION = -8002,
    INTERNAL = -8005,
    INVALID_DEVICE = -8007,
    NOT_FOUND = -8008,
    IOCTL_FAILED = -8009,
    NOT_READY = -8012,
    IN_CONTAINER = -8013,
    BUSY = IN_CONTAINER,            /* the driver's own "busy" has the same code */
    OCCUPIED = -8020,
    NOT_SUPPORTED = -8255,
    /* What the common code asks for by other names. */
    DRIVER_NOT_LOADED = NOT_READY,
    OPERATING_SYSTEM = INTERNAL,
    INSUFFICIENT_SIZE = -8003,
};

#define STATE_NAME "libdcmi-sim.so"
#define STATE_MAGIC 0x4D495355504E4453ull
#define FUNCTION_PREFIX "dcmi"
#define INTERFACE_NAME "DCMI"
#define FAULT_CODE_MINIMUM (-9999)
#define FAULT_CODE_MAXIMUM (-1)

#include "common.h"

enum {
    CHIPS_MAX = 64,
    TEMPLATES_MAX = 16,
    SLICES_MAX = 16,                /* virtual ids of a chip: 100 + 16 * its physical id, and on */
    GROUPS_MAX = 4,
    GROUP_PLACES = 2,               /* a group hosts one slice, or two of the smallest */
    ERRORS_MAX = 128,
    EVENTS_MAX = 256,
    FIRST_VID = 100,
    VIDS_PER_CHIP = 16,
    ALL_SLICES = 65535,             /* to destroy */
    THOUSAND = 1000,                /* amounts are in thousandths: some templates have fractions */
};

#define CHOOSE 0xFFFFFFFFu         /* for a virtual id or a group: the driver chooses */

enum interface { INTERFACE_1 = 1, INTERFACE_2 = 2 };   /* dcmi_* or dcmiv2_* */
enum vnpu_mode { MODE_DOCKER, MODE_VM };
enum work_mode { WORK_AMP, WORK_SMP };
enum health { HEALTH_OK, HEALTH_WARNING, HEALTH_ALARM, HEALTH_CRITICAL };
enum resource { AICORE, AICPU, VPC, VENC, VDEC, JPEGD, JPEGE, PNGD, RESOURCES };
enum topology { TOPO_SELF, TOPO_SYS, TOPO_PHB, TOPO_HCCS, TOPO_PXB, TOPO_PIX, TOPO_SIO, TOPO_HCCS_SW,
                TOPO_UB, TOPO_UNKNOWN };

struct template {
    char name[TEMPLATE_NAME_LEN];
    uint32_t amounts[RESOURCES];    /* thousandths */
    uint32_t memory;                /* as displayed, GB */
    uint64_t memory_mib;            /* what a slice measures; 0: its share of the chip's */
    uint32_t places;                /* of a group: 1 of the smallest, else all */
    bool vm_only;
};

/* What a chip is; written by load only. Strings are empty and numbers ABSENT where the description gives none. */
struct board {
    char type[32], name[32], version[32], npu_name[32], product[64], model[64], manufacturer[64], manufactured[32], serial[64];
    uint32_t card, chip, physical, slot, board_id, pcb_id, bom_id, mainboard_id, aicores;
    bool management;                /* the card has a management controller */
    struct address address;
    uint32_t pci_device_id, pci_subsystem_id;
    char pci_path[PATH_MAX_BYTES], cpu_affinity[PATH_MAX_BYTES], ip[48];
    int32_t numa_node, hccs_group, temperature, power, voltage;             /* °C, 0.1 W, 0.01 V */
    uint32_t vdie[DIE_ID_COUNT], ndie[DIE_ID_COUNT];
    bool hbm, slices, needs_amp, needs_single_die, sriov, sio;
    uint32_t ub_dies, ub_ports;     /* ports of the unified bus, on each die; 0: it has none */
    uint64_t memory_mib, memory_used;
    uint32_t memory;                /* as displayed, GB */
    uint32_t frequency_memory, frequency_aicore, frequency_aicore_maximum, frequency_control;   /* MHz */
    int32_t totals[RESOURCES];      /* thousandths; ABSENT: unknown */
    uint32_t aicpu_whole;           /* where the first slice moves cores between control and AICPU: before it; else 0 */
    uint32_t slices_maximum, groups;
    uint32_t template_count;
    struct template templates[TEMPLATES_MAX];
    bool super_pod;
    uint32_t sdid, scale, super_pod_id, server_id, chassis_id, super_pod_type;
};

struct slice {
    uint64_t serial;                /* 0: no such slice; else unique for ever */
    uint32_t template, group;       /* group CHOOSE: it has none */
};

struct process {
    struct lifetime life;
    uint32_t vid;                   /* CHOOSE: the chip itself */
    uint64_t memory;                /* MiB */
};

struct chip {
    struct board board;
    uint64_t epoch;                 /* of the attachment */
    bool lost, unplugged, share, fragmented;
    uint32_t health, error_count, errors[ERRORS_MAX];
    uint32_t network;               /* what the test of its network port finds: enum dcmi_rdfx_detect_result */
    uint32_t link_ups, link_downs;  /* of that port, since power came on */
    uint32_t sent, received, bad_packets;   /* of that port: MB/s, and in all */
    uint32_t hccs_errors[HCCS_MAX_PCS_NUM], sio_errors;
    struct slice slices[SLICES_MAX];                                        /* by virtual id */
    struct process processes[PROCESSES_MAX];
};

struct event { uint64_t sequence, time; uint32_t chip, code, severity, assertion; };

struct machine {
    SHARED_OF_MACHINE
    char tool_version[32], etc_root[PATH_MAX_BYTES], init_command[PATH_MAX_BYTES];
    uint32_t interface, vnpu_mode, work_mode, multi_die_policy;
    uint32_t slice_major;           /* of /dev/vdavinciV */
    bool slice_nodes, recover, share_recover, guard_destroy, occupied_is_internal, plus_rules, single_thread, mount_namespaces,
        unified_bus, topology;      /* chips without a PCI function; whether the links between chips can be read */
    uint64_t host_mount_namespace;  /* of the process that loaded the machine */
    uint32_t chip_count;
    struct event events[EVENTS_MAX];
    struct chip chips[CHIPS_MAX];   /* last: only the used part is copied */
};

/* call.c: the frame. */
struct call {
    const char *function;
    const struct machine *machine;
    struct machine *write;          /* the same, while writing */
    int index;                      /* place in machine->chips, or NO_DEVICE */
    int slice;                      /* where a container has only that of the chip, or NO_DEVICE */
    const struct chip *chip;
    struct chip *chip_write;
    int card, device;
    unsigned interface;
    bool locked, writing, inside;
};

int call_begin(struct call *call, const char *function, unsigned interface);
int call_begin_chip(struct call *call, const char *function, int card, int device);
int call_begin_card(struct call *call, const char *function, int card);   /* any chip of it */
int call_begin_device(struct call *call, const char *function, int number);    /* dcmiv2 */
int call_write(struct call *call);                   /* needs privilege; call->write is valid after it */
int call_commit(struct call *call);
int call_commit_slices(struct call *call);           /* their nodes follow */
void call_end(struct call *call);
int stub_answer(const char *function, int answer);

#define CALL(begin, ...)                                                                     \
    struct call call __attribute__((cleanup(call_end)));                                     \
    do {                                                                                     \
        int begin_result = begin(&call, __func__, ##__VA_ARGS__);                            \
        if (begin_result != SUCCESS)                                                         \
            return begin_result;                                                             \
    } while (0)
#define REQUIRE(condition, otherwise)                                                        \
    do {                                                                                     \
        if (!(condition))                                                                    \
            return (otherwise);                                                              \
    } while (0)
#define WRITE_CALL(call)                                                                     \
    do {                                                                                     \
        int write_result = call_write(call);                                                 \
        if (write_result != SUCCESS)                                                         \
            return write_result;                                                             \
    } while (0)
#define UNPACK(...) __VA_ARGS__
/* One function under its two names: by card and chip, and by the number of a device. What follows is the body. */
#define BOTH(name, second, parameters, arguments)                                            \
    static int name##_answer(struct call *call, UNPACK parameters);                          \
    EXPORT int dcmi_##name(int card_id, int device_id, UNPACK parameters)                    \
    {                                                                                        \
        CALL(call_begin_chip, card_id, device_id);                                           \
        return name##_answer(&call, UNPACK arguments);                                       \
    }                                                                                        \
    EXPORT int dcmiv2_##second(int dev_id, UNPACK parameters)                                \
    {                                                                                        \
        CALL(call_begin_device, dev_id);                                                     \
        return name##_answer(&call, UNPACK arguments);                                       \
    }                                                                                        \
    static int name##_answer(struct call *call, UNPACK parameters)

/* visibility.c: what this process has. */
struct seen { int chip, slice; uint64_t serial, epoch; };   /* slice NO_DEVICE: the whole chip */
uint64_t own_mount_namespace(void);
bool in_container(const struct machine *machine);
int visibility_enter(const struct machine *machine);  /* at the initialization; devices of other containers are occupied */
void visibility_follow(const struct machine *machine);   /* again, after another machine was loaded */
unsigned seen_count(void);
const struct seen *seen_device(unsigned index);       /* by logic id */
int seen_logic(int chip);                             /* logic id of a chip, or NO_DEVICE */
uint32_t physical_of(const struct machine *machine, const struct seen *seen);
uint32_t user_of(const struct machine *machine, int chip, int slice);   /* the container that has it open; 0: no container */

/* vnpu.c: rules of slicing; no I/O. */
struct shortage { int32_t resource; uint32_t free; };  /* what there is too little of (RESOURCES: memory, -1: groups or ids) */
bool chip_sliced(const struct chip *chip);
uint32_t slice_vid(const struct chip *chip, unsigned index);
int template_by_name(const struct board *board, const char *name);   /* or ABSENT */
int32_t total_of(const struct chip *chip, unsigned resource, bool sliced);
int32_t free_of(const struct chip *chip, unsigned resource, bool sliced);
uint32_t memory_free(const struct chip *chip);        /* as displayed, GB */
uint64_t slice_memory(const struct board *board, const struct template *template);   /* MiB */
unsigned group_places_used(const struct chip *chip, unsigned group);
int slice_place(const struct chip *chip, const struct template *template, uint32_t *vid, uint32_t *group, struct shortage *shortage);
int slice_permitted(const struct machine *machine, const struct chip *chip);
bool slice_has_processes(const struct chip *chip, unsigned index);
bool chip_has_processes(const struct chip *chip);     /* of the chip itself */

/* slice_nodes.c */
void slices_commit(const struct machine *machine);   /* commits, and makes the nodes equal to the state, where it may */

/* persist.c: /etc/vnpu.cfg. */
bool slices_save(const struct machine *machine);
void slices_replay(struct machine *machine);

/* api_links.c */
bool room(unsigned *size, size_t needed);
unsigned hccs_links(const struct machine *machine, const struct chip *chip);
int link_information(const struct call *call, int main_command, unsigned sub_command, void *buffer, unsigned *size);

/* life.c */
void chip_power_on(struct chip *chip);
bool has_port(const struct board *board);
bool port_is_up(uint32_t result);                     /* what the test of a network port finds */
void port_tested(struct chip *chip, uint32_t result);
void links_rest(struct chip *chip);                   /* nothing wrong, and nothing goes over them */
void event_add(struct machine *machine, int chip, uint32_t code, uint32_t severity, uint32_t assertion);
int topology_between(const struct chip *one, const struct chip *other);

/* control_show.c */
int control_show(int words, char **word, struct json *json, char *error, size_t size);
int control_template(int words, char **word, struct json *json, char *error, size_t size);
int control_port(int words, char **word, struct json *json, char *error, size_t size);

#endif
