// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/sirupsen/logrus"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

const (
	cdiFolder    = "/var/run/cdi"
	cdiClass     = "claim"
	capabilities = "/proc/driver/nvidia/capabilities"
)

// specs writes a file for each claim, of what nvcdi has told once.
type specs struct {
	vendor string
	common cdispecs.ContainerEdits
	gpus   map[string]cdispecs.ContainerEdits
	major  int64
}

func newSpecs(library *hardware, name, hook string, devices map[string]device) (*specs, error) {
	silent := logrus.New()
	silent.SetOutput(io.Discard)
	made := &specs{vendor: "k8s." + name, gpus: map[string]cdispecs.ContainerEdits{}}
	told, err := nvcdi.New(
		nvcdi.WithNvmlLib(library.library),
		nvcdi.WithMode("nvml"),
		nvcdi.WithLogger(silent),
		nvcdi.WithNVIDIACDIHookPath(hook),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	)
	if err != nil {
		return nil, fmt.Errorf("nvcdi: %w", err)
	}
	common, err := told.GetCommonEdits()
	if err != nil {
		return nil, fmt.Errorf("the edits that all containers have: %w", err)
	}
	made.common = *common.ContainerEdits
	for _, each := range devices {
		if _, known := made.gpus[each.UUID]; known {
			continue
		}
		found, err := told.GetDeviceSpecsByID(each.UUID)
		if err != nil || len(found) == 0 {
			return nil, fmt.Errorf("the edits of %s: %d found: %w", each.UUID, len(found), err)
		}
		made.gpus[each.UUID] = found[0].ContainerEdits
	}
	made.major, err = capabilityMajor()
	return made, err
}

// id is the name by which a container runtime finds the device.
func (s *specs) id(uid, name string) string {
	return fmt.Sprintf("%s/%s=%s-%s", s.vendor, cdiClass, uid, name)
}

func (s *specs) path(uid string) string {
	return filepath.Join(cdiFolder, cdi.GenerateTransientSpecName(s.vendor, cdiClass, uid)+".yaml")
}

// write writes the file of a claim.
func (s *specs) write(uid string, devices []heldDevice) error {
	var entries []cdispecs.Device
	for _, held := range devices {
		edits := s.gpus[held.UUID]
		if held.Instance != nil {
			nodes, err := s.capabilityNodes(*held.Instance)
			if err != nil {
				return err
			}
			edits.DeviceNodes = append(append([]*cdispecs.DeviceNode{}, edits.DeviceNodes...), nodes...)
		}
		entries = append(entries, cdispecs.Device{Name: uid + "-" + held.Name, ContainerEdits: edits})
	}
	made, err := spec.New(
		spec.WithVendor(s.vendor), spec.WithClass(cdiClass), spec.WithDeviceSpecs(entries), spec.WithEdits(s.common),
	)
	if err != nil {
		return fmt.Errorf("the specification of claim %s: %w", uid, err)
	}
	return made.Save(s.path(uid))
}

// remove takes the file of a claim away.
func (s *specs) remove(uid string) error {
	err := os.Remove(s.path(uid))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// capabilityNodes are the device nodes by which a container may use a partition's two instances.
func (s *specs) capabilityNodes(of instance) ([]*cdispecs.DeviceNode, error) {
	folder := fmt.Sprintf("%s/gpu%d/mig/gi%d", capabilities, of.Minor, of.GPU)
	var nodes []*cdispecs.DeviceNode
	for _, path := range []string{folder + "/access", fmt.Sprintf("%s/ci%d/access", folder, of.CI)} {
		minor, err := numberIn(path, "DeviceFileMinor:")
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, &cdispecs.DeviceNode{
			Path: fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", minor), Type: "c", Major: s.major, Minor: minor, Permissions: "rw",
		})
	}
	return nodes, nil
}

func capabilityMajor() (int64, error) {
	file, err := os.Open("/proc/devices")
	if err != nil {
		return 0, err
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if words := strings.Fields(lines.Text()); len(words) == 2 && words[1] == "nvidia-caps" {
			return strconv.ParseInt(words[0], 10, 64)
		}
	}
	return 0, errors.New("/proc/devices has no nvidia-caps")
}

// numberIn is the number behind a word in a small file of the driver.
func numberIn(path, word string) (int64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	words := strings.Fields(string(text))
	for at, each := range words {
		if each == word && at+1 < len(words) {
			return strconv.ParseInt(words[at+1], 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, word)
}
