/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * Power, clocks, temperature, utilization: readings and their setters. Unloading the driver resets all settings.
 */
#include "simulator.h"

#include <stdlib.h>
#include <string.h>

enum { GRAPHICS, SM, MEMORY_CLOCK, VIDEO, CLOCKS };

#define POWER_NUMBER(function, expression)                                        \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *milliwatts)       \
    {                                                                             \
        DEVICE_CALL(device, ACCEPT_GPU);                                          \
        REQUIRE(milliwatts, INVALID_ARGUMENT);                                    \
        REQUIRE(call.gpu->board.power_default != ABSENT, NOT_SUPPORTED);          \
        *milliwatts = (unsigned)(expression);                                     \
        return SUCCESS;                                                           \
    }

POWER_NUMBER(nvmlDeviceGetPowerManagementLimit, call.gpu->power_limit)
POWER_NUMBER(nvmlDeviceGetEnforcedPowerLimit, call.gpu->power_limit)
POWER_NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, call.gpu->board.power_default)
POWER_NUMBER(nvmlDeviceGetPowerManagementMode, 1)
POWER_NUMBER(nvmlDeviceGetPowerSource, 0)

static int64_t power_usage(const struct gpu *gpu)
{
    int64_t usage = gpu->board.power_usage == ABSENT ? gpu->board.power_default / 10 : gpu->board.power_usage;
    return usage < gpu->power_limit ? usage : gpu->power_limit;
}

POWER_NUMBER(nvmlDeviceGetPowerUsage, power_usage(call.gpu))

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *minimum, unsigned *maximum)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(minimum && maximum, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.power_default != ABSENT, NOT_SUPPORTED);
    *minimum = (unsigned)call.gpu->board.power_minimum;
    *maximum = (unsigned)call.gpu->board.power_maximum;
    return SUCCESS;
}

static nvmlReturn_t set_power_limit(struct call *call, unsigned milliwatts)
{
    const struct board *board = &call->gpu->board;
    REQUIRE(board->power_default != ABSENT, NOT_SUPPORTED);
    REQUIRE(milliwatts >= board->power_minimum && milliwatts <= board->power_maximum, INVALID_ARGUMENT);
    nvmlReturn_t result = call_write(call);
    REQUIRE(result == SUCCESS, result);
    call->gpu_write->power_limit = milliwatts;
    return call_commit(call);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned milliwatts)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    return set_power_limit(&call, milliwatts);
}

/* Scope 0 is the GPU; a module of GPU and CPU (1) is NVIDIA Grace's and not modelled. */
EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit_v2(nvmlDevice_t device, nvmlPowerValue_v2_t *value)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(value, INVALID_ARGUMENT);
    REQUIRE(value->version == VERSION_WORD(nvmlPowerValue_v2_t, 2), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(value->powerScope <= 1, INVALID_ARGUMENT);
    REQUIRE(value->powerScope == 0, NOT_SUPPORTED);
    return set_power_limit(&call, value->powerValueMw);
}

/* Millijoules since the driver was loaded: idle power over time. */
static uint64_t energy(const struct gpu *gpu)
{
    uint64_t now = now_microseconds();
    return now > gpu->attached_at ? (now - gpu->attached_at) / 1000 * (uint64_t)power_usage(gpu) / 1000 : 0;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(millijoules, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.power_default != ABSENT, NOT_SUPPORTED);
    *millijoules = energy(call.gpu);
    return SUCCESS;
}

static unsigned clamp(unsigned value, unsigned minimum, unsigned maximum)
{
    if (maximum && value > maximum)
        return maximum;
    return value < minimum ? minimum : value;
}

/* What runs now: the idle clock, held inside the lock. */
static unsigned current_clock(const struct gpu *gpu, unsigned type)
{
    if (type == MEMORY_CLOCK)
        return clamp(gpu->board.clocks[type], gpu->memory_locked_minimum, gpu->memory_locked_maximum);
    if (type == VIDEO)
        return gpu->board.clocks[type];
    return clamp(gpu->board.clocks[type], gpu->locked_minimum, gpu->locked_maximum);
}

#define CLOCK_READING(function, expression)                                                    \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned type, unsigned *megahertz)      \
    {                                                                                          \
        DEVICE_CALL(device, ACCEPT_ANY);                                                       \
        REQUIRE(type < CLOCKS && megahertz, INVALID_ARGUMENT);                                 \
        *megahertz = (expression);                                                             \
        return *megahertz ? SUCCESS : NOT_SUPPORTED;                                           \
    }

