// The page of the dashboard requests /api/state every few seconds and shows it. Charts of an hour or a day, and those of one LUN
// or session, come from /api/history. Text from the target becomes text, never markup.

const $ = (id) => document.getElementById(id);
// Lengths of the time axis and their steps, in seconds. The first three are those of a chart that is filling.
const axes = { "5m": [[60, 15], [120, 30], [300, 60]], "1h": [[3600, 600]], "24h": [[86400, 4 * 3600]] };
const step = 100; // more rows per click
const most = 1000; // rows
const patience = 10000; // ms to wait for an answer

// ---- Numbers

function scaled(v, base, units, digits = 3) {
  let i = 0;
  while (v >= base && i < units.length - 1) {
    v /= base;
    i++;
  }
  const decimals = i === 0 || v === 0 ? 0 : Math.max(0, digits - String(Math.floor(v)).length);
  return `${v.toFixed(decimals)} ${units[i]}`;
}
const rate = (v) => scaled(v, 1000, ["B/s", "kB/s", "MB/s", "GB/s"]);
const size = (v) => (v > 0 ? scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : "–");
const count = (v) => (v >= 1e6 ? scaled(v, 1000, ["", "k", "M", "G"]) : Math.round(v).toLocaleString("en"));
const depth = (v) => (v > 0 && v < 100 ? v.toPrecision(2) : count(v));
const many = (n, one, more = one + "s") => `${n.toLocaleString("en")} ${n === 1 ? one : more}`;

