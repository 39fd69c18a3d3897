// The panel of one job, and the dialogs by which a user acts.

import { Refused, ask } from "./link.js";
import { lastBefore } from "./model.js";
import { prepare } from "./views.js";
import { CLASSES, SOURCES, clock, el, mib, ms, percent, places, sentence, settings, span, times } from "./words.js";

const $ = (selector) => document.querySelector(selector);

/** Says something for a moment; screen readers read it too. */
export function say(text) {
  const said = $("#said");
  said.textContent = text;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { said.textContent = ""; }, 6000);
}

function failure(error) {
  return error instanceof Refused && error.hint ? `${error.message} (${error.hint})` : error.message;
}

/** Sends a request, and says what became of it. */
async function act(verb, fields) {
  try {
    const reply = await ask(verb, fields);
    say(reply.done?.what ?? (reply.submitted ? `submitted as ${reply.submitted.name}` : "done"));
    return reply;
  } catch (error) {
    say(failure(error));
    return null;
  }
}

/** A dialog with a title; it is removed when it closes. */
function dialog(title, ...parts) {
  const made = el("dialog", { "aria-label": title }, el("h2", {}, title), ...parts);
  made.addEventListener("close", () => made.remove());
  document.body.append(made);
  made.showModal();
  return made;
}

const button = (text, onclick, kind) => el("button", { type: "button", class: kind, onclick }, text);

export class Panel {
  constructor({ onclose }) {
    this.root = $("#panel");
    this.onclose = onclose;
    this.job = null;
  }

  open(run, job) {
    Object.assign(this, { run, job, history: null, before: document.activeElement });
    this.title = el("h2", { id: "panel-title", tabindex: -1 }, job.name);
    this.facts = el("dl");
    this.chart = el("canvas", { role: "img" });
    this.key = el("p", { class: "key" });
    this.acts = el("div", { class: "act" });
    this.story = el("ol");
    this.output = el("pre", { tabindex: 0, "aria-label": "Output" });
    this.output.hidden = true;
    const close = button("Close", () => this.close());
    this.measured = el("div", {}, el("h3", {}, job.class === "service" ? "Latency" : "Slowdown against running alone"), this.chart, this.key);
    this.root.replaceChildren(el("div", { class: "top" }, this.title, close), this.acts, this.facts, this.measured,
      el("h3", {}, "Explain"), this.story, this.output);
    this.root.hidden = false;
    this.state = null;
    this.title.focus({ preventScroll: true });
    this.told = null;
    if (run.live) this.explain();
  }

  close() {
    if (!this.job) return;
    this.job = null;
    this.root.hidden = true;
    this.before?.focus?.({ preventScroll: true });
    this.onclose();
  }

  /** The history as the daemon tells it, which goes further back than this page. */
  async explain() {
    const { job } = this;
    try {
      const { history } = await ask("history", { job: job.name });
      if (this.job === job) this.history = history.map((moment) => ({ t: moment.at / 1e6, what: moment.what }));
    } catch (error) {
      if (this.job === job) this.history = null;
    }
    this.told = null;
  }

