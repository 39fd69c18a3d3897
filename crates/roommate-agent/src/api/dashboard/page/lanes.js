// GPUs as lanes over time, on a canvas: tenants stacked by their share. Only the lanes in sight are
// drawn, so that a thousand cost no more than fifty.

import { lastBefore } from "./model.js";
import { clock, hueOf, percent, settings, span, times } from "./words.js";

const GUTTER = 76, AXIS = 24;

/** Height of a lane by how many there are and how much room. */
function heightOf(count, room) {
  return Math.max(16, Math.min(44, Math.floor(room / Math.max(count, 1))));
}

/** Steps of the time axis in seconds. */
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2592000];

export class Lanes {
  constructor(root, { run, onselect, label }) {
    this.run = run;
    this.onselect = onselect;
    this.range = [0, 1];
    this.cursor = null;
    this.selected = null;
    this.at = null;
    this.scroller = root;
    root.classList.add("lanes");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.label = label;
    this.space = document.createElement("div");
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    root.append(this.canvas, this.space);
    root.parentElement.append(this.tip);
    this.pen = this.canvas.getContext("2d", { alpha: false });
    root.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.unpoint());
    this.canvas.addEventListener("click", (event) => {
      const hit = this.hit(event.offsetX, event.offsetY);
      if (hit) this.onselect(hit.tenant.job);
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => { this.at = null; this.draw(); });
    new ResizeObserver(() => this.size()).observe(root);
    this.colours();
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    this.ink = {
      back: of("--lane-back"), idle: of("--lane-idle"), line: of("--line"), text: of("--ink"),
      muted: of("--muted"), accent: of("--accent"), light: Number(of("--bar-light")), chroma: Number(of("--bar-chroma")),
      bar: of("--bar-ink"), veil: of("--veil"), font: style.fontFamily || "sans-serif",
    };
    this.hatch = null;
  }

  size() {
    const ratio = devicePixelRatio || 1;
    const width = this.scroller.clientWidth, height = this.scroller.clientHeight;
    if (width === 0 || height === 0) return;
    this.width = width;
    this.height = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    this.ratio = ratio;
    this.draw();
  }

  layout() {
    const count = this.run.gpus.length;
    this.lane = heightOf(count, this.height - AXIS - 4);
    const whole = count * this.lane + AXIS + 4;
    this.space.style.height = `${Math.max(0, whole - this.height)}px`;
  }

  x(t) {
    const [from, to] = this.range;
    return GUTTER + ((t - from) / (to - from)) * (this.width - GUTTER - 8);
  }

  time(x) {
    const [from, to] = this.range;
    return from + ((x - GUTTER) / (this.width - GUTTER - 8)) * (to - from);
  }

  draw() {
    if (!this.width) return;
    this.layout();
    const { pen, ink, ratio, width, height } = this;
    const began = performance.now();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = ink.back;
    pen.fillRect(0, 0, width, height);
    pen.font = `11px ${ink.font}`;
    pen.textBaseline = "middle";
    const top = this.scroller.scrollTop, first = Math.max(0, Math.floor(top / this.lane));
    const last = Math.min(this.run.gpus.length, Math.ceil((top + height - AXIS) / this.lane));
    pen.save();
    pen.beginPath();
    pen.rect(0, AXIS, width, height - AXIS);
    pen.clip();
    for (let at = first; at < last; at++) this.drawLane(this.run.gpus[at], AXIS + at * this.lane - top);
    pen.restore();
    this.drawAxis();
    this.took = performance.now() - began;
    const many = this.run.gpus.length;
    const told = `${this.label}: ${many} ${many === 1 ? "GPU" : "GPUs"} as lanes over time. Arrow keys move between GPUs and their tenants, Enter opens one. The tables below say the same.`;
    if (this.canvas.getAttribute("aria-label") !== told) this.canvas.setAttribute("aria-label", told);
  }

