/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * What power does to a chip, what happened, and how chips lie to each other.
 */
#include "simulator.h"

#include <string.h>

void chip_power_on(struct chip *chip)
{
    memset(chip->slices, 0, sizeof chip->slices);
    memset(chip->processes, 0, sizeof chip->processes);
    chip->lost = chip->unplugged;
    chip->share = chip->fragmented = false;
    chip->health = HEALTH_OK;
    chip->error_count = 0;
    chip->network = DCMI_RDFX_DETECT_OK;
    chip->link_ups = 1;
    chip->link_downs = 0;
    links_rest(chip);
    chip->epoch++;
}

bool has_port(const struct board *board) { return board->ip[0] || board->ub_dies; }

/* Whose test has no address to look for says nothing of the link. */
bool port_is_up(uint32_t result) { return result == DCMI_RDFX_DETECT_OK || result == DCMI_RDFX_DETECT_IP_SET; }

void port_tested(struct chip *chip, uint32_t result)
{
    const bool was = port_is_up(chip->network), is = port_is_up(result);
    chip->link_ups += is && !was;
    chip->link_downs += was && !is;
    chip->network = result;
}

void links_rest(struct chip *chip)
{
    memset(chip->hccs_errors, 0, sizeof chip->hccs_errors);
    chip->sent = chip->received = chip->bad_packets = chip->sio_errors = 0;
}

void event_add(struct machine *machine, int chip, uint32_t code, uint32_t severity, uint32_t assertion)
{
    uint64_t sequence = ++machine->events_written;
    machine->events[sequence % EVENTS_MAX] = (struct event){ .sequence = sequence, .time = now_microseconds() / 1000, .chip = (uint32_t)chip,
                                                             .code = code, .severity = severity, .assertion = assertion };
}

/* How many components two paths of the PCI tree have in common. */
static unsigned common_components(const char *one, const char *other)
{
    unsigned count = 0;
    for (; *one && *one == *other; one++, other++)
        count += *one == '/';
    return count;
}

/* SIO and HCCS where the chips are tied together, else what the way over PCI passes. */
int topology_between(const struct chip *one, const struct chip *other)
{
    const struct board *a = &one->board, *b = &other->board;
    if (one == other)
        return TOPO_SELF;
    if (a->card == b->card && a->sio)
        return TOPO_SIO;
    if (a->hccs_group != ABSENT && a->hccs_group == b->hccs_group)
        return a->sio ? TOPO_HCCS_SW : TOPO_HCCS;    /* modules of two dies are linked through a switch */
    /* pciDDDD:BB/port/upstream/downstream/chip: a common upstream port is one switch, a common root port several. */
    switch (common_components(a->pci_path, b->pci_path)) {
    case 0: return a->numa_node == b->numa_node ? TOPO_PHB : TOPO_SYS;
    case 1: return TOPO_PHB;
    case 2: return TOPO_PXB;
    default: return TOPO_PIX;
    }
}
