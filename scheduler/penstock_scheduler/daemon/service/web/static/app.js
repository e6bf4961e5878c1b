// The pages' own script: keeps a page up to date, shows what a cell is, moves through time, and tells what went wrong.
"use strict";

const byId = (id) => document.getElementById(id);

// What is told to the viewer, and to screen readers.
function say(text, bad = true) {
  const box = byId("message");
  box.textContent = text;
  box.className = bad ? "bad" : "good";
  box.hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { box.hidden = true; }, bad ? 15000 : 4000);
}

// Fragments -----------------------------------------------------------------------------------------------------------------

let past = false; // the map shows another time: pictures of nodes are not updated

function put(parts) {
  for (const [id, html] of Object.entries(parts)) {
    if (past && id.startsWith("node-")) continue;
    const element = byId(id);
    if (element === null) continue;
    if (id.startsWith("node-")) element.innerHTML = html; // many and small: as fast as can be
    else Idiomorph.morph(element, html, { morphStyle: "innerHTML", ignoreActiveValue: true });
    htmx.process(element);
  }
  document.dispatchEvent(new CustomEvent("parts", { detail: parts }));
}

async function readAgain() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.redirected || !answer.ok) { location.reload(); return; }
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  Idiomorph.morph(byId("main"), fresh.getElementById("main").innerHTML, { morphStyle: "innerHTML", ignoreActiveValue: true });
  htmx.process(byId("main"));
  document.body.dataset.live = fresh.body.dataset.live;
  document.dispatchEvent(new CustomEvent("parts", { detail: null }));
}

function connection(text) {
  const line = byId("connection");
  line.textContent = text;
  line.hidden = text === "";
}

let source = null;

function listen() {
  const { live, shows } = document.body.dataset;
  if (source) source.close();
  source = null;
  if (!live) return;
  source = new EventSource(`${live}${live.includes("?") ? "&" : "?"}shows=${encodeURIComponent(shows || "")}`);
  source.addEventListener("open", () => connection(""));
  source.addEventListener("parts", (event) => { connection(""); put(JSON.parse(event.data)); });
  source.addEventListener("reload", () => { readAgain(); });
  source.addEventListener("trouble", (event) => connection(event.data));
  source.addEventListener("error", async () => {
    connection("The connection is lost; what you see may be old. Trying again …");
    if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
    document.body.dataset.shows = "";
    try {
      const answer = await fetch("/v1/me");
      if (answer.status === 401) { location.reload(); return; }
    } catch { /* not there yet */ }
    setTimeout(listen, 3000);
  });
}

// A page in the background needs no updates; it gets them all at once when it is looked at again.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { if (source) source.close(); source = null; } else if (source === null) listen();
});

// Requests that htmx sends ---------------------------------------------------------------------------------------------------

document.addEventListener("htmx:responseError", (event) => {
  let text = `the server answered ${event.detail.xhr.status}`;
  try { text = JSON.parse(event.detail.xhr.responseText).error.message; } catch { /* not ours */ }
  say(text);
});
document.addEventListener("htmx:sendError", () => say("The server does not answer. Nothing was done, or it is safe to repeat."));
document.addEventListener("htmx:afterRequest", (event) => {
  const { done, then } = event.detail.elt.dataset;
  if (then && event.detail.successful) location.assign(then);
  if (done && event.detail.successful) say(done, false);
});

// Orders with a body, which htmx does not send as JSON: <form data-send="POST /v1/drains"> sends its fields, a button its data-body.
function token() {
  try { return JSON.parse(document.body.getAttribute("hx-headers") || "{}"); } catch { return {}; }
}