function time(seconds) {
  if (seconds === undefined || seconds === null) return "–";
  if (seconds === 0) return "0";
  if (seconds < 1e-3) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${seconds.toPrecision(3)} s`;
}

function age(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = units.findIndex(([n]) => s >= n);
  if (i < 0) return "0 s";
  const [n, name] = units[i];
  const next = units[i + 1];
  const rest = next ? Math.floor((s % n) / next[0]) : 0;
  return `${Math.floor(s / n)} ${name}` + (rest && i < 2 ? ` ${rest} ${next[1]}` : "");
}

const two = (n) => String(n).padStart(2, "0");
const ago = (text, now) => {
  const ms = now - new Date(text);
  return ms < 86400e3 ? `${age(ms).split(" ").slice(0, 2).join(" ")} ago` : when(text, now);
};
function agoLength(seconds) { // like 45 s, 10 min, 4 h
  if (seconds % 3600 === 0) return `${seconds / 3600} h`;
  return seconds % 60 === 0 ? `${seconds / 60} min` : `${seconds} s`;
}
const clock = (d) => `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
function when(text, now) {
  const d = new Date(text);
  const day = `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
  return d.toDateString() === now.toDateString() ? clock(d) : `${day} ${clock(d)}`;
}

// ---- Elements

function el(tag, cls, text) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
}
function say(e, text) {
  if (e.textContent !== text) e.textContent = text; // an equal text keeps the selection of the user
}
function look(e, cls) {
  if (e.className !== cls) e.className = cls;
}

// Parts of cells: a text with a small text below it, and a badge with one.
function lines(cell, text, small) {
  if (!cell.firstChild) cell.append(el("span"), el("small"));
  say(cell.firstChild, text);
  say(cell.lastChild, small ?? "");
}
function badge(cell, text, cls, small) {
  lines(cell, text, small);
  look(cell.firstChild, `badge ${cls}`);
}

// A column is [label, class of its cells, function that shows a row in a cell]. The first
// column is the heading of its row. kind returns the class of a row.
function fill(table, rows, key, columns, kind = () => "") {
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map((tr) => [tr.dataset.key, tr]));
  rows.forEach((row, i) => {
    const k = String(key(row));
    const cls = kind(row);
    let tr = old.get(k);
    old.delete(k);
    if (!tr) {
      tr = el("tr");
      tr.dataset.key = k;
      tr.role = "row"; // lost without this where rows are cards
      columns.forEach(([label, cellClass], j) => {
        const cell = el(j === 0 ? "th" : "td", cellClass);
        cell.role = j === 0 ? "rowheader" : "cell";
        if (j === 0) cell.scope = "row";
        else cell.dataset.label = label;
        tr.append(cell);
      });
    }
    look(tr, cls);
    columns.forEach(([, , show], j) => show(tr.cells[j], row));
    if (body.rows[i] !== tr) body.insertBefore(tr, body.rows[i] ?? null);
  });
  for (const tr of old.values()) tr.remove();
}

// link shows a text that opens the drawer of an object, with a small text below it.
function link(cell, href, text, small) {
  if (!cell.firstChild) cell.append(el("a"), el("small"));
  if (cell.firstChild.getAttribute("href") !== href) cell.firstChild.setAttribute("href", href);
  say(cell.firstChild, text);
  say(cell.lastChild, small ?? "");
}

// ---- Charts

const svgns = "http://www.w3.org/2000/svg";
function shape(parent, tag, cls, attrs) {
  const e = document.createElementNS(svgns, tag);
  if (cls) e.setAttribute("class", cls);
  for (const [k, v] of Object.entries(attrs ?? {})) e.setAttribute(k, v);
  parent.append(e);
  return e;
}

// A scale has the ticks of an axis, and a function that returns the share of the axis below a value.
// From 0, with at most four steps of 1, 2 or 5 times a power of ten:
const from = (floor) => (values) => linear(values, floor);
function linear(values, floor = 1000) {
  const highest = Math.max(floor, ...values);
  const p = 10 ** Math.floor(Math.log10(highest / 4));
  const step = [1, 2, 5, 10].map((m) => m * p).find((s) => highest / s <= 4);
  const n = Math.ceil(highest / step - 1e-9);
  return { ticks: Array.from({ length: n + 1 }, (_, i) => i * step), part: (v) => v / (n * step) };
}

// Powers of ten at equal distances, because latencies differ by factors. Values below 1 µs are on the axis.
function decades(values) {
  const exponents = (values.length ? values : [1e-4]).map((v) => Math.log10(Math.max(v, 1e-6)));
  const lo = Math.floor(Math.min(...exponents));
  const n = Math.max(1, Math.ceil(Math.max(...exponents)) - lo);
  const between = n === 1 ? [1, 2, 5] : n === 2 ? [1, 3] : [1];
  const ticks = Array.from({ length: n }, (_, i) => between.map((m) => m * 10 ** (lo + i))).flat();
  return { ticks: [...ticks, 10 ** (lo + n)], part: (v) => Math.max(0, (Math.log10(v) - lo) / n) };
}

class Chart {
  // Series are [key of a point, name]. The chart is a new panel of parent.
  constructor(parent, id, title, series, format, scale) {
    Object.assign(this, { id, title, series, format, scale, points: [], width: 0, span: "5m", every: 2 });
    const panel = parent.appendChild(el("section", "panel"));
    panel.setAttribute("aria-labelledby", `${id}-title`);
    const bar = panel.appendChild(el("div", "bar"));
    const heading = bar.appendChild(el(parent.id === "charts" ? "h3" : "h4", "", title));
    heading.id = `${id}-title`;
    const legend = bar.appendChild(el("div", "legend"));
    const box = panel.appendChild(el("div", "chart"));
    box.id = id;
    this.svg = shape(box, "svg", "", { role: "img", "aria-label": `${title}: no data yet` });
    this.frame = shape(this.svg, "g");
    this.curves = series.map(([k]) => shape(this.svg, "path", `curve ${k}`));
    this.cursor = shape(this.svg, "line", "cursor", { visibility: "hidden" });
    this.dots = series.map(([k]) => shape(this.svg, "circle", `dot ${k}`, { r: 3.5, visibility: "hidden" }));
    this.at = legend.appendChild(el("span", "at"));
    this.values = series.map(([k, name]) => {
      const item = legend.appendChild(el("span"));
      item.append(el("i", k), name, " ");
      return item.appendChild(el("b"));
    });
    this.svg.addEventListener("pointermove", (e) => this.point(e.clientX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw(this.points)).observe(box);
  }

  x(t) { return this.left + (this.width - this.left - this.right) * (1 - (this.end - t) / (this.length * 1000)); }
  y(v) { return this.top + (this.height - this.top - this.bottom) * (1 - this.part(v)); }

  draw(points) {
    this.points = points;
    this.width = this.svg.clientWidth;
    this.height = this.svg.clientHeight;
    if (!this.width) return;
    Object.assign(this, { left: 66, right: 14, top: 10, bottom: 24 });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.end = points.length ? points.at(-1).at : Date.now();
    const lengths = axes[this.span];
    [this.length, this.dx] = lengths.find(([s]) => !points.length || points[0].at >= this.end - s * 1000) ?? lengths.at(-1);
    const seen = points.filter((p) => p.at >= this.end - this.length * 1000);
    Object.assign(this, this.scale(seen.flatMap((p) => this.series.map(([k]) => p[k])).filter((v) => v !== undefined)));
    this.axes();
    this.series.forEach(([k], i) => {
      const path = (run) => "M" + run.map((p) => `${this.x(p.at).toFixed(1)} ${this.y(p[k]).toFixed(1)}`).join("L");
      this.curves[i].setAttribute("d", this.runs(seen, k).map(path).join(""));
    });
    this.svg.dataset.points = seen.length;
    const last = points.at(-1);
    this.svg.setAttribute("aria-label", last
      ? `${this.title}: ` + this.series.map(([k, name]) => `${name} ${this.format(last[k])}`).join(", ") + `; the last ${age(last.at - seen[0].at)}`
      : `${this.title}: no data yet`);
    this.point(this.over ?? null);
  }

  // Returns the points in runs. No line connects points with missing values between them.
  runs(points, k) {
    const list = [];
    let before = null;
    for (const p of points) {
      if (p[k] === undefined) {
        before = null;
        continue;
      }
      if (!before || p.at - before.at > 4 * this.every * 1000) list.push([]);
      list.at(-1).push(p);
      before = p;
    }
    return list;
  }

  axes() {
    this.frame.replaceChildren();
    for (const v of this.ticks) {
      const y = Math.round(this.y(v));
      shape(this.frame, "line", "grid", { x1: this.left, x2: this.width - this.right, y1: y, y2: y });
      shape(this.frame, "text", "", { x: this.left - 8, y: y + 4, "text-anchor": "end" }).textContent = this.format(v).replace(/\.0+(?= )/, "");
    }
    const dx = this.width < 460 ? 2 * this.dx : this.dx;
    for (let s = 0; s <= this.length; s += dx) {
      const x = this.x(this.end - s * 1000);
      const anchor = s === 0 ? "end" : "middle";
      shape(this.frame, "text", "", { x: s === 0 ? this.width - this.right : x, y: this.height - 6, "text-anchor": anchor })
        .textContent = s > 0 ? `−${agoLength(s)}` : stale ? clock(new Date(this.end)) : "now";
    }
  }

  // Shows the values at a position on the screen, or the last ones.
  point(clientX) {
    this.over = clientX;
    let p = this.points.at(-1);
    if (clientX !== null && p && this.width) {
      const x = clientX - this.svg.getBoundingClientRect().left;
      p = this.points.reduce((a, b) => (Math.abs(this.x(a.at) - x) <= Math.abs(this.x(b.at) - x) ? a : b));
      const at = this.x(p.at).toFixed(1);
      for (const [k, v] of Object.entries({ x1: at, x2: at, y1: this.top, y2: this.height - this.bottom, visibility: "visible" })) this.cursor.setAttribute(k, v);
    } else {
      this.cursor.setAttribute("visibility", "hidden");
    }
    this.series.forEach(([k], i) => {
      const there = clientX !== null && p && p[k] !== undefined;
      this.dots[i].setAttribute("visibility", there ? "visible" : "hidden");
      if (there) {
        this.dots[i].setAttribute("cx", this.x(p.at).toFixed(1));
        this.dots[i].setAttribute("cy", this.y(p[k]).toFixed(1));
      }
      say(this.values[i], p ? this.format(p[k]) : "–");
    });
    say(this.at, clientX !== null && p ? clock(new Date(p.at)) : "");
  }
}

// ---- State

let interval = 2; // seconds
let started = "";
let stale = false; // the target does not answer
let points = []; // of the last five minutes
let now = new Date(); // of the last sample
let portals = [];
const recent = { events: [], refused: [] }; // the last one first
const keep = { events: 100, refused: 50 };
const open = new Set(); // targets whose idle LUNs are shown
const lists = {
  sessions: { rows: 25, key: (r) => `${r.tsih} ${r.started}`, noun: "session" },
  luns: { rows: 50, key: (r) => r.key, noun: "LUN" },
};
const latencies = [["read50", "Read p50"], ["read99", "p99"], ["write50", "Write p50"], ["write99", "p99"]];
const commands = [["reads", "Reads"], ["writes", "Writes"], ["others", "Others"]];
const bytes = (v) => (v === undefined ? "–" : size(v));
const charts = [
  new Chart($("charts"), "throughput", "Throughput", [["read", "Read"], ["write", "Write"]], rate, linear),
  new Chart($("charts"), "latency", "Latency", latencies, time, decades),
  new Chart($("charts"), "commands", "Commands per second", commands, count, from(10)),
  new Chart($("charts"), "errors", "Errors", [["errors", "Errors and aborts"]], count, from(4)),
];
const drawerCharts = [
  new Chart($("drawer-charts"), "own-commands", "Commands per second", commands, count, from(10)),
  new Chart($("drawer-charts"), "own-latency", "Read and write latency", latencies, time, decades),
  new Chart($("drawer-charts"), "own-throughput", "Throughput", [["read", "Read"], ["write", "Write"]], rate, linear),
  new Chart($("drawer-charts"), "own-sizes", "Mean size of a command", [["read_size", "Read"], ["write_size", "Write"]], bytes, from(4096)),
  new Chart($("drawer-charts"), "own-errors", "Errors", [["errors", "Errors and aborts"]], count, from(4)),
];

// pointOf returns a point of /api/state as those of /api/history are.
const pointOf = (p) => ({
  number: p.number, at: new Date(p.time).getTime(),
  read: p.read_bytes_per_second, write: p.write_bytes_per_second,
  reads: p.read.iops, writes: p.write.iops, others: Math.max(0, p.iops - p.read.iops - p.write.iops), errors: p.errors,
  read50: p.read.latency_p50, read99: p.read.latency_p99, write50: p.write.latency_p50, write99: p.write.latency_p99,
});

const load = [
  ["IOPS", "n", (c, r) => say(c, count(r.iops))],
  ["Read", "n", (c, r) => say(c, rate(r.read_bytes_per_second))],
  ["Write", "n", (c, r) => say(c, rate(r.write_bytes_per_second))],
  ["Read p99", "n", (c, r) => say(c, time(r.read.latency_p99))],
  ["Write p99", "n", (c, r) => say(c, time(r.write.latency_p99))],
  ["Depth", "n", (c, r) => say(c, depth(r.depth))],
];

function numbers(ids) { // 0, 1, 2, 5 as 0–2, 5
  const parts = [];
  for (const id of ids) {
    const last = parts.at(-1);
    if (last && last[1] === id - 1) last[1] = id;
    else parts.push([id, id]);
  }
  return parts.map(([a, b]) => (a === b ? `${a}` : a + 1 === b ? `${a}, ${b}` : `${a}–${b}`)).join(", ");
}

function showSessions(s) {
  lists.sessions.columns ??= [
    ["Initiator", "", (c, r) => link(c, `#session/${r.tsih}`, r.initiator, `session ${r.tsih}` + (r.remote ? ` from ${r.remote}` : "") + (r.connections > 1 ? `, ${r.connections} connections` : ""))],
    ["Transport", "", (c, r) => badge(c, r.transport === "iser" ? "iSER" : "TCP", r.unprotected ? "warn" : r.transport === "iser" ? "info" : "plain",
      r.unprotected ? `${r.ipsec}: ${r.unprotected}` : r.ipsec)],
    ["Target and LUNs", "wrap wide", (c, r) => (r.discovery ? lines(c, "discovery") : lines(c, r.target, r.luns?.length ? `LUN ${numbers(r.luns)}` : "no LUNs"))],
    ...load,
    ["Age", "n", (c, r) => say(c, age(now - new Date(r.started)))],
  ];
  fill($("sessions"), s.rows, lists.sessions.key, lists.sessions.columns);
  showRest("sessions", s, s.matching - s.rows.length);
}