CLOCK_READING(nvmlDeviceGetClockInfo, current_clock(call.gpu, type))
CLOCK_READING(nvmlDeviceGetMaxClockInfo, call.gpu->board.maximum_clocks[type])
CLOCK_READING(nvmlDeviceGetMaxCustomerBoostClock, type == MEMORY_CLOCK || type == VIDEO ? 0 : call.gpu->board.maximum_clocks[type])
CLOCK_READING(nvmlDeviceGetDefaultApplicationsClock, type == VIDEO ? 0 : call.gpu->board.application_clocks[type])
CLOCK_READING(nvmlDeviceGetApplicationsClock, type == VIDEO ? 0
              : type == MEMORY_CLOCK ? (call.gpu->application_memory ? call.gpu->application_memory : call.gpu->board.application_clocks[type])
              : call.gpu->application_graphics ? call.gpu->application_graphics : call.gpu->board.application_clocks[type])

EXPORT nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned type, unsigned which, unsigned *megahertz)
{
    enum { CURRENT, APPLICATION, APPLICATION_DEFAULT, BOOST_MAXIMUM };
    switch (which) {
    case CURRENT: return nvmlDeviceGetClockInfo(device, type, megahertz);
    case APPLICATION: return nvmlDeviceGetApplicationsClock(device, type, megahertz);
    case APPLICATION_DEFAULT: return nvmlDeviceGetDefaultApplicationsClock(device, type, megahertz);
    case BOOST_MAXIMUM: return nvmlDeviceGetMaxCustomerBoostClock(device, type, megahertz);
    default: return stub_answer(__func__, INVALID_ARGUMENT);
    }
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned *count, unsigned *clocks)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.memory_clock_count, NOT_SUPPORTED);
    unsigned room = *count;
    *count = call.gpu->board.memory_clock_count;
    REQUIRE(clocks && room >= *count, INSUFFICIENT_SIZE);
    for (unsigned index = 0; index < *count; index++)
        clocks[index] = call.gpu->board.memory_clocks[index].memory;
    return SUCCESS;
}

static const struct memory_clock *memory_clock(const struct board *board, unsigned megahertz)
{
    for (unsigned index = 0; index < board->memory_clock_count; index++) {
        if (board->memory_clocks[index].memory == megahertz)
            return &board->memory_clocks[index];
    }
    return NULL;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned memory, unsigned *count, unsigned *clocks)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.memory_clock_count, NOT_SUPPORTED);
    const struct memory_clock *selected = memory_clock(&call.gpu->board, memory);
    REQUIRE(selected, NOT_FOUND);
    unsigned room = *count;
    *count = (selected->maximum - selected->minimum) / selected->step + 1;
    REQUIRE(clocks && room >= *count, INSUFFICIENT_SIZE);
    for (unsigned index = 0; index < *count; index++)
        clocks[index] = selected->maximum - index * selected->step;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetApplicationsClocks(nvmlDevice_t device, unsigned memory, unsigned graphics)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(call.gpu->board.memory_clock_count, NOT_SUPPORTED);
    const struct memory_clock *selected = memory_clock(&call.gpu->board, memory);
    REQUIRE(selected && graphics >= selected->minimum && graphics <= selected->maximum
                && (selected->maximum - graphics) % selected->step == 0, INVALID_ARGUMENT);
    WRITE_CALL();
    call.gpu_write->application_memory = memory;
    call.gpu_write->application_graphics = graphics;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceResetApplicationsClocks(nvmlDevice_t device)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(call.gpu->board.memory_clock_count, NOT_SUPPORTED);
    WRITE_CALL();
    call.gpu_write->application_memory = call.gpu_write->application_graphics = 0;
    return call_commit(&call);
}

/* The driver takes the nearest clocks it has; a range upside down or beyond the board is refused. */
EXPORT nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned minimum, unsigned maximum)
{
    enum { LIMIT_TDP = 0xFFFFFF01u, LIMIT_UNLIMITED = 0xFFFFFF02u, VOLTA = 5 };
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(call.gpu->board.architecture >= VOLTA && call.gpu->board.maximum_clocks[GRAPHICS], NOT_SUPPORTED);
    unsigned top = call.gpu->board.maximum_clocks[GRAPHICS];
    minimum = minimum == LIMIT_TDP || minimum == LIMIT_UNLIMITED ? top : minimum;
    maximum = maximum == LIMIT_TDP || maximum == LIMIT_UNLIMITED ? top : maximum;
    REQUIRE(minimum <= maximum && maximum > 0 && maximum <= top, INVALID_ARGUMENT);
    WRITE_CALL();
    call.gpu_write->locked_minimum = minimum;
    call.gpu_write->locked_maximum = maximum;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceResetGpuLockedClocks(nvmlDevice_t device)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    WRITE_CALL();
    call.gpu_write->locked_minimum = call.gpu_write->locked_maximum = 0;
    return call_commit(&call);
}