  drawLane(gpu, y) {
    const { pen, ink, lane } = this;
    const [from, to] = this.range;
    const gap = lane > 20 ? 4 : lane > 12 ? 2 : 1;
    const height = lane - gap, right = this.x(to), left = GUTTER;
    pen.fillStyle = ink.idle;
    pen.fillRect(left, y, right - left, height);
    const { frames } = gpu;
    let at = Math.max(0, lastBefore(frames, from));
    // Neighbouring pieces of one tenant get one label.
    const labels = [];
    for (; at < frames.length && frames[at].t < to; at++) {
      const { tenants } = frames[at];
      if (tenants.length === 0) continue;
      const x0 = Math.max(left, this.x(frames[at].t));
      const end = at + 1 < frames.length ? frames[at + 1].t : this.reach();
      const x1 = Math.min(right, this.x(Math.min(end, to)));
      if (x1 - x0 < 0.3) continue;
      this.drawTenants(tenants, x0, x1, y, height, labels);
    }
    for (const label of labels) this.drawLabel(label);
    if (lane >= 14 || gpu.idx % 4 === 0) {
      pen.fillStyle = ink.muted;
      pen.textAlign = "right";
      pen.fillText(gpu.place.length > 9 ? `…${gpu.place.slice(-8)}` : gpu.place, GUTTER - 10, y + height / 2);
    }
    if (this.at?.gpu === gpu) {
      pen.strokeStyle = ink.accent;
      pen.lineWidth = 2;
      pen.strokeRect(left + 1, y + 1, right - left - 2, height - 2);
    }
  }

  /** How far tenants of now are drawn. */
  reach() {
    return this.run.live ? this.run.now() : this.run.end;
  }

  /** The parts of a GPU that tenants get: what is promised, and the rest in equal parts. */
  parts(tenants) {
    const promised = (tenant) => tenant.phase.knobs?.sm_permille ?? 1000;
    const open = tenants.filter((tenant) => promised(tenant) === 0).length;
    const all = tenants.reduce((sum, tenant) => sum + promised(tenant), 0);
    if (open === tenants.length) return tenants.map(() => 1 / tenants.length);
    const scale = open > 0 ? 0.8 / Math.max(all / 1000, 0.8) : 1 / Math.max(all / 1000, 1);
    const rest = 1 - (all / 1000) * scale;
    return tenants.map((tenant) => (promised(tenant) === 0 ? rest / open : (promised(tenant) / 1000) * scale));
  }

  drawTenants(tenants, x0, x1, y, height, labels) {
    const parts = tenants.length === 1 ? [Math.min(1, (tenants[0].phase.knobs?.sm_permille || 1000) / 1000)] : this.parts(tenants);
    let top = y;
    tenants.forEach((tenant, n) => {
      const tall = Math.max(1, parts[n] * height);
      this.drawBar(tenant, x0, x1, top, tall - (n + 1 < tenants.length && tall > 4 ? 1 : 0));
      const before = labels.find((label) => label.job === tenant.job && label.x1 >= x0 - 1 && label.y === top && label.tall === tall);
      if (before) before.x1 = x1;
      else labels.push({ job: tenant.job, x0, x1, y: top, tall });
      top += tall;
    });
  }

  drawBar({ job, phase }, x0, x1, y, tall) {
    const { pen, ink } = this;
    const hue = hueOf(job), wide = x1 - x0;
    const faded = this.selected && this.selected !== job;
    pen.globalAlpha = faded ? 0.28 : phase.state === "starting" ? 0.55 : 1;
    if (phase.state === "held") {
      pen.strokeStyle = `oklch(${ink.light} ${ink.chroma} ${hue})`;
      pen.lineWidth = 1;
      pen.setLineDash([4, 3]);
      pen.strokeRect(x0 + 0.5, y + 0.5, Math.max(0, wide - 1), Math.max(0, tall - 1));
      pen.setLineDash([]);
    } else {
      const pale = job.class === "best_effort" ? 0.55 : 1;
      pen.fillStyle = `oklch(${ink.light} ${ink.chroma * pale} ${hue})`;
      pen.fillRect(x0, y, wide, tall);
      if (job.class === "service" && wide > 3) {
        pen.fillStyle = this.hatched();
        pen.fillRect(x0, y, wide, tall);
      }
      const pace = phase.knobs?.pace_permille ?? 1000;
      if (pace < 1000 && tall > 5) {
        // What of its speed it may not use.
        pen.fillStyle = ink.veil;
        pen.fillRect(x0, y, wide, tall * (1 - pace / 1000) * 0.5);
      }
    }
    pen.globalAlpha = 1;
  }

