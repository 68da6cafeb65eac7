// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors

package main

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// instance is how a partition is known while it is there.
type instance struct {
	UUID  string `json:"uuid"`
	Minor int    `json:"minor"` // of its GPU
	GPU   int    `json:"gpu"`   // the GPU instance's number
	CI    int    `json:"ci"`    // the compute instance's number
}

// hardware is NVML, opened once, with handles that are kept.
type hardware struct {
	library nvml.Interface
	handles map[string]nvml.Device
}

func newHardware(path string) (*hardware, error) {
	made := &hardware{nvml.New(nvml.WithLibraryPath(path)), map[string]nvml.Device{}}
	if code := made.library.Init(); code != nvml.SUCCESS {
		return nil, failed("nvmlInit", "NVML", code)
	}
	number, code := made.library.DeviceGetCount()
	if code != nvml.SUCCESS {
		return nil, failed("nvmlDeviceGetCount", "NVML", code)
	}
	for index := range number {
		handle, code := made.library.DeviceGetHandleByIndex(index)
		if code != nvml.SUCCESS {
			return nil, failed("nvmlDeviceGetHandleByIndex", fmt.Sprintf("GPU %d", index), code)
		}
		uuid, code := handle.GetUUID()
		if code != nvml.SUCCESS {
			return nil, failed("nvmlDeviceGetUUID", fmt.Sprintf("GPU %d", index), code)
		}
		made.handles[uuid] = handle
	}
	return made, nil
}

func failed(call, what string, code nvml.Return) error {
	return fmt.Errorf("%s of %s: %v", call, what, code)
}

// create makes a partition at its place, with the one compute instance that has all of it.
func (h *hardware) create(wanted device) (*instance, error) {
	handle := h.handles[wanted.UUID]
	current, _, code := handle.GetMigMode()
	if code != nvml.SUCCESS {
		return nil, failed("nvmlDeviceGetMigMode", wanted.UUID, code)
	}
	if current != nvml.DEVICE_MIG_ENABLE {
		if code, _ := handle.SetMigMode(nvml.DEVICE_MIG_ENABLE); code != nvml.SUCCESS {
			return nil, failed("nvmlDeviceSetMigMode", wanted.UUID, code)
		}
	}
	profile, code := handle.GetGpuInstanceProfileInfo(wanted.Profile)
	if code != nvml.SUCCESS {
		return nil, failed("nvmlDeviceGetGpuInstanceProfileInfo", wanted.UUID, code)
	}
	place := nvml.GpuInstancePlacement{Start: wanted.Start, Size: wanted.Size}
	made, code := handle.CreateGpuInstanceWithPlacement(&profile, &place)
	if code != nvml.SUCCESS {
		return nil, failed("nvmlDeviceCreateGpuInstanceWithPlacement", wanted.UUID, code)
	}
	about, code := made.GetInfo()
	if code != nvml.SUCCESS {
		return nil, failed("nvmlGpuInstanceGetInfo", wanted.UUID, code)
	}
	// A partition of so many slices has the compute profile of as many; their numbers are those of the GPU instance's.
	compute, code := made.GetComputeInstanceProfileInfo(wanted.Profile, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	if code != nvml.SUCCESS {
		return nil, failed("nvmlGpuInstanceGetComputeInstanceProfileInfo", wanted.UUID, code)
	}
	inside, code := made.CreateComputeInstance(&compute)
	if code != nvml.SUCCESS {
		return nil, failed("nvmlGpuInstanceCreateComputeInstance", wanted.UUID, code)
	}
	told, code := inside.GetInfo()
	if code != nvml.SUCCESS {
		return nil, failed("nvmlComputeInstanceGetInfo", wanted.UUID, code)
	}
	uuid, code := told.Device.GetUUID()
	if code != nvml.SUCCESS {
		return nil, failed("nvmlDeviceGetUUID", "the partition", code)
	}
	minor, code := handle.GetMinorNumber()
	if code != nvml.SUCCESS {
		return nil, failed("nvmlDeviceGetMinorNumber", wanted.UUID, code)
	}
	return &instance{UUID: uuid, Minor: minor, GPU: int(about.Id), CI: int(told.Id)}, nil
}

// destroy takes a partition away, and switches partitioning off with the last one, so that the GPU can be given whole.
func (h *hardware) destroy(held device, known instance) error {
	handle := h.handles[held.UUID]
	made, code := handle.GetGpuInstanceById(known.GPU)
	if code != nvml.SUCCESS {
		return failed("nvmlDeviceGetGpuInstanceById", held.UUID, code)
	}
	inside, code := made.GetComputeInstanceById(known.CI)
	if code != nvml.SUCCESS {
		return failed("nvmlGpuInstanceGetComputeInstanceById", held.UUID, code)
	}
	if code := inside.Destroy(); code != nvml.SUCCESS {
		return failed("nvmlComputeInstanceDestroy", held.UUID, code)
	}
	if code := made.Destroy(); code != nvml.SUCCESS {
		return failed("nvmlGpuInstanceDestroy", held.UUID, code)
	}
	number, code := handle.GetMaxMigDeviceCount()
	if code != nvml.SUCCESS {
		return failed("nvmlDeviceGetMaxMigDeviceCount", held.UUID, code)
	}
	for index := range number {
		if _, code := handle.GetMigDeviceHandleByIndex(index); code == nvml.SUCCESS {
			return nil
		}
	}
	if code, _ := handle.SetMigMode(nvml.DEVICE_MIG_DISABLE); code != nvml.SUCCESS {
		return failed("nvmlDeviceSetMigMode", held.UUID, code)
	}
	return nil
}