  show(t) {
    const { run, job } = this;
    if (!job) return;
    const view = run.isNow(t) ? job.view : null, phase = run.stateAt(job, t);
    const { measured, believed, source } = run.slowdownAt(job, t);
    const state = view?.state ?? phase?.state ?? "not submitted yet";
    if (state !== this.state) {
      this.state = state;
      this.actions(view);
      if (run.live) this.explain();
    }
    const latency = job.latency[lastBefore(job.latency, t)];
    const sample = job.samples[lastBefore(job.samples, t)];
    const held = run.heldFor(job, t);
    const facts = [
      ["state", held ? `${state}, held back for ${held}` : state],
      ["why", view?.why ?? run.whyAt(job, t)],
      ["class", CLASSES[job.class] ?? job.class],
      ["owner", view?.owner?.name ?? job.owner],
      ["GPUs", phase?.gpus.length ? places(run, phase.gpus) : `${job.wants} wanted`],
      ["runs with", phase?.gpus.length ? settings(phase.knobs) || "the whole of its GPUs" : null],
      ["speed", view && view.pace < 1 ? `limited to ${percent(view.pace)}` : null],
      ["step", sample || view?.step_s ? span(view?.step_s ?? sample.step) : null],
      ["batch", view?.batch ? String(view.batch) : null],
      ["memory", view?.gpu_mib || view?.mem_mib ? mib(view.gpu_mib || view.mem_mib) : null],
      ["progress", view?.steps ? `${Math.floor(view.done).toLocaleString("en")} of ${view.steps.toLocaleString("en")} steps` : null],
      ["time left", view?.left_s !== undefined && view?.left_s !== null ? span(view.left_s) : null],
      ["slowdown", measured !== null ? `${times(measured)} measured` : null],
      ["predicted", believed !== null ? `${times(believed)}, ${SOURCES[source]}` : null],
      ["objective", job.slo ? `p99 of ${ms(job.slo)}` : null],
      ["p99", latency ? ms(latency.p99) : null],
      ["starts", view ? `${view.starts}, failures ${view.failures}` : null],
      ["command", view?.command?.join(" ") ?? null],
      ["kind of work", job.profile && job.profile !== view?.command?.join(" ") ? job.profile : null],
    ].filter(([, value]) => value);
    const text = JSON.stringify(facts);
    if (text !== this.shownFacts) {
      this.shownFacts = text;
      this.facts.replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
    }
    this.draw(t);
    this.tell(t);
  }

  /** What may be done to the job; the daemon decides whether this user may. */
  actions(view) {
    const { job } = this, buttons = [];
    if (view && !view.ended) {
      const held = view.state === "suspended";
      buttons.push(held
        ? button("Resume", () => act("resume", { job: job.name }))
        : button("Suspend", () => act("suspend", { job: job.name })));
      buttons.push(button("Resize…", () => resize(job)));
      buttons.push(button("Cancel…", () => cancel(job), "bad"));
    }
    if (view) buttons.push(button("Output", () => this.read()));
    this.acts.replaceChildren(...buttons);
  }

  async read() {
    const { job } = this;
    this.output.hidden = false;
    try {
      let from, text = "";
      for (;;) {
        const { piece } = await ask("logs", from ? { job: job.name, from } : { job: job.name });
        if (piece.bytes.length === 0) break;
        text = (text + (typeof piece.bytes === "string" ? piece.bytes : new TextDecoder().decode(new Uint8Array(piece.bytes)))).slice(-60000);
        from = piece.next;
      }
      this.output.textContent = text || "There is no output.";
      this.output.scrollTop = this.output.scrollHeight;
      this.output.scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.output.textContent = failure(error);
    }
  }

  tell(t) {
    const { run, job } = this;
    const shown = job.moments.slice(-200).filter((moment) => moment.at_s <= t);
    const signature = `${shown.length} ${this.history?.length}`;
    if (signature === this.told) return;
    this.told = signature;
    const lines = this.history
      ? this.history.slice(-200).map(({ t: at, what }) => [at, what])
      : shown.map((moment) => [moment.at_s, sentence(run, moment)]);
    this.story.replaceChildren(...lines.reverse().map(([at, what]) => el("li", {}, el("time", {}, clock(run, at)), el("span", {}, what))));
  }

