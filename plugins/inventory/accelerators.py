# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: accelerators
version_added: 0.1.0
short_description: Groups the nodes of a cluster by their accelerators
description:
  - Reads ResourceSlices, ResourceClaims, and Nodes of any vendor and any driver from a cluster or from a file. Each node with devices becomes a host,
    with variables for its devices and the available ones.
  - The name of the configuration file must end with C(accelerators.yml) or C(accelerators.yaml).
  - The group C(accelerators) contains all nodes with devices. With O(group_prefix), the groups C(accelerator_driver_...), C(accelerator_type_...),
    C(accelerator_product_...), and C(accelerator_profile_...) contain the nodes with each driver, type, product, and partition profile.
    C(accelerator_free) contains nodes with a whole device that a claim can allocate now, and C(accelerator_tainted) contains nodes with a tainted
    device. Characters that Ansible does not allow in group names are replaced with underscores.
  - The host variable C(accelerators) is a list in the form of the filter P(dra.accelerators.accelerators#filter), without C(draws).
  - C(accelerator_drivers), C(accelerator_types), C(accelerator_products), and C(accelerator_profiles) are lists of strings. C(accelerator_counts) and
    C(accelerator_available) are the numbers of whole devices and of available whole devices, by type. The other host variables are
    C(accelerator_tainted) and C(accelerator_node), with C(name), C(ready), C(unschedulable), C(labels), and C(addresses) (by type).
  - Nodes that are also hosts of another inventory get the groups and variables too.
notes:
  - Requires the permissions to list C(resourceslices) and C(resourceclaims) in the API group C(resource.k8s.io), and C(nodes).
requirements:
  - The Python package C(kubernetes), version 12 or newer, on the Ansible controller. Not required with O(file).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - constructed
  - inventory_cache
options:
  plugin:
    description: The name of this plugin.
    type: str
    required: true
    choices:
      - dra.accelerators.accelerators
  file:
    description:
      - A file to read instead of a cluster, in the format of C(kubectl get resourceslices,resourceclaims,nodes --all-namespaces -o json), or in YAML.
        A relative path starts at the directory of the configuration file.
    type: str
  claims:
    description: Whether to read claims. If it is V(false), every device without a taint counts as available.
    type: bool
    default: true
  drivers:
    description: Names of the drivers whose devices are included. If empty, all drivers.
    type: list
    elements: str
    default: []
  devices:
    description:
      - The devices that C(accelerators) lists. V(whole) lists devices that are not a part of another published device, V(all) lists all devices, and
        V(none) lists no devices. A GPU with all possible partitions is published as about fifty devices.
    type: str
    default: whole
    choices:
      - whole
      - all
      - none
  nodes_without:
    description: Whether nodes without devices are hosts too, without groups.
    type: bool
    default: false
  address:
    description:
      - The type of the Node's address for C(ansible_host). V(none) does not set it.
      - A node's kubelet reports the addresses. If the address is not an IP address, or with V(Hostname) not a DNS name, the plugin does not use it,
        and a warning names the node.
    type: str
    default: none
    choices:
      - none
      - InternalIP
      - ExternalIP
      - Hostname
  default_groups:
    description: Whether to create the groups in the description. The groups of O(groups) and O(keyed_groups) are always created.
    type: bool
    default: true
  group_prefix:
    description: The prefix of the group names, except C(accelerators).
    type: str
    default: accelerator_
  kubeconfig:
    description:
      - The path of a kubeconfig file. The default is E(KUBECONFIG), then C(~/.kube/config), then, inside a pod, the pod's service account.
    type: path
    env:
      - name: K8S_AUTH_KUBECONFIG
  context:
    description: The name of the context in the kubeconfig file. The default is the file's current context.
    type: str
    env:
      - name: K8S_AUTH_CONTEXT
  host:
    description: URL of the API server. Replaces the one of the kubeconfig file.
    type: str
    env:
      - name: K8S_AUTH_HOST
  api_key:
    description: Bearer token. With O(host), no kubeconfig file is read.
    type: str
    env:
      - name: K8S_AUTH_API_KEY
  ca_cert:
    description: Path of the CA certificate that verifies the API server's certificate.
    type: path
    env:
      - name: K8S_AUTH_SSL_CA_CERT
  client_cert:
    description: Path of a client certificate. With O(host), no kubeconfig file is read.
    type: path
    env:
      - name: K8S_AUTH_CERT_FILE
  client_key:
    description: Path of the private key of O(client_cert).
    type: path
    env:
      - name: K8S_AUTH_KEY_FILE
  validate_certs:
    description: Whether to verify the API server's certificate. The default is the setting of the kubeconfig file, or V(true).
    type: bool
    env:
      - name: K8S_AUTH_VERIFY_SSL
seealso:
  - plugin: dra.accelerators.accelerators_with
    plugin_type: filter
  - plugin: dra.accelerators.holding_accelerators
    plugin_type: test
"""

EXAMPLES = r"""
# accelerators.yml: The nodes of the cluster in KUBECONFIG.
# `ansible-inventory -i accelerators.yml --graph` shows groups such as accelerator_product_NVIDIA_H100_80GB_HBM3.
plugin: dra.accelerators.accelerators
address: InternalIP

---
# accelerators.yml: Custom groups by free devices and by labels of the Node. The result is cached for five minutes.
plugin: dra.accelerators.accelerators
kubeconfig: /etc/kubernetes/admin.conf
default_groups: false
groups:
  two_free_gpus: accelerators is dra.accelerators.holding_accelerators(2, type='gpu', free='40Gi')
  idle: accelerators is not dra.accelerators.holding_accelerators(held=true)
keyed_groups:
  - key: accelerator_products
    prefix: holds
  - key: accelerator_node.labels['topology.kubernetes.io/zone']
    prefix: zone
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: /tmp/accelerators
cache_timeout: 300

---
# accelerators.yml: Read a file if the cluster cannot be reached.
plugin: dra.accelerators.accelerators
file: cluster.json
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ansible.template
import yaml
from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    ApiError,
    connection,
    served_version,
    without_managed_fields,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.inventory_hosts import (
    groups,
    hosts,
    is_address,
    split_objects,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.manifest_files import check_nesting
from ansible_collections.dra.accelerators.plugins.module_utils.core.decoding import (
    SkippedObject,
    decode,
    describe_skipped,
)

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
ENDINGS = ("accelerators.yml", "accelerators.yaml")


def _as_text(value: Any) -> Any:
    """Return a value from the cluster that Ansible does not template. From ansible-core 2.19 on, no value is a template by default."""
    if hasattr(ansible.template, "trust_as_template"):
        return value
    from ansible.utils.unsafe_proxy import wrap_var

    return wrap_var(value)


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):  # type: ignore[misc]
    """The inventory plugin."""

    NAME = "dra.accelerators.accelerators"

    def verify_file(self, path: str) -> bool:
        """Return whether the name of a file is that of a configuration file of this plugin."""
        return bool(super().verify_file(path)) and path.endswith(ENDINGS)

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Add hosts and groups. Raises AnsibleParserError."""
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        for name, variables in self._found(path, cache).items():
            self._add(name, variables)

    def _found(self, path: str, cache: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return the hosts from the cache, or from the cluster or the file."""
        key, keeps = self.get_cache_key(path), self.get_option("cache")
        if keeps and cache:
            try:
                kept: Mapping[str, Mapping[str, Any]] = self._cache[key]
            except KeyError:
                pass  # the cache has no entry, or the entry has expired
            else:
                return kept
        found = self._read_hosts(path)
        if keeps:
            self._cache[key] = found
        return found

    def _read_hosts(self, path: str) -> dict[str, dict[str, Any]]:
        try:
            slices, claims, nodes = self._of_file(path) if self.get_option("file") else self._of_cluster()
            drivers = self.get_option("drivers")
            return hosts(
                [each for each in slices if not drivers or each["spec"]["driver"] in drivers],
                claims if self.get_option("claims") else (),
                nodes,
                which=self.get_option("devices"),
                without=self.get_option("nodes_without"),
            )
        except (ApiError, OSError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
            raise AnsibleParserError(f"{path}: {error}") from error

    def _of_file(self, path: str) -> Any:
        place = Path(path).absolute().parent / Path(self.get_option("file")).expanduser()
        text = place.read_text("utf-8")
        # A cluster has many ResourceSlices, and JSON is parsed a hundred times as fast as YAML.
        if text.lstrip().startswith("{"):
            decoded = decode(text.encode(), opaque_of=())
            self._warn_skipped(decoded.skipped)
            return split_objects([decoded.value])
        check_nesting(text)
        return split_objects(yaml.safe_load_all(text))

    def _warn_skipped(self, skipped: tuple[SkippedObject, ...]) -> None:
        if skipped:
            self.display.warning(describe_skipped(skipped))

    def _of_cluster(self) -> Any:
        api = connection({name: self.get_option(name) for name in API_OPTIONS}, self.display.warning)
        base = f"/apis/{GROUP}/{served_version(api, GROUP, VERSIONS)}"
        paths = (f"{base}/resourceslices", f"{base}/resourceclaims", "/api/v1/nodes")
        claims = self.get_option("claims")
        return tuple(
            api.list_all(path, {}, without_managed_fields) if claims or path != paths[1] else [] for path in paths
        )

    def _add(self, name: str, found: Mapping[str, Any]) -> None:
        # Values from the cluster are never templates.
        variables = _as_text(dict(found))
        self.inventory.add_host(name)
        for variable, value in variables.items():
            self.inventory.set_variable(name, variable, value)
        kind = self.get_option("address")
        address = variables["accelerator_node"]["addresses"].get(kind)
        if address and is_address(kind, address):
            self.inventory.set_variable(name, "ansible_host", address)
        elif address:
            expected = "an IP address" if kind.endswith("IP") else "a DNS name"
            self.display.warning(
                f"The Node {name} has the {kind} {str(address)[:80]!r}, expected {expected}: its ansible_host is not set. Examine the node."
            )
        if self.get_option("default_groups"):
            for group in groups(found, self.get_option("group_prefix")):
                self.inventory.add_child(self.inventory.add_group(self._sanitize_group_name(group)), name)
        strict = self.get_option("strict")
        self._set_composite_vars(self.get_option("compose"), variables, name, strict=strict)
        self._add_host_to_composed_groups(self.get_option("groups"), variables, name, strict=strict)
        self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, name, strict=strict)