/* From Ampere on, but not Hopper, whose memory clock is locked at the next initialization only. */
static bool locks_memory_clock(const struct board *board)
{
    enum { AMPERE = 7, HOPPER = 9 };
    return board->architecture >= AMPERE && board->architecture != HOPPER && board->maximum_clocks[MEMORY_CLOCK];
}

EXPORT nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(nvmlDevice_t device, unsigned minimum, unsigned maximum)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(locks_memory_clock(&call.gpu->board), NOT_SUPPORTED);
    REQUIRE(minimum <= maximum && maximum > 0 && maximum <= call.gpu->board.maximum_clocks[MEMORY_CLOCK], INVALID_ARGUMENT);
    WRITE_CALL();
    call.gpu_write->memory_locked_minimum = minimum;
    call.gpu_write->memory_locked_maximum = maximum;
    return call_commit(&call);
}

EXPORT nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(nvmlDevice_t device)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(locks_memory_clock(&call.gpu->board), NOT_SUPPORTED);
    WRITE_CALL();
    call.gpu_write->memory_locked_minimum = call.gpu_write->memory_locked_maximum = 0;
    return call_commit(&call);
}

enum { REASON_IDLE = 0x1, REASON_USER_CLOCKS = 0x2, REASON_SW_POWER_CAP = 0x4, REASON_HW_SLOWDOWN = 0x8, REASON_SYNC_BOOST = 0x10,
       REASON_SW_THERMAL = 0x20, REASON_HW_THERMAL = 0x40, REASON_HW_POWER_BRAKE = 0x80, REASON_DISPLAY = 0x100 };

static unsigned long long clocks_reasons(const struct gpu *gpu)
{
    unsigned long long reasons = gpu->thermal ? REASON_SW_THERMAL | REASON_HW_THERMAL | REASON_HW_SLOWDOWN : gpu_in_use(gpu) ? 0 : REASON_IDLE;
    if (gpu->slowdown)
        reasons = (reasons & ~(unsigned long long)REASON_IDLE) | gpu->slowdown;
    return gpu->application_graphics ? reasons | REASON_USER_CLOCKS : reasons;
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(reasons, INVALID_ARGUMENT);
    *reasons = clocks_reasons(call.gpu);
    return SUCCESS;
}

/* Not an alias: drivers before 535 have only this name, and each of the two names can have a separate fault. */
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(reasons, INVALID_ARGUMENT);
    *reasons = clocks_reasons(call.gpu);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(reasons, INVALID_ARGUMENT);
    *reasons = REASON_IDLE | REASON_USER_CLOCKS | REASON_SW_POWER_CAP | REASON_HW_SLOWDOWN | REASON_SYNC_BOOST | REASON_SW_THERMAL
               | REASON_HW_THERMAL | REASON_HW_POWER_BRAKE | REASON_DISPLAY;
    return SUCCESS;
}
ALIAS(nvmlDeviceGetSupportedClocksThrottleReasons, nvmlDeviceGetSupportedClocksEventReasons, nvmlDevice_t, unsigned long long *);

EXPORT nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, unsigned *state)
{
    DEVICE_CALL(device, ACCEPT_ANY);
    REQUIRE(state, INVALID_ARGUMENT);
    *state = 0;
    return SUCCESS;
}
ALIAS(nvmlDeviceGetPowerState, nvmlDeviceGetPerformanceState, nvmlDevice_t, unsigned *);

/* A hot GPU stands above its slowdown threshold. */
static int temperature(const struct gpu *gpu)
{
    int hot = gpu->board.slowdown != ABSENT ? gpu->board.slowdown + 1 : 95;
    return gpu->thermal ? hot : gpu->board.temperature;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *degrees)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(sensor == 0 && degrees, INVALID_ARGUMENT);
    *degrees = (unsigned)temperature(call.gpu);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *answer)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(answer, INVALID_ARGUMENT);
    REQUIRE(answer->version == VERSION_WORD(nvmlTemperature_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(answer->sensorType == 0, INVALID_ARGUMENT);
    answer->temperature = temperature(call.gpu);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *answer)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(answer, INVALID_ARGUMENT);
    REQUIRE(answer->version == VERSION_WORD(nvmlMarginTemperature_t, 1), ARGUMENT_VERSION_MISMATCH);
    REQUIRE(call.gpu->board.slowdown != ABSENT, NOT_SUPPORTED);
    answer->marginTemperature = call.gpu->board.slowdown - temperature(call.gpu);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned threshold, unsigned *degrees)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(threshold < 8 && degrees, INVALID_ARGUMENT);
    const struct board *board = &call.gpu->board;
    const int thresholds[8] = { board->shutdown, board->slowdown, board->memory_maximum, board->gpu_maximum, ABSENT, ABSENT, ABSENT, ABSENT };
    REQUIRE(thresholds[threshold] != ABSENT, NOT_SUPPORTED);
    *degrees = (unsigned)thresholds[threshold];
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned *count)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(count, INVALID_ARGUMENT);
    *count = call.gpu->board.fans == ABSENT ? 0 : (unsigned)call.gpu->board.fans;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned fan, unsigned *speed)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(speed, INVALID_ARGUMENT);
    REQUIRE(call.gpu->board.fans != ABSENT, NOT_SUPPORTED);
    REQUIRE(fan < (unsigned)call.gpu->board.fans, INVALID_ARGUMENT);
    *speed = call.gpu->board.fan_speed == ABSENT ? 0 : (unsigned)call.gpu->board.fan_speed;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned *speed) { return nvmlDeviceGetFanSpeed_v2(device, 0, speed); }

