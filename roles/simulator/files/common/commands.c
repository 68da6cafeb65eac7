/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * The private control symbol: commands of an operator of the simulator, as one line of text; the answer is one JSON object.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

int begin_control_write(struct machine **machine, char *error, size_t size)
{
    int result = state_begin_write(machine);
    if (result == SUCCESS && !(*machine)->loaded) {
        state_abandon();
        result = DRIVER_NOT_LOADED;
    }
    if (result != SUCCESS)
        snprintf(error, size, "%s", result == NO_PERMISSION ? "the state cannot be written; expected root, on the host"
                                                            : "no machine is loaded; load one first");
    return result;
}

int run_event_count(int words, char **word, struct json *json, char *error, size_t size)
{
    (void)words;
    (void)word;
    const struct machine *machine = state_refresh();
    if (!machine) {
        snprintf(error, size, "no machine is loaded; load one first");
        return DRIVER_NOT_LOADED;
    }
    json_number(json, "events", (long long)machine->events_written);
    return SUCCESS;
}

/* "calls": the number of calls of the interface since the machine was loaded. "calls reset" also resets the counts. */
int run_calls(int words, char **word, struct json *json, char *error, size_t size)
{
    const bool reset = words == 2 && strcmp(word[1], "reset") == 0;
    if (words == 2 && !reset) {
        snprintf(error, size, "calls: found \"%s\", expected reset or nothing", word[1]);
        return INVALID_ARGUMENT;
    }
    if (!state_counters(reset)) {
        snprintf(error, size, "the calls cannot be %s; expected root, on the host, and a machine that is loaded", reset ? "reset" : "read");
        return NO_PERMISSION;
    }
    counters_show(json);
    if (reset)
        count_nothing_yet();
    return SUCCESS;
}

static int run_command(char *line, struct json *json, char *error, size_t size)
{
    char *word[COMMAND_WORDS_MAX + 1], *rest = line;
    int words = 0;
    for (char *each = strsep(&rest, " \t\r\n"); each && words < COMMAND_WORDS_MAX; each = strsep(&rest, " \t\r\n")) {
        if (*each)
            word[words++] = each;
    }
    word[words] = NULL;
    for (const struct command *command = commands; words && command->name; command++) {
        if (strcmp(command->name, word[0]) != 0)
            continue;
        if (words >= command->words_min && words <= command->words_max)
            return command->run(words, word, json, error, size);
        snprintf(error, size, "%s: found %d words, expected: %s", word[0], words, command->usage);
        return INVALID_ARGUMENT;
    }
    snprintf(error, size, "found \"%.64s\", expected one of", words ? word[0] : "");
    for (const struct command *command = commands; command->name; command++)
        snprintf(error + strlen(error), size - strlen(error), " %s", command->name);
    return INVALID_ARGUMENT;
}

EXPORT int acceleratorSimulatorControl(const char *command, char *reply, unsigned reply_size)
{
    char line[1024], error[ERROR_MAX_BYTES] = "";
    if (!command || !reply || reply_size < 2 || strlen(command) >= sizeof line)
        return INVALID_ARGUMENT;
    copy_text(line, sizeof line, command);
    struct json json = { .text = reply, .size = reply_size };
    process_lock();
    json_open(&json, NULL, '{');
    json_bool(&json, "ok", true);
    if (strncmp(line, "load", 4) != 0)
        state_open();
    int result = run_command(line, &json, error, sizeof error);
    process_unlock();
    if (result != SUCCESS) {
        json = (struct json){ .text = reply, .size = reply_size };
        json_open(&json, NULL, '{');
        json_bool(&json, "ok", false);
        json_text(&json, "error", *error ? error : code_text(result));
        json_number(&json, "code", result);
    }
    json_close(&json, '}');
    return json.cut ? INSUFFICIENT_SIZE : result;
}