const colours = { ready: "good", "not ready": "bad", failed: "bad", orphaned: "bad" };
const lunLink = (target, id) => `#lun/${encodeURIComponent(target)}/${id}`;
function lunState(c, r) {
  const state = r.health ?? r.state;
  badge(c, state, colours[state] ?? "warn", r.since ? `since ${when(r.since, now)}: ${r.reason}` : r.reason);
}

// quiet reports whether an object has no load. On a phone its zeros are left out.
const quiet = (r) => r.iops === 0 && r.in_flight === 0 && r.errors === 0;

// showLUNs shows the LUNs by target: a row with the totals of a target and how many idle LUNs are hidden, and then the others.
function showLUNs(s) {
  const byTarget = new Map(s.groups.map((g) => [g.target, []]));
  for (const r of s.rows) byTarget.get(r.target)?.push(r);
  const rows = [];
  for (const g of s.groups) {
    rows.push({ ...g, group: true, kind: quiet(g) ? "group quiet" : "group", key: `group ${g.target}` });
    for (const r of byTarget.get(g.target)) rows.push({ ...r, kind: r.idle && !r.health && r.state === "ready" ? "idle" : quiet(r) ? "quiet" : "", key: `${r.target} ${r.id} ${r.state === "draining"}` });
  }
  lists.luns.columns ??= [
    ["LUN", "", (c, r) => {
      if (r.group) {
        lines(c, r.target, [many(r.luns, "LUN"), many(r.sessions, "session"), r.alias].filter(Boolean).join(", "));
        idleButton(c, r);
      } else link(c, lunLink(r.target, r.id), `LUN ${r.id}`);
    }],
    ["State", "wrap wide", (c, r) => {
      if (!r.group) lunState(c, r);
      else badge(c, r.trouble ? `${r.trouble} down` : r.luns ? "all ready" : "empty", r.trouble ? "bad" : r.luns ? "good" : "plain");
    }],
    ["Size", "n", (c, r) => lines(c, size(r.size), r.group ? "" : r.read_only ? `${r.backend}, read only` : r.backend)],
    ["Reservation", "wrap", (c, r) => say(c, r.group ? "" : r.reservation ?? "–")],
    ...load,
  ];
  fill($("luns"), rows, lists.luns.key, lists.luns.columns, (r) => r.kind);
  showRest("luns", s, s.matching - s.hidden - s.rows.length);
}

