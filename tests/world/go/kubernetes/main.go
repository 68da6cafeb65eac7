// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors

// The services of Kubernetes in one program: what it does follows from the name that it is called by.
//
// They share most of their packages. As one program they are linked once instead of five times, and a node holds the
// shared code once. Each process runs one of them: only its command is ever made, so that no two meet in the registries
// of flags, metrics and feature gates. kubectl stays a program of its own: it is called thousands of times, and what the
// services do before main would double what each call costs.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	_ "time/tzdata" // time zones of CronJobs

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// services has the name of each service and what makes and runs its command.
var services = map[string]func() int{
	"kube-apiserver":          func() int { return cli.Run(apiserver.NewAPIServerCommand()) },
	"kube-controller-manager": func() int { return cli.Run(controllers.NewControllerManagerCommand()) },
	"kube-scheduler":          func() int { return cli.Run(scheduler.NewSchedulerCommand()) },
	"kube-proxy":              func() int { return cli.Run(proxy.NewProxyCommand()) },
	"kubelet":                 func() int { return cli.Run(kubelet.NewKubeletCommand(context.Background())) },
}

func main() {
	name := filepath.Base(os.Args[0])
	run, known := services[name]
	if !known {
		names := strings.Join(slices.Sorted(maps.Keys(services)), ", ")
		fmt.Fprintf(os.Stderr, "called as %s; expected one of %s: call it by a link of that name\n", name, names)
		os.Exit(2)
	}
	os.Exit(run())
}
