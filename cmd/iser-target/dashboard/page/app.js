// The page of the dashboard requests /api/state every few seconds and shows it. Text from
// the target becomes text, never markup.

const $ = (id) => document.getElementById(id);
const spans = [[60, 15], [120, 30], [300, 60]]; // lengths of the time axis and their steps, in seconds
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
// column is the heading of its row.
function fill(table, rows, key, columns) {
  const body = table.tBodies[0];
  const old = new Map([...body.rows].map((tr) => [tr.dataset.key, tr]));
  rows.forEach((row, i) => {
    const k = String(key(row));
    let tr = old.get(k);
    old.delete(k);
    if (!tr) {
      tr = el("tr");
      tr.dataset.key = k;
      tr.role = "row"; // lost without this where rows are cards
      columns.forEach(([label, cls], j) => {
        const cell = el(j === 0 ? "th" : "td", cls);
        cell.role = j === 0 ? "rowheader" : "cell";
        if (j === 0) cell.scope = "row";
        else cell.dataset.label = label;
        tr.append(cell);
      });
    }
    columns.forEach(([, , show], j) => show(tr.cells[j], row));
    if (body.rows[i] !== tr) body.insertBefore(tr, body.rows[i] ?? null);
  });
  for (const tr of old.values()) tr.remove();
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
function linear(values) {
  const highest = Math.max(1000, ...values);
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
  // Series are [key of a point, name].
  constructor(id, series, format, scale) {
    Object.assign(this, { id, series, format, scale, points: [], width: 0 });
    this.svg = shape($(id), "svg", "", { role: "img" });
    this.frame = shape(this.svg, "g");
    this.curves = series.map(([k]) => shape(this.svg, "path", `curve ${k}`));
    this.cursor = shape(this.svg, "line", "cursor", { visibility: "hidden" });
    this.dots = series.map(([k]) => shape(this.svg, "circle", `dot ${k}`, { r: 3.5, visibility: "hidden" }));
    this.at = $(`${id}-legend`).appendChild(el("span", "at"));
    this.values = series.map(([k, name]) => {
      const item = $(`${id}-legend`).appendChild(el("span"));
      item.append(el("i", k), name, " ");
      return item.appendChild(el("b"));
    });
    this.svg.addEventListener("pointermove", (e) => this.point(e.clientX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw(this.points)).observe($(id));
  }

  x(t) { return this.left + (this.width - this.left - this.right) * (1 - (this.end - t) / (this.span * 1000)); }
  y(v) { return this.top + (this.height - this.top - this.bottom) * (1 - this.part(v)); }

  draw(points) {
    this.points = points;
    this.width = this.svg.clientWidth;
    this.height = this.svg.clientHeight;
    if (!this.width) return;
    Object.assign(this, { left: 66, right: 14, top: 10, bottom: 24 });
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.end = points.length ? points.at(-1).at : Date.now();
    [this.span, this.dx] = spans.find(([s]) => !points.length || points[0].at >= this.end - s * 1000) ?? spans.at(-1);
    const seen = points.filter((p) => p.at >= this.end - this.span * 1000);
    Object.assign(this, this.scale(seen.flatMap((p) => this.series.map(([k]) => p[k])).filter((v) => v !== undefined)));
    this.axes();
    this.series.forEach(([k], i) => {
      const path = (run) => "M" + run.map((p) => `${this.x(p.at).toFixed(1)} ${this.y(p[k]).toFixed(1)}`).join("L");
      this.curves[i].setAttribute("d", this.runs(seen, k).map(path).join(""));
    });
    this.svg.dataset.points = seen.length;
    const last = points.at(-1);
    this.svg.setAttribute("aria-label", last
      ? this.series.map(([k, name]) => `${name} ${this.format(last[k])}`).join(", ") + `; the last ${age(last.at - seen[0].at)}`
      : "no data yet");
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
      if (!before || p.at - before.at > 4 * interval * 1000) list.push([]);
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
    for (let s = 0; s <= this.span; s += dx) {
      const x = this.x(this.end - s * 1000);
      const anchor = s === 0 ? "end" : "middle";
      shape(this.frame, "text", "", { x: s === 0 ? this.width - this.right : x, y: this.height - 6, "text-anchor": anchor })
        .textContent = s === 0 ? "now" : `−${s % 60 ? `${s} s` : `${s / 60} min`}`;
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
let points = [];
const recent = { events: [], refused: [] }; // the last one first
const keep = { events: 100, refused: 50 };
const lists = {
  sessions: { rows: 25, key: (r) => `${r.tsih} ${r.started}`, noun: "session" },
  luns: { rows: 25, key: (r) => `${r.target} ${r.id} ${r.state === "draining"}`, noun: "LUN" },
};
const charts = [
  new Chart("throughput", [["read", "Read"], ["write", "Write"]], rate, linear),
  new Chart("latency", [["p50", "p50"], ["p99", "p99"]], time, decades),
];

const load = [
  ["IOPS", "n", (c, r) => say(c, count(r.iops))],
  ["Read", "n", (c, r) => say(c, rate(r.read_bytes_per_second))],
  ["Write", "n", (c, r) => say(c, rate(r.write_bytes_per_second))],
  ["p50", "n", (c, r) => say(c, time(r.latency_p50))],
  ["p99", "n", (c, r) => say(c, time(r.latency_p99))],
  ["In flight", "n", (c, r) => say(c, count(r.in_flight))],
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

function showSessions(s, now) {
  lists.sessions.columns ??= [
    ["Initiator", "", (c, r) => lines(c, r.initiator, `session ${r.tsih}` + (r.remote ? ` from ${r.remote}` : "") + (r.connections > 1 ? `, ${r.connections} connections` : ""))],
    ["Transport", "", (c, r) => badge(c, r.transport === "iser" ? "iSER" : "TCP", r.unprotected ? "warn" : r.transport === "iser" ? "info" : "plain",
      r.unprotected ? `${r.ipsec}: ${r.unprotected}` : r.ipsec)],
    ["Target and LUNs", "wrap wide", (c, r) => (r.discovery ? lines(c, "discovery") : lines(c, r.target, r.luns?.length ? `LUN ${numbers(r.luns)}` : "no LUNs"))],
    ...load,
    ["Age", "n", (c, r) => say(c, age(lists.sessions.now - new Date(r.started)))],
  ];
  lists.sessions.now = now;
  showList("sessions", s);
}

function showLUNs(s, now) {
  const colour = { ready: "good", "not ready": "bad", failed: "bad", orphaned: "bad" };
  lists.luns.now = now;
  const why = (r) => (r.since ? `since ${when(r.since, lists.luns.now)}: ${r.reason}` : r.reason);
  lists.luns.columns ??= [
    ["LUN", "", (c, r) => lines(c, `LUN ${r.id}`, r.target)],
    ["State", "wrap wide", (c, r) => badge(c, r.health ?? r.state, colour[r.health ?? r.state] ?? "warn", why(r))],
    ["Size", "n", (c, r) => lines(c, size(r.size), r.read_only ? `${r.backend}, read only` : r.backend)],
    ["Reservation", "wrap", (c, r) => say(c, r.reservation ?? "–")],
    ...load,
  ];
  showList("luns", s);
}

function showList(id, t) {
  const l = lists[id];
  fill($(id), t.rows, l.key, l.columns);
  say($(`${id}-count`), t.matching === t.all ? t.all.toLocaleString("en") : `${t.matching.toLocaleString("en")} of ${t.all.toLocaleString("en")}`);
  $(id).hidden = t.rows.length === 0;
  $(`${id}-empty`).hidden = t.rows.length > 0;
  say($(`${id}-empty`), t.all === 0 ? `No ${l.noun}s.` : "Nothing matches the filter.");
  const rest = Math.min(t.matching, most) - t.rows.length;
  $(`${id}-more`).hidden = rest <= 0;
  say($(`${id}-more`), `Show ${many(Math.min(step, rest), "more " + l.noun, "more " + l.noun + "s")}`);
}

const hidden = ["outcome", "local", "isid", "cid"]; // attributes that are shown elsewhere, or useless here
function attributes(e) {
  return Object.entries(e.attrs ?? {}).filter(([k, v]) => !hidden.includes(k) && v !== "").map(([k, v]) => `${k}=${v}`).join("  ");
}

function showEvents(a, now) {
  for (const id of ["events", "refused"]) recent[id] = [...a[id], ...recent[id]].slice(0, keep[id]);
  const attr = (k) => (c, e) => say(c, String(e.attrs?.[k] || "–"));
  fill($("refused"), recent.refused, (e) => e.number, [
    ["Time", "time", (c, e) => say(c, when(e.time, now))],
    ["Initiator", "wrap wide", attr("initiator")],
    ["Target", "wrap wide", attr("target")],
    ["From", "time wide", attr("remote")],
    ["Stage", "", attr("stage")],
    ["Reason", "wrap wide", (c, e) => lines(c, String(e.attrs?.reason ?? "–"), e.attrs?.status && `status: ${e.attrs.status}`)],
  ]);
  say($("refused-count"), recent.refused.length ? String(recent.refused.length) : "");
  const levels = { ERROR: "bad", WARN: "warn" };
  fill($("events"), recent.events, (e) => e.number, [
    ["Time", "time", (c, e) => say(c, when(e.time, now))],
    ["Level", "", (c, e) => badge(c, e.level.toLowerCase(), levels[e.level] ?? "plain")],
    ["About", "", (c, e) => say(c, e.event)],
    ["What", "wrap wide", (c, e) => lines(c, e.event === "login" ? `login ${e.attrs?.outcome ?? ""}` : e.text, attributes(e))],
  ]);
  for (const id of ["refused", "events"]) {
    $(id).hidden = recent[id].length === 0;
    $(`${id}-empty`).hidden = recent[id].length > 0;
  }
}

function showHealth(a, now) {
  const trouble = [];
  if (a.not_ready) trouble.push(`${many(a.not_ready, "LUN")} not ready`);
  if (a.unwell) trouble.push(`${many(a.unwell, "LUN")} not healthy`);
  if (a.pending.length) trouble.push("restart pending");
  say($("health"), trouble.join(", ") || "Serving");
  look($("health"), `pill ${trouble.length ? "warn" : "good"}`);
  say($("about"), [
    a.version && `version ${a.version}`, `up ${age(now - new Date(a.started))}`, many(a.targets, "target"),
    `${a.portals.length === 1 ? "portal" : "portals"} ${a.portals.map((p) => p.address).join(", ")}`,
  ].filter(Boolean).join(" · "));
  notice($("pending"), a.pending);
  notice($("limits"), a.limits);
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
    ask();
    return;
  }
  started = a.started;
  interval = a.interval;
  const now = new Date(a.time);
  const more = a.points.map((p) => ({
    number: p.number, at: new Date(p.time).getTime(),
    read: p.read_bytes_per_second, write: p.write_bytes_per_second, p50: p.latency_p50, p99: p.latency_p99,
  }));
  if (more.length && more[0].number !== (points.at(-1)?.number ?? 0) + 1) points = more;
  else points = [...points, ...more];
  points = points.filter((p) => p.at >= now.getTime() - (spans.at(-1)[0] + 10) * 1000);
  showHealth(a, now);
  const t = a.total;
  for (const [id, text] of Object.entries({ read: rate(t.read_bytes_per_second), write: rate(t.write_bytes_per_second), iops: count(t.iops), p50: time(t.latency_p50), p99: time(t.latency_p99), "in-flight": count(t.in_flight) })) {
    say($(`tile-${id}`), text);
  }
  for (const c of charts) c.draw(points);
  showSessions(a.sessions, now);
  showLUNs(a.luns, now);
  showEvents(a, now);
  say($("interval"), String(a.interval));
}

// ---- Requests

let timer = 0;
let asking = null;
let answered = null; // time of the last answer

function url() {
  const q = new URLSearchParams({ after: points.at(-1)?.number ?? 0, events: Math.max(0, ...[...recent.events, ...recent.refused].map((e) => e.number)) });
  for (const [id, l] of Object.entries(lists)) {
    q.set(`${id}.rows`, l.rows);
    q.set(`${id}.sort`, $(`${id}-sort`).value);
    const find = $(`${id}-find`).value.trim();
    if (find) q.set(`${id}.find`, find);
  }
  return `api/state?${q}`;
}

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const limit = setTimeout(() => mine.abort(new Error(`no answer within ${patience / 1000} s`)), patience);
  try {
    const r = await fetch(url(), { signal: mine.signal, cache: "no-store", credentials: "omit" });
    if (!r.ok) throw new Error(`${r.status} ${await r.text()}`);
    const a = await r.json();
    if (mine !== asking) return;
    answered = new Date();
    $("lost").hidden = true;
    show(a);
  } catch (e) {
    if (mine !== asking) return; // a later request is in progress
    say($("health"), "No answer");
    look($("health"), "pill bad");
    say($("lost"), `The target does not answer (${e.message}). ${answered ? `The page shows the state at ${clock(answered)}.` : ""} Retrying.`);
    $("lost").hidden = false;
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
ask();