function idleButton(c, g) {
  if (c.children.length < 3) {
    const b = c.appendChild(el("button", "idle-button"));
    b.type = "button";
    b.value = g.target;
    b.addEventListener("click", () => {
      if (!open.delete(b.value)) open.add(b.value);
      ask();
    });
  }
  const b = c.lastChild;
  b.hidden = !g.hidden && !open.has(g.target);
  say(b, open.has(g.target) ? "Hide idle LUNs" : `Show ${many(g.hidden, "idle LUN")}`);
  b.setAttribute("aria-label", `${b.textContent} of ${g.target}`);
}

// showRest shows how many objects there are, what to do without objects, and the button for the rows that are left.
function showRest(id, t, left) {
  const l = lists[id];
  const total = t.all.toLocaleString("en");
  say($(`${id}-count`), t.matching === t.all ? total : `${t.matching.toLocaleString("en")} of ${total}`);
  say($(`tab-${id}-count`), total);
  const none = id === "luns" ? t.groups.length === 0 : t.rows.length === 0;
  $(id).hidden = none;
  $(`${id}-empty`).hidden = t.matching > 0;
  if (t.matching === 0) help($(`${id}-empty`), t.all === 0 ? empty[id]() : ["Nothing matches the filter."]);
  const more = Math.min(left, most - t.rows.length);
  $(`${id}-more`).hidden = more <= 0;
  say($(`${id}-more`), `Show ${many(Math.min(step, more), "more " + l.noun, "more " + l.noun + "s")}`);
}

