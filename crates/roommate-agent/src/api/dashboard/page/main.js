// The page: connects, keeps the time that is shown, and draws when something changed.

import { metrics } from "./compare.js";
import { Lanes } from "./lanes.js";
import { Refused, keep, stream, token } from "./link.js";
import { Run } from "./model.js";
import { Panel, draft, keys, say } from "./panel.js";
import { Views } from "./views.js";
import { CLASSES, clock, el, span } from "./words.js";

const $ = (selector) => document.querySelector(selector);
const SPANS = [60, 300, 900, 3600, 6 * 3600, 86400];
/** Time between drawings of a live run. Lanes move by less than a pixel in it. */
const LIVE_MS = 500;
/** Time between updates of the text beside the lanes: nobody reads it faster. */
const TABLES_MS = 120;

const runs = [];
let charts = [];
let views, panel;
/** The time that is shown; null = now. */
let cursor = null;
let playing = false;
let speed = 60;
let wanted = 300;
let dirty = true;
/** When the text was updated last, and whether it is older than the lanes. */
let told = 0, late = false;

const shown = () => runs[0];
const end = () => Math.max(...runs.map((run) => (run.live ? run.now() : run.end)), 1);
const time = () => cursor ?? end();

function theme(next) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = next ?? localStorage.getItem("roommate-theme") ?? (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now;
  for (const chart of charts) chart.colours();
  dirty = true;
}

function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("roommate-theme", next);
  theme(next);
}

/** The times from which to which lanes are drawn. */
function range() {
  const last = end();
  if (wanted === 0 || wanted >= last && !shown().live) return [0, last * 1.002];
  if (cursor === null) return [Math.max(0, last - wanted), last];
  const from = Math.max(0, Math.min(cursor - wanted * 0.75, last - wanted));
  return [from, from + wanted];
}

function draw() {
  const run = shown(), t = time();
  const of = range();
  views.window = wanted || end();
  for (const chart of charts) {
    chart.range = of;
    chart.cursor = cursor;
    chart.selected = panel.job && chart.run === panel.run ? panel.job : null;
    chart.draw();
  }
  const now = performance.now();
  late = now - told < TABLES_MS;
  if (!late) {
    told = now;
    for (const table of [views.running, views.queue, views.over]) table.selected = panel.job?.name ?? null;
    views.show(run, t, $("#find").value);
    panel.show(t);
  }
  const slider = $("#slider");
  if (!$("#transport").hidden) {
    if (document.activeElement !== slider || playing) slider.value = String(Math.round((t / end()) * 10000));
    $("#time").textContent = `${clock(run, t)} of ${span(end())}`;
    slider.setAttribute("aria-valuetext", clock(run, t));
  }
  link(run);
}

function link(run) {
  const said = $("#link");
  said.className = run.lost ? "lost" : run.live ? "live" : "";
  const text = run.lost ? `no answer: ${run.lost}` : run.live ? "live" : run.complete ? "journal" : "reads…";
  if (said.textContent !== text) said.textContent = text;
  const about = [run.title, run.cluster, run.policy && `policy ${run.policy}`].filter(Boolean).join(" · ");
  if ($("#about").textContent !== about) $("#about").textContent = about;
}

let last = 0, frames = [];

function frame(now) {
  requestAnimationFrame(frame);
  if (playing) {
    cursor = Math.min(end(), time() + ((now - last) / 1000) * speed);
    if (cursor >= end()) play(false);
    dirty = true;
  }
  const live = cursor === null && shown()?.live && now - last >= LIVE_MS;
  if (late && performance.now() - told >= TABLES_MS) dirty = true;
  if (!dirty && !live) {
    if (playing) last = now;
    return;
  }
  last = now;
  dirty = false;
  const began = performance.now();
  if (runs.length > 0 && shown().gpus.length > 0) draw();
  frames.push(performance.now() - began);
  if (frames.length > 600) frames = frames.slice(-300);
}

function play(on) {
  playing = on;
  if (on && time() >= end()) cursor = 0;
  last = performance.now();
  $("#play").textContent = on ? "Pause" : "Play";
}

function select(run, job) {
  panel.open(run, job);
  dirty = true;
}

function size() {
  const most = runs.length > 1 ? 0.3 : 0.46;
  for (const chart of charts) {
    const wants = chart.run.gpus.length * 44 + 30;
    chart.scroller.style.height = `${Math.round(Math.max(90, Math.min(wants, innerHeight * most)))}px`;
  }
}

/** A chart for a run, once it is known what GPUs it has. */
function chart(run) {
  const root = el("div"), box = el("div", { class: "chart" }, runs.length > 1 || run.title ? el("h3", {}, run.title) : "", root);
  $("#charts").append(box);
  const made = new Lanes(root, { run, label: run.title || "Live", onselect: (job) => select(run, job) });
  charts.push(made);
  size();
  made.size();
}

function offerSpans(live) {
  const list = $("#span");
  if (list.dataset.live === String(live)) return;
  list.dataset.live = String(live);
  wanted = live ? 300 : 0;
  const offered = live ? SPANS.slice(0, 3) : [0, ...SPANS];
  list.replaceChildren(...offered.map((s) => el("option", { value: s, selected: s === wanted }, s === 0 ? "all" : `last ${span(s)}`.replace(" 00 s", "").replace(" 00 m", ""))));
}

