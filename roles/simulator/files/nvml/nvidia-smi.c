/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * nvidia-smi for simulated boards: the calls that administrators and node software make, answered through NVML alone,
 * so that it shows what any NVML client would see, inside a container as well. Exit codes: 0 done, 2 wrong words,
 * 4 not permitted, 6 no such GPU, 9 driver not loaded, 12 library not found, 15 GPU lost, 255 anything else.
 */
#include "nvidia-smi.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *library;

void *nvml_symbol(const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "NVIDIA-SMI: the driver's library does not have %s\n", name);
        exit(255);
    }
    return found;
}

const char *nvml_text(nvmlReturn_t code)
{
    return ((const char *(*)(nvmlReturn_t))nvml_symbol("nvmlErrorString"))(code);
}

int exit_code(nvmlReturn_t code)
{
    switch (code) {
    case SUCCESS: return 0;
    case INVALID_ARGUMENT: return 2;
    case NOT_SUPPORTED: return 3;
    case NO_PERMISSION: return 4;
    case NOT_FOUND: return 6;
    case DRIVER_NOT_LOADED: return 9;
    case GPU_IS_LOST: return 15;
    default: return 255;
    }
}

void fail(nvmlReturn_t code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    if (code != SUCCESS)
        fprintf(stderr, ": %s", nvml_text(code));
    fputc('\n', stderr);
    exit(code == SUCCESS ? 2 : exit_code(code));
}

static char reply[65536];

const char *control_reply(void) { return reply; }