// portal returns an address that initiators can use.
function portal() {
  const address = portals[0]?.advertise?.[0] ?? portals[0]?.address ?? "ADDRESS:3260";
  return address.replace(/^(0\.0\.0\.0|\[::\])(?=:)/, location.hostname);
}
let firstTarget = "";
// What to do if there are no objects: a text and commands.
const empty = {
  sessions: () => ["No initiator is logged in. On a Linux host:",
    `iscsiadm -m discovery -t sendtargets -p ${portal()}\niscsiadm -m node -T ${firstTarget || "TARGET"} -p ${portal()} --login`,
    "If a login is refused, the tab Events says why. For other systems, on the machine of the target:", `iser-target connect ${firstTarget || "TARGET"} --for windows`],
  luns: () => (firstTarget
    ? ["No target has LUNs. On the machine of the target:", `iser-target lun create ${firstTarget} --path /srv/disk.img --size 10G`]
    : ["There is no target. On the machine of the target:", "iser-target target create iqn.2026-11.org.example:store --initiator 'iqn.1993-08.org.debian:*'\niser-target lun create store --path /srv/disk.img --size 10G"]),
};
function help(box, texts) {
  if (box.dataset.texts === texts.join("\n")) return;
  box.dataset.texts = texts.join("\n");
  box.replaceChildren(...texts.map((text, i) => el(i % 2 ? "pre" : "p", "", text)));
}

// ---- Events

const brief = (name) => (name?.includes(":") ? `…${name.slice(name.lastIndexOf(":"))}` : name);
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// A sentence is a list of texts and of names, which are {name}. used names the attributes that it has.
function sentence(e) {
  const a = e.attrs ?? {};
  const used = new Set(["outcome", "local", "isid", "cid", "session", "stage", "restart", "transport", "target", "initiator", "lun"]); // shown, or useless here
  const take = (k) => {
    used.add(k);
    return a[k];
  };
  const initiator = { name: a.initiator || "an initiator" };
  const target = a.session === "discovery" ? "the list of targets" : { name: a.target || "the target" };
  const over = a.transport ? ` over ${a.transport === "iser" ? "iSER" : "TCP"}` : "";
  const lun = a.lun === undefined ? null : [`LUN ${a.lun} of `, { name: a.target || "a target" }];
  const because = () => (a.reason ? `: ${take("reason")}` : "");
  let parts;
  if (e.event === "login" && a.outcome === "accepted") parts = [initiator, " logged in to ", target, over, ` from ${take("remote")}`];
  else if (e.event === "login" && a.outcome === "refused") {
    parts = ["Refused the login of ", initiator, ...(a.target ? [" to ", target] : []), ` from ${take("remote")}`, because()];
  } else if (e.event === "session" && e.text === "session ended") {
    parts = [initiator, a.reason === "logout" ? " logged out of " : " lost its session with ", target, a.duration ? ` after ${take("duration")}` : ""];
    if (a.reason === "logout" || a.reason === "discovery done") {
      if (a.reason !== "logout") parts[1] = " has read ";
      take("reason");
    } else parts.push(because());
  } else if (e.event === "session" && e.text === "session killed") parts = [`${capital(take("by") ?? "an operator")} ended session ${take("tsih")} of `, initiator, because()];
  else if (e.event === "config" && a.change) parts = [capital(take("change")), a.restart ? " (at the next start)" : ""];
  else if (e.text === "serving" && a.portal) parts = [`Serving on ${take("portal")}`];
  else if (lun) parts = [...lun, `: ${e.text}`, because()];
  else parts = [capital(e.text), ...(a.initiator ? [": ", initiator] : []), because()];
  if (parts.some((p) => p === initiator && a.initiator) || !a.initiator) used.add("initiator");
  else used.delete("initiator");
  const rest = Object.entries(a).filter(([k, v]) => !used.has(k) && v !== "" && v !== "[]" && v !== false);
  return { parts, rest: rest.map(([k, v]) => `${k.replaceAll("_", " ")} ${v}`).join(" · ") };
}

