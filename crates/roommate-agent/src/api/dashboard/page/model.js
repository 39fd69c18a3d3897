// A run as the page knows it: what happened to each job and each GPU, in order of time. A live run
// grows; a recorded one is complete. Everything that is drawn is asked of it for a time.

/** The last element of a list sorted by `t` that is not after a time. */
export function lastBefore(list, t) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle].t <= t) low = middle + 1; else high = middle;
  }
  return low - 1;
}

const MOST_DECISIONS = 5000;

export class Run {
  constructor() {
    this.title = "";
    this.policy = "";
    this.cluster = "";
    this.world = "";
    this.live = false;
    this.complete = false;
    this.gpus = [];
    this.jobs = [];
    this.byName = new Map();
    this.byIdx = [];
    this.decisions = [];
    this.metrics = [];
    this.machine = null;
    this.end = 0;
    this.lost = null;
    this.noJournal = null;
    // When jobs that wait are expected to start.
    this.forecast = new Map();
    // When `end` was true, by the clock of this page.
    this.heard = performance.now();
  }

  /** The time of the run now: that of a live one goes on between messages. */
  now() {
    const since = this.live && !this.lost ? (performance.now() - this.heard) / 1000 : 0;
    return this.end + Math.min(since, 3);
  }

  take(message) {
    if (message.recording) {
      this.title ||= message.title ?? "";
      if (message.metrics) this.metrics = message.metrics;
      this.complete = message.done;
    } else {
      this.live = true;
      this.complete = true;
      this.lost = message.lost ?? null;
      this.noJournal = message.no_journal ?? this.noJournal;
      this.heard = performance.now();
    }
    if (message.machine) this.machine = message.machine;
    // Without a journal the machine says what GPUs there are.
    if (message.machine && this.gpus.length === 0 && this.noJournal) this.guessGpus(message.machine);
    for (const line of message.lines ?? []) this.line(line);
    if (message.now_s !== undefined) this.end = Math.max(this.end, message.now_s);
    for (const view of message.jobs ?? []) this.view(view);
    if (message.starts) {
      this.forecast = new Map(Object.entries(message.starts).map(([name, in_s]) => [name, message.now_s + in_s]));
    }
  }

  line(line) {
    if (line.head) this.head(line.head);
    else if (line.job) this.card(line.job);
    else if (line.moment) this.moment(line.moment);
    else if (line.end) this.end = Math.max(this.end, line.end.at_s);
  }

  head(head) {
    // A new part of a live journal: jobs are numbered again, and what runs is said again.
    this.byIdx = [];
    Object.assign(this, { policy: head.policy, cluster: head.cluster, world: head.world });
    if (this.gpus.length > 0) return;
    let node = 0;
    for (const group of head.groups) {
      for (let n = 0; n < group.nodes; n++, node++) {
        for (let slot = 0; slot < group.gpus; slot++) {
          const place = head.groups.length === 1 && group.nodes === 1 ? `${slot}` : `${head.nodes?.[node] ?? node}.${slot}`;
          this.gpus.push({ idx: this.gpus.length, node, slot, place, model: group.model, mem: group.mem_mib, frames: [] });
        }
      }
    }
  }

  guessGpus(machine) {
    Object.assign(this, { policy: machine.policy, cluster: machine.cluster });
    for (let slot = 0; slot < machine.devices; slot++) {
      this.gpus.push({ idx: slot, node: 0, slot, place: `${slot}`, model: "", mem: 0, frames: [] });
    }
  }

  /** The job of this name; it keeps its past when a new part of the journal registers it again. */
  named(name, index) {
    let job = this.byName.get(name);
    if (!job) {
      job = {
        name, order: this.jobs.length, class: "guaranteed", wants: 1, profile: "", work: null, slo: null,
        phases: [], whys: [], samples: [], beliefs: [], latency: [], moments: [], held: [],
        submitted: null, ended: null, view: null, index,
      };
      this.jobs.push(job);
      this.byName.set(name, job);
    }
    return job;
  }

  card(card) {
    const job = this.named(card.name, card.job);
    Object.assign(job, {
      class: card.class, wants: card.gpus, profile: card.profile,
      work: card.work ?? null, slo: card.slo_ms ?? job.slo, owner: card.owner ?? null,
    });
    this.byIdx[card.job] = job;
  }

  moment(moment) {
    const job = this.byIdx[moment.job], t = moment.at_s;
    if (!job) return;
    this.end = Math.max(this.end, t);
    switch (moment.is) {
      case "submitted":
        job.submitted ??= t;
        this.phase(job, t, "waiting", [], null);
        break;
      case "placed":
        this.phase(job, t, "starting", moment.gpus, moment.knobs);
        break;
      case "runs": {
        const now = job.phases.at(-1);
        if (now && now.gpus.length > 0) this.phase(job, t, "running", now.gpus, now.knobs);
        break;
      }
      case "tuned": {
        const now = job.phases.at(-1);
        if (now) this.phase(job, t, now.state, now.gpus, moment.knobs);
        break;
      }
      case "leaves":
        this.phase(job, t, moment.suspended ? "in memory" : "waiting", [], null);
        break;
      case "failed":
        this.phase(job, t, "failed", [], null);
        job.whys.push({ t, why: moment.why });
        break;
      case "ended":
        this.phase(job, t, moment.how, [], null);
        job.ended = t;
        break;
      case "why":
        job.whys.push({ t, why: moment.why });
        break;
      case "held_back":
        job.whys.push({ t, why: moment.why });
        job.held.push({ t, held: moment.held, service: this.byIdx[moment.service]?.name });
        break;
      case "set": {
        const now = job.phases.at(-1);
        if (moment.held !== undefined && now) {
          this.phase(job, t, moment.held ? "held" : "running", now.gpus, now.knobs);
        }
        job.whys.push({ t, why: moment.why });
        break;
      }
      case "sampled":
        job.samples.push({ t, step: moment.step_s, batch: moment.batch, mem: moment.mem_mib, times: moment.slowdown ?? null });
        return;
      case "believed":
        job.beliefs.push({ t, times: moment.times, source: moment.source });
        return;
      case "served":
        job.latency.push({ t, p99: moment.p99_ms, p50: moment.p50_ms, requests: moment.requests, late: moment.late });
        return;
      default:
        return;
    }
    job.moments.push(moment);
    if (moment.is !== "runs") {
      this.decisions.push({ t, job, moment });
      if (this.live && this.decisions.length > MOST_DECISIONS) this.decisions.splice(0, 1000);
    }
  }