async function send(element, body) {
  const { send: order, ask, done } = element.dataset;
  if (ask && !confirm(ask.replaceAll("{name}", body.name ?? ""))) return;
  const [method, path] = order.split(" ");
  try {
    const answer = await fetch(path, { method, headers: { "Content-Type": "application/json", ...token() }, body: JSON.stringify(body) });
    if (answer.ok) { say(done, false); return; }
    let text = `the server answered ${answer.status}`;
    try { text = (await answer.json()).error.message; } catch { /* not ours */ }
    say(text);
  } catch { say("The server does not answer. Nothing was done, or it is safe to repeat."); }
}

document.addEventListener("submit", (event) => {
  if (!event.target.dataset.send) return;
  event.preventDefault();
  send(event.target, { ...JSON.parse(event.target.dataset.body || "{}"), ...Object.fromEntries(new FormData(event.target)) });
});
document.addEventListener("click", (event) => {
  const button = event.target.closest?.("button[data-send]");
  if (button) send(button, JSON.parse(button.dataset.body || "{}"));
});

// The map --------------------------------------------------------------------------------------------------------------------

const tip = byId("tip");

function describe(cell, x, y) {
  const job = cell.dataset.job;
  const row = byId(`holder-${job}`);
  tip.textContent = row
    ? [...row.cells].map((each) => each.textContent.replace(/\s+/g, " ").trim()).join(" · ")
    : `job ${job}`;
  tip.hidden = false;
  tip.style.left = `${Math.min(x + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(y + 12, innerHeight - tip.offsetHeight - 8)}px`;
}

let lit = null;

function light(job) {
  if (job === lit) return;
  lit = job;
  for (const each of document.querySelectorAll(".lit")) each.classList.remove("lit");
  if (job === null) { tip.hidden = true; return; }
  for (const each of document.querySelectorAll(`[data-job="${CSS.escape(job)}"]`)) each.classList.add("lit");
}

document.addEventListener("pointerover", (event) => {
  const cell = event.target.closest?.("[data-job]");
  light(cell ? cell.dataset.job : null);
  if (cell) describe(cell, event.clientX, event.clientY);
});

