// Two runs by their metrics.

import { el, span } from "./words.js";

function shown(row) {
  if (!row) return "–";
  if (row.unit === "s") return span(row.value);
  if (row.unit === "share") return `${(row.value * 100).toFixed(1)} %`;
  return Number.isInteger(row.value) ? row.value.toLocaleString("en") : row.value.toFixed(3);
}

/** The table of metrics; the better value of each row is marked. */
export function metrics(root, runs) {
  const keys = new Map();
  for (const run of runs) for (const row of run.metrics) keys.set(row.key, row);
  const head = el("tr", {}, el("th", { scope: "col" }, "metric"), ...runs.map((run) => el("th", { scope: "col", class: "r" }, run.title)));
  const rows = [...keys.values()].map(({ key, label, better }) => {
    const found = runs.map((run) => run.metrics.find((row) => row.key === key));
    const values = found.map((row) => row?.value ?? null);
    const differ = values.length === 2 && values.every((v) => v !== null) && values[0] !== values[1] && better !== "neither";
    const best = differ ? (better === "lower" ? Math.min(...values) : Math.max(...values)) : null;
    const cells = found.map((row, n) => {
      const isBest = differ && values[n] === best;
      return el("td", { class: isBest ? "r better" : "r" }, shown(row), isBest ? el("span", { class: "hidden" }, " (better)") : "");
    });
    return el("tr", {}, el("th", { scope: "row" }, label), ...cells);
  });
  const table = el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
  root.replaceChildren(el("div", { class: "rows", tabindex: 0, role: "region", "aria-label": "Metrics of the runs" }, table));
}