function showSentence(cell, e) {
  if (cell.firstChild) return; // an event does not change
  const { parts, rest } = sentence(e);
  const text = cell.appendChild(el("span"));
  for (const p of parts) {
    if (typeof p === "string") text.append(p);
    else {
      const b = text.appendChild(el("b", "", brief(p.name)));
      b.title = p.name;
    }
  }
  cell.append(el("small", "", rest));
}

function showTime(cell, e) {
  if (!cell.firstChild) {
    const t = cell.appendChild(el("time"));
    t.dateTime = e.time;
    t.title = new Date(e.time).toLocaleString();
  }
  say(cell.firstChild, ago(e.time, now));
}

function showEvents(a) {
  for (const id of ["events", "refused"]) recent[id] = [...a[id], ...recent[id]].slice(0, keep[id]);
  const attr = (k) => (c, e) => say(c, String(e.attrs?.[k] || "–"));
  const key = (e) => `${started} ${e.number}`; // the numbers of another process begin at 1, too
  fill($("refused"), recent.refused, key, [
    ["Time", "time", showTime],
    ["Initiator", "wrap wide", attr("initiator")],
    ["Target", "wrap wide", attr("target")],
    ["From", "time wide", attr("remote")],
    ["Stage", "", attr("stage")],
    ["Reason", "wrap wide", (c, e) => lines(c, String(e.attrs?.reason ?? "–"), e.attrs?.status && `status: ${e.attrs.status}`)],
  ]);
  say($("refused-count"), recent.refused.length ? String(recent.refused.length) : "");
  const levels = { ERROR: "bad", WARN: "warn" };
  fill($("events"), recent.events, key, [
    ["Time", "time", showTime],
    ["Level", "", (c, e) => badge(c, { ERROR: "error", WARN: "warning" }[e.level] ?? e.level.toLowerCase(), levels[e.level] ?? "plain")],
    ["About", "", (c, e) => say(c, e.event)],
    ["What", "wrap wide", showSentence],
  ]);
  for (const id of ["refused", "events"]) {
    $(id).hidden = recent[id].length === 0;
    $(`${id}-empty`).hidden = recent[id].length > 0;
  }
}

// alarm shows in the pill, the title and the icon of the tab that something is down: how many LUNs, or "!".
function alarm(text, cls, mark) {
  say($("health"), text);
  look($("health"), `pill ${cls}`);
  const title = `${mark ? `(${mark}) ` : ""}iser-target ${location.host}`;
  if (document.title !== title) document.title = title;
  const icon = cls === "bad" ? "icon-bad.svg" : "icon.svg";
  if ($("icon").getAttribute("href") !== icon) $("icon").setAttribute("href", icon);
}

function showHealth(a) {
  const trouble = [];
  if (a.not_ready) trouble.push(`${many(a.not_ready, "LUN")} not ready`);
  if (a.unwell) trouble.push(`${many(a.unwell, "LUN")} not healthy`);
  if (a.pending.length) trouble.push("restart pending");
  const down = a.not_ready + a.failed;
  alarm(trouble.join(", ") || "Serving", down ? "bad" : trouble.length ? "warn" : "good", down || "");
  $("trouble-panel").hidden = a.trouble.length === 0;
  const all = a.not_ready + a.unwell;
  say($("trouble-count"), all > a.trouble.length ? `the first ${a.trouble.length} of ${all}` : String(all));
  fill($("trouble"), a.trouble, (r) => `${r.target} ${r.id}`, [["LUN", "", (c, r) => link(c, lunLink(r.target, r.id), `LUN ${r.id}`, r.target)], ["State", "wrap wide", lunState]]);
  say($("about"), [
    a.version && `version ${a.version}`, `up ${age(now - new Date(a.started))}`, many(a.targets, "target"),
    `${a.portals.length === 1 ? "portal" : "portals"} ${a.portals.map((p) => p.address).join(", ")}`,
  ].filter(Boolean).join(" · "));
  notice($("pending"), a.pending);
  notice($("limits"), a.limits);
}

// showCluster shows the gateways of the group that the target is in, and what is wrong with it.
function showCluster(c) {
  $("cluster-panel").hidden = !c;
  notice($("cluster-trouble"), c ? [c.reason && `This gateway serves no shared LUN: ${c.reason}`, c.conflict, c.unserved ? `${many(c.unserved, "shared LUN")} served by no gateway` : ""].filter(Boolean) : []);
  if (!c) return;
  say($("cluster-count"), c.all > c.gateways.length ? `the first ${c.gateways.length} of ${c.all}` : String(c.all));
  fill($("cluster"), c.gateways, (g) => g.name, [
    ["Gateway", "", (cell, g) => lines(cell, g.name, g.name === c.name ? "this one" : "")],
    ["State", "wrap wide", (cell, g) => {
      if (g.config_reason) badge(cell, "old configuration", "bad", g.config_reason);
      else if (g.draining) badge(cell, "draining", "warn", "takes no LUN");
      else if (g.unable) badge(cell, "incomplete", "warn", `without ${many(g.unable, "LUN")}`);
      else badge(cell, "ready", "good");
    }],
    ["LUNs served", "n", (cell, g) => say(cell, g.luns.toLocaleString("en"))],
    ["Version", "", (cell, g) => lines(cell, g.version, g.config ? `configuration ${g.config}` : "")],
  ]);
}