nvmlReturn_t control(const char *format, ...)
{
    char command[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    int code = ((int (*)(const char *, char *, unsigned))nvml_symbol("acceleratorSimulatorControl"))(command, reply, sizeof reply);
    return code;
}

static bool selected(const char *wanted, unsigned index, nvmlDevice_t device)
{
    if (!wanted)
        return true;
    char list[1024], uuid[96] = "", number[16];
    nvmlPciInfo_t pci;
    memset(&pci, 0, sizeof pci);
    snprintf(list, sizeof list, "%s", wanted);
    snprintf(number, sizeof number, "%u", index);
    ((nvmlReturn_t (*)(nvmlDevice_t, char *, unsigned))nvml_symbol("nvmlDeviceGetUUID"))(device, uuid, sizeof uuid);
    ((nvmlReturn_t (*)(nvmlDevice_t, nvmlPciInfo_t *))nvml_symbol("nvmlDeviceGetPciInfo_v3"))(device, &pci);
    for (char *save, *word = strtok_r(list, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        size_t length = strlen(word), full = strlen(pci.busId);
        if (!strcmp(word, number) || !strcasecmp(word, uuid))
            return true;
        if (length > 4 && full >= length && !strcasecmp(word, pci.busId + full - length))
            return true;
    }
    return false;
}

unsigned for_each_gpu(const char *wanted, void (*act)(unsigned, nvmlDevice_t, void *), void *context)
{
    unsigned count = 0, acted = 0;
    nvmlReturn_t code = ((nvmlReturn_t (*)(unsigned *))nvml_symbol("nvmlDeviceGetCount_v2"))(&count);
    if (code != SUCCESS)
        fail(code, "Unable to count the GPUs");
    for (unsigned index = 0; index < count; index++) {
        nvmlDevice_t device;
        code = ((nvmlReturn_t (*)(unsigned, nvmlDevice_t *))nvml_symbol("nvmlDeviceGetHandleByIndex_v2"))(index, &device);
        if (code != SUCCESS) {
            if (wanted)
                continue;
            fprintf(stderr, "Unable to determine the device handle for gpu %u: %s\n", index, nvml_text(code));
            continue;
        }
        if (selected(wanted, index, device)) {
            act(index, device, context);
            acted++;
        }
    }
    if (!acted && wanted) {
        fprintf(stderr, "No devices were found: no GPU is called %s; `nvidia-smi -L` lists them\n", wanted);
        exit(6);
    }
    if (!acted)
        puts("No devices were found");
    return acted;
}

static void usage(void)
{
    puts("nvidia-smi                                     a summary\n"
         "nvidia-smi -L                                  GPUs and MIG devices with their UUIDs\n"
         "nvidia-smi -q [-i GPU,…]                       names, modes and the place in the fabric of each GPU\n"
         "nvidia-smi --query-gpu=FIELD,… --format=csv[,noheader][,nounits] [-i GPU,…]\n"
         "nvidia-smi --help-query-gpu                    the fields\n"
         "nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv[,noheader][,nounits] [-i GPU,…]\n"
         "nvidia-smi … -l SECONDS                        again and again, with the devices kept open\n"
         "nvidia-smi --gpu-reset -i GPU,…                reset\n"
         "nvidia-smi -mig 0|1 | -pm 0|1 | -pl WATT | -c MODE | -lgc MIN,MAX | -rgc  [-i GPU,…]\n"
         "nvidia-smi compute-policy [-l] [--set-timeslice=0..3] [-i GPU,…]\n"
         "nvidia-smi conf-compute -grs | -srs 0|1\n"
         "nvidia-smi power-profiles -l | -gr | -ge  [-i GPU,…]\n"
         "nvidia-smi mig -lgip | -lgipp | -lgi | -lci | -cgi ID[:START],… [-C] | -dci -gi ID | -dgi [-gi ID]  [-i GPU,…]");
}

static const char *value_of(const char *word, int argc, char **argv, int *position)
{
    const char *equal = strchr(word, '=');
    if (equal)
        return equal + 1;
    if (*position + 1 >= argc)
        fail(SUCCESS, "%s needs a value; `nvidia-smi --help` lists the options", word);
    return argv[++*position];
}

static bool is(const char *word, const char *option)
{
    size_t length = strlen(option);
    return !strncmp(word, option, length) && (word[length] == '\0' || (option[1] == '-' && word[length] == '='));
}

static unsigned loop_seconds(const char *text)
{
    char *end;
    unsigned long seconds = strtoul(text, &end, 10);
    if (end == text || *end || !seconds || seconds > 86400)
        fail(SUCCESS, "-l needs a number of seconds, found %s; `nvidia-smi --help` lists the options", text);
    return (unsigned)seconds;
}

static void parse(struct options *options, int argc, char **argv)
{
    int position = 1;
    if (position < argc && (!strcmp(argv[1], "mig") || !strcmp(argv[1], "compute-policy") || !strcmp(argv[1], "power-profiles") || !strcmp(argv[1], "conf-compute")))
        options->group = argv[position++];
    for (; position < argc; position++) {
        const char *word = argv[position];
        if (is(word, "-h") || is(word, "--help")) options->action = ACTION_HELP;
        else if (is(word, "-L") || is(word, "--list-gpus")) options->action = ACTION_LIST;
        else if (is(word, "--help-query-gpu")) options->action = ACTION_HELP_QUERY;
        else if (is(word, "-i") || is(word, "--id")) options->gpus = value_of(word, argc, argv, &position);
        else if (is(word, "--query-gpu")) options->action = ACTION_QUERY, options->value = value_of(word, argc, argv, &position);
        else if (is(word, "-q") || is(word, "--query")) options->action = ACTION_DETAILS;
        else if (is(word, "--query-compute-apps"))
            options->action = ACTION_QUERY_PROCESSES, options->value = value_of(word, argc, argv, &position);
        else if (is(word, "--format")) options->format = value_of(word, argc, argv, &position);
        else if (is(word, "--gpu-reset") || is(word, "-r")) options->action = ACTION_RESET;
        else if (is(word, "-mig")) options->action = ACTION_MIG_MODE, options->value = value_of(word, argc, argv, &position);
        else if (is(word, "-pm")) options->action = ACTION_PERSISTENCE, options->value = value_of(word, argc, argv, &position);
        else if (is(word, "-pl")) options->action = ACTION_POWER_LIMIT, options->value = value_of(word, argc, argv, &position);
        else if (is(word, "-lgc")) options->action = ACTION_LOCK_CLOCKS, options->value = value_of(word, argc, argv, &position);
        else if (is(word, "-rgc")) options->action = ACTION_UNLOCK_CLOCKS;
        else if (options->group && !strcmp(options->group, "mig")) {
            if (is(word, "-lgip")) options->action = ACTION_MIG_PROFILES;
            else if (is(word, "-lgipp")) options->action = ACTION_MIG_PLACEMENTS;
            else if (is(word, "-lgi")) options->action = ACTION_MIG_INSTANCES;
            else if (is(word, "-lci")) options->action = ACTION_MIG_COMPUTE_INSTANCES;
            else if (is(word, "-cgi")) options->action = ACTION_MIG_CREATE, options->value = value_of(word, argc, argv, &position);
            else if (is(word, "-C")) options->with_compute_instance = true;
            else if (is(word, "-dci")) options->action = ACTION_MIG_DESTROY_COMPUTE;
            else if (is(word, "-dgi")) options->action = ACTION_MIG_DESTROY;
            else if (is(word, "-gi")) options->instance = value_of(word, argc, argv, &position);
            else fail(SUCCESS, "%s: no such option of mig; `nvidia-smi --help` lists them", word);
        } else if (options->group && !strcmp(options->group, "conf-compute")) {
            if (is(word, "-grs")) options->action = ACTION_READY_STATE;
            else if (is(word, "-srs")) options->action = ACTION_READY_STATE, options->value = value_of(word, argc, argv, &position);
            else fail(SUCCESS, "%s: no such option of conf-compute; `nvidia-smi --help` lists them", word);
        } else if (options->group && !strcmp(options->group, "power-profiles")) {
            if (is(word, "-l")) options->action = ACTION_WORKLOAD_PROFILES;
            else if (is(word, "-gr")) options->action = ACTION_REQUESTED_PROFILES;
            else if (is(word, "-ge")) options->action = ACTION_ENFORCED_PROFILES;
            else fail(SUCCESS, "%s: no such option of power-profiles; `nvidia-smi --help` lists them", word);
        } else if (options->group && is(word, "--set-timeslice")) options->action = ACTION_TIMESLICE, options->value = value_of(word, argc, argv, &position);
        else if (options->group && is(word, "-l")) options->action = ACTION_SHOW_TIMESLICE;
        else if (is(word, "-l") || is(word, "--loop")) options->loop = loop_seconds(value_of(word, argc, argv, &position));
        else if (is(word, "-c")) options->action = ACTION_COMPUTE_MODE, options->value = value_of(word, argc, argv, &position);
        else fail(SUCCESS, "Invalid combination of input arguments: %s; `nvidia-smi --help` lists the options", word);
    }
}

int main(int argc, char **argv)
{
    struct options options = {.action = ACTION_SUMMARY};
    parse(&options, argc, argv);
    if (options.action == ACTION_HELP) {
        usage();
        return 0;
    }
    if (options.action == ACTION_HELP_QUERY) {
        list_query_fields();
        return 0;
    }
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        puts("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display Driver is "
             "properly installed and present in your system.");
        return 12;
    }
    nvmlReturn_t code = ((nvmlReturn_t (*)(void))nvml_symbol("nvmlInit_v2"))();
    if (code != SUCCESS) {
        printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver: %s\n", nvml_text(code));
        return exit_code(code);
    }
    int result = run_action(&options);
    while (options.loop && result == 0) {
        fflush(stdout);
        sleep(options.loop);
        result = run_action(&options);
    }
    ((nvmlReturn_t (*)(void))nvml_symbol("nvmlShutdown"))();
    return result;
}