  hatched() {
    if (this.hatch) return this.hatch;
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const pen = tile.getContext("2d");
    pen.strokeStyle = this.ink.veil;
    pen.lineWidth = 2;
    for (const shift of [-8, 0, 8]) {
      pen.moveTo(shift, 8);
      pen.lineTo(shift + 8, 0);
    }
    pen.stroke();
    this.hatch = this.pen.createPattern(tile, "repeat");
    return this.hatch;
  }

  drawLabel({ job, x0, x1, y, tall }) {
    const { pen, ink } = this;
    if (tall < 11 || x1 - x0 < 34) return;
    const faded = this.selected && this.selected !== job;
    pen.save();
    pen.beginPath();
    pen.rect(x0, y, x1 - x0 - 3, tall);
    pen.clip();
    pen.globalAlpha = faded ? 0.5 : 1;
    pen.fillStyle = ink.bar;
    pen.textAlign = "left";
    pen.fillText(job.name, x0 + 5, y + tall / 2 + 0.5);
    pen.restore();
  }

  drawAxis() {
    const { pen, ink, width, height } = this;
    const [from, to] = this.range;
    pen.fillStyle = ink.back;
    pen.fillRect(0, 0, width, AXIS - 2);
    const fits = Math.max(2, Math.floor((width - GUTTER) / 96));
    const step = STEPS.find((s) => (to - from) / s <= fits) ?? (to - from) / fits;
    pen.fillStyle = ink.muted;
    pen.strokeStyle = ink.line;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    // Ticks of a clock stand on whole minutes of the clock, not of the run.
    const shift = this.run.live ? (Date.now() / 1000 - this.run.now()) % step : 0;
    for (let t = Math.ceil((from + shift) / step) * step - shift; t <= to; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      if (x < GUTTER) continue;
      pen.globalAlpha = 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, height);
      pen.stroke();
      pen.globalAlpha = 1;
      if (x < width - 24) pen.fillText(clock(this.run, t), Math.max(x, GUTTER + 12), 10);
    }
    if (this.cursor !== null && this.cursor >= from && this.cursor <= to) {
      const x = this.x(this.cursor);
      pen.fillStyle = ink.veil;
      pen.globalAlpha = 0.35;
      pen.fillRect(x, AXIS, this.x(to) - x, height);
      pen.globalAlpha = 1;
      pen.fillStyle = ink.accent;
      pen.fillRect(x - 1, AXIS - 6, 2, height);
    }
  }

  gpuAt(y) {
    const at = Math.floor((y - AXIS + this.scroller.scrollTop) / this.lane);
    return y < AXIS ? null : this.run.gpus[at] ?? null;
  }

  hit(x, y) {
    const gpu = this.gpuAt(y);
    if (!gpu || x < GUTTER) return null;
    const t = this.time(x);
    if (t > this.reach()) return null;
    const tenants = this.run.tenantsAt(gpu, t);
    if (tenants.length === 0) return null;
    const within = (y - AXIS + this.scroller.scrollTop) % this.lane / this.lane;
    const parts = this.parts(tenants);
    let sum = 0;
    const at = parts.findIndex((part) => (sum += part) >= within);
    return { gpu, t, tenant: tenants[at < 0 ? tenants.length - 1 : at] };
  }

  point(event) {
    const hit = this.hit(event.offsetX, event.offsetY);
    this.canvas.style.cursor = hit ? "pointer" : "default";
    if (!hit) return this.unpoint();
    this.show(hit, event.offsetX, event.offsetY);
  }

  unpoint() {
    this.tip.hidden = true;
  }

  show({ gpu, t, tenant }, x, y) {
    const { run } = this, { job, phase } = tenant;
    const { measured, believed } = run.slowdownAt(job, t);
    const rows = [
      ["", `${phase.state} on GPU ${gpu.place}, since ${clock(run, tenant.since)}`],
      ["runs with", settings(phase.knobs) || "the whole GPU"],
      ["slowdown", measured || believed ? `${times(measured)} measured, ${times(believed)} predicted` : null],
      ["why", run.whyAt(job, t)],
    ];
    const said = rows.filter(([, value]) => value).map(([name, value]) => {
      const row = document.createElement("div");
      if (name) row.append(Object.assign(document.createElement("span"), { textContent: `${name} ` }));
      row.append(value);
      return row;
    });
    this.tip.replaceChildren(Object.assign(document.createElement("strong"), { textContent: job.name }), ...said);
    this.tip.hidden = false;
    const box = this.tip.parentElement, wide = this.tip.offsetWidth, tall = this.tip.offsetHeight;
    const topOf = this.scroller.offsetTop, below = y + 18 + tall < this.height;
    this.tip.style.left = `${Math.max(4, Math.min(x + 12, box.clientWidth - wide - 8))}px`;
    this.tip.style.top = `${topOf + (below ? y + 18 : Math.max(0, y - tall - 10))}px`;
  }

  /** Arrow keys: up and down between GPUs, left and right between the tenants of one at the cursor. */
  key(event) {
    const keys = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 };
    const { gpus } = this.run;
    if (event.key === "Enter" && this.at?.tenant) return this.onselect(this.at.tenant.job);
    if (!(event.key in keys) || gpus.length === 0) return undefined;
    event.preventDefault();
    const t = Math.min(this.cursor ?? this.range[1], this.reach());
    let { gpu, n } = this.at ?? { gpu: null, n: 0 };
    if (!gpu) [gpu, n] = [gpus[0], 0];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      gpu = gpus[Math.max(0, Math.min(gpus.length - 1, gpu.idx + keys[event.key]))];
      n = 0;
    } else n += keys[event.key];
    const tenants = this.run.tenantsAt(gpu, t);
    n = tenants.length ? (n + tenants.length) % tenants.length : 0;
    this.at = { gpu, n, tenant: tenants[n] };
    const y = gpu.idx * this.lane, { scrollTop } = this.scroller;
    if (y < scrollTop) this.scroller.scrollTop = y;
    else if (y + this.lane > scrollTop + this.height - AXIS) this.scroller.scrollTop = y + this.lane - this.height + AXIS;
    this.draw();
    if (this.at.tenant) this.show({ gpu, t, tenant: this.at.tenant }, this.x(t) - 260, AXIS + y - this.scroller.scrollTop);
    else this.unpoint();
    return undefined;
  }
}

/** How much of the GPUs tenants have at a time. */
export function heldAt(run, t) {
  let held = 0, shared = 0;
  for (const gpu of run.gpus) {
    const tenants = run.tenantsAt(gpu, t);
    if (tenants.length > 1) shared++;
    if (tenants.length === 0) continue;
    const open = tenants.some((tenant) => (tenant.phase.knobs?.sm_permille ?? 1000) === 0);
    const sum = tenants.reduce((all, tenant) => all + (tenant.phase.knobs?.sm_permille ?? 1000), 0);
    held += open ? 1 : Math.min(1, sum / 1000);
  }
  return { held, shared, of: run.gpus.length, part: percent(run.gpus.length ? held / run.gpus.length : 0), span };
}
