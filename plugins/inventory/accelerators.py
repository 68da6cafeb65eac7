# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: accelerators
version_added: 0.1.0
short_description: Groups a cluster's nodes by the accelerators that they hold
description:
  - Reads ResourceSlices, ResourceClaims and Nodes from a cluster or from a file, of any vendor and any driver, and makes each node that holds devices
    a host, with what it has and what of that is free.
  - A configuration file's name has to end with C(accelerators.yml) or C(accelerators.yaml).
  - The groups are C(accelerators) with all such nodes, and by O(group_prefix) C(accelerator_driver_...), C(accelerator_type_...),
    C(accelerator_product_...) and C(accelerator_profile_...) for each driver, type, product and kind of partition that a node has,
    C(accelerator_free) for nodes of which a claim could have a whole device now, and C(accelerator_tainted) for those with a device that has a
    taint. Whatever Ansible does not take in a group's name becomes an underscore.
  - The host variables are C(accelerators), a list as the filter P(dra.accelerators.accelerators#filter) returns it, without C(draws);
    C(accelerator_drivers), C(accelerator_types), C(accelerator_products) and C(accelerator_profiles), lists of texts; C(accelerator_counts) and
    C(accelerator_available), by type how many whole devices there are and how many a claim could have; C(accelerator_tainted); and
    C(accelerator_node), with C(name), C(ready), C(unschedulable), C(labels) and C(addresses) (by type).
  - Nodes that are hosts of another inventory beside this one get groups and variables.
notes:
  - Needs the permissions to list C(resourceslices) and C(resourceclaims) in the API group C(resource.k8s.io), and C(nodes).
requirements:
  - The Python package C(kubernetes) on the controller, version 12 or newer; not with O(file).
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
      - A file in place of a cluster, as C(kubectl get resourceslices,resourceclaims,nodes --all-namespaces -o json) writes it, or in YAML. Where its path
        is relative, it is taken from the folder of the configuration file.
    type: str
  claims:
    description: Whether to read claims. If it is V(false), every device without a taint counts as available.
    type: bool
    default: true
  drivers:
    description: Names of drivers whose devices count. Without any, all drivers.
    type: list
    elements: str
    default: []
  devices:
    description:
      - Which devices C(accelerators) lists, V(whole) those that are no part of something else that is published, V(all), or V(none). A GPU of
        which every partition is possible is published as some fifty devices.
    type: str
    default: whole
    choices:
      - whole
      - all
      - none
  nodes_without:
    description: Whether nodes that hold no device are hosts too, without any group.
    type: bool
    default: false
  address:
    description:
      - The type of a Node's address that becomes C(ansible_host). V(none) does not set it.
      - A node's kubelet reports the addresses. One that is no IP address, or with V(Hostname) no DNS name, is not used, and a warning names the node.
    type: str
    default: none
    choices:
      - none
      - InternalIP
      - ExternalIP
      - Hostname
  default_groups:
    description: Whether the groups above are made. What O(groups) and O(keyed_groups) ask for is made in any case.
    type: bool
    default: true
  group_prefix:
    description: What the names of these groups begin with, other than that of C(accelerators).
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
    description: Path of the certificate authority's certificate that signed the API server's one.
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
# accelerators.yml: the nodes of the cluster of KUBECONFIG.
# `ansible-inventory -i accelerators.yml --graph` shows groups such as accelerator_product_NVIDIA_H100_80GB_HBM3.
plugin: dra.accelerators.accelerators
address: InternalIP

---
# accelerators.yml: groups of one's own, by what is free and by labels of the Node, and what is asked is kept for five minutes.
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
# accelerators.yml: of a file, where the cluster cannot be reached.
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
from ansible_collections.dra.accelerators.plugins.module_utils._hosts import groups, hosts, is_address, sorted_out
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    ApiError,
    connection,
    served_version,
)
from ansible_collections.dra.accelerators.plugins.module_utils._manifests import check_nesting
from ansible_collections.dra.accelerators.plugins.module_utils.core.decoding import (
    SkippedObject,
    decode,
    describe_skipped,
)

GROUP = "resource.k8s.io"
VERSIONS = ("v1", "v1beta2", "v1beta1")
ENDINGS = ("accelerators.yml", "accelerators.yaml")


def _as_text(value: Any) -> Any:
    """Return what a cluster says as what is no template. From 2.19 on nothing is one unless somebody says so."""
    if hasattr(ansible.template, "trust_as_template"):
        return value
    from ansible.utils.unsafe_proxy import wrap_var

    return wrap_var(value)


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):  # type: ignore[misc]
    """The inventory, as Ansible asks for it."""

    NAME = "dra.accelerators.accelerators"

    def verify_file(self, path: str) -> bool:
        """Whether a file is one of this plugin's, by its name."""
        return bool(super().verify_file(path)) and path.endswith(ENDINGS)

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Add hosts and groups. Raises AnsibleParserError."""
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        for name, variables in self._found(path, cache).items():
            self._add(name, variables)

    def _found(self, path: str, cache: bool) -> Mapping[str, Mapping[str, Any]]:
        """Return what was kept, or what the cluster or the file says now."""
        key, keeps = self.get_cache_key(path), self.get_option("cache")
        if keeps and cache:
            try:
                kept: Mapping[str, Mapping[str, Any]] = self._cache[key]
            except KeyError:
                pass  # nothing is kept, or it is too old
            else:
                return kept
        found = self._looked(path)
        if keeps:
            self._cache[key] = found
        return found

    def _looked(self, path: str) -> dict[str, dict[str, Any]]:
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
        # A cluster's slices are much, and JSON is read a hundred times as fast as YAML.
        if text.lstrip().startswith("{"):
            decoded = decode(text.encode(), opaque_of=())
            self._warn_skipped(decoded.skipped)
            return sorted_out([decoded.value])
        check_nesting(text)
        return sorted_out(yaml.safe_load_all(text))

    def _warn_skipped(self, skipped: tuple[SkippedObject, ...]) -> None:
        if skipped:
            self.display.warning(describe_skipped(skipped))

    def _of_cluster(self) -> Any:
        api = connection({name: self.get_option(name) for name in API_OPTIONS}, self.display.warning)
        base = f"/apis/{GROUP}/{served_version(api, GROUP, VERSIONS)}"
        claims = api.list_all(f"{base}/resourceclaims", {}) if self.get_option("claims") else []
        return api.list_all(f"{base}/resourceslices", {}), claims, api.list_all("/api/v1/nodes", {})

    def _add(self, name: str, found: Mapping[str, Any]) -> None:
        # What a cluster says is text, whatever it looks like.
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