/* A GPU in MIG mode has no utilization. */
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(utilization, INVALID_ARGUMENT);
    REQUIRE(!call.gpu->mig_current, NOT_SUPPORTED);
    *utilization = (nvmlUtilization_t){ 0, 0 };
    return SUCCESS;
}

#define ENGINE_UTILIZATION(function)                                                                          \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *utilization, unsigned *microseconds)          \
    {                                                                                                         \
        DEVICE_CALL(device, ACCEPT_GPU);                                                                      \
        REQUIRE(utilization && microseconds, INVALID_ARGUMENT);                                               \
        REQUIRE(!call.gpu->mig_current, NOT_SUPPORTED);                                                       \
        *utilization = 0;                                                                                     \
        *microseconds = 100000;                                                                               \
        return SUCCESS;                                                                                       \
    }

ENGINE_UTILIZATION(nvmlDeviceGetEncoderUtilization)
ENGINE_UTILIZATION(nvmlDeviceGetDecoderUtilization)
ENGINE_UTILIZATION(nvmlDeviceGetJpgUtilization)
ENGINE_UTILIZATION(nvmlDeviceGetOfaUtilization)

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kilobytes)
{
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(counter <= 1 && kilobytes, INVALID_ARGUMENT);
    *kilobytes = 0;
    return SUCCESS;
}

/* Time spent below the wanted clocks, ns: none but while the GPU is hot, when all of it is thermal. */
EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned policy, nvmlViolationTime_t *time)
{
    enum { THERMAL = 1, POLICIES = 12 };
    DEVICE_CALL(device, ACCEPT_GPU);
    REQUIRE(policy < POLICIES && time, INVALID_ARGUMENT);
    uint64_t now = now_microseconds();
    time->referenceTime = now;
    time->violationTime = policy == THERMAL && call.gpu->thermal && now > call.gpu->attached_at ? (now - call.gpu->attached_at) * 1000 : 0;
    return SUCCESS;
}

/* Readings of the field values that belong here; false: not one of these. */
bool power_field(const struct gpu *gpu, nvmlFieldValue_t *field)
{
    enum { MEMORY_TEMPERATURE = 82, TOTAL_ENERGY = 83, POWER_AVERAGE = 185, POWER_INSTANT, POWER_MINIMUM, POWER_MAXIMUM, POWER_DEFAULT,
           POWER_CURRENT, ENERGY, POWER_REQUESTED };
    int64_t number;
    switch (field->fieldId) {
    case POWER_AVERAGE:
    case POWER_INSTANT: number = power_usage(gpu); break;
    case POWER_MINIMUM: number = gpu->board.power_minimum; break;
    case POWER_MAXIMUM: number = gpu->board.power_maximum; break;
    case POWER_DEFAULT: number = gpu->board.power_default; break;
    case POWER_CURRENT:
    case POWER_REQUESTED: number = gpu->power_limit; break;
    case TOTAL_ENERGY:
    case ENERGY:
        field->nvmlReturn = gpu->board.power_default != ABSENT ? SUCCESS : NOT_SUPPORTED;
        field->valueType = VALUE_UNSIGNED_LONG_LONG;
        field->value.ullVal = energy(gpu);
        return true;
    case MEMORY_TEMPERATURE:
        field->nvmlReturn = gpu->board.memory_maximum != ABSENT ? SUCCESS : NOT_SUPPORTED;
        field->valueType = VALUE_UNSIGNED_INT;
        field->value.uiVal = (unsigned)temperature(gpu);
        return true;
    default: return false;
    }
    field->nvmlReturn = gpu->board.power_default != ABSENT ? SUCCESS : NOT_SUPPORTED;
    field->valueType = VALUE_UNSIGNED_INT;
    field->value.uiVal = (unsigned)number;
    return true;
}