// notice shows texts as the items of a notice, which is hidden without them.
function notice(box, texts) {
  box.hidden = texts.length === 0;
  const items = box.lastElementChild;
  if (items.children.length !== texts.length || [...items.children].some((li, i) => li.textContent !== texts[i])) {
    items.replaceChildren(...texts.map((text) => el("li", "", text)));
  }
}

function show(a) {
  if (started && a.started !== started) { // another process, whose numbers begin at 1
    started = "";
    points = recent.events = recent.refused = [];
    for (const h of histories) h.points = [];
    ask();
    return;
  }
  const begun = performance.now();
  started = a.started;
  interval = a.interval;
  now = new Date(a.time);
  portals = a.portals;
  firstTarget = a.luns.groups.map((g) => g.target).sort()[0] ?? "";
  const more = a.points.map(pointOf);
  if (more.length && more[0].number !== (points.at(-1)?.number ?? 0) + 1) points = more;
  else points = [...points, ...more];
  points = points.filter((p) => p.at >= now.getTime() - 310e3);
  showHealth(a);
  showCluster(a.cluster);
  const t = a.total;
  for (const [id, text] of Object.entries({ read: rate(t.read_bytes_per_second), write: rate(t.write_bytes_per_second), iops: count(t.iops), "read-p99": time(t.read?.latency_p99), "write-p99": time(t.write?.latency_p99), depth: depth(t.depth) })) {
    say($(`tile-${id}`), text);
  }
  if ($("span").value === "5m") drawAll(charts, "5m", interval, points);
  showSessions(a.sessions);
  showLUNs(a.luns);
  showEvents(a);
  say($("interval"), String(a.interval));
  performance.clearMeasures("show"); // the last one is enough
  performance.measure("show", { start: begun });
}

function drawAll(list, span, every, list2) {
  for (const c of list) {
    Object.assign(c, { span, every });
    c.draw(list2);
  }
}

// ---- Requests

let timer = 0;
let asking = null;
let answered = null; // time of the last answer

// absolute returns the URL of a path relative to the page. fetch takes none with a user and a password, which that of the page may have.
const absolute = (path) => new URL(path, location.origin + location.pathname);

function url() {
  const q = new URLSearchParams({ after: points.at(-1)?.number ?? 0, events: Math.max(0, ...[...recent.events, ...recent.refused].map((e) => e.number)) });
  for (const target of [...open].slice(-100)) q.append("luns.open", target);
  for (const [id, l] of Object.entries(lists)) {
    q.set(`${id}.rows`, l.rows);
    q.set(`${id}.sort`, $(`${id}-sort`).value);
    const find = $(`${id}-find`).value.trim();
    if (find) q.set(`${id}.find`, find);
  }
  return `api/state?${q}`;
}

// lost notes whether the target answers. Old numbers are grey, and no longer called those of now.
function lost(is) {
  $("lost").hidden = !is;
  document.body.classList.toggle("stale", is);
  if (stale === is) return;
  stale = is;
  for (const c of [...charts, ...drawerCharts]) c.draw(c.points);
}

// A History requests the points of a span, those of the total or of the object of the drawer, when new ones are due.
class History {
  constructor(list, select) {
    Object.assign(this, { list, select, of: "", points: [], asked: 0, every: 0 });
    select.addEventListener("change", () => {
      drawAll(list, select.value, 2, []);
      this.ask();
    });
  }

  // Returns the query of what is shown, or null.
  what() { return this.select.value === "5m" ? null : ""; }

  async ask() {
    const what = this.what();
    const of = what === null ? "" : `${what} ${this.select.value}`;
    if (of !== this.of) Object.assign(this, { of, points: [], asked: 0, every: 0 });
    if (what === null || document.hidden || Date.now() - this.asked < this.every * 1000) return;
    this.asked = Date.now();
    const q = new URLSearchParams(what);
    q.set("span", this.select.value);
    q.set("after", this.points.at(-1)?.at ?? 0);
    let a;
    try {
      const r = await fetch(absolute(`api/history?${q}`), { cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(patience) });
      if (of !== this.of) return;
      if (r.status === 404) return this.gone(await r.text());
      if (!r.ok) throw new Error(`${r.status}`);
      a = await r.json();
    } catch {
      this.asked = 0; // the next answer of the target asks again
      return;
    }
    if (of !== this.of) return;
    // The facts of an object are of the last sample, so that they come more often than the points of a day.
    this.every = what === "" ? a.every : interval;
    this.points = [...this.points, ...a.points].filter((p) => p.at > new Date(a.time).getTime() - a.seconds * 1000 - 1);
    this.got(a);
    drawAll(this.list, this.select.value, a.every, this.points);
  }