// Arrow keys move between the nodes of a map; Tab leaves it.
document.addEventListener("keydown", (event) => {
  const node = event.target.closest?.("a.node");
  if (!node || !["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
  const all = [...document.querySelectorAll("#map a.node")];
  const at = all.indexOf(node);
  const row = all.filter((each) => Math.abs(each.offsetTop - node.offsetTop) < 4).length || 1;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + row, ArrowUp: at - row, Home: 0, End: all.length - 1 }[event.key];
  const next = all[Math.max(0, Math.min(all.length - 1, to))];
  event.preventDefault();
  node.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// Time -----------------------------------------------------------------------------------------------------------------------

const slider = byId("slider");
if (slider) {
  const ago = byId("ago");
  const play = byId("play");
  let asked = 0;
  let timer = null;
  const show = async () => {
    const minutes = -ago.valueAsNumber;
    const number = ++asked;
    past = minutes > 0;
    byId("map").classList.toggle("past", past);
    const when = new Date(Date.now() - minutes * 60000).toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" });
    byId("ago-text").textContent = past ? `${when}: Penstock's jobs as they were; the state of nodes is not shown` : "now";
    if (!past) { readAgain(); return; }
    const query = new URLSearchParams(location.search);
    query.set("ago", minutes * 60);
    const answer = await fetch(`${byId("map").dataset.at}?${query}`);
    if (number !== asked || !answer.ok) return; // the slider has moved on
    for (const [id, html] of Object.entries(await answer.json())) {
      const element = byId(id);
      if (element) element.innerHTML = html;
    }
  };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "Replay the day"; };
  ago.addEventListener("input", () => { stop(); show(); });
  slider.addEventListener("submit", (event) => event.preventDefault());
  play.addEventListener("click", () => {
    if (timer !== null) { stop(); return; }
    if (ago.valueAsNumber === 0) ago.value = ago.min;
    play.textContent = "Stop";
    timer = setInterval(() => {
      ago.value = Math.min(0, ago.valueAsNumber + 10);
      show();
      if (ago.valueAsNumber === 0) stop();
    }, 400);
  });
}

// Charts: uPlot draws what a fragment beside it has as JSON. The fragment changes, the chart stays. -----------------------------

const charts = [];

function data(id) {
  const element = document.querySelector(`#${id} [data-json]`);
  return element ? JSON.parse(element.dataset.json) : null;
}

// Times of an axis: the time of the day, and the date at midnight and where only days are shown.
function timeLabel(at, step) {
  const when = new Date(at * 1000);
  if (step >= 86400 || (when.getHours() === 0 && when.getMinutes() === 0 && when.getSeconds() === 0)) {
    return when.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  }
  return when.toLocaleTimeString("en-GB", step < 60 ? {} : { hour: "2-digit", minute: "2-digit" });
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

class Chart {
  constructor(figure) {
    this.figure = figure;
    this.names = figure.dataset.lines.split(",");
    this.text = "";
    this.plot = null;
    this.empty = document.createElement("p");
    this.empty.className = "none";
    this.empty.textContent = "Nothing has been reported.";
    figure.append(this.empty);
  }

  draw() {
    const found = data(this.figure.dataset.from);
    const columns = found ? [found.time, ...this.names.map((name) => found[name] || [])] : [[]];
    const text = JSON.stringify(columns);
    if (text === this.text) return;
    this.text = text;
    const some = columns.slice(1).some((column) => column.some((value) => value !== null));
    this.empty.hidden = some;
    if (!some) { if (this.plot) { this.plot.destroy(); this.plot = null; } return; }
    const names = this.names;
    const last = columns.slice(1).map((column) => column.filter((value) => value !== null).at(-1));
    this.figure.setAttribute("role", "group");
    this.figure.setAttribute("aria-label", `${this.figure.querySelector("figcaption").textContent}; newest: ${names.map((name, at) => `${name} ${this.say(last[at])}`).join(", ")}`);
    if (this.plot) { this.plot.setData(columns); this.showNewest(); return; }
    const axis = { stroke: colour("--fg"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") }, font: "12px system-ui" };
    this.plot = new uPlot({
      width: this.figure.clientWidth, height: 190,
      scales: { x: { range: (self, first, last) => (first === last ? [first - 60, last + 60] : [first, last]) }, y: { range: (self, least, most) => [Math.min(0, least), (most || 1) * 1.05] } },
      axes: [{ ...axis, space: 70, values: (self, ticks, at, space, step) => ticks.map((tick) => timeLabel(tick, step)) }, { ...axis, size: 62, values: (self, ticks) => ticks.map((tick) => this.say(tick)) }],
      series: [{ value: (self, at) => (at === null ? "" : new Date(at * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" })) },
        ...names.map((name, at) => ({ label: name, stroke: colour(`--line-${at}`), width: 2, dash: at % 2 ? [6, 4] : [], points: { show: columns[0].length < 3 }, value: (self, value) => (value === null ? "–" : `${this.say(value)} ${this.figure.dataset.unit}`) }))],
      cursor: { y: false },
      hooks: { setLegend: [() => this.showNewest()] },
    }, columns, this.figure);
    this.showNewest();
  }

  // Without a pointer on the chart, the figures below it are the newest ones.
  showNewest() {
    if (this.plot && this.plot.cursor.left < 0) this.plot.setLegend({ idx: this.plot.data[0].length - 1 }, false);
  }

  say(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)} G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)} k`;
    return `${+value.toPrecision(3)}`;
  }
}

function drawCharts() { for (const chart of charts) chart.draw(); }

for (const figure of document.querySelectorAll("figure.chart")) charts.push(new Chart(figure));
if (charts.length) {
  drawCharts();
  document.addEventListener("parts", drawCharts);
  new ResizeObserver(() => {
    for (const chart of charts) if (chart.plot) chart.plot.setSize({ width: chart.figure.clientWidth, height: 190 });
  }).observe(byId("main"));
}

// "With N GPUs of type T" ----------------------------------------------------------------------------------------------------

const what = byId("what");

function length(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 129600 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

function answerWhat() {
  const { lines, left, present } = data("options") || { lines: {} };
  what.hidden = Object.keys(lines).length === 0;
  if (what.hidden) return;
  const type = byId("what-type");
  const gpus = byId("what-gpus");
  const names = Object.keys(lines).join();
  if (type.dataset.names !== names) {
    type.dataset.names = names;
    type.replaceChildren(...Object.keys(lines).map((name) => new Option(name, name)));
    if (present && lines[present[0]]) {
      type.value = present[0];
      gpus.value = Math.max(0, lines[present[0]].findIndex((each) => each[0] === present[1]));
    }
  }
  const line = lines[type.value];
  gpus.max = line.length - 1;
  const [count, nodes, goodput, price] = line[Math.min(gpus.valueAsNumber, line.length - 1)];
  const now = present && (lines[present[0]] || []).find((each) => each[0] === present[1]);
  const parts = [`${count} ${type.value}${nodes > 1 ? ` on ${nodes} nodes` : ""}: ${+goodput.toPrecision(3)} samples/s`];
  if (now && now[2] > 0) parts.push(`${(goodput / now[2]).toFixed(2)} times the present speed`);
  if (left !== null && goodput > 0) parts.push(`the rest takes ${length(left / goodput)}, until ${new Date(Date.now() + 1000 * left / goodput).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" })}`);
  if (left !== null && goodput > 0) parts.push(`${+(count * left / goodput / 3600).toPrecision(3)} GPU-hours`);
  if (price !== null) parts.push(`price ${+price.toPrecision(3)}`);
  byId("what-text").textContent = parts.join("; ");
  gpus.setAttribute("aria-valuetext", `${count} GPUs`);
}

if (what) {
  answerWhat();
  what.addEventListener("input", answerWhat);
  what.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("parts", answerWhat);
}

// What if: replays run in penstockd; the page asks for them as long as one runs. ------------------------------------------------

const FIGURES = [
  ["avg_jct_h", "average time from submission to end", "h"], ["p50_jct_h", "median", "h"], ["p99_jct_h", "99th percentile", "h"],
  ["makespan_h", "until the last job ends", "h"], ["queue_h", "average time without GPUs", "h"],
  ["utilisation", "GPUs held by jobs", "%"], ["gpu_h_per_job", "GPU-hours a job", "h"],
  ["restarts_per_job", "restarts a job", ""], ["ended", "jobs that ended", ""], ["cost", "cost", "USD"],
];

function element(name, text, ...inside) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...inside);
  return made;
}

class Replays {
  constructor(form) {
    this.form = form;
    this.box = byId("replays");
    this.done = new Map(); // id of a task that has ended -> the task with its result
    this.timer = null;
    form.addEventListener("submit", (event) => { event.preventDefault(); this.begin(); });
    this.look();
  }

  async ask(method, path, body) {
    const answer = await fetch(path, { method, headers: { "Content-Type": "application/json", ...token() }, body });
    if (answer.ok) return answer.json();
    let text = `the server answered ${answer.status}`;
    try { text = (await answer.json()).error.message; } catch { /* not ours */ }
    throw new Error(text);
  }

  async begin() {
    const { days, policy, ...nodes } = Object.fromEntries(new FormData(this.form));
    const order = { ...nodes, policies: policy ? [policy] : [], from_s: days ? Date.now() / 1000 - 86400 * days : null };
    try { await this.ask("POST", "/v1/whatif", JSON.stringify(order)); } catch (error) { say(error.message); }
    this.look();
  }

  async end(task) {
    try { await this.ask("DELETE", `/v1/whatif/${encodeURIComponent(task.id)}`); } catch (error) { say(error.message); }
    this.look();
  }

  async look() {
    clearTimeout(this.timer);
    try {
      const tasks = await this.ask("GET", "/v1/whatif");
      for (const task of tasks) {
        if (task.state === "done" && !this.done.has(task.id)) this.done.set(task.id, await this.ask("GET", `/v1/whatif/${encodeURIComponent(task.id)}`));
      }
      this.box.replaceChildren(...tasks.map((task) => this.drawn(this.done.get(task.id) || task)));
      if (tasks.some((task) => task.state === "running")) this.timer = setTimeout(() => this.look(), 2000);
    } catch (error) {
      this.box.replaceChildren(element("p", error.message));
      this.timer = setTimeout(() => this.look(), 10000);
    }
  }

  drawn(task) {
    const { add_nodes: more, remove_nodes: fewer, policies } = task.order;
    const what = [policies.join(", "), more && `with ${more} more`, fewer && `without ${fewer}`].filter(Boolean).join(", ") || "as it is now";
    const head = element("p", `${what} (${task.user}): ${task.state === "running" ? task.step || "begins" : task.state} `);
    if (task.state === "running") {
      const bar = element("progress", null);
      bar.value = task.fraction;
      bar.setAttribute("aria-label", "done");
      head.append(bar, " ");
    }
    const button = element("button", task.state === "running" ? "Cancel" : "Forget");
    button.type = "button";
    button.addEventListener("click", () => this.end(task));
    head.append(button);
    const section = element("section", null, head);
    section.className = "card";
    if (task.error) section.append(element("p", task.error));
    if (task.result) section.append(this.table(task.result), ...(task.result.notes || []).map((note) => { const line = element("p", note); line.className = "soft"; return line; }));
    return section;
  }

  table(result) {
    const names = Object.keys(result.policies);
    const heads = ["", ...names.map((name) => (name === "recorded" ? "what happened" : name))].map((name) => { const head = element("th", name); head.scope = "col"; return head; });
    const rows = FIGURES.map(([key, words, unit]) => {
      const values = names.map((name) => result.policies[name].mean[key]);
      if (values.every((value) => value === null || value === undefined)) return null;
      return element("tr", null, element("td", words), ...values.map((value) => {
        const cell = element("td", value === null || value === undefined ? "–" : `${+(unit === "%" ? 100 * value : value).toPrecision(3)} ${unit}`);
        cell.className = "n";
        return cell;
      }));
    }).filter(Boolean);
    for (const head of heads.slice(1)) head.className = "n";
    return element("table", null, element("thead", null, element("tr", null, ...heads)), element("tbody", null, ...rows));
  }
}

if (byId("whatif")) new Replays(byId("whatif"));

// Where the picture of a job's GPUs is wider than the screen, its newest end shows.
const strip = byId("strip");
if (strip) strip.scrollLeft = strip.scrollWidth;

// The output follows its end, unless its reader has scrolled up.
const output = byId("log");
if (output) {
  output.scrollTop = output.scrollHeight;
  let follows = true;
  output.addEventListener("scroll", () => { follows = output.scrollHeight - output.scrollTop - output.clientHeight < 30; });
  document.addEventListener("parts", () => { if (follows) output.scrollTop = output.scrollHeight; });
}

const login = byId("login");
if (login) {
  login.addEventListener("submit", async (event) => {
    event.preventDefault();
    const error = byId("login-error");
    error.textContent = "";
    try {
      const body = JSON.stringify({ token: byId("token").value.trim() });
      const answer = await fetch("/v1/session", { method: "POST", headers: { "Content-Type": "application/json" }, body });
      if (answer.ok) { location.assign(login.dataset.next); return; }
      error.textContent = (await answer.json()).error.message;
    } catch { error.textContent = "The server does not answer; try again."; }
    byId("token").select();
  });
}

// Filters take effect at once.
document.addEventListener("change", (event) => { if (event.target.matches("select.auto")) event.target.form.requestSubmit(); });

listen();
