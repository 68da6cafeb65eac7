#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
#
# Starts etcd, an API server at this host's address, and the namespace controller as units, creates a Node with this host's name, and prints an
# administrator's kubeconfig.
set -eu
cd /srv/api-server
address=$(ip -4 -o route get 203.0.113.1 | sed -n 's/.* src \([0-9.]*\).*/\1/p')
token=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
printf '%s,administrator,administrator,"system:masters"\n' "$token" >tokens
openssl ecparam -name prime256v1 -genkey -noout -out service-account.key
cat >/etc/systemd/system/molecule-etcd.service <<END
[Service]
Type=notify
ExecStart=/usr/local/bin/etcd --data-dir=/srv/api-server/etcd --unsafe-no-fsync=true --log-level=warn \
    --listen-client-urls=http://127.0.0.1:2389 --advertise-client-urls=http://127.0.0.1:2389 --listen-peer-urls=http://127.0.0.1:2390
[Install]
WantedBy=multi-user.target
END
cat >/etc/systemd/system/molecule-apiserver.service <<END
[Unit]
Requires=molecule-etcd.service
After=molecule-etcd.service
[Service]
Type=notify
ExecStart=/usr/local/bin/kube-apiserver --bind-address=0.0.0.0 --advertise-address=$address --secure-port=6444 \
    --etcd-servers=http://127.0.0.1:2389 --cert-dir=/srv/api-server/certificates --token-auth-file=/srv/api-server/tokens \
    --authorization-mode=RBAC --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file=/srv/api-server/service-account.key --service-account-signing-key-file=/srv/api-server/service-account.key \
    --service-cluster-ip-range=10.255.255.0/24 --profiling=false
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --quiet --now molecule-etcd.service molecule-apiserver.service
authority=$(base64 -w0 certificates/apiserver.crt)
cat >kubeconfig <<END
apiVersion: v1
kind: Config
clusters: [{name: molecule, cluster: {server: "https://$address:6444", certificate-authority-data: $authority}}]
users: [{name: administrator, user: {token: "$token"}}]
contexts: [{name: molecule, context: {cluster: molecule, user: administrator}}]
current-context: molecule
END
cat >/etc/systemd/system/molecule-controllers.service <<END
[Unit]
After=molecule-apiserver.service
[Service]
ExecStart=/usr/local/bin/kube-controller-manager --kubeconfig=/srv/api-server/kubeconfig --controllers=namespace-controller \
    --leader-elect=false --bind-address=127.0.0.1
Restart=always
RestartSec=1
[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --quiet --now molecule-controllers.service
for _ in $(seq 60); do
    if kubectl --kubeconfig kubeconfig get --raw /readyz >/dev/null 2>&1; then break; fi
    sleep 1
done
kubectl --kubeconfig kubeconfig apply -f - >/dev/null <<END
{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "$(hostname)", "labels": {"site": "kept"}}}
END
kubectl --kubeconfig kubeconfig patch node "$(hostname)" --subresource=status --type=merge --patch \
    '{"status": {"addresses": [{"type": "InternalIP", "address": "'"$address"'"}]}}' >/dev/null
cat kubeconfig
