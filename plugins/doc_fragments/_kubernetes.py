# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """How a module reaches the Kubernetes API; names and environment variables as in kubernetes.core."""

    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - Path of a kubeconfig file on the host where the module runs.
      - The default is the environment variable E(K8S_AUTH_KUBECONFIG), then E(KUBECONFIG), then C(~/.kube/config),
        then, inside a pod, the pod's service account.
    type: path
  context:
    description:
      - The name of the context in the kubeconfig file. The default is the file's current context.
      - The environment variable E(K8S_AUTH_CONTEXT) counts if the option is not given.
    type: str
  host:
    description:
      - URL of the API server. Replaces the one of the kubeconfig file.
      - The environment variable E(K8S_AUTH_HOST) counts if the option is not given.
    type: str
  api_key:
    description:
      - Bearer token. With O(host), no kubeconfig file is read.
      - The environment variable E(K8S_AUTH_API_KEY) counts if the option is not given.
    type: str
  ca_cert:
    description:
      - Path of the certificate authority's certificate that signed the API server's one.
      - The environment variable E(K8S_AUTH_SSL_CA_CERT) counts if the option is not given.
    type: path
    aliases:
      - ssl_ca_cert
  client_cert:
    description:
      - Path of a client certificate. With O(host), no kubeconfig file is read.
      - The environment variable E(K8S_AUTH_CERT_FILE) counts if the option is not given.
    type: path
    aliases:
      - cert_file
  client_key:
    description:
      - Path of the private key of O(client_cert).
      - The environment variable E(K8S_AUTH_KEY_FILE) counts if the option is not given.
    type: path
    aliases:
      - key_file
  validate_certs:
    description:
      - Whether to verify the API server's certificate. The default is the setting of the kubeconfig file, or V(true).
      - The environment variable E(K8S_AUTH_VERIFY_SSL) counts if the option is not given.
    type: bool
    aliases:
      - verify_ssl
requirements:
  - The Python package C(kubernetes) on the host where the module runs, version 12 or newer.
"""
