"use strict";
// A running job, looked at once in an interval. All text of the job is put in as text, never as markup.

const token = location.hash.slice(1);
const KEPT = 120; // looks that the lines show
const history = new Map(); // by key: [{rate, queue}]
const state = { job: null, chosen: "", paused: false, stacks: null, lastLine: 0, find: "", failed: 0 };
const at = (id) => document.getElementById(id);

function make(name, options = {}, ...children) {
  const svg = name === "svg" || name === "path";
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "on") for (const [event, hear] of Object.entries(value)) element.addEventListener(event, hear);
    else if (value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

async function ask(what) {
  const answer = await fetch("api/" + what, { headers: { Authorization: "Bearer " + token }, cache: "no-store" });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

// Words and numbers.

function size(count) {
  if (count === null || count === undefined) return "";
  for (const [least, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (count >= least) return (count / least).toFixed(1) + " " + unit;
  return count + " B";
}

function duration(seconds) {
  if (seconds >= 1) return seconds.toPrecision(3) + " s";
  if (seconds >= 1e-3) return (seconds * 1e3).toPrecision(3) + " ms";
  return (seconds * 1e6).toPrecision(3) + " µs";
}

const many = (count, word) => `${count.toLocaleString()} ${count === 1 ? word : word.endsWith("s") ? word + "es" : word + "s"}`;
const total = (list, value) => list.reduce((sum, each) => sum + value(each), 0);
const isBad = (proc) => ["silent", "stopped", "dead"].includes(proc.state);

function note(key, rate, queue) {
  const line = history.get(key) ?? [];
  line.push({ rate, queue });
  if (line.length > KEPT) line.shift();
  history.set(key, line);
}

function line(key, what, caption) {
  const points = (history.get(key) ?? []).map((each) => each[what]);
  const top = Math.max(1, ...points);
  const step = 100 / (KEPT - 1);
  const first = KEPT - points.length;
  const path = points.map((value, n) => `${n ? "L" : "M"}${((first + n) * step).toFixed(2)},${(31 - (28 * value) / top).toFixed(2)}`).join("");
  const now = points.length ? points[points.length - 1] : 0;
  return make("figure", {},
    make("svg", { class: "line " + what, viewBox: "0 0 100 34", preserveAspectRatio: "none", role: "img", "aria-label": `${caption} ${now}` }, make("path", { d: path })),
    make("figcaption", {}, make("span", {}, caption), make("span", {}, Math.round(now).toLocaleString())));
}

// The grids: a row for each place in all dimensions but the last, which runs across.

function grid(procs) {
  const dims = Object.keys(procs[0].point);
  const across = dims[dims.length - 1];
  const rows = new Map();
  for (const proc of procs) {
    const key = dims.slice(0, -1).map((dim) => `${dim} ${proc.point[dim]}`).join(", ");
    if (!rows.has(key)) rows.set(key, []);
    rows.get(key).push(proc);
  }
  const width = Math.min(32, Math.max(...[...rows.values()].map((row) => row.length)));
  const box = make("div", { class: "grid", role: "group" });
  box.style.gridTemplateColumns = `max-content repeat(${width}, minmax(48px, max-content))`;
  if (across && width > 1) {
    box.append(make("span", { class: "name" }, ""));
    for (let n = 0; n < width; n++) box.append(make("span", { class: "name" }, n ? String(n) : `${across} 0`));
  }
  for (const [key, row] of rows) {
    row.forEach((proc, n) => {
      if (n % width === 0) box.append(make("span", { class: "name" }, n ? "" : key));
      box.append(cell(proc));
    });
    for (let n = row.length; n % width; n++) box.append(make("span"));
  }
  return box;
}

function cell(proc) {
  const running = proc.actors.flatMap((actor) => actor.running);
  const queue = total(proc.actors, (actor) => actor.queue);
  const classes = ["cell"];
  if (isBad(proc)) classes.push("bad");
  else if (running.length || total(proc.actors, (actor) => actor.rate) > 0) classes.push("busy");
  if (queue) classes.push("waits");
  if (proc.name === state.chosen) classes.push("chosen");
  const says = `${proc.name}: ${proc.state}` + (running.length ? `, ${running[0].endpoint} for ${duration(running[0].seconds)}` : "") + (queue ? `, ${queue} waiting` : "");
  const button = make("button", { class: classes.join(" "), "data-proc": proc.name, title: says, "aria-label": says, on: { click: () => choose(proc.name) } },
    isBad(proc) ? proc.state : queue ? String(queue) : proc.life > 1 ? `life ${proc.life}` : "");
  if (proc.cpu !== null) button.style.setProperty("--share", `${Math.round(30 + 70 * Math.min(1, proc.cpu))}%`);
  return button;
}

// The panel of one process.

function details() {
  const panel = at("details");
  const proc = procs().find((each) => each.name === state.chosen);
  panel.hidden = !state.chosen;
  if (!state.chosen) return;
  if (!proc) {
    panel.replaceChildren(make("p", {}, `${state.chosen} is not there any more`));
    return;
  }
  const facts = { host: proc.host, pid: proc.pid, state: proc.state, processor: proc.cpu === null ? "" : Math.round(proc.cpu * 100) + " %", memory: size(proc.memory), life: proc.life > 1 ? proc.life : "", "calls that wait": proc.calls || "" };
  panel.replaceChildren(
    make("header", {}, make("h1", {}, proc.name),
      make("button", { on: { click: () => showStacks(proc.name) } }, "stacks"),
      make("button", { on: { click: () => choose("") }, "aria-label": "close" }, "×")),
    make("table", {}, ...Object.entries(facts).filter(([, value]) => value !== "" && value !== null).map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, String(value))))),
    ...proc.actors.map((actor) => make("div", { class: "actor" },
      make("p", {}, make("b", {}, `${actor.name}[${actor.rank}] `), make("span", { class: "class" }, actor.class)),
      ...actor.running.map((each) => make("p", { class: "does" }, `${each.endpoint} for ${duration(each.seconds)}` + (each.caller ? `, called by ${each.caller}` : ""))),
      make("p", {}, `${actor.state}; ${many(actor.handled, "message")} handled` + (actor.failed ? `, ${actor.failed.toLocaleString()} failed` : "") + (actor.handled ? `, ${duration(actor.mean)} each` : "")),
      line(proc.name + actor.id, "rate", "handled a second"), line(proc.name + actor.id, "queue", "waiting"))),
    ...(state.stacks?.proc === proc.name ? [make("pre", { tabindex: "0" }, state.stacks.text || "no threads are told of")] : []));
}

function choose(name) {
  state.chosen = name;
  if (!name) state.stacks = null;
  draw();
}

async function showStacks(name) {
  state.stacks = { proc: name, text: "asking …" };
  details();
  try {
    state.stacks = await ask("stacks?proc=" + encodeURIComponent(name));
  } catch (error) {
    state.stacks = { proc: name, text: String(error.message) };
  }
  details();
}

// The whole.

const procs = () => (state.job ? state.job.hosts.flatMap((host) => host.procs.map((proc) => ({ ...proc, host: host.name }))) : []);

function draw() {
  const job = state.job;
  if (!job) return;
  const all = procs();
  const actors = all.flatMap((proc) => proc.actors);
  const focused = document.activeElement?.dataset?.proc;
  document.title = (job.failures.length ? `(${job.failures.length}) ` : "") + "mesh: " + (job.script.split("/").pop() || "python");
  at("script").textContent = `${job.script.split("/").pop() || "python"}, pid ${job.pid}`;
  at("summary").textContent = [many(job.hosts.length, "host"), many(all.length, "process"), many(actors.length, "actor"), `${total(actors, (actor) => actor.queue).toLocaleString()} waiting`].join(", ");
  at("totals").replaceChildren(line("", "rate", "handled a second"), line("", "queue", "waiting"));
  const meshes = new Map();
  for (const proc of all) meshes.set(proc.mesh, [...(meshes.get(proc.mesh) ?? []), proc]);
  at("meshes").replaceChildren(...[...meshes].map(([name, list]) => {
    const hosts = [...new Set(list.map((proc) => proc.host))];
    const where = hosts.length > 3 ? many(hosts.length, "host") : hosts.join(", ");
    return make("div", { class: "mesh" }, make("h2", {}, make("b", {}, name), ` ${many(list.length, "process")} on ${where}`), grid(list));
  }));
  if (focused) document.querySelector(`[data-proc="${CSS.escape(focused)}"]`)?.focus();
  const list = at("failures").querySelector("ol");
  const open = new Set([...list.querySelectorAll("details[open]")].map((each) => each.dataset.key));
  at("failures").hidden = job.failures.length === 0;
  list.replaceChildren(...job.failures.map((each) => {
    const [head, ...rest] = each.text.split("\n");
    const key = each.time + head;
    return make("li", {}, make("details", { "data-key": key, open: open.has(key) },
      make("summary", {}, head), make("pre", {}, rest.join("\n"))));
  }));
  details();
}

function say(text, isTrouble) {
  at("state").textContent = text;
  at("state").classList.toggle("bad", isTrouble);
}

async function look() {
  let pause = 1000;
  if (!state.paused && !document.hidden) {
    try {
      const job = await ask("look");
      pause = 1000 * job.interval;
      if (!state.job || job.time !== state.job.time) {
        state.job = job;
        const actors = procs().flatMap((proc) => proc.actors.map((actor) => [proc.name + actor.id, actor]));
        for (const [key, actor] of actors) note(key, actor.rate, actor.queue);
        note("", total(actors, ([, actor]) => actor.rate), total(actors, ([, actor]) => actor.queue));
        draw();
      }
      await logs();
      state.failed = 0;
      say("live", false);
    } catch (error) {
      state.failed += 1;
      pause = Math.min(30000, 1000 * 2 ** state.failed);
      say(error instanceof TypeError ? "the dashboard has ended" : error.message, true);
    }
  } else if (state.paused) {
    say("paused", false);
  }
  setTimeout(look, pause);
}

async function logs() {
  const found = await ask("logs?after=" + state.lastLine);
  if (!found.length) return;
  const pre = at("logs").querySelector("pre");
  const follows = pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 20;
  for (const each of found) {
    state.lastLine = each.number;
    const row = make("div", { class: each.error ? "error" : "" }, each.text);
    row.hidden = !each.text.includes(state.find);
    pre.append(row);
  }
  while (pre.childElementCount > 2000) pre.firstChild.remove();
  if (follows) pre.scrollTop = pre.scrollHeight;
}

function find() {
  state.find = at("find").value;
  for (const row of at("logs").querySelectorAll("pre > div")) row.hidden = !row.textContent.includes(state.find);
}

function onKey(event) {
  if (event.target.tagName === "INPUT") {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const cells = [...document.querySelectorAll(".cell")];
  const here = cells.findIndex((each) => each === document.activeElement);
  const go = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (go && cells.length) {
    event.preventDefault();
    cells[(here + go + cells.length) % cells.length].focus();
  } else if (event.key === "Escape") choose("");
  else if (event.key === "p") { state.paused = !state.paused; say(state.paused ? "paused" : "live", false); }
  else if (event.key === "s" && state.chosen) showStacks(state.chosen);
  else if (event.key === "/") { event.preventDefault(); at("find").focus(); }
}

document.addEventListener("keydown", onKey);
document.addEventListener("DOMContentLoaded", () => { at("find").addEventListener("input", find); look(); });
