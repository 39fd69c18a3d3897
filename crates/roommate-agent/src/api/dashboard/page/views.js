// What is beside the lanes: figures, services, tables and decisions, for one run at one time.

import { heldAt } from "./lanes.js";
import { lastBefore } from "./model.js";
import { Table } from "./table.js";
import { CLASSES, clock, el, hueOf, mib, ms, percent, places, sentence, span, times } from "./words.js";

const $ = (selector) => document.querySelector(selector);

export class Views {
  constructor({ onselect }) {
    this.onselect = onselect;
    this.t = 0;
    const key = (job) => job.name;
    const name = { name: "job", title: "job", class: "w18", of: (job) => this.name(job), by: (job) => job.name };
    const slow = (job) => this.run.slowdownAt(job, this.t);
    this.running = new Table($("#running > div"), {
      label: "Running jobs", key, onselect, empty: "No job has GPUs.",
      columns: [
        { ...name, class: "w15" },
        { title: "class", class: "w12 narrow", of: (job) => CLASSES[job.class] ?? job.class, by: (job) => job.class },
        { title: "state", class: "w13", of: (job) => this.state(job), by: (job) => this.state(job) },
        { title: "GPUs", class: "w8", of: (job) => places(this.run, this.phase(job)?.gpus ?? []), by: (job) => this.phase(job)?.gpus[0] ?? 0 },
        { title: "share", class: "w6 r narrow", of: (job) => this.share(job), by: (job) => this.phase(job)?.knobs?.sm_permille ?? 1000 },
        { title: "batch", class: "w6 r narrow", of: (job) => this.batch(job), by: (job) => this.batch(job) },
        { title: "memory", class: "w9 r narrow", of: (job) => mib(this.memory(job)), by: (job) => this.memory(job) },
        { title: "slowdown", class: "w9 r", of: (job) => times(slow(job).measured), by: (job) => slow(job).measured, mark: (cell, job) => tint(cell, slow(job).measured) },
        { title: "predicted", class: "w9 r narrow", of: (job) => times(slow(job).believed), by: (job) => slow(job).believed },
        { title: "done", class: "w6 r", of: (job) => percent(this.done(job)), by: (job) => this.done(job) },
        { title: "left", class: "w9 r", of: (job) => span(this.view(job)?.left_s), by: (job) => this.view(job)?.left_s },
      ],
    });
    this.queue = new Table($("#queue > div"), {
      label: "Jobs that wait", key, onselect, empty: "Nothing waits.",
      columns: [
        { ...name, class: "w18" },
        { title: "class", class: "w12 narrow", of: (job) => CLASSES[job.class] ?? job.class, by: (job) => job.class },
        { title: "GPUs", class: "w6 r", of: (job) => String(job.wants), by: (job) => job.wants },
        { title: "waits for", class: "w11 r", of: (job) => span(this.t - this.since(job)), by: (job) => -this.since(job) },
        { title: "starts in", class: "w15 r", of: (job) => this.starts(job), by: (job) => this.startsIn(job) },
        { title: "why", class: "w34", of: (job) => this.why(job) },
      ],
    });
    this.over = new Table($("#over > div"), {
      label: "Jobs that ended", key, onselect, empty: "No job has ended.",
      columns: [
        { ...name, class: "w18" },
        { title: "how", class: "w34", of: (job) => this.view(job)?.state ?? this.phase(job)?.state ?? "", by: (job) => this.phase(job)?.state },
        { title: "took", class: "w11 r", of: (job) => span(job.ended - job.submitted), by: (job) => job.ended - job.submitted },
        { title: "ended", class: "w11 r", of: (job) => clock(this.run, job.ended), by: (job) => job.ended },
      ],
    });
    this.list = el("ol");
    $("#decisions > div").append(el("div", { class: "rows", tabindex: 0, role: "region", "aria-label": "Latest decisions" }, this.list));
    this.cards = new Map();
    this.first = null;
  }

  name(job) {
    const dot = el("span", { class: "dot" });
    dot.style.background = `oklch(var(--bar-light) var(--bar-chroma) ${hueOf(job)})`;
    return el("span", {}, dot, job.name);
  }

  phase(job) { return this.run.stateAt(job, this.t); }

  /** What the daemon says of a job, if this is now. */
  view(job) { return this.run.isNow(this.t) ? job.view : null; }

  state(job) {
    const service = this.view(job)?.service;
    const held = this.run.heldFor(job, this.t);
    if (held) return `held back for ${held}`;
    if (service && !service.ready) return "not ready";
    return this.view(job)?.state ?? this.phase(job)?.state ?? "";
  }

  share(job) {
    const sm = this.phase(job)?.knobs?.sm_permille ?? 1000;
    return sm === 0 ? "free" : percent(sm / 1000);
  }

