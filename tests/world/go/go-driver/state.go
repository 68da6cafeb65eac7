// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager/checksum"
)

// The one file of all claims.
const checkpointName = "checkpoint.json"

// heldDevice is a device that a claim has, and the partition that was made for it.
type heldDevice struct {
	device
	Name     string    `json:"name"`
	Instance *instance `json:"instance,omitempty"`
}

// prepared is what is written down of a claim: all of its status, as NVIDIA's driver does.
type prepared struct {
	State   string                          `json:"state"`
	Status  resourceapi.ResourceClaimStatus `json:"status"`
	Devices []heldDevice                    `json:"devices"`
}

// checkpoint is all claims, with the sum that the kubelet's checkpoints have.
type checkpoint struct {
	Checksum checksum.Checksum   `json:"checksum"`
	Claims   map[string]prepared `json:"claims"`
}

// MarshalCheckpoint takes the sum over the text, in which it counts as none.
func (c *checkpoint) MarshalCheckpoint() ([]byte, error) {
	c.Checksum = 0
	text, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	c.Checksum = checksum.New(text)
	return json.Marshal(c)
}

// UnmarshalCheckpoint reads what MarshalCheckpoint has written.
func (c *checkpoint) UnmarshalCheckpoint(text []byte) error {
	return json.Unmarshal(text, c)
}

// VerifyChecksum says whether the sum is that of what was read.
func (c *checkpoint) VerifyChecksum() error {
	found := c.Checksum
	c.Checksum = 0
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	c.Checksum = found
	return found.Verify(text)
}

// state keeps the claims in a checkpoint of the kubelet's kind; lock is held while it is read, and while it is changed.
type state struct {
	files checkpointmanager.CheckpointManager
	lock  locker
}

func newState(folder string, lock locker) (*state, error) {
	files, err := checkpointmanager.NewCheckpointManager(folder)
	if err != nil {
		return nil, err
	}
	return &state{files, lock}, files.CreateCheckpoint(checkpointName, &checkpoint{})
}

// read returns the claims by their UIDs.
func (s *state) read(ctx context.Context) (map[string]prepared, error) {
	release, err := s.lock.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()
	return s.found()
}

func (s *state) found() (map[string]prepared, error) {
	found := &checkpoint{Claims: map[string]prepared{}}
	if err := s.files.GetCheckpoint(checkpointName, found); err != nil {
		return nil, fmt.Errorf("%s: %w", checkpointName, err)
	}
	if found.Claims == nil {
		found.Claims = map[string]prepared{}
	}
	return found.Claims, nil
}

// change reads the claims, changes them, and writes them.
func (s *state) change(ctx context.Context, how func(map[string]prepared)) error {
	release, err := s.lock.acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	claims, err := s.found()
	if err != nil {
		return err
	}
	how(claims)
	return s.files.CreateCheckpoint(checkpointName, &checkpoint{Claims: claims})
}

// locker is who waits for whom.
type locker interface {
	acquire(ctx context.Context) (release func(), err error)
}

// noLock is for what another lock is held for.
type noLock struct{}

func (noLock) acquire(context.Context) (func(), error) { return func() {}, nil }

// processLock lets one call after the other go on, at once.
type processLock struct{ mutex sync.Mutex }

func (l *processLock) acquire(context.Context) (func(), error) {
	l.mutex.Lock()
	return l.mutex.Unlock, nil
}

// nodeLock is a locked file: who does not get it asks again after a while. NVIDIA's driver gives up after ten seconds, which
// many claims at once can exceed on a slow machine; here every call is to have its time.
type nodeLock struct{ path string }

const (
	askAgain = 100 * time.Millisecond
	askUntil = time.Minute
)

func (l *nodeLock) acquire(ctx context.Context) (func(), error) {
	file, err := os.OpenFile(l.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, askUntil)
	defer cancel()
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { file.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			file.Close()
			return nil, fmt.Errorf("locking %s: %w", l.path, err)
		}
		select {
		case <-limited.Done():
			file.Close()
			return nil, fmt.Errorf("%s was locked for %s", l.path, askUntil)
		case <-time.After(askAgain):
		}
	}
}