  got() {}
  gone() {}
}

const histories = [new History(charts, $("span")), new History(drawerCharts, $("drawer-span"))];
const [, drawer] = histories;
let object = ""; // query of the object in the drawer; empty: it is closed
drawer.what = () => object || null;
drawer.got = (a) => {
  say($("drawer-title"), a.title);
  say($("drawer-command"), a.command);
  $("drawer-state").hidden = !a.state;
  say($("drawer-state"), a.state ?? "");
  look($("drawer-state"), `badge ${colours[a.state] ?? "warn"}`);
  const facts = $("drawer-facts");
  if (facts.dataset.facts !== JSON.stringify(a.facts)) {
    facts.dataset.facts = JSON.stringify(a.facts);
    facts.replaceChildren(...(a.facts ?? []).flatMap(([name, value]) => [el("dt", "", name), el("dd", "", value)]));
  }
  $("drawer-gone").hidden = true;
  $("drawer-empty").hidden = drawer.points.length > 0;
  $("drawer-charts").hidden = drawer.points.length === 0;
};
drawer.gone = (text) => {
  say($("drawer-gone"), `${capital(text.trim())}. It ended, or was removed.`);
  $("drawer-gone").hidden = false;
};

// ---- Views

const views = ["overview", "sessions", "luns", "events"];
let view = "overview";

// route shows the view, or the object, that the address names, so that an address can be shared.
function route() {
  const [what, ...rest] = location.hash.slice(1).split("/");
  const one = what === "lun" && rest.length === 2 ? new URLSearchParams({ target: decode(rest[0]), lun: rest[1] })
    : what === "session" && rest.length === 1 ? new URLSearchParams({ session: rest[0] }) : null;
  if (one) {
    if (object !== String(one)) {
      object = String(one);
      say($("drawer-title"), "…");
      $("drawer-facts").replaceChildren();
      delete $("drawer-facts").dataset.facts;
      for (const id of ["gone", "empty", "charts"]) $(`drawer-${id}`).hidden = true;
      drawAll(drawerCharts, $("drawer-span").value, 2, []);
      if (!$("drawer").open) $("drawer").showModal();
      $("drawer-title").focus();
      drawer.ask();
    }
    return;
  }
  object = "";
  if ($("drawer").open) $("drawer").close();
  view = views.includes(what) ? what : "overview";
  for (const v of views) {
    const on = v === view;
    $(`view-${v}`).hidden = !on;
    $(`tab-${v}`).setAttribute("aria-selected", String(on));
    $(`tab-${v}`).tabIndex = on ? 0 : -1;
  }
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

for (const [i, v] of views.entries()) {
  $(`tab-${v}`).addEventListener("click", () => (location.hash = v));
  $(`tab-${v}`).addEventListener("keydown", (e) => { // as the ARIA practices have it for tabs
    const to = { ArrowRight: i + 1, ArrowLeft: i + views.length - 1, Home: 0, End: views.length - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    location.hash = views[to % views.length];
    $(`tab-${views[to % views.length]}`).focus();
  });
}
$("drawer-close").addEventListener("click", () => $("drawer").close());
$("drawer").addEventListener("click", (e) => e.target === $("drawer") && $("drawer").close()); // outside it
$("drawer").addEventListener("close", () => {
  if (object) location.hash = view;
});
window.addEventListener("hashchange", route);

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const limit = setTimeout(() => mine.abort(new Error(`no answer within ${patience / 1000} s`)), patience);
  try {
    const r = await fetch(absolute(url()), { signal: mine.signal, cache: "no-store", credentials: "same-origin" });
    if (!r.ok) throw new Error(`${r.status} ${await r.text()}`);
    const a = await r.json();
    if (mine !== asking) return;
    answered = new Date();
    lost(false);
    show(a);
    for (const h of histories) h.ask();
  } catch (e) {
    if (mine !== asking) return; // a later request is in progress
    lost(true);
    alarm("No answer", "bad", "!");
    say($("lost-text"), `The target does not answer (${e.message}). ${answered ? `The page shows the state at ${clock(answered)}.` : ""} Retrying.`);
  } finally {
    clearTimeout(limit);
    if (mine === asking && !document.hidden) timer = setTimeout(ask, interval * 1000);
  }
}

for (const [id, l] of Object.entries(lists)) {
  let typing = 0;
  $(`${id}-find`).addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(ask, 200);
  });
  $(`${id}-sort`).addEventListener("change", ask);
  $(`${id}-more`).addEventListener("click", () => {
    l.rows = Math.min(l.rows + step, most);
    ask();
  });
}
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : ask()));
say($("host"), location.host);
document.title = `iser-target ${location.host}`;
route();
ask();