  batch(job) {
    const batch = this.view(job)?.batch ?? this.sample(job)?.batch ?? this.phase(job)?.knobs?.batch;
    return batch ? String(batch) : "–";
  }

  sample(job) { return job.samples[lastBefore(job.samples, this.t)]; }

  memory(job) {
    const view = this.view(job);
    return view?.gpu_mib || view?.mem_mib || this.sample(job)?.mem || this.phase(job)?.knobs?.mem_mib || 0;
  }

  done(job) {
    const view = this.view(job);
    return view?.steps ? view.done / view.steps : null;
  }

  since(job) {
    const last = job.phases.slice(0, lastBefore(job.phases, this.t) + 1).findLast((phase) => phase.gpus.length > 0);
    const left = job.phases.find((phase) => last && phase.t > last.t && phase.gpus.length === 0);
    return left?.t ?? job.submitted ?? this.t;
  }

  startsIn(job) {
    if (!this.run.isNow(this.t)) return this.nextStart(job);
    const at = this.run.forecast.get(job.name);
    return at === undefined ? null : Math.max(0, at - this.t);
  }

  /** Of a recorded run it is known when a job started. */
  nextStart(job) {
    const next = job.phases.find((phase) => phase.t > this.t && phase.gpus.length > 0);
    return next ? next.t - this.t : null;
  }

  starts(job) {
    const in_s = this.startsIn(job);
    if (in_s === null) return "not known";
    return this.run.isNow(this.t) ? `about ${span(in_s)}` : span(in_s);
  }

  why(job) {
    return this.view(job)?.why ?? this.run.whyAt(job, this.t) ?? "the policy has not placed it yet";
  }

  show(run, t, find) {
    this.run = run;
    this.t = t;
    const wanted = find.toLowerCase();
    const matches = (job) => !wanted || job.name.toLowerCase().includes(wanted);
    const { running, waiting, over } = run.listAt(t);
    this.figures(running, waiting, over);
    const rows = [[this.running, running, "#running"], [this.queue, waiting, "#queue"], [this.over, over.reverse(), "#over"]];
    for (const [table, jobs, root] of rows) {
      table.show(jobs.filter(matches));
      $(`${root} h2 span`).textContent = jobs.length ? jobs.length.toLocaleString("en") : "";
    }
    this.services(running.filter((job) => job.class === "service" && matches(job)));
    this.decide(matches);
  }

  figures(running, waiting, over) {
    const { run, t } = this;
    const { held, shared, of } = heldAt(run, t);
    const services = running.filter((job) => job.class === "service" && job.latency.length > 0);
    const misses = services.filter((job) => job.slo && this.latency(job)?.p99 > job.slo);
    const slow = running.map((job) => run.slowdownAt(job, t).measured).filter((value) => value !== null);
    const mean = slow.length ? slow.reduce((a, b) => a + b, 0) / slow.length : null;
    const figures = [
      [`${held.toFixed(of > 99 ? 0 : 1)} of ${of}`, "GPUs held"],
      [String(shared), "GPUs shared"],
      [running.length.toLocaleString("en"), "jobs running"],
      [waiting.length.toLocaleString("en"), "waiting"],
      [over.length.toLocaleString("en"), "ended"],
      ...(mean === null ? [] : [[times(mean), "mean slowdown"]]),
      ...(services.length === 0 ? [] : [[`${services.length - misses.length} of ${services.length}`, "services in time", misses.length ? "bad" : "good"]]),
    ];
    const list = $("#figures");
    while (list.children.length > figures.length) list.lastChild.remove();
    while (list.children.length < figures.length) list.append(el("li", {}, el("b"), el("small")));
    figures.forEach(([value, name, mark], n) => {
      const [big, small] = list.children[n].children;
      if (big.textContent !== value) big.textContent = value;
      if (small.textContent !== name) small.textContent = name;
      big.className = mark ?? "";
    });
  }

  latency(job) { return job.latency[lastBefore(job.latency, this.t)]; }

  services(services) {
    const root = $("#services"), cards = $("#services .cards");
    root.hidden = services.length === 0;
    const shown = services.slice(0, 60);
    for (const [name, card] of this.cards) {
      if (shown.every((job) => job.name !== name)) {
        card.root.remove();
        this.cards.delete(name);
      }
    }
    for (const job of shown) {
      let card = this.cards.get(job.name);
      if (!card) {
        card = this.card(job);
        this.cards.set(job.name, card);
        cards.append(card.root);
      }
      this.fill(card, job);
    }
  }

  card(job) {
    const p99 = el("b"), late = el("span", { class: "muted" }), held = el("p"), chart = el("canvas", { role: "img" });
    const open = el("button", { type: "button", class: "open", onclick: () => this.onselect(job) }, job.name);
    const root = el("div", { class: "service" }, el("div", { class: "line" }, open, p99), chart, el("div", { class: "line" }, late), held);
    return { root, p99, late, held, chart };
  }