  /** A job is in this state from now on, on these GPUs. */
  phase(job, t, state, gpus, knobs) {
    const before = job.phases.at(-1)?.gpus ?? [];
    const phase = { t, state, gpus, knobs };
    job.phases.push(phase);
    for (const gpu of new Set([...before, ...gpus])) {
      const lane = this.gpus[gpu];
      if (!lane) continue;
      const last = lane.frames.at(-1);
      const tenants = (last?.tenants ?? []).slice();
      const at = tenants.findIndex((tenant) => tenant.job === job);
      const stays = gpus.includes(gpu);
      if (stays && at >= 0) tenants[at] = { job, phase, since: tenants[at].since };
      else if (stays) tenants.push({ job, phase, since: t });
      else if (at >= 0) tenants.splice(at, 1);
      if (last && last.t === t) last.tenants = tenants;
      else lane.frames.push({ t, tenants });
    }
  }

  /** What a daemon says of a job now. */
  view(view) {
    const job = this.named(view.name, view.idx), t = this.end;
    const before = job.view;
    job.view = view;
    job.class = view.class.replace("-", "_");
    job.wants = view.wants;
    job.slo ??= view.service?.objective_ms ?? null;
    job.submitted ??= view.submitted_s;
    if (view.ended && job.ended === null) job.ended = view.submitted_s + view.age_s;
    if (this.noJournal) this.guessPhase(job, view);
    if (view.slowdown !== undefined && view.slowdown !== before?.slowdown) {
      job.samples.push({ t, step: view.step_s, batch: view.batch, mem: view.gpu_mib ?? view.mem_mib, times: view.slowdown });
    }
    if (view.believed && view.believed.times !== before?.believed?.times) {
      job.beliefs.push({ t, times: view.believed.times, source: view.believed.source });
    }
    if (view.service && !view.ended) {
      const { p99_ms, p50_ms, requests, late, queued, held } = view.service;
      const more = requests - (before?.service?.requests ?? requests);
      job.latency.push({ t, p99: p99_ms, p50: p50_ms, requests: more, late: late - (before?.service?.late ?? late), queued, held });
      if (job.latency.length > 2000) job.latency.splice(0, 500);
    }
  }

  guessPhase(job, view) {
    const knobs = { sm_permille: Math.round(view.share * 1000) };
    const last = job.phases.at(-1);
    const same = last && last.state === view.state && `${last.gpus}` === `${view.devices}`;
    if (!same) this.phase(job, last ? this.end : view.submitted_s, view.state, view.ended ? [] : view.devices, knobs);
  }

  /** The state of a job at a time; null before it was submitted. */
  stateAt(job, t) {
    const at = lastBefore(job.phases, t);
    return at < 0 ? null : job.phases[at];
  }

  whyAt(job, t) {
    return job.whys[lastBefore(job.whys, t)]?.why ?? null;
  }

  /** Whether the words of the daemon about a job are those of this time. */
  isNow(t) {
    return this.live && t >= this.end - 2;
  }

  /** The slowdown of a job at a time: as measured, and as believed. */
  slowdownAt(job, t) {
    const phase = this.stateAt(job, t);
    const runs = phase && phase.gpus.length > 0;
    const sample = runs ? job.samples[lastBefore(job.samples, t)] : null;
    const belief = runs ? job.beliefs[lastBefore(job.beliefs, t)] : null;
    return {
      measured: sample && sample.t >= phase.t - 60 ? sample.times : null,
      believed: belief?.times ?? null,
      source: belief?.source ?? null,
    };
  }

  /** Whether a service holds back a job at a time, and which. */
  heldFor(job, t) {
    const last = job.held[lastBefore(job.held, t)];
    return last?.held ? last.service : null;
  }

  /** Jobs that a service holds back at a time. */
  heldBy(service, t) {
    return this.jobs.filter((job) => job.held.length > 0 && this.heldFor(job, t) === service.name);
  }

  tenantsAt(gpu, t) {
    const at = lastBefore(gpu.frames, t);
    return at < 0 ? [] : gpu.frames[at].tenants;
  }

  /** Jobs at a time: those that have GPUs, those that wait, and services among the first. */
  listAt(t) {
    const running = [], waiting = [], over = [];
    for (const job of this.jobs) {
      const phase = this.stateAt(job, t);
      if (!phase) continue;
      if (job.ended !== null && job.ended <= t) over.push(job);
      else if (phase.gpus.length > 0) running.push(job);
      else waiting.push(job);
    }
    return { running, waiting, over };
  }
}