async function follow(number) {
  const run = new Run();
  runs[number] = run;
  let of = 1;
  const take = (message) => {
    if (message.recording) [, of] = message.recording;
    run.take(message);
    if (run.gpus.length > 0 && !charts.some((made) => made.run === run)) {
      offerSpans(run.live);
      $("#new").hidden = !run.live;
      if (run.live || number === 0) chart(run);
    }
    dirty = true;
  };
  await stream(number, take);
  return { run, of };
}

async function recordings(of) {
  for (let number = 1; number < of; number++) {
    await follow(number);
    chart(runs[number]);
  }
  if (of > 1) {
    $("#charts .chart").prepend(el("h3", {}, runs[0].title));
    $("#charts .chart h3 + h3")?.remove();
    size();
  }
  if (runs.some((run) => run.metrics.length > 0)) {
    $("#compare").hidden = false;
    $("#compare").classList.toggle("last", of === 1);
    $("#compare h2").textContent = of > 1 ? "Side by side" : "Metrics";
    metrics($("#compare > div"), runs);
  }
  $("#transport").hidden = false;
  // In the middle there is most to see.
  cursor = end() / 2;
  speed = Math.max(1, Math.round(end() / 60));
  const speeds = [1, 10, 60, 600, 3600, speed].sort((a, b) => a - b).filter((s, n, all) => all.indexOf(s) === n);
  $("#speed").replaceChildren(...speeds.map((s) => el("option", { value: s, selected: s === speed }, `${s}×`)));
  dirty = true;
}

/** Asks for a token where the address had none, or a wrong one. */
function enter(why) {
  return new Promise((resolve) => {
    const given = el("input", { type: "password", autocomplete: "off", "aria-label": "Token" });
    const box = el("dialog", { "aria-label": "Token" }, el("h2", {}, "Token"), el("p", {}, why),
      el("p", { class: "hint" }, "`roommate token create` makes one, and `roommate ui` opens this page with one."),
      el("form", { onsubmit: (event) => { event.preventDefault(); keep(given.value); box.remove(); resolve(); } },
        el("label", {}, "Token", given), el("div", { class: "act" }, el("button", { class: "main" }, "Open"))));
    box.addEventListener("cancel", (event) => event.preventDefault());
    document.body.append(box);
    box.showModal();
  });
}

async function connect() {
  if (!token()) await enter("This page belongs to a daemon, which wants to know who asks.");
  let wait = 500;
  for (;;) {
    try {
      const { run, of } = await follow(0);
      if (!run.live) return recordings(of);
      run.lost = "the connection ended";
      wait = 500;
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        await enter("The token is missing, wrong, expired or revoked.");
        continue;
      }
      if (shown()) shown().lost = error.message;
      $("#link").className = "lost";
      $("#link").textContent = `no answer: ${error.message}`;
    }
    dirty = true;
    await new Promise((resolve) => { setTimeout(resolve, wait); });
    wait = Math.min(wait * 2, 8000);
    charts.forEach((made) => made.scroller.parentElement.remove());
    charts = [];
    panel.close();
  }
}

function press(event) {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) panel.close();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const acts = {
    "/": () => $("#find").focus(),
    t: switchTheme,
    "?": keys,
    n: () => { if (!$("#new").hidden) draft(shown()); },
    " ": () => { if (!$("#transport").hidden && event.target.tagName !== "BUTTON") play(!playing); else return false; return true; },
  };
  const did = acts[event.key]?.();
  if (acts[event.key] && did !== false) event.preventDefault();
}

function dropped() {
  const over = $("#drop");
  const can = () => shown()?.live;
  addEventListener("dragover", (event) => { if (can()) { event.preventDefault(); over.hidden = false; } });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) over.hidden = true; });
  addEventListener("drop", async (event) => {
    if (!can()) return;
    event.preventDefault();
    over.hidden = true;
    const file = event.dataTransfer.files[0];
    if (file) draft(shown(), await file.text())();
  });
}

function start() {
  theme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme());
  panel = new Panel({ onclose: () => { dirty = true; } });
  views = new Views({ onselect: (job) => select(shown(), job) });
  $("#legend").append(...Object.entries(CLASSES).map(([key, name]) => el("span", {}, el("i", { class: `of-${key}` }), name)), el("span", {}, el("i", { class: "of-held" }), "suspended by its user"));
  $("#theme").addEventListener("click", switchTheme);
  $("#help").addEventListener("click", keys);
  $("#new").addEventListener("click", () => draft(shown()));
  $("#find").addEventListener("input", () => { dirty = true; });
  $("#span").addEventListener("change", (event) => { wanted = Number(event.target.value); dirty = true; });
  $("#play").addEventListener("click", () => play(!playing));
  $("#speed").addEventListener("change", (event) => { speed = Number(event.target.value); });
  $("#slider").addEventListener("input", (event) => {
    cursor = (Number(event.target.value) / 10000) * end();
    if (shown().live && cursor >= end() - 1) cursor = null;
    dirty = true;
  });
  addEventListener("resize", () => { size(); dirty = true; });
  addEventListener("keydown", press);
  dropped();
  requestAnimationFrame(frame);
  connect().catch((error) => say(error.message));
}

// For tests and for people who look: how long frames took, and what is shown.
globalThis.roommate = { frames: () => frames, runs, seek: (t) => { cursor = t; dirty = true; }, time };
start();
