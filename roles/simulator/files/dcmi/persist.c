/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * /etc/vnpu.cfg: the switch of the recovery, and a line for each slice, by which a boot makes the slices again. It is written before the
 * change is there for others: a process that is killed in between leaves what the next boot makes, as on real machines.
 */
#include "simulator.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 256 };

static const char *const switch_words[] = { "vnpu_config_recover:disable", "vnpu_config_recover:enable" };
static const char section_start[] = "[vnpu-config start]", section_end[] = "[vnpu-config end]";

static void file_path(const struct machine *machine, const char *suffix, char path[PATH_MAX_BYTES + 32])
{
    snprintf(path, PATH_MAX_BYTES + 32, "%s/vnpu.cfg%s", machine->etc_root, suffix);
}

static bool write_lines(FILE *file, const struct machine *machine)
{
    fprintf(file, "%s\n%s\n", switch_words[machine->recover], section_start);
    /* By physical id, then by virtual id. */
    for (uint32_t physical = 0; machine->recover && physical < CHIPS_MAX; physical++) {
        for (unsigned index = 0; index < machine->chip_count; index++) {
            const struct chip *chip = &machine->chips[index];
            for (unsigned slice = 0; chip->board.physical == physical && slice < SLICES_MAX; slice++) {
                const struct slice *each = &chip->slices[slice];
                const uint32_t vid = slice_vid(chip, slice);
                if (!each->serial)
                    continue;
                fprintf(file, "%u:%u:npu-smi set -t create-vnpu -i %u -c %u -f %s -v %u", physical, vid, chip->board.card, chip->board.chip,
                        chip->board.templates[each->template].name, vid);
                if (each->group != CHOOSE)
                    fprintf(file, " -g %u", each->group);
                fputc('\n', file);
            }
        }
    }
    fprintf(file, "%s\n", section_end);
    return fflush(file) == 0 && fsync(fileno(file)) == 0;
}

/* Return false if the file cannot be written: then the change must not happen. A link can be an attack, so it is refused. */
bool slices_save(const struct machine *machine)
{
    char path[PATH_MAX_BYTES + 32], new[PATH_MAX_BYTES + 32], backup[PATH_MAX_BYTES + 32];
    struct stat status;
    file_path(machine, "", path);
    file_path(machine, ".new", new);
    file_path(machine, ".bak", backup);
    if (lstat(path, &status) == 0 && !S_ISREG(status.st_mode))
        return false;
    int descriptor = open(new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    FILE *file = descriptor >= 0 ? fdopen(descriptor, "w") : NULL;
    if (!file) {
        if (descriptor >= 0)
            close(descriptor);
        return false;
    }
    bool good = fchmod(descriptor, 0600) == 0 && write_lines(file, machine);
    good = fclose(file) == 0 && good;
    if (good && access(path, F_OK) == 0) {
        unlink(backup);
        good = link(path, backup) == 0 || errno == EPERM;
    }
    return good && rename(new, path) == 0;
}

/* One line of the section; what cannot be made again stays away, as where a chip was taken out. */
static void replay_line(struct machine *machine, const char *line)
{
    unsigned physical, vid, card, device, group = CHOOSE;
    char name[TEMPLATE_NAME_LEN];
    int length = 0;
    if (sscanf(line, "%u:%u:npu-smi set -t create-vnpu -i %u -c %u -f %31s -v %*u%n", &physical, &vid, &card, &device, name, &length) != 5
        || !length)
        return;
    sscanf(line + length, " -g %u", &group);
    for (unsigned index = 0; index < machine->chip_count; index++) {
        struct chip *chip = &machine->chips[index];
        struct shortage shortage;
        uint32_t wanted = vid;
        /* The numbers of cards may have moved; the physical id says which chip it was. */
        int template = chip->board.physical == physical ? template_by_name(&chip->board, name) : ABSENT;
        if (template == ABSENT || chip->lost || slice_permitted(machine, chip) != SUCCESS
            || slice_place(chip, &chip->board.templates[template], &wanted, &group, &shortage) != SUCCESS)
            continue;
        chip->slices[wanted - slice_vid(chip, 0)] =
            (struct slice){ .serial = ++machine->serial, .template = (uint32_t)template, .group = group };
    }
}

/* A boot: existing slices are lost, and those in the file are created again if the switch is on. Without a file it is on. */
void slices_replay(struct machine *machine)
{
    char path[PATH_MAX_BYTES + 32], line[LINE_MAX_BYTES + 2];
    bool section = false;
    file_path(machine, "", path);
    FILE *file = fopen(path, "re");
    machine->recover = true;
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (strcmp(line, switch_words[false]) == 0)
            machine->recover = false;
        else if (strcmp(line, section_start) == 0)
            section = true;
        else if (strcmp(line, section_end) == 0)
            break;
        else if (section && machine->recover)
            replay_line(machine, line);
    }
    if (file)
        fclose(file);
}