  /** Slowdown measured and predicted, or latency and its objective. */
  draw(t) {
    const { run, job } = this;
    const serves = job.class === "service";
    const list = serves ? job.latency : job.samples.filter((sample) => sample.times !== null);
    this.measured.hidden = list.length === 0 && job.beliefs.length === 0;
    if (this.measured.hidden) return;
    const made = prepare(this.chart);
    if (!made) return;
    const { pen, width, height, ink, font } = made;
    const from = Math.max(job.submitted ?? 0, run.live ? t - 900 : 0), to = Math.max(t, from + 1);
    const value = serves ? (p) => p.p99 : (p) => p.times;
    const points = list.filter((p) => p.t >= from && p.t <= t);
    const beliefs = serves ? [] : job.beliefs.filter((p) => p.t <= t);
    const low = serves ? 0 : 0.9;
    const high = Math.max(serves ? (job.slo ?? 0) * 1.3 : 1.5, ...points.map(value), ...beliefs.map((p) => p.times)) * 1.05;
    const x = (at) => 30 + ((at - from) / (to - from)) * (width - 34), y = (v) => height - 6 - ((v - low) / (high - low)) * (height - 14);
    pen.font = `10px ${font}`;
    pen.strokeStyle = ink("--line");
    pen.fillStyle = ink("--muted");
    for (const mark of serves ? [0, job.slo ?? high / 2, high] : [1, (1 + high) / 2, high]) {
      pen.beginPath();
      pen.moveTo(30, y(mark));
      pen.lineTo(width, y(mark));
      pen.stroke();
      pen.fillText(serves ? `${Math.round(mark)}` : mark.toFixed(2), 0, y(mark) + 3);
    }
    const line = (of, get, color, dash, steps) => {
      pen.strokeStyle = ink(color);
      pen.setLineDash(dash);
      pen.lineWidth = 1.7;
      pen.beginPath();
      of.forEach((p, n) => {
        const at = Math.max(x(p.t), 30);
        if (n === 0) pen.moveTo(at, y(get(p)));
        else {
          if (steps) pen.lineTo(at, y(get(of[n - 1])));
          pen.lineTo(at, y(get(p)));
        }
      });
      if (steps && of.length > 0) pen.lineTo(x(t), y(get(of.at(-1))));
      pen.stroke();
      pen.setLineDash([]);
    };
    line(points, value, "--accent", []);
    if (serves && job.slo) line([{ t: from, v: job.slo }, { t: to, v: job.slo }], (p) => p.v, "--bad", [4, 3]);
    line(beliefs, (p) => p.times, "--muted", [4, 3], true);
    const texts = serves ? ["p99 in ms", `objective ${ms(job.slo)}`] : ["measured", "predicted by the policy's model"];
    if (this.key.textContent === "") this.key.append(el("i"), texts[0], el("i", { class: "believed" }), texts[1]);
    const last = points.at(-1);
    this.chart.setAttribute("aria-label", `${texts[0]}: ${last ? value(last).toFixed(2) : "nothing measured"}; ${texts[1]}${beliefs.length ? `: ${beliefs.at(-1).times.toFixed(2)}` : ""}`);
  }
}

function cancel(job) {
  const box = dialog(`Cancel ${job.name}?`, el("p", {}, "Its process is ended. It cannot be taken back."),
    el("div", { class: "act" }, button("Keep it", () => box.close()),
      button("Cancel the job", async () => { box.close(); await act("cancel", { job: job.name }); }, "bad")));
}

function resize(job) {
  const batch = el("input", { type: "number", min: 0, step: 1, name: "batch", placeholder: "as it is" });
  const share = el("input", { type: "number", min: 0, max: 100, step: 1, name: "share", placeholder: "as it is" });
  const send = async (event) => {
    event.preventDefault();
    const fields = { job: job.name };
    if (batch.value !== "") fields.batch = Number(batch.value);
    if (share.value !== "") fields.share = Number(share.value) / 100;
    if (Object.keys(fields).length > 1 && await act("resize", fields)) box.close();
  };
  const form = el("form", { onsubmit: send },
    el("label", {}, "Batch size", batch), el("label", {}, "Share of each GPU, %", share),
    el("p", { class: "hint" }, "0 leaves it to the policy again. The batch size needs a job with the SDK."),
    el("div", { class: "act" }, button("Close", () => box.close()), el("button", { class: "main" }, "Resize")));
  const box = dialog(`Resize ${job.name}`, form);
}

export function keys() {
  const all = [["/", "find a job"], ["n", "new job, or what if"], ["t", "light or dark"], ["space", "play and pause a journal"],
    ["← → ↑ ↓", "move over the lanes, once they have the focus"], ["Enter", "open the job there"], ["Esc", "close"]];
  const box = dialog("Keys", el("dl", { class: "keys" }, ...all.flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])),
    el("div", { class: "act" }, button("Close", () => box.close())));
}

