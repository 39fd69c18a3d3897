// How values and moments are written.

export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s === 0) return "0 s";
  if (s < 1) return ms(s * 1000);
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${pad(Math.floor(s % 60))} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${pad(Math.floor((s % 3600) / 60))} m`;
  return `${Math.floor(s / 86400)} d ${pad(Math.floor((s % 86400) / 3600))} h`;
}

const pad = (n) => String(n).padStart(2, "0");

/** A time of a run: of a live one as the clock shows it, else since its beginning. */
export function clock(run, t) {
  if (!run.live) return span(t);
  const date = new Date(Math.round(Date.now() / 1000 - (run.now() - t)) * 1000);
  return `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

export function percent(part) {
  return part === null || part === undefined ? "–" : `${Math.round(part * 100)} %`;
}

export function times(value) {
  return value === null || value === undefined ? "–" : `${value.toFixed(2)}×`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function mib(value) {
  if (!value) return "–";
  return value >= 1024 ? `${(value / 1024).toFixed(1)} GiB` : `${value} MiB`;
}

export const CLASSES = { guaranteed: "guaranteed", best_effort: "best effort", service: "service" };

export const SOURCES = { measured: "as measured before", learnt: "predicted from what both use", thumb: "by rule of thumb" };

/** GPUs as ranges of their places. */
export function places(run, gpus) {
  const names = gpus.map((gpu) => run.gpus[gpu]?.place ?? String(gpu));
  return names.length > 8 ? `${names.slice(0, 7).join(" ")} and ${names.length - 7} more` : names.join(" ");
}

/** How a job runs on its GPUs, in a few words. */
export function settings(knobs) {
  if (!knobs) return "";
  const words = [];
  const sm = knobs.sm_permille ?? 1000, pace = knobs.pace_permille ?? 1000;
  if (sm === 0) words.push("shares without a guaranteed part");
  else if (sm < 1000) words.push(`${sm / 10} % of each`);
  if ((knobs.sm_most_permille ?? 1000) < 1000) words.push(`at most ${knobs.sm_most_permille / 10} %`);
  if (knobs.batch) words.push(`batch ${knobs.batch}`);
  if (pace < 1000) words.push(`at most at ${pace / 10} % of its speed`);
  if (knobs.floor_permille) words.push(`guaranteed ${knobs.floor_permille / 10} % of its speed`);
  if (knobs.priority) words.push("first in line");
  if (knobs.mem_mib) words.push(mib(knobs.mem_mib));
  return words.join(", ");
}

/** A moment as a sentence without the name of the job. */
export function sentence(run, moment) {
  const with_ = (knobs) => { const text = settings(knobs); return text ? `, ${text}` : ""; };
  switch (moment.is) {
    case "submitted": return "submitted";
    case "placed": return `placed on GPU ${places(run, moment.gpus)}${with_(moment.knobs)}`;
    case "runs": return "runs";
    case "tuned": return `to run with other settings${with_(moment.knobs)}`;
    case "leaves": return moment.suspended ? "suspended: its process stays in host memory" : "asked to leave its GPUs";
    case "failed": return `failed: ${moment.why}`;
    case "ended": return moment.how;
    default: return moment.why ?? moment.is;
  }
}

/** A new element. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const HUES = [250, 150, 45, 310, 200, 95, 20, 275, 175, 345, 70, 225];

/** The hue of a job, the same wherever it is drawn. */
export function hueOf(job) {
  if (job.hue === undefined) {
    let hash = 7;
    for (const char of job.name) hash = (hash * 31 + char.codePointAt(0)) >>> 0;
    job.hue = HUES[(hash ^ (hash >>> 7)) % HUES.length];
  }
  return job.hue;
}
