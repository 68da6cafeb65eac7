// SPDX-License-Identifier: Apache-2.0
// Copyright (c) 2026 The dra.accelerators authors
//
// Adds interaction to the report: a map of all devices, nodes that show their devices when opened, search, and sorting.
// All data is written as text, never as markup.
(function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const FEW = 4, SHOWN = 60, NAMED = 64, GIB = 1073741824;
  const STATES = { sick: "faulty", withheld: "withheld", full: "full", partly: "partly used", free: "free" };
  const byId = (id) => document.getElementById(id);

  function element(name, options, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(options || {})) {
      if (key === "text") made.textContent = value;
      else if (key === "style") made.style.cssText = value; // the page's policy forbids style attributes
      else made.setAttribute(key, value);
    }
    made.append(...children.filter((each) => each !== null));
    return made;
  }
  function drawn(name, options) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(options || {})) {
      if (key === "style") made.style.cssText = value;
      else made.setAttribute(key, value);
    }
    return made;
  }
  const ago = (seconds) => (seconds >= 172800 ? `${Math.floor(seconds / 86400)} d ago` : seconds >= 7200 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 60)} min ago`);
  const moment = (asOf) => `${ago(asOf.seconds)} (${asOf.at.replace("T", " ").replace("Z", " UTC")})`;
  const gib = (bytes) => `${Math.round(bytes / GIB)} GiB`;
  const model = (device) => data.models[device.model];
  const share = (device) => (model(device).memory_bytes ? device.used_bytes / model(device).memory_bytes : 0);
  const silent = (node) => node.source !== "node" && data.asked.nodes && node.asked;
  const podsOf = new Map(data.claims.map((each) => [each.name, each.pods]));

  // ---- squares: one for each device, with a shape for each state, so that color is not the only information

  function squares() {
    const paths = { frame: "", full: "", part: "", ill: "", away: "", other: "", gone: "" };
    return {
      add(device, x, y, size) {
        const s = size, box = (w, h, dx, dy) => `M${x + dx} ${y + dy}h${w}v${h}h${-w}z`;
        paths.frame += box(s, s, 0, 0);
        if (device.state === "sick") paths.ill += `M${x + s / 2} ${y}l${s / 2} ${s / 2}l${-s / 2} ${s / 2}l${-s / 2} ${-s / 2}z`;
        else if (device.state === "withheld") paths.away += `M${x + 1} ${y + s - 1}L${x + s - 1} ${y + 1}M${x + 1} ${y + 1}L${x + s - 1} ${y + s - 1}`;
        else if (device.state === "full") paths.full += box(s, s, 0, 0);
        else if (device.state === "partly") {
          const h = Math.max(Math.min(share(device), 0.85) * s, 1.5);
          paths.part += box(s, h, 0, s - h);
        }
        if (device.drift) paths.other += box(s + 1, s + 1, -0.5, -0.5);
      },
      silent(x, y, width, size) { paths.gone += `M${x - 1} ${y - 1}h${width + 2}v${size + 2}h${-width - 2}z`; },
      into(svg) {
        for (const [name, d] of Object.entries(paths)) if (d) svg.append(drawn("path", { class: name, d }));
        return svg;
      },
    };
  }

  function strip(node) {
    const all = squares(), size = 13, step = 16, count = Math.max(node.devices.length, 1);
    node.devices.forEach((device, index) => all.add(device, index * step + 1, 1, size));
    const said = Object.keys(STATES).filter((state) => node.totals[state]).map((state) => `${node.totals[state]} ${STATES[state]}`);
    const svg = drawn("svg", { class: "strip", viewBox: `0 0 ${Math.max(count, 8) * step} ${size + 2}`, role: "img", "aria-label": said.join(", ") || "no devices" });
    return all.into(svg);
  }

  function legend() {
    const samples = [
      ["free", { state: "free" }], ["partly used", { state: "partly", used_bytes: 1, half: true }], ["full", { state: "full" }],
      ["faulty", { state: "sick" }], ["withheld: tainted or not published", { state: "withheld" }], ["layout differs", { state: "free", drift: true }], ["silent node", null],
    ];
    for (const [text, device] of samples) {
      const all = squares();
      if (device === null) all.silent(2, 2, 11, 11);
      else if (device.half) { device.model = 0; device.used_bytes = data.models.length ? model(device).memory_bytes / 2 : 1; }
      if (device && (!device.half || data.models.length)) all.add(device, 1, 1, 13);
      byId("legend").append(element("li", {}, all.into(drawn("svg", { viewBox: "0 0 15 15", "aria-hidden": "true" })), text));
    }
  }

  function map() {
    if (!data.nodes.length) return;
    const named = data.nodes.length <= NAMED;
    const size = named ? 18 : 9, step = named ? 21 : 10, above = named ? 16 : 0;
    const most = Math.max(...data.nodes.map((node) => node.devices.length), 1);
    const width = most * step + 14, high = size + above + 7, across = Math.max(Math.min(Math.floor(1200 / width), data.nodes.length), 1);
    const all = squares(), labels = [];
    data.nodes.forEach((node, number) => {
      const x = (number % across) * width + 8, y = Math.floor(number / across) * high + 6 + above;
      node.devices.forEach((device, index) => all.add(device, x + index * step, y, size));
      if (silent(node)) all.silent(x, y, Math.max(node.devices.length, most) * step - step + size, size);
      if (named) {
        const label = drawn("text", { x, y: y - 5 });
        label.textContent = node.name.length > most * 3.6 ? `${node.name.slice(0, Math.max(Math.floor(most * 3.6) - 1, 6))}…` : node.name;
        labels.push(label);
      }
    });
    const rows = Math.ceil(data.nodes.length / across);
    const t = data.totals;
    const label = `${t.devices} devices: ${t.full} full, ${t.partly} partly used, ${t.free} free, ${t.sick} faulty, ${t.withheld} withheld. The table of nodes below contains the same data.`;
    const wide = across * width + 4;
    const svg = drawn("svg", { class: "map", viewBox: `0 0 ${wide} ${rows * high + 8}`, style: `max-width:${Math.max(wide, 320)}px`, role: "img", "aria-label": label });
    const title = drawn("title");
    svg.append(title, ...labels);
    all.into(svg);
    const under = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const column = Math.floor((at.x - 4) / width), row = Math.floor((at.y - 3) / high);
      return column >= 0 && column < across && row >= 0 ? row * across + column : -1;
    };
    svg.addEventListener("mousemove", (event) => {
      const node = data.nodes[under(event)];
      title.textContent = node ? `${node.name}: ${node.totals.full} full, ${node.totals.partly} partly, ${node.totals.free} free, ${node.totals.sick} faulty, ${node.totals.withheld} withheld` : label;
    });
    svg.addEventListener("click", (event) => { const number = under(event); if (data.nodes[number]) reveal(number); });
    byId("map").append(svg);
    byId("map-section").hidden = false;
  }

  // ---- a node's devices

  function scale(device) {
    const bar = element("div", { class: "scale", "aria-hidden": "true" });
    const slices = model(device).slices;
    if (device.claims.length) {
      bar.append(element("div", { class: "taken", text: device.claims.map(short).join(", ") }));
      return bar;
    }
    const placed = slices > 0 && device.partitions.every((each) => each.size > 0);
    bar.style.gridTemplateColumns = placed ? `repeat(${slices}, minmax(0, 1fr))` : columns(device);
    for (const part of device.partitions) {
      const kind = part.claims.length ? "taken" : part.owner === "foreign" ? "hand" : "idle";
      const box = element("div", { class: kind }, part.profile.replace(/\.\d+gb/, ""), element("br"), part.claims.map(short).join(", "));
      if (placed) box.style.gridColumn = `${part.start + 1} / span ${part.size}`;
      bar.append(box);
    }
    return bar;
  }
  function columns(device) {
    const parts = device.partitions.map((each) => each.memory_bytes || 1);
    const left = model(device).memory_bytes - parts.reduce((sum, each) => sum + each, 0);
    return [...parts, ...(left > 0 ? [left] : [])].map((each) => `minmax(0, ${Math.max(Math.round(each / GIB), 1)}fr)`).join(" ") || "1fr";
  }
  const short = (claim) => claim.slice(claim.indexOf("/") + 1);
  function who(claims) {
    return claims.map((claim) => {
      const pods = podsOf.get(claim) || [];
      return pods.length ? `${claim} (${pods.length > 1 ? "pods" : "pod"} ${pods.join(", ")})` : claim;
    }).join("; ");
  }
  function occupants(device) {
    const list = element("ul", { class: "who" });
    if (device.claims.length) list.append(element("li", { text: `whole: ${who(device.claims)}` }));
    for (const part of device.partitions) {
      const at = part.size ? ` at ${part.start}` : "";
      const held = part.claims.length ? who(part.claims) : part.owner === "foreign" ? "created manually, not available for claims" : "not in use";
      list.append(element("li", {}, element("b", { text: `${part.profile}${at}` }), `: ${held}`));
    }
    return list.children.length ? list : null;
  }
  function said(kind, label, text) {
    return element("p", { class: "said" }, element("span", { class: `mark ${kind}`, text: `${label} ` }), text);
  }
  function fits(device) {
    const found = Object.entries(device.fits).map(([profile, count]) => (profile ? `${count} × ${profile}` : "the whole device"));
    return found.length ? found.join(", or ") : "";
  }
  function card(device) {
    const product = model(device).product;
    const made = element("article", { class: `device is-${device.state}`, "aria-label": `Device ${device.index}, ${STATES[device.state]}` },
      element("h5", {}, `${device.index} · ${product.replace(/^NVIDIA /, "")}`, element("span", { text: STATES[device.state] })),
      scale(device), occupants(device));
    for (const sign of device.health) made.append(said(sign.severity === "informative" ? "" : "sick", sign.cause, `${sign.message} ${sign.remedy}`));
    for (const taint of device.taints) made.append(said("held", "tainted", `${taint.key}${taint.value ? "=" : ""}${taint.value}:${taint.effect}${taint.rule ? `, from the rule ${taint.rule}` : ""}`));
    if (device.as_of && (device.health.length || device.drift)) made.append(said("held", "earlier data", `Health and layout are from ${moment(device.as_of)}.`));
    if (data.asked.cluster && !device.published) made.append(said("held", "withheld", "The device is not published."));
    if (device.drift) made.append(said("drift", "layout differs", `${device.drift.wanted}: ${device.drift.steps.join("; ")}${device.drift.held_by.length ? `; in use by ${device.drift.held_by.join(", ")}` : ""}`));
    if (device.reset_awaited) made.append(said("held", "reset pending", "A change of the device's mode takes effect after a reset."));
    const room = device.state === "free" && "" in device.fits ? "the whole device, or any of its partitions" : fits(device);
    if (room && device.state !== "sick") made.append(said("", "fits", room));
    const groups = Object.entries(device.groups).map(([kind, name]) => `${kind} ${name}`);
    made.append(element("p", { class: "said soft", text: [gib(model(device).memory_bytes), device.pci, device.uuid, ...groups, device.processes ? `${device.processes} processes` : ""].filter(Boolean).join(" · ") }));
    return made;
  }
  // For each kind of links, a row of all devices of the vendor, with a line through the devices of each group.
  function links(node) {
    const list = element("ul", { class: "links", "aria-label": "Devices with direct links between them" });
    for (const kind of new Set(node.devices.flatMap((each) => Object.keys(each.groups)))) {
      const vendor = model(node.devices.find((each) => kind in each.groups)).vendor;
      const row = node.devices.filter((each) => model(each).vendor === vendor);
      const groups = [...grouped(row.filter((each) => kind in each.groups), (each) => each.groups[kind]).values()].filter((each) => each.length > 1);
      if (!groups.length) continue;
      const at = (device) => 22 * row.indexOf(device) + 11, ends = [], shapes = [];
      for (const group of groups) {
        const first = at(group[0]), last = at(group[group.length - 1]);
        const free = ends.findIndex((end) => end < first), lane = free < 0 ? ends.length : free, y = 22 + 11 * lane;
        ends[lane] = last;
        shapes.push(drawn("path", { class: "link", d: `M${first} ${y}H${last}` }), ...group.map((each) => drawn("circle", { class: "end", cx: at(each), cy: y, r: 4 })));
      }
      const svg = drawn("svg", { viewBox: `0 0 ${22 * row.length} ${17 + 11 * ends.length}`, style: `width:${22 * row.length}px`, "aria-hidden": "true" });
      for (const each of row) {
        const label = drawn("text", { x: at(each), y: 11 });
        label.textContent = each.index;
        svg.append(label);
      }
      svg.append(...shapes);
      const said = groups.map((group) => group.map((each) => each.index).join(", ")).join("; ");
      list.append(element("li", {}, svg, element("span", {}, element("b", { text: kind }), ` links ${said}`)));
    }
    return list.children.length ? list : null;
  }
  function grouped(list, key) {
    const found = new Map();
    for (const each of list) { const name = key(each); found.set(name, [...(found.get(name) || []), each]); }
    return found;
  }
  function inside(node) {
    const box = element("div");
    const layout = node.layout.known ? `Layout: ${node.layout.source}, ${node.layout.matches ? "no differences" : "differs"}.` : node.source === "node" ? "The node has no layout." : !node.asked ? "The node was not queried in this run. Its data is from the cluster and the previous report." : node.source === "cluster" ? "The node did not answer. The report shows its published devices." : "The node did not answer and has no published devices.";
    const old = new Set(node.devices.filter((each) => each.as_of).map((each) => moment(each.as_of)));
    box.append(element("p", { class: "small soft", text: [layout, ...[...old].map((each) => `Health and layout are from ${each}.`)].join(" ") }));
    for (const each of node.refused) box.append(said("drift", "rejected", `${each.message} ${each.hint}`));
    for (const each of node.unread) box.append(said("sick", "not read", each));
    box.append(...[links(node)].filter(Boolean));
    for (const [numa, near] of grouped(node.devices, (each) => each.numa)) {
      const socket = element("div", { class: "numa" }, element("h3", { text: numa === null ? "NUMA node unknown" : `NUMA node ${numa}` }));
      const roots = element("div", { class: "roots" });
      for (const [root, those] of grouped(near, (each) => each.root)) {
        const title = element("h4", { text: root ? `PCIe root ${root}` : "PCIe root unknown" });
        roots.append(element("div", { class: "root" }, title, ...those.map(card)));
      }
      socket.append(roots);
      box.append(socket);
    }
    return box;
  }

  // ---- the table of nodes

  const rows = [...document.querySelectorAll("#nodes tbody tr[data-node]")];
  const body = document.querySelector("#nodes tbody");
  let every = false;

  function toggle(row, open) {
    const number = Number(row.dataset.node), button = row.querySelector("button.open");
    let detail = byId(`inside-${number}`);
    if (open === undefined) open = !detail || detail.hidden;
    if (open && !detail) {
      detail = element("tr", { class: "detail", id: `inside-${number}` }, element("td", { colspan: 5 }, inside(data.nodes[number])));
      row.after(detail);
    }
    if (detail) detail.hidden = !open || row.hidden;
    button.setAttribute("aria-expanded", String(open));
    if (open) button.setAttribute("aria-controls", `inside-${number}`);
  }
  function reveal(number) {
    const row = rows[number];
    if (row.hidden) { byId("find").value = ""; byId("show").value = ""; every = true; arrange(); }
    toggle(row, true);
    row.querySelector("button.open").focus();
    row.scrollIntoView({ block: "start" });
  }
  let words = null;
  function textOf(number) {
    words = words || data.nodes.map((node) => [node.name, ...node.devices.map((device) => [device.uuid, model(device).product, device.pci,
      ...[...device.claims, ...device.partitions.flatMap((each) => [...each.claims, each.uuid, each.profile])].map((each) => `${each} ${(podsOf.get(each) || []).join(" ")}`)].join(" "))].join(" ").toLowerCase());
    return words[number];
  }
  function suits(node, wish) {
    const away = silent(node);
    if (!wish) return true;
    if (wish === "silent") return away;
    if (wish === "look") return away || node.totals.sick + node.totals.withheld + node.totals.drift + node.unread.length > 0;
    return node.totals[wish] > 0;
  }
  const usedOf = (row) => { const t = data.nodes[row.dataset.node].totals; return t.memory_bytes ? t.used_bytes / t.memory_bytes : 0; };
  let order = "name";
  function arrange() {
    const wish = byId("show").value, text = byId("find").value.trim().toLowerCase();
    if (byId("order").value !== order) {
      order = byId("order").value;
      const sorted = [...rows];
      if (order !== "name") sorted.sort((a, b) => (order === "used" ? usedOf(b) - usedOf(a) : usedOf(a) - usedOf(b)) || a.dataset.node - b.dataset.node);
      for (const row of sorted) { body.append(row); const detail = byId(`inside-${row.dataset.node}`); if (detail) body.append(detail); }
    }
    let met = 0, shown = 0;
    for (const row of body.querySelectorAll("tr[data-node]")) {
      const number = Number(row.dataset.node);
      const good = suits(data.nodes[number], wish) && (!text || textOf(number).includes(text));
      met += good;
      row.hidden = !good || (!every && shown >= SHOWN);
      shown += !row.hidden;
      const detail = byId(`inside-${number}`);
      if (detail) detail.hidden = row.hidden || row.querySelector("button.open").getAttribute("aria-expanded") !== "true";
    }
    byId("count").textContent = met === data.nodes.length ? `${met} nodes` : `${met} of ${data.nodes.length} nodes`;
    byId("more").hidden = shown === met;
    byId("more").textContent = `Show all ${met} nodes`;
  }
  function furnish() {
    const watch = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { draw(entry.target); watch.unobserve(entry.target); }
    }, { rootMargin: "300px" });
    for (const row of rows) {
      const head = row.cells[0], button = element("button", { type: "button", class: "open", "aria-expanded": "false", text: head.textContent });
      head.replaceChildren(button);
      button.addEventListener("click", () => toggle(row));
      watch.observe(row);
    }
  }
  function draw(row) {
    if (row.drawn) return;
    row.drawn = true;
    const node = data.nodes[row.dataset.node], cell = row.querySelector(".devices"), use = row.querySelector(".use");
    const text = element("div", { class: "small soft", text: cell.textContent });
    cell.replaceChildren(strip(node), text);
    const bar = element("span", { class: "bar", style: "width:80px;margin-right:8px", "aria-hidden": "true" }, element("i"));
    bar.firstChild.style.width = `${100 * usedOf(row)}%`;
    use.prepend(bar);
  }
  function shorten() {
    for (const table of document.querySelectorAll("table[data-long]")) {
      const rest = [...table.tBodies[0].rows].slice(Number(table.dataset.long));
      if (rest.length < 3) continue;
      for (const row of rest) row.hidden = true;
      const button = element("button", { type: "button", text: `Show ${rest.length} more` });
      button.addEventListener("click", () => { for (const row of rest) row.hidden = false; rest[0].tabIndex = -1; rest[0].focus(); button.remove(); });
      button.className = "only-screen";
      table.parentElement.after(button);
    }
  }

  legend();
  map();
  furnish();
  shorten();
  byId("tools").hidden = false;
  for (const id of ["show", "order"]) byId(id).addEventListener("change", arrange);
  byId("find").addEventListener("input", arrange);
  byId("more").addEventListener("click", () => { every = true; arrange(); });
  byId("open-all").addEventListener("click", () => { for (const row of rows) if (!row.hidden) toggle(row, true); });
  window.addEventListener("beforeprint", () => {
    for (const row of rows) draw(row);
    for (const table of document.querySelectorAll("table[data-long]")) for (const row of table.tBodies[0].rows) row.hidden = false;
    if (data.nodes.length <= FEW) for (const row of rows) toggle(row, true);
    else { every = true; arrange(); }
  });
  arrange();
  if (data.nodes.length <= FEW) for (const row of rows) toggle(row, true);
  document.documentElement.dataset.ready = "true";
})();