  fill(card, job) {
    const { run, t } = this, now = this.latency(job), view = this.view(job)?.service;
    const { slo } = job;
    const missed = slo && now && now.p99 > slo;
    card.p99.textContent = now ? `p99 ${ms(now.p99)}` : "no requests";
    card.p99.className = missed ? "bad" : "good";
    const all = view ?? { requests: sum(job.latency, t, "requests"), late: sum(job.latency, t, "late") };
    const objective = slo ? `objective ${ms(slo)}${missed ? ", missed" : ", kept"}` : "no objective";
    card.late.textContent = `${objective} · ${all.late.toLocaleString("en")} of ${all.requests.toLocaleString("en")} requests late${view?.queued ? ` · ${view.queued} queued` : ""}`;
    const held = run.heldBy(job, t).map((other) => {
      const pace = other.view && run.isNow(t) ? ` at ${percent(other.view.pace)} of its speed` : "";
      return `${other.name}${pace}`;
    });
    const launches = view?.held ? `Launches of roommates held ${percent(view.held)} of the time. ` : "";
    card.held.textContent = launches + (held.length ? `Held back for it: ${held.join(", ")}.` : "Nobody is held back for it.");
    const from = Math.max(0, t - this.window);
    card.chart.setAttribute("aria-label", `p99 of ${job.name} over the last ${span(this.window)}: now ${ms(now?.p99)}, ${objective}`);
    sparkline(card.chart, job, [from, t], run.jobs.filter((other) => other.held.some((h) => h.service === job.name)));
  }

  decide(matches) {
    const { run, t } = this;
    const last = lastBefore(run.decisions, t);
    const shown = [];
    for (let at = last; at >= 0 && shown.length < 80; at--) {
      if (matches(run.decisions[at].job)) shown.push(run.decisions[at]);
    }
    if (shown[0] === this.first && shown.length === this.list.children.length) return;
    this.first = shown[0];
    this.list.replaceChildren(...shown.map(({ t: at, job, moment }) => el("li", {},
      el("time", {}, clock(run, at)),
      el("div", {}, el("button", { type: "button", class: "open", onclick: () => this.onselect(job) }, job.name), ` ${sentence(run, moment)}`))));
    if (shown.length === 0) this.list.append(el("li", { class: "none" }, run.noJournal ? `There is no history: ${run.noJournal}.` : "Nothing was decided yet."));
  }
}

function sum(list, t, field) {
  let all = 0;
  for (let at = lastBefore(list, t); at >= 0; at--) all += list[at][field] ?? 0;
  return all;
}

function tint(cell, value) {
  cell.classList.toggle("warn", value !== null && value >= 1.25);
}

/** A canvas with the size that it is shown in. */
export function prepare(canvas) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (width === 0) return null;
  if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
  if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const style = getComputedStyle(document.documentElement);
  return { pen, width, height, ink: (name) => style.getPropertyValue(name).trim(), font: style.fontFamily };
}

/** Latency over time, with the objective and when roommates were held back. */
function sparkline(canvas, job, [from, to], roommates) {
  const made = prepare(canvas);
  if (!made) return;
  const { pen, width, height, ink, font } = made;
  const points = [];
  for (let at = lastBefore(job.latency, to); at >= 0 && job.latency[at].t >= from - 5; at--) points.unshift(job.latency[at]);
  const slo = job.slo ?? 0;
  const high = Math.max(slo * 1.6, ...points.map((p) => p.p99), 1) * 1.05;
  const x = (t) => ((t - from) / Math.max(to - from, 1e-9)) * width, y = (v) => height - 2 - (v / high) * (height - 14);
  pen.fillStyle = ink("--veil");
  pen.globalAlpha = 0.5;
  for (const other of roommates) {
    other.held.forEach((h, n) => {
      if (!h.held || h.service !== job.name) return;
      const end = other.held[n + 1]?.t ?? to;
      const [x0, x1] = [Math.max(0, x(h.t)), Math.min(width, x(end))];
      if (x1 > x0) pen.fillRect(x0, height - 5, Math.max(1, x1 - x0), 5);
    });
  }
  pen.globalAlpha = 1;
  if (slo) {
    pen.strokeStyle = ink("--bad");
    pen.setLineDash([4, 3]);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(0, y(slo));
    pen.lineTo(width, y(slo));
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = ink("--muted");
    pen.font = `10px ${font}`;
    pen.fillText(ms(slo), 2, y(slo) - 3);
  }
  pen.strokeStyle = ink("--accent");
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.beginPath();
  points.forEach((p, n) => (n ? pen.lineTo(x(p.t), y(p.p99)) : pen.moveTo(x(p.t), y(p.p99))));
  pen.stroke();
}