const EXAMPLE = `name: try
command: [python3, train.py]
devices: 1
class: best-effort
steps: 1000
`;

/** The dialog for a job file: where it would go, and to submit it. */
export function draft(run, text = EXAMPLE) {
  const area = el("textarea", { "aria-label": "Job file", spellcheck: "false" });
  area.value = text;
  const file = el("input", { type: "file", "aria-label": "Open a job file", onchange: async () => { area.value = await file.files[0].text(); } });
  const folder = el("input", { type: "text", name: "workdir", placeholder: "that of the program that serves this page" });
  const answer = el("div", { class: "answer", role: "status" });
  answer.hidden = true;
  const fields = (then) => ({ text: area.value, then, key: crypto.randomUUID(), workdir: folder.value || null });
  const run_ = async (then) => {
    answer.hidden = false;
    answer.replaceChildren(then === "submit" ? "Submits…" : "The engine decides on a copy of the present state…");
    try {
      const reply = await ask("draft", fields(then));
      if (reply.submitted) {
        say(`submitted as ${reply.submitted.name}`);
        box.close();
      } else answer.replaceChildren(...verdict(run, reply.foreseen));
    } catch (error) {
      answer.replaceChildren(el("p", { class: "bad" }, error.message), ...(error.hint ? [el("p", { class: "hint" }, error.hint)] : []));
    }
  };
  const box = dialog("New job", el("form", { onsubmit: (event) => { event.preventDefault(); run_("foresee"); } },
    file, el("label", { class: "tall" }, area), el("label", {}, "Folder for paths", folder), answer,
    el("div", { class: "act" }, button("Close", () => box.close()), el("button", {}, "What if?"), button("Submit", () => run_("submit"), "main"))));
  area.focus();
  return () => run_("foresee");
}

function guess({ times: value, source }) {
  return `${times(value)} (${SOURCES[source]})`;
}

/** What would become of a job, in words. */
function verdict(run, found) {
  const parts = [];
  const where = `GPU ${places(run, found.gpus)}${found.share > 0 && found.share < 1 ? `, ${percent(found.share)} of each` : ""}`;
  if (found.starts_now) parts.push(el("p", {}, el("b", {}, `It would start at once on ${where}.`)));
  else if (found.starts_in_s !== null) {
    parts.push(el("p", {}, el("b", {}, `It would wait, and start in about ${span(found.starts_in_s)} on ${where}.`)));
  } else parts.push(el("p", {}, el("b", {}, "It would wait; when it starts cannot be known.")));
  if (found.why) parts.push(el("p", { class: "hint" }, `Why: it ${found.why}`));
  if (!found.starts_now) parts.push(el("p", { class: "hint" }, `${found.others_waiting} other jobs wait.`));
  if (found.slowdown) parts.push(el("p", {}, `Its steps would take ${times(found.slowdown.times)} as long as alone, ${SOURCES[found.slowdown.source]}.`));
  if (found.roommates.length > 0) {
    const rows = found.roommates.map((other) => el("tr", {}, el("th", { scope: "row" }, other.job),
      el("td", {}, other.before ? times(other.before.times) : "does not run"), el("td", {}, guess(other.after))));
    parts.push(el("table", {}, el("thead", {}, el("tr", {}, ...["roommate", "slowdown now", "and then"].map((title) => el("th", { scope: "col" }, title)))), el("tbody", {}, ...rows)));
  } else if (found.gpus.length > 0) parts.push(el("p", {}, "It would have no roommates."));
  if (found.others.length > 0) parts.push(el("p", {}, "The policy would also do this:"), el("ul", {}, ...found.others.map((text) => el("li", {}, text))));
  parts.push(el("p", { class: "hint" }, "An estimate: the policy decides on a copy of the present state. Slowdowns are what its model believes; jobs without a number of steps are taken never to end."));
  return parts;
}
