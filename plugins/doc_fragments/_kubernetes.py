# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """The options for access to the Kubernetes API, with names and environment variables as in kubernetes.core."""

    DOCUMENTATION = r"""
options:
  kubeconfig:
    description:
      - The path of a kubeconfig file on the host where the module runs.
      - The default is the value of the environment variable E(K8S_AUTH_KUBECONFIG), then that of E(KUBECONFIG), then C(~/.kube/config).
        Inside a pod, the last default is the pod's service account.
    type: path
  context:
    description:
      - The name of the context in the kubeconfig file. The default is the file's current context.
      - The environment variable E(K8S_AUTH_CONTEXT) is used if the option is not set.
    type: str
  host:
    description:
      - The URL of the API server. It overrides the URL in the kubeconfig file.
      - The environment variable E(K8S_AUTH_HOST) is used if the option is not set.
    type: str
  api_key:
    description:
      - The bearer token. With O(host), the module reads no kubeconfig file.
      - The environment variable E(K8S_AUTH_API_KEY) is used if the option is not set.
    type: str
  ca_cert:
    description:
      - The path of the CA certificate that signed the API server's certificate.
      - The environment variable E(K8S_AUTH_SSL_CA_CERT) is used if the option is not set.
    type: path
    aliases:
      - ssl_ca_cert
  client_cert:
    description:
      - The path of a client certificate. With O(host), the module reads no kubeconfig file.
      - The environment variable E(K8S_AUTH_CERT_FILE) is used if the option is not set.
    type: path
    aliases:
      - cert_file
  client_key:
    description:
      - The path of the private key of O(client_cert).
      - The environment variable E(K8S_AUTH_KEY_FILE) is used if the option is not set.
    type: path
    aliases:
      - key_file
  validate_certs:
    description:
      - Whether to verify the API server's certificate. The default is the setting of the kubeconfig file, or V(true).
      - The environment variable E(K8S_AUTH_VERIFY_SSL) is used if the option is not set.
    type: bool
    aliases:
      - verify_ssl
requirements:
  - The Python package C(kubernetes), version 12 or newer, on the host where the module runs.
"""
