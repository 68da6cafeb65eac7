/* SPDX-License-Identifier: Apache-2.0
 * Copyright (c) 2026 The dra.accelerators authors
 *
 * UUIDs of MIG devices: version 5 (SHA-1 of a namespace and a name), of the GPU's UUID, the memory slices and the ids. The same
 * placement on the same GPU therefore gets the same UUID again.
 */
#include "simulator.h"

#include <stdio.h>
#include <string.h>

static uint32_t rotate(uint32_t value, unsigned bits) { return value << bits | value >> (32 - bits); }

/* SHA-1 (FIPS 180-4) of at most 119 bytes: two blocks. */
static void sha1(const unsigned char *text, size_t length, unsigned char digest[20])
{
    uint32_t hash[5] = { 0x67452301, 0xEFCDAB89, 0x98BADCFE, 0x10325476, 0xC3D2E1F0 };
    unsigned char message[128] = { 0 };
    size_t blocks = length < 56 ? 1 : 2;
    memcpy(message, text, length);
    message[length] = 0x80;
    for (unsigned byte = 0; byte < 8; byte++)
        message[blocks * 64 - 1 - byte] = (unsigned char)((uint64_t)length * 8 >> 8 * byte);
    for (size_t block = 0; block < blocks; block++) {
        uint32_t word[80];
        for (unsigned i = 0; i < 16; i++) {
            const unsigned char *at = message + block * 64 + 4 * i;
            word[i] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        }
        for (unsigned i = 16; i < 80; i++)
            word[i] = rotate(word[i - 3] ^ word[i - 8] ^ word[i - 14] ^ word[i - 16], 1);
        uint32_t a = hash[0], b = hash[1], c = hash[2], d = hash[3], e = hash[4];
        for (unsigned i = 0; i < 80; i++) {
            uint32_t mixed = i < 20 ? (b & c) | (~b & d) : i < 40 ? b ^ c ^ d : i < 60 ? (b & c) | (b & d) | (c & d) : b ^ c ^ d;
            uint32_t constant = i < 20 ? 0x5A827999 : i < 40 ? 0x6ED9EBA1 : i < 60 ? 0x8F1BBCDC : 0xCA62C1D6;
            uint32_t next = rotate(a, 5) + mixed + e + constant + word[i];
            e = d;
            d = c;
            c = rotate(b, 30);
            b = a;
            a = next;
        }
        hash[0] += a;
        hash[1] += b;
        hash[2] += c;
        hash[3] += d;
        hash[4] += e;
    }
    for (unsigned i = 0; i < 20; i++)
        digest[i] = (unsigned char)(hash[i / 4] >> (24 - 8 * (i % 4)));
}

void mig_uuid(const struct gpu *gpu, int instance, int compute, char uuid[48])
{
    const struct gpu_instance *owner = &gpu->instances[instance];
    unsigned char message[96] = { 0 }, digest[20];
    if (!parse_uuid_bytes(gpu->board.uuid + strlen("GPU-"), message))
        memset(message, 0, 16);
    int length = snprintf((char *)message + 16, sizeof message - 16, "partition %d at %u:%u engine %d at %u:%u", instance, owner->start,
                          owner->size, compute, owner->compute[compute].start, owner->compute[compute].size);
    sha1(message, 16 + (size_t)length, digest);
    digest[6] = (unsigned char)((digest[6] & 0x0F) | 0x50);
    digest[8] = (unsigned char)((digest[8] & 0x3F) | 0x80);
    snprintf(uuid, 48, "MIG-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", digest[0], digest[1], digest[2],
             digest[3], digest[4], digest[5], digest[6], digest[7], digest[8], digest[9], digest[10], digest[11], digest[12],
             digest[13], digest[14], digest[15]);
}
