// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors

// A DRA driver for GPUs in Go, for comparison with the measurements of our driver on the same boards in the same run.
//
// It is no driver for anybody's node. It has what is on the way of a claim, made of the libraries that drivers in Go
// are made of: the kubelet plugin of k8s.io/dynamic-resource-allocation, the kubelet's checkpoints, go-nvml, and
// nvcdi of the NVIDIA Container Toolkit. A claim takes the steps that NVIDIA's own driver for DRA publishes (the
// repository kubernetes-sigs/dra-driver-nvidia-gpu, its cmd/gpu-kubelet-plugin: device_state.go, cdi.go, nvlib.go): the checkpoint
// is read, and read and written as "started"; the partition is made; the specification is built from what nvcdi has
// told once, and written; the checkpoint is read and written as "completed". It publishes nothing, recovers nothing, watches
// nothing, and counts nothing, so that it is rather quicker than a driver that does.
//
// -way says how it does that. "nvidia" is that driver's way (driver.go, device_state.go, pkg/flock, pkg/flags/kubeclient.go): one claim of a
// node after the other, behind a lock file that is asked for every 100 ms; another lock file each time that the checkpoint is read or
// changed; a client of the API server as client-go makes it when it is told nothing, which speaks JSON (but with no limit of its own on
// calls, where that driver has five a second); one line in the log for a claim that was prepared. "lean" is the least that the checkpoint's one
// file allows: a lock within the process, protobuf, no log.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
)

// Where a kubelet expects its plugins' folders.
const plugins = "/var/lib/kubelet/plugins"

// device is what a driver knows of a device that it publishes before any claim has it.
type device struct {
	UUID      string `json:"uuid"`      // of the GPU
	Partition bool   `json:"partition"` // one that is made for its claim
	Start     uint32 `json:"start"`     // its place, in memory slices
	Size      uint32 `json:"size"`
	Profile   int    `json:"profile"` // the number of its GPU instance profile in NVML's enumeration
}

// way is how a claim's steps are taken.
type way string

const (
	nvidia way = "nvidia"
	lean   way = "lean"
)

// driver serves the calls of a kubelet.
type driver struct {
	name     string
	way      way
	devices  map[string]device
	lock     locker
	state    *state
	hardware *hardware
	specs    *specs
}

func main() {
	name := flag.String("driver", "", "the driver's name, and that of its folder among the kubelet's plugins")
	node := flag.String("node", "", "the node's name")
	kubeconfig := flag.String("kubeconfig", "", "how the API server is reached")
	listed := flag.String("devices", "", "a file of JSON: the devices by their names")
	library := flag.String("library", "libnvidia-ml.so.1", "NVML")
	hook := flag.String("hook", "/usr/bin/nvidia-cdi-hook", "the toolkit's hook for containers, by its path there")
	how := flag.String("way", "nvidia", "how it works: nvidia or lean")
	flag.Parse()
	if err := serve(*name, *node, *kubeconfig, *listed, *library, *hook, way(*how)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve runs the driver until it is told to end, and says "ready" when calls are answered.
func serve(name, node, kubeconfig, listed, library, hook string, how way) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	folder := filepath.Join(plugins, name)
	if err := os.MkdirAll(folder, 0o750); err != nil {
		return err
	}
	made, err := newDriver(name, folder, listed, library, hook, how)
	if err != nil {
		return err
	}
	client, err := newClient(kubeconfig, how)
	if err != nil {
		return err
	}
	helper, err := kubeletplugin.Start(ctx, made,
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(node),
		kubeletplugin.DriverName(name),
		kubeletplugin.PluginDataDirectoryPath(folder),
		kubeletplugin.Serialize(false),
		// The kubelet is not to know it: its calls come from whoever measures.
		kubeletplugin.RegistrationService(false),
	)
	if err != nil {
		return fmt.Errorf("starting the plugin: %w", err)
	}
	fmt.Println("ready")
	<-ctx.Done()
	helper.Stop()
	return nil
}

func newDriver(name, folder, listed, library, hook string, how way) (*driver, error) {
	text, err := os.ReadFile(listed)
	if err != nil {
		return nil, err
	}
	made := &driver{name: name, way: how, devices: map[string]device{}}
	if err := json.Unmarshal(text, &made.devices); err != nil {
		return nil, fmt.Errorf("%s: %w", listed, err)
	}
	var files locker
	switch how {
	case lean:
		made.lock, files = &processLock{}, noLock{}
	case nvidia:
		made.lock, files = &nodeLock{filepath.Join(folder, "calls.lock")}, &nodeLock{filepath.Join(folder, "files.lock")}
	default:
		return nil, fmt.Errorf("-way is %q: nvidia or lean is wanted", how)
	}
	if made.state, err = newState(folder, files); err != nil {
		return nil, err
	}
	if made.hardware, err = newHardware(library); err != nil {
		return nil, err
	}
	made.specs, err = newSpecs(made.hardware, name, hook, made.devices)
	return made, err
}

// newClient has no limit of its own on calls: the usual one would be all that is measured.
func newClient(kubeconfig string, how way) (kubernetes.Interface, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 1000, 1000
	if how == lean {
		config.ContentType = "application/vnd.kubernetes.protobuf"
		config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	}
	return kubernetes.NewForConfig(config)
}

// HandleError ends the driver: nothing that fails here may become a figure.
func (d *driver) HandleError(_ context.Context, err error, message string) {
	fmt.Fprintf(os.Stderr, "%s: %v\n", message, err)
	os.Exit(1)
}

// WatchHealthStatus says that nothing is told of health.
func (d *driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return kubeletplugin.ErrHealthNotSupported
}

// PrepareResourceClaims prepares each claim by itself.
func (d *driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		devices, err := d.prepare(ctx, claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices, Err: err}
	}
	return results, nil
}

// UnprepareResourceClaims gives each claim back by itself.
func (d *driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = d.unprepare(ctx, string(claim.UID))
	}
	return results, nil
}

func (d *driver) prepare(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	release, err := d.lock.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	uid := string(claim.UID)
	known, err := d.state.read(ctx)
	if err != nil {
		return nil, err
	}
	if former, ok := known[uid]; ok {
		return nil, fmt.Errorf("claim %s is known already, as %s", uid, former.State)
	}
	results := claim.Status.Allocation.Devices.Results
	for _, other := range known {
		for _, held := range other.Devices {
			for _, result := range results {
				if result.Driver == d.name && result.Device == held.Name {
					return nil, fmt.Errorf("device %s is held by another claim", held.Name)
				}
			}
		}
	}
	entry := prepared{State: "PrepareStarted", Status: claim.Status}
	if err := d.state.change(ctx, func(claims map[string]prepared) { claims[uid] = entry }); err != nil {
		return nil, err
	}
	var devices []kubeletplugin.Device
	for _, result := range results {
		if result.Driver != d.name {
			continue
		}
		wanted, ok := d.devices[result.Device]
		if !ok {
			return nil, fmt.Errorf("there is no device %s", result.Device)
		}
		held := heldDevice{Name: result.Device, device: wanted}
		if wanted.Partition {
			if held.Instance, err = d.hardware.create(wanted); err != nil {
				return nil, err
			}
		}
		entry.Devices = append(entry.Devices, held)
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{result.Request},
			PoolName:     result.Pool,
			DeviceName:   result.Device,
			CDIDeviceIDs: []string{d.specs.id(uid, result.Device)},
		})
	}
	if err := d.specs.write(uid, entry.Devices); err != nil {
		return nil, err
	}
	entry.State = "PrepareCompleted"
	if err := d.state.change(ctx, func(claims map[string]prepared) { claims[uid] = entry }); err != nil {
		return nil, err
	}
	if d.way == nvidia {
		klog.Infof("Claim %s/%s:%s has its devices: %v", claim.Namespace, claim.Name, uid, devices)
	}
	return devices, nil
}

func (d *driver) unprepare(ctx context.Context, uid string) error {
	release, err := d.lock.acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	known, err := d.state.read(ctx)
	if err != nil {
		return err
	}
	for _, held := range known[uid].Devices {
		if held.Partition {
			if err := d.hardware.destroy(held.device, *held.Instance); err != nil {
				return err
			}
		}
	}
	if err := d.specs.remove(uid); err != nil {
		return err
	}
	return d.state.change(ctx, func(claims map[string]prepared) { delete(claims, uid) })
}
